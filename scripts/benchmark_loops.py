"""What is around a private step: how rows are cut into micro-batches, Trainer's own loop, and the first check."""

from __future__ import annotations

import csv
import itertools
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import (
    BENCHMARK,
    Dtype,
    Processor,
    begin_peak,
    clock_of,
    in_turns,
    median_of,
    peak_mib,
    ratio_of,
    setting_of,
)
from rich.console import Console
from rich.table import Table
from workloads import CASES, VARIANTS, build


def _rows_of_lengths(texts: Path | None, tokenizer: str | None, rows: int) -> list[dict[str, list[int]]]:
    """Random tokens: as many as whole rows of a CSV file have, or from 16 to 512, each as likely."""
    draw, vocabulary = random.Random(0), CASES["llama lora"].config["vocab_size"]
    if texts is None:
        counts = [draw.randint(16, 512) for _ in range(rows)]
    else:
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer)
        with texts.open(encoding="utf-8", newline="") as file:
            lines = [" || ".join(row.values()) for row in csv.DictReader(file)]
        counts = [len(encode(line)["input_ids"]) for line in draw.sample(lines, rows)]
    return [{"input_ids": [draw.randrange(vocabulary) for _ in range(count)]} for count in counts]


def _cut(rows: list[dict[str, list[int]]], cut: str, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a logical batch; `cut` is "8 rows", or "2048 tokens" of any number of rows, and "8 rows 32"
    of equal widths, which are multiples of 32."""
    from hf_dp.data.collate import LogicalBatchCollator

    number, what, *multiple = cut.split()

    def pad(few: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in few)
        longest += -longest % int((multiple or "1")[0])
        made = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        for name, filler in made.items():
            kept = ([1] * len(row["input_ids"]) if name == "attention_mask" else row["input_ids"] for row in few)
            made[name] = torch.tensor([ids + [filler] * (longest - len(ids)) for ids in kept], device=device)
        return made

    size, cap = (int(number), None) if what == "rows" else (len(rows), int(number))
    split = LogicalBatchCollator(size, pad, max_tokens=cap, equal_widths=bool(multiple))
    found: list[dict[str, torch.Tensor]] = split(rows)["micro_batches"]
    return found


def lengths(
    texts: Annotated[Path | None, typer.Option(help="CSV, a row an example; without it 16 to 512 tokens.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of the texts.")] = None,
    rows: Annotated[int, typer.Option(help="In the logical batch.")] = 64,
    cut: Annotated[list[str] | None, typer.Option(help="How it is cut, the first for comparison.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 3,
    alone: Annotated[bool, typer.Option(hidden=True, help="Only the peak memory of the first, in MiB.")] = False,
) -> None:
    """A private step on rows of mixed lengths, cut by rows and by tokens: ratios of time and memory, in turns."""
    setting, case, data = setting_of("float32", "sdpa"), CASES["llama lora"], _rows_of_lengths(texts, tokenizer, rows)
    cuts = cut or ["8 rows", "1024 tokens", "2048 tokens", "4096 tokens"]
    import peft
    import transformers.models.auto.modeling_auto  # noqa: F401 - not part of what is measured

    del peft
    before = peak_mib()
    made = {name: _cut(data, name, setting.device) for name in (cuts[:1] if alone else cuts)}
    steps = {name: VARIANTS["hf_dp"](case, build(case, setting), parts) for name, parts in made.items()}
    for step in steps.values():
        step()
    if alone:
        print(torch.cuda.max_memory_allocated() / 2**20 if setting.device.type == "cuda" else peak_mib() - before)
        return
    seconds = in_turns(steps, repeats, setting.device)
    asked = [*(["--texts", str(texts), "--tokenizer", str(tokenizer)] if texts else []), "--rows", str(rows), "--alone"]
    table = Table("cut", "micro-batches", "tokens with padding", "time", "memory", "seconds", "MiB")
    peaks = {}
    for name, parts in made.items():
        command = [sys.executable, str(BENCHMARK), "lengths", *asked, "--cut", name]
        peaks[name] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        padded = sum(batch["input_ids"].numel() for batch in parts)
        ratios = ratio_of(seconds[name], seconds[cuts[0]]), peaks[name] / peaks[cuts[0]]
        table.add_row(
            name, str(len(parts)), str(padded), *(f"{ratio:.2f}" for ratio in ratios),
            f"{median_of(seconds[name]):.2f}", f"{peaks[name]:.0f}",
        )  # fmt: skip
    counts = [len(row["input_ids"]) for row in data]
    print(f"{rows} rows of {min(counts)} to {max(counts)} tokens, {sum(counts)} in all, median {median_of(counts):.0f}")
    Console(width=120).print(table)


class _Virtual(torch.utils.data.Dataset):
    """As many examples as wanted, made when they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([index % 97, index % 89, index % 83, index % 79])
        return {"input_ids": ids, "labels": ids}


def trainer(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    size: Annotated[int, typer.Option(help="Examples in the dataset.")] = 10**7,
    logging_steps: Annotated[int, typer.Option(help="As in TrainingArguments.")] = 500,
) -> None:
    """What a step of DPTrainer takes beyond the engine: sampling, ledger, logging, Trainer's own loop."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, default_data_collator

    import hf_dp.training.run as module
    from hf_dp import DPTrainer, PrivacyConfig

    inside: list[float] = []
    engine = module.private_gradient

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = engine(*args, **kwargs)
        inside.append(time.perf_counter() - start)
        return result

    config = GPT2Config(vocab_size=100, n_positions=8, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    with tempfile.TemporaryDirectory() as folder:
        private = DPTrainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                logging_steps=logging_steps,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=_Virtual(size),
            data_collator=default_data_collator,
            privacy=PrivacyConfig(noise_multiplier=1.0),
        )
        starts: list[float] = []
        step = private.training_step
        private.training_step = lambda *args: starts.append(time.perf_counter()) or step(*args)  # type: ignore[method-assign]
        module.private_gradient = timed  # type: ignore[assignment]
        private.train()
        module.private_gradient = engine
    whole = (starts[-1] - starts[10]) / (len(starts) - 11)
    engine_alone = sum(inside[10:-1]) / len(inside[10:-1])
    print(f"a step: {1000 * whole:.2f} ms, of it the engine {1000 * engine_alone:.2f} ms, everything else "
          f"{1000 * (whole - engine_alone):.2f} ms (n = {size}, optimizer and data collation included)")  # fmt: skip


def startup(
    model: Annotated[str, typer.Option(help="Folder of a causal language model, trained with LoRA r 8.")],
    texts: Annotated[Path, typer.Option(help="CSV, a row an example.")],
    rows: Annotated[int, typer.Option(help="Of a logical batch.")] = 32,
    steps: Annotated[int, typer.Option(help="Timed steps, after one more.")] = 5,
    at_once: Annotated[int, typer.Option(help="Rows of a micro-batch.")] = 8,
    dtype: Dtype = "float32",
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing.")] = False,
    processor: Processor = False,
) -> None:
    """What the check before the first step takes, in steps of the same training (logical batches of `rows`); and the
    most memory that each takes beyond the model. For that set MALLOC_MMAP_THRESHOLD_=65536."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

    from hf_dp import DPTrainer, PrivacyConfig
    from hf_dp.training.engine import Engine

    encode = AutoTokenizer.from_pretrained(model)
    with texts.open(encoding="utf-8", newline="") as file:
        data = [dict(encode(" || ".join(row.values()))) for row in csv.DictReader(file)]
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)),
        LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    check, took, clock, peaks = Engine.check, list[float](), clock_of(processor), list[float]()

    def timed(engine: Engine) -> None:
        held, start = begin_peak(), clock()
        check(engine)
        took.append(clock() - start)
        peaks.extend((held, peak_mib()))
        begin_peak()

    with tempfile.TemporaryDirectory() as folder:
        private = DPTrainer(
            adapted,
            TrainingArguments(
                folder, max_steps=steps + 2, per_device_train_batch_size=min(rows, at_once), save_strategy="no",
                gradient_accumulation_steps=max(1, rows // at_once), report_to=[], disable_tqdm=True,
                gradient_checkpointing=checkpointing, bf16=dtype == "bfloat16", use_cpu=True,
            ),
            train_dataset=data,
            data_collator=DataCollatorForLanguageModeling(encode, mlm=False),
            privacy=PrivacyConfig(noise_multiplier=1.0),
        )  # fmt: skip
        starts: list[float] = []
        step = private.training_step
        private.training_step = lambda *args: starts.append(clock()) or step(*args)  # type: ignore[method-assign]
        Engine.check = timed  # type: ignore[method-assign]
        try:
            private.train()
        finally:
            Engine.check = check  # type: ignore[method-assign]
    each = [after - before for before, after in itertools.pairwise(starts[1:])]
    print(f"the check took {sum(took):.1f} s, a step {median_of(each):.2f} s ({min(each):.2f} to {max(each):.2f}): "
          f"{sum(took) / median_of(each):.1f} steps of {rows} rows each, "
          f"{sum(took) / median_of(each) * rows / 8:.1f} of 8 rows")  # fmt: skip
    held, of_check, of_steps = *peaks, peak_mib()
    print(f"memory, in MiB: {held:.0f} before, {of_check - held:.0f} more in the check, {of_steps - held:.0f} in steps")
