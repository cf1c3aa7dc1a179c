"""Prompts and answers for causal language models: data, loss on the answer only, evaluation, generation.

The privacy unit is a row of the training data: one conversation, or one prompt with its answer.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from hf_dp.errors import ConfigurationError
from hf_dp.losses import per_example_losses

SCRATCH = "scratch"
IGNORED = -100
_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json"}
Row = dict[str, list[int]]


def read(source: str, split: str, limit: int | None) -> Dataset:
    """A local CSV, JSON or JSON lines file, or a split of a dataset on the hub; its first `limit` rows."""
    path = Path(source)
    if path.suffix in _KINDS:
        if not path.is_file():
            raise ConfigurationError(f"there is no file {source!r}.", why="there is no data.", fix="check the path.")
        data = load_dataset(_KINDS[path.suffix], data_files=str(path), split="train")
    else:
        data = load_dataset(source, split=split)
    return data if limit is None else data.select(range(min(limit, len(data))))


def tokenizer_and_model(name: str, width: int, layers: int, positions: int) -> tuple[Any, Any]:
    """Those of a hub name or a directory; of "scratch" a random GPT-2 over characters, whose alphabet is public."""
    if name == SCRATCH:
        tokenizer = characters()
        config = GPT2Config(
            vocab_size=len(tokenizer), n_positions=positions, n_embd=width, n_layer=layers, n_head=max(1, width // 32),
            bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        return tokenizer, GPT2LMHeadModel(config)
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


def characters() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character."""
    names = ["<unk>", "<pad>", "<eos>", *string.printable]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def with_lora(model: Any, rank: int) -> Any:
    """`model` frozen, with adapters on all of its linear layers but the output."""
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def row(parts: Iterable[tuple[list[int], bool]], max_length: int) -> Row:
    """Tokens in parts, of which some are answers: labels on those only, cut off after `max_length`."""
    ids: list[int] = []
    labels: list[int] = []
    for part, is_answer in parts:
        ids += part
        labels += part if is_answer else [IGNORED] * len(part)
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def dataset(rows: list[Row], what: str) -> Dataset:
    """Rows as a dataset, without those whose answer was cut off altogether: they would teach nothing.

    Each row stays or goes for itself, so that one more row of data is at most one more row of the dataset.
    """
    kept = [one for one in rows if any(label != IGNORED for label in one["labels"])]
    if not kept:
        raise ConfigurationError(
            f"no row of the {what} data has a token of an answer.",
            why="there is nothing to learn, or to measure.",
            fix="raise max_length, or check the columns.",
        )
    if len(kept) < len(rows):
        print(f"{what}: {len(rows) - len(kept)} of {len(rows)} rows have no answer within max_length and are left out")
    return Dataset.from_list(kept)


@torch.no_grad()
def answer_losses(model: Any, rows: Dataset, collate: Callable[[list[Any]], Any], size: int) -> torch.Tensor:
    """(n, 2): of each row the mean loss of its answer's tokens, in nats, and their number."""
    was_training = model.training
    model.eval()
    found = []
    for start in tqdm(range(0, len(rows), size), desc="evaluation"):
        batch = collate(list(rows.select(range(start, min(start + size, len(rows)))))).to(model.device)
        losses = per_example_losses(model, batch)
        found.append(torch.stack([losses, batch["labels"][:, 1:].ne(IGNORED).sum(1).to(losses)], 1).cpu())
    model.train(was_training)
    return torch.cat(found)


def per_token(losses: torch.Tensor) -> float:
    """The mean over all answer tokens of what `answer_losses` found."""
    return float((losses[:, 0] * losses[:, 1]).sum() / losses[:, 1].sum())


@torch.no_grad()
def continued(model: Any, tokenizer: Any, prompts: list[list[int]], size: int, new_tokens: int) -> list[str]:
    """What the model says after each prompt, greedily, up to its end token."""
    was_training = model.training
    model.eval()
    said: list[str] = []
    for start in tqdm(range(0, len(prompts), size), desc="generation"):
        batch = tokenizer.pad(
            {"input_ids": prompts[start : start + size]}, padding_side="left", return_tensors="pt"
        ).to(model.device)
        out = model.generate(
            **batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        said += [text.strip() for text in texts]
    model.train(was_training)
    return said


def show(title: str, results: dict[str, dict[str, float]]) -> None:
    """Prints results, a row each, before and after training."""
    table = Table(title=title)
    columns = list(dict.fromkeys(column for values in results.values() for column in values))
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for name, values in results.items():
        table.add_row(name, *(f"{values[column]:.4f}" if column in values else "" for column in columns))
    Console().print(table)
