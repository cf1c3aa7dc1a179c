"""Small trainings for the tests of DPTrainer: rows, a collator, arguments, and the parameters after each step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from tests.architectures import VOCABULARY
from tests.zoo import tiny

ROWS, MICRO, EXPECTED, STEPS = 48, 4, 8, 4
Rows = list[dict[str, Any]]


def rows(n: int = ROWS, seed: int = 0, low: int = 2, high: int = 9) -> Rows:
    """Random sequences of `low` to `high` tokens; the label is one of three, readable from the first token."""
    draw = random.Random(seed)
    out = []
    for _ in range(n):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(low, high))]
        out.append({"input_ids": ids, "labels": ids[0] % 3})
    return out


def pad(examples: Rows, side: str = "right") -> dict[str, Tensor]:
    """A padding collator; labels that are lists are padded with -100."""
    longest = max(len(e["input_ids"]) for e in examples)

    def row(values: list[int], filler: int) -> list[int]:
        fill = [filler] * (longest - len(values))
        return [*fill, *values] if side == "left" else [*values, *fill]

    batch = {
        "input_ids": torch.tensor([row(e["input_ids"], 0) for e in examples]),
        "attention_mask": torch.tensor([row([1] * len(e["input_ids"]), 0) for e in examples]),
    }
    if "labels" in examples[0]:
        labels = [e["labels"] for e in examples]
        batch["labels"] = torch.tensor(labels if isinstance(labels[0], int) else [row(v, -100) for v in labels])
    return batch


def pad_for_language(examples: Rows, side: str = "right") -> dict[str, Tensor]:
    """As `pad`, with the tokens themselves as labels."""
    return pad([{"input_ids": e["input_ids"], "labels": e["input_ids"]} for e in examples], side)


def classifier(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Of one layer: the checks of a training take as long as it has operations."""
    return tiny("distilbert", "sequence", dtype, **{"n_layers": 1, **changes})


def with_lora(model: nn.Module | None = None, **changes: Any) -> Any:
    """A GPT-2, or a `classifier`, under an adapter without dropout."""
    model = classifier() if model is None else model
    names = ["c_attn"] if "GPT2" in type(model).__name__ else ["q_lin", "v_lin"]
    task = "CAUSAL_LM" if "GPT2" in type(model).__name__ else "SEQ_CLS"
    values = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": names, "task_type": task, **changes}
    return get_peft_model(model, LoraConfig(**values))


def arguments(path: Path | str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // MICRO, "max_steps": STEPS,
        "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "logging_steps": 1000, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    return TrainingArguments(str(path), **{**values, **changes})


def private(**changes: Any) -> PrivacyConfig:
    """Reproducible, moderate noise; nothing to calibrate."""
    values = {"noise_multiplier": 1.0, "seed": 7, **changes}
    return PrivacyConfig(**values)


def exact(**changes: Any) -> PrivacyConfig:
    """No noise, and by default no clipping: plain SGD on Poisson batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return private(**{"noise_multiplier": 0, "clipping_norm": float("inf"), **changes})


def make(
    path: Path | str,
    model: nn.Module | None = None,
    privacy: PrivacyConfig | None = None,
    kind: type[Any] = DPTrainer,
    parts: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer of `kind`; `parts` are arguments of the trainer, `changes` those of `TrainingArguments`."""
    given = {"train_dataset": rows(), "data_collator": pad, **(parts or {})}
    if "model_init" not in given:
        given["model"] = classifier() if model is None else model
    return kind(args=arguments(path, **changes), privacy=privacy or private(), **given)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def distance(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    return max(float((one[name] - two[name]).abs().max()) for name in one)


class Trajectory(TrainerCallback):
    """The parameters at the beginning and after each step."""

    def __init__(self) -> None:
        self.points: list[dict[str, Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.points.append(parameters(model))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.points.append(parameters(model))


def draws(seed: int, steps: int = STEPS, n: int = ROWS, expected: int = EXPECTED) -> list[list[int]]:
    """The logical batches of a seeded run."""
    sampler = PoissonBatchSampler.of(n, expected, Entropy(seed))
    return [sampler.draw(step) for step in range(steps)]


def a_tokenizer(words: set[str]) -> PreTrainedTokenizerFast:
    """Of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


# Of the family that SmolLM2 and Qwen have: a message each, with a system message where none is given.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def a_chat_tokenizer(texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Of bytes, and of what is frequent in `texts`; it pads with the end of a turn, and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[1],
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def last_log(trainer: Any, name: str) -> Any:
    """What was logged last under a name."""
    return next(entry[name] for entry in reversed(trainer.state.log_history) if name in entry)


def trained(path: Path, **changes: Any) -> Any:
    """A trainer that has trained."""
    trainer = make(path, **changes)
    trainer.train()
    return trainer


def assert_resumes_as_it_was(
    path: Path, own: PrivacyConfig, others: Iterable[PrivacyConfig], word: str, *errors: type[Exception]
) -> None:
    """A resumed training is the uninterrupted one, and other promises are refused with `word`."""

    def trainer(privacy: PrivacyConfig) -> Any:
        return make(path, privacy=privacy, save_strategy="steps", save_steps=2, max_steps=4)

    whole, resumed, checkpoint = trainer(own), trainer(own), str(path / "checkpoint-2")
    whole.train()
    resumed.train(resume_from_checkpoint=checkpoint)
    assert same(parameters(resumed.model), parameters(whole.model))
    assert resumed.privacy_report() == whole.privacy_report()
    for other in others:
        with pytest.raises(errors, match=word):
            trainer(other).train(resume_from_checkpoint=checkpoint)


def saved_by(path: Path, *args: Any, **changes: Any) -> Path:
    """`path`, into which a trainer as of `make` has saved its model, when it had trained."""
    trainer = make(path, *args, **changes)
    trainer.train()
    trainer.save_model()
    return path


class Recommender(nn.Module):
    """Tables of categorical features, found without their names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.users, self.days = nn.Embedding(3000, 4), nn.Embedding(1200, 3), nn.Embedding(7, 2)
        self.head = nn.Linear(9, 2)

    def forward(self, features: Tensor) -> Tensor:
        parts = [self.items(features[:, 0]), self.users(features[:, 1]), self.days(features[:, 2])]
        logits: Tensor = self.head(torch.cat(parts, dim=1))
        return logits


class Clicks(DPTrainer):
    """Trains a `Recommender`."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(inputs["features"]), inputs["labels"], reduction="none")


def clicks(n: int = 60) -> Rows:
    """A few items and users out of many, each often."""
    return [{"features": [i % 11, (7 * i) % 13, i % 7], "labels": i % 2} for i in range(n)]


def stack(examples: Rows) -> dict[str, Tensor]:
    """Collates `clicks`."""
    return {name: torch.tensor([e[name] for e in examples]) for name in ("features", "labels")}


class NoWholeTable(TorchDispatchMode):
    """Remembers operations that make a dense tensor as large as a table, other than the table itself."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table, self.found = table, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            is_dense = isinstance(made, Tensor) and not made.is_sparse and made.numel() >= self.table.numel()
            if is_dense and made.untyped_storage().data_ptr() != self.table.untyped_storage().data_ptr():
                self.found.add(str(func))
        return result


class PoissonSpy(TrainerCallback):
    """The size of each logical batch and the noisy gradient that it became."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        owner = model if model is not None else self.model
        self.gradients.append({name: p.grad.detach().clone() for name, p in owner.named_parameters()})

    model: Any = None


def gradients_of(trainer: Any) -> list[dict[str, Tensor]]:
    spy = PoissonSpy()
    spy.model = trainer.model
    trainer.add_callback(spy)
    trainer.train()
    return spy.gradients


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])
