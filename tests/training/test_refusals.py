"""Bad input is refused by name, with a way out, before anything is spent and before any parameter changes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorWithFlattening,
    DefaultDataCollator,
    DistilBertForSequenceClassification,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.errors import ConfigurationError, HfDpError, PreflightError, UnsupportedModelError
from hf_dp.training.refusals import private_arguments
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.workbench import (
    ROWS,
    arguments,
    classifier,
    draws,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import VOCABULARY, tiny


def refused(
    path: Path,
    error: type[HfDpError],
    words: str,
    model: nn.Module | None = None,
    *,
    at_once: bool = True,
    **given: Any,
) -> HfDpError:
    """Makes and trains; asserts that it was refused, at the trainer's construction where that is promised."""
    model = classifier() if model is None else model
    before = parameters(model)
    trainer: Any = None
    with pytest.raises(error) as caught:  # noqa: PT012
        trainer = make(path, model, **given)
        trainer.train()
    assert re.search(words, caught.value.found), caught.value.found
    assert caught.value.why
    assert caught.value.fix
    assert (trainer is None) == at_once
    if trainer is not None:
        assert trainer.ledger.steps == 0
        assert trainer.ledger.entries == ()
    assert same(before, parameters(model))
    return caught.value


def test_the_helper_notices_what_is_not_refused(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(tmp_path, ConfigurationError, "anything")


# --- the promise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "target_epsilon=None and noise_multiplier=None"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "target_epsilon=1.0 and noise_multiplier=1.0"),
        ({"target_epsilon": 0}, "target_epsilon=0"),
        ({"target_epsilon": -1.0}, "target_epsilon=-1.0"),
        ({"target_epsilon": float("inf")}, "target_epsilon=inf"),
        ({"target_epsilon": float("nan")}, "target_epsilon=nan"),
        ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ({"target_epsilon": 1.0, "target_delta": 0.0}, "target_delta=0.0"),
        ({"target_epsilon": 1.0, "target_delta": 1.5}, "target_delta=1.5"),
        ({"target_epsilon": 1.0, "clipping_norm": 0.0}, "clipping_norm=0.0"),
        ({"target_epsilon": 1.0, "clipping_norm": float("inf")}, "clipping_norm=inf together with noise"),
    ],
)
def test_a_promise_that_is_none(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        PrivacyConfig(**values)
    assert caught.value.fix


@pytest.mark.parametrize("privacy", [None, {"target_epsilon": 8.0}, 8.0])
def test_something_else_in_place_of_a_promise(tmp_path: Path, privacy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"PrivacyConfig\(target_epsilon=8.0\)"):
        DPTrainer(model=classifier(), args=arguments(tmp_path), train_dataset=rows(), privacy=privacy)


@pytest.mark.parametrize("delta", [1 / ROWS, 0.5])
def test_a_delta_of_1_over_n_or_more(tmp_path: Path, delta: float) -> None:
    refused(tmp_path, ConfigurationError, f"delta={delta}", privacy=private(target_delta=delta))


def test_a_delta_that_only_the_number_of_rows_shows_to_be_bad(tmp_path: Path) -> None:
    config = PrivacyConfig(target_epsilon=8.0, target_delta=1 / ROWS)
    refused(tmp_path, ConfigurationError, "delta=", privacy=config)


# --- the data ---------------------------------------------------------------------------------------------------------


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class Counts(torch.utils.data.Dataset[Any]):
    """Has 48 rows, and says something else."""

    def __init__(self, *said: Any) -> None:
        self.rows, self.said = rows(), list(said)

    def __len__(self) -> int:
        said: int = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        return said

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


BAD_DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "none of it": (list, "0 examples"),
    "fewer than the expected batch": (lambda: rows(7), "an expected batch of 8 from a training dataset of 7"),
    "one example": (lambda: rows(1), "1 examples"),
    "an iterable dataset of torch": (Streamed, "Streamed, which can only be iterated"),
    "a streamed dataset": (lambda: datasets.Dataset.from_list(rows()).to_iterable_dataset(), "IterableDataset"),
    "a generator": (lambda: iter(rows()), "which can only be iterated"),
    "a set": (lambda: {1, 2, 3}, "which can only be iterated"),
    "fewer rows than it says": (lambda: Counts(100), "Counts, whose last example cannot be read"),
    "a length that changes": (lambda: Counts(48, 40), "whose length was 48 and then 40"),
    "a length below zero": (lambda: Counts(-1), "Counts, whose last example cannot be read"),
    "a length that is no number": (lambda: Counts("48"), "Counts, whose last example cannot be read"),
    "a length beyond counting": (lambda: Counts(10**400), "Counts, whose last example cannot be read"),
    "all splits at once": (
        lambda: datasets.DatasetDict(train=datasets.Dataset.from_list(rows())),
        "DatasetDict with the keys train",
    ),
}


@pytest.mark.parametrize("steps", [4, -1])
@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_training_data(tmp_path: Path, name: str, steps: int) -> None:
    data, words = BAD_DATA[name]
    refused(tmp_path, ConfigurationError, words, parts={"train_dataset": data()}, max_steps=steps)


def test_a_single_row_of_its_own(tmp_path: Path) -> None:
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "parts": {"train_dataset": rows(1)}}
    refused(tmp_path, ConfigurationError, "n=1 training examples, and no delta", **one)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"labels": 3}, "Target 3 is out of bounds"),
        ({"labels": -1}, "Target -1 is out of bounds"),
        ({"input_ids": [5, VOCABULARY]}, "index out of range"),
        ({"input_ids": [5, -7]}, "index out of range"),
        ({"input_ids": [5] * 3000}, "size of tensor"),
        ({"labels": None}, "TypeError"),
    ],
)
def test_one_bad_row_that_is_drawn_late(tmp_path: Path, bad: dict[str, Any], words: str) -> None:
    many = [*rows(2000)]
    assert make(tmp_path, parts={"train_dataset": datasets.Dataset.from_list(many)}).train().global_step
    many[1501] |= bad
    data = datasets.Dataset.from_list(many)
    refused(tmp_path, ConfigurationError, f"row 1501 .*{words}", at_once=False, parts={"train_dataset": data})


def test_rows_without_labels(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"]} for row in rows()]
    refused(tmp_path, ConfigurationError, "no 'labels'", parts={"train_dataset": data}, at_once=False)


# --- collators --------------------------------------------------------------------------------------------------------


class PaddingFree(DefaultDataCollator):
    padding_free = True


def mean_length(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {**pad(examples), "mean": torch.tensor(1.0)}


def shared_row(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {**pad(examples), "position_ids": torch.arange(9)[None]}


def flattened(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[i for e in examples for i in e["input_ids"]]])}


def without_mask(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for name, value in pad(examples).items() if name != "attention_mask"}


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (DataCollatorWithFlattening(), "DataCollatorWithFlattening puts several examples in one row"),
        (PaddingFree(), "PaddingFree puts several examples in one row"),
        (flattened, r"flattened returned 'input_ids' of shape \(1, "),
        (mean_length, "single number 'mean'"),
        (shared_row, r"'position_ids' of shape \(1, 9\)"),
        (lambda examples: list(examples), "list, not a mapping"),
        (lambda examples: {"text": ["a"] * len(examples)}, "no torch tensor"),
        (default_data_collator, "default_data_collator fails on .* examples together .*expected sequence of length"),
    ],
)
def test_failure_22_collators_that_mix_examples(tmp_path: Path, collate: Any, words: str) -> None:
    refused(
        tmp_path,
        ConfigurationError,
        words,
        at_once=False,
        parts={"data_collator": collate},
        remove_unused_columns=False,
    )


def fnet() -> nn.Module:
    """It mixes all positions, padding included, and takes no mask."""
    config = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 20, "max_position_embeddings": 40}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("fnet", vocab_size=VOCABULARY, **config))


def without_mask_for_language(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for name, value in pad_for_language(examples).items() if name != "attention_mask"}


def test_padding_that_changes_an_example(tmp_path: Path) -> None:
    refused(tmp_path, PreflightError, "in a batch", at_once=False, parts={"data_collator": without_mask})


class Lazy(torch.utils.data.Dataset[Any]):
    """Nothing is known of it but what is read."""

    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


@dataclasses.dataclass
class Example:
    ids: list[int]


def as_text(row: dict[str, Any]) -> str:
    """Of as many characters, whatever its tokens are."""
    return " ".join(map(str, row["input_ids"])).ljust(100, "!")


# What a row is, and how the collator gets its tokens out of it.
AS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], list[int]]]] = {
    "a list": (lambda row: row, lambda row: row["input_ids"]),
    "a tuple": (lambda row: (row["input_ids"], 0), lambda row: row[0]),
    "text": (as_text, lambda row: [int(word) for word in row.rstrip("!").split()]),
    "a column of text": (lambda row: {"text": as_text(row)}, lambda row: AS["text"][1](row["text"])),
    "a dataclass": (lambda row: Example(row["input_ids"]), lambda row: row.ids),
    "nested": (lambda row: {"chat": [{"ids": row["input_ids"]}]}, lambda row: row["chat"][0]["ids"]),
    "a tensor (1, T)": (lambda row: torch.tensor([row["input_ids"]]), lambda row: row[0].tolist()),
    "beside a longer list": (lambda row: {**row, "features": [0.5] * 50}, lambda row: row["input_ids"]),
}
KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "a list": lambda data: data,
    "a Hugging Face dataset": datasets.Dataset.from_list,
    "with a transform": lambda data: datasets.Dataset.from_list(data).with_transform(lambda rows: rows),
    "a torch dataset": Lazy,
}
# Of these the shortest and the longest row are known at the start, wherever they are.
KNOWN = [("a list", "a list"), ("a list", "beside a longer list"), ("a Hugging Face dataset", "a list")]
UNKNOWN = [
    *(("a list", form) for form in AS if (("a list", form)) not in KNOWN),
    ("a Hugging Face dataset", "a column of text"),
    ("a Hugging Face dataset", "nested"),
    ("with a transform", "a list"),
    ("a torch dataset", "a list"),
    ("a torch dataset", "beside a longer list"),
]


def parts_of(kind: str, form: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    wrap, tokens = AS[form]

    def collate(examples: list[Any]) -> dict[str, Tensor]:
        return without_mask_for_language([{"input_ids": tokens(example)} for example in examples])

    return {"data_collator": collate, "train_dataset": KINDS[kind]([wrap(row) for row in data])}


@pytest.mark.parametrize(("kind", "form"), KNOWN)
@pytest.mark.parametrize(
    "where", [pytest.param(0, marks=pytest.mark.slow), 337, pytest.param(799, marks=pytest.mark.slow)]
)
def test_failure_30_one_long_row_wherever_it_is(tmp_path: Path, where: int, kind: str, form: str) -> None:
    data = rows(800, low=6, high=6)
    data[where]["input_ids"] = list(range(3, 33))
    given = {"parts": parts_of(kind, form, data), "remove_unused_columns": False}
    refused(tmp_path, PreflightError, "in a batch", fnet(), at_once=False, **given)


@pytest.mark.parametrize(
    ("kind", "form", "length"),
    [
        *(pytest.param(kind, form, 30, marks=[pytest.mark.slow] * (i % 2)) for i, (kind, form) in enumerate(UNKNOWN)),
        *(
            pytest.param(kind, form, 3, marks=[pytest.mark.slow] * (i % 4 > 0))
            for i, (kind, form) in enumerate(UNKNOWN)
        ),
    ],
)
def test_failure_30_one_row_of_another_length_is_refused_when_it_is_drawn(
    tmp_path: Path, kind: str, form: str, length: int
) -> None:
    """What a row is made of tells nothing; what the collator makes of it does."""
    data = rows(800, low=6, high=6)
    at_the_start = {i * 799 // 31 for i in range(32)}
    first = next(i for i in draws(7, 1, n=800)[0] if i not in at_the_start)
    data[first]["input_ids"] = list(range(3, 3 + length))
    # By itself in its micro-batch, for a narrow one.
    given = {"parts": parts_of(kind, form, data), "remove_unused_columns": False, "per_device_train_batch_size": 1}
    given["gradient_accumulation_steps"] = 8
    refused(tmp_path, PreflightError, "in a batch", fnet(), at_once=False, **given)


def test_failure_30_a_switch_that_one_short_row_turns_for_good(tmp_path: Path) -> None:
    """BigBird goes over to full attention."""
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    sparse = AutoConfig.for_model("big_bird", vocab_size=VOCABULARY, block_size=2, num_random_blocks=1, **config)
    data = rows(low=30, high=40)
    data[31]["input_ids"] = data[31]["input_ids"][:3]
    parts = {"data_collator": pad_for_language, "train_dataset": Lazy(data)}
    model = AutoModelForMaskedLM.from_config(sparse)
    words = r"change bert\.attention_type from 'block_sparse' to 'original_full', and it stays so"
    refused(tmp_path, UnsupportedModelError, words, model, at_once=False, parts=parts)
    assert model.bert.attention_type == model.bert.encoder.attention_type == "block_sparse"


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_30_a_row_longer_than_any_before_is_looked_at_before_it_counts(tmp_path: Path, workers: int) -> None:
    """Phi-3's longrope: one row above a threshold gives all beside it other frequencies."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    data = rows(400, low=4, high=9)
    early = {i for step in draws(7, 2, n=400) for i in step} | {i * 399 // 31 for i in range(32)}
    late = next(i for step in draws(7, n=400)[2:] for i in step if i not in early)
    data[late]["input_ids"] = list(range(3, 23))
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 16}
    models = [tiny("phi3", "causal_lm", torch.float32, **changes) for _ in range(2)]
    parts = {"data_collator": pad_for_language, "train_dataset": Lazy(data)}
    trainer = make(tmp_path, models[0], parts=parts, dataloader_num_workers=workers)
    with pytest.raises(PreflightError, match="in a batch|inv_freq is another"):
        trainer.train()
    assert 2 <= trainer.ledger.steps == trainer.state.global_step < 4
    for row in data:
        row["input_ids"] = row["input_ids"][:16]
    assert make(tmp_path, models[1], parts={**parts, "train_dataset": Lazy(data)}).train().global_step == 4


def test_failure_30_a_long_row_where_all_are_of_one_width(tmp_path: Path) -> None:
    """Positions that follow the mask tell a model which row is the longest."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}}
    model = tiny("phi3", "causal_lm", torch.float32, **rope, original_max_position_embeddings=16)

    def on_the_left(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        wide = pad_for_language([*examples, {"input_ids": [3] * 24}])
        lengths = wide["attention_mask"].sum(1).tolist()
        return {k: torch.stack([r.roll(-n) for r, n in zip(v, lengths, strict=True)])[:-1] for k, v in wide.items()}

    data = rows(low=4, high=9)
    data[draws(7)[0][0]]["input_ids"] = list(range(3, 23))
    trainer = make(tmp_path, model, parts={"data_collator": on_the_left, "train_dataset": Lazy(data)})
    with pytest.raises(PreflightError, match="in a batch|inv_freq is another"):
        trainer.train()
    assert trainer.ledger.steps == 0


@pytest.mark.parametrize("kind", KINDS)
def test_failure_30_rows_of_one_length_have_no_padding(tmp_path: Path, kind: str) -> None:
    parts = {"data_collator": without_mask_for_language, "train_dataset": KINDS[kind](rows(low=6, high=6))}
    assert make(tmp_path, fnet(), parts=parts).train().global_step == 4


@pytest.mark.parametrize("kind", KINDS)
def test_failure_30_one_width_for_all_micro_batches_is_a_way_out(tmp_path: Path, kind: str) -> None:
    def wide(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {k: v[:-1] for k, v in without_mask_for_language([*examples, {"input_ids": [3] * 12}]).items()}

    parts = {"data_collator": wide, "train_dataset": KINDS[kind](rows())}
    assert make(tmp_path, fnet(), parts=parts).train().global_step == 4


def test_padding_that_changes_an_example_under_a_random_collator(tmp_path: Path) -> None:
    def masked(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = without_mask([{"input_ids": e["input_ids"], "labels": e["input_ids"]} for e in examples])
        hidden = torch.rand(batch["input_ids"].shape) < 0.5
        return {"input_ids": batch["input_ids"].masked_fill(hidden, 1), "labels": batch["labels"]}

    model = tiny("bert", "masked_lm", torch.float32)
    refused(tmp_path, PreflightError, "padd|in a batch", model, at_once=False, parts={"data_collator": masked})


def test_failure_29_a_random_collator_that_mixes_rows(tmp_path: Path) -> None:
    def cut_and_mixed(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = pad(examples)
        others = batch["input_ids"][torch.randperm(len(examples))]
        hidden = torch.rand(batch["input_ids"].shape) < 0.3
        return {**batch, "input_ids": torch.where(hidden, others, batch["input_ids"])}

    parts = {"data_collator": cut_and_mixed}
    refused(tmp_path, ConfigurationError, "cut_and_mixed gives an example another row", at_once=False, parts=parts)


# --- the model --------------------------------------------------------------------------------------------------------


def with_head(*layers: nn.Module) -> nn.Module:
    model: Any = classifier()
    model.pre_classifier = nn.Sequential(model.pre_classifier, *layers)
    return model


class Blend(nn.Module):
    """A use of a parameter for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, x.cos(), self.scale)


class BatchMean(nn.Module):
    """Examples that mix, without any parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_nothing_to_train(tmp_path: Path) -> None:
    model = classifier().requires_grad_(False)
    refused(tmp_path, UnsupportedModelError, "no trainable parameter", model)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_normalisation(tmp_path: Path, kind: type[nn.Module]) -> None:
    refused(tmp_path, UnsupportedModelError, f"pre_classifier.1 is batch normalisation .{kind.__name__}",
            with_head(kind(24)))  # fmt: skip


def test_a_parameter_without_a_rule(tmp_path: Path) -> None:
    error = refused(tmp_path, UnsupportedModelError, "pre_classifier.1.scale", with_head(Blend()), at_once=False)
    assert "freeze" in error.fix


def test_examples_that_mix(tmp_path: Path) -> None:
    refused(tmp_path, PreflightError, "neighbours", with_head(BatchMean()), at_once=False)


class Remembering(nn.Module):
    """Each example by itself, but a running average of them goes into the saved model, without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def test_buffers_that_remember_the_data(tmp_path: Path) -> None:
    model: Any = with_head(Remembering())
    refused(tmp_path, UnsupportedModelError, "buffer 'pre_classifier.1.mean' changes", model, at_once=False)
    assert not model.pre_classifier[1].mean.any(), "put back as it was"


def test_a_model_in_dataparallel(tmp_path: Path) -> None:
    model = classifier()
    wrapped = nn.DataParallel(model)
    wrapped.config = model.config  # type: ignore[assignment]
    refused(tmp_path, ConfigurationError, "DataParallel", wrapped)


def test_several_devices_would_be_dataparallel(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ConfigurationError, match=r"DataParallel on 2 devices[\s\S]*torchrun"):
        DPTrainer(model=classifier(), args=args, train_dataset=rows(), data_collator=pad, privacy=private())


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm=0.5"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"weight_decay": 1e300}, "weight_decay=1e\\+300"),
        ({"adam_epsilon": float("inf")}, "adam_epsilon=inf"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"label_smoothing_factor": 2.0}, "label_smoothing_factor=2.0"),
        ({"label_smoothing_factor": -1.0}, "label_smoothing_factor=-1.0"),
        ({"label_smoothing_factor": float("nan")}, "label_smoothing_factor=nan"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs=inf"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_steps": 1.5}, "max_steps=1.5"),
        ({"max_steps": True}, "max_steps=True"),
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size='8'"),
        ({"per_device_train_batch_size": -4}, "per_device_train_batch_size=-4"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "layerwise"),
    ],
)
def test_failure_22_and_23_arguments_that_would_break_the_promise(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    refused(tmp_path, ConfigurationError, words, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    ],
)
def test_failure_23_arguments_that_not_every_machine_lets_be_made(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    args = arguments(tmp_path)
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ConfigurationError, match=words) as caught:
        private_arguments(args, PrivacyConfig(target_epsilon=1))
    assert caught.value.fix


@pytest.mark.parametrize("value", [0, 0.0, 1.0])
def test_max_grad_norm_may_be_0_or_the_default(tmp_path: Path, value: float) -> None:
    assert make(tmp_path, max_grad_norm=value).args.max_grad_norm == 0


def test_label_smoothing_where_it_is_not_defined(tmp_path: Path) -> None:
    def multi(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**pad(examples), "labels": torch.eye(3)[[e["labels"] for e in examples]]}

    for problem in ("multi_label_classification", "regression"):
        model: Any = classifier()
        model.config.problem_type = problem
        refused(
            tmp_path, ConfigurationError, "label_smoothing_factor=0.1", model, at_once=False,
            parts={"data_collator": multi}, label_smoothing_factor=0.1,
        )  # fmt: skip


def test_no_steps(tmp_path: Path) -> None:
    config = PrivacyConfig(target_epsilon=8.0)
    refused(
        tmp_path, ConfigurationError, "steps=0", at_once=False, privacy=config, max_steps=-1, num_train_epochs=0
    )  # fmt: skip


def test_failure_12_an_optimizer_that_asks_for_the_gradient_again(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters())
    refused(tmp_path, ConfigurationError, "LBFGS", model, parts={"optimizers": (optimizer, None)})


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    other = torch.optim.SGD(classifier().parameters(), lr=0.1)
    refused(tmp_path, ConfigurationError, "SGD holds none", parts={"optimizers": (other, None)})


def test_failure_12_an_optimizer_that_the_trainer_makes_is_looked_at_as_well(tmp_path: Path) -> None:
    class Own(DPTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.LBFGS(self.model.parameters())
            return self.optimizer

    refused(tmp_path, ConfigurationError, "LBFGS", kind=Own, at_once=False)


# --- subclasses -------------------------------------------------------------------------------------------------------


class OwnStep(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class OwnLoader(DPTrainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class WeightedSampler(DPTrainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS)


class Behind(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class MixinLast(Behind, DPTrainerMixin):  # type: ignore[misc]
    pass


class OwnLoss(DPTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnStep, "OwnStep.training_step"),
        (OwnLoader, "OwnLoader.get_train_dataloader"),
        (WeightedSampler, "WeightedSampler chooses its own training sampler"),
        (OwnLoss, "OwnLoss.compute_loss gives one loss for the whole batch"),
    ],
)
def test_failure_22_subclasses_that_would_bypass_the_private_step(tmp_path: Path, kind: Any, words: str) -> None:
    refused(tmp_path, ConfigurationError, words, kind=kind)


def test_the_mixin_behind_the_trainer_does_not_train_unnoticed(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ConfigurationError)):
        make(tmp_path, kind=MixinLast)


def test_a_loss_function_for_the_whole_batch(tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    refused(tmp_path, ConfigurationError, "compute_loss_func", parts={"compute_loss_func": mean})


class MeanLoss(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return super().compute_per_example_loss(model, inputs).mean()


class SharedDenominator(DPTrainer):
    """Failure 3 by the user's own hand: normalised over the batch."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        return losses / inputs["attention_mask"].sum()


class ConstantLoss(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return torch.zeros(len(inputs["input_ids"]))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (MeanLoss, ConfigurationError, r"returned \(\), not"),
        (SharedDenominator, PreflightError, "neighbours|in a batch"),
        (ConstantLoss, UnsupportedModelError, "does not depend on any trainable parameter"),
    ],
)
def test_losses_that_are_not_one_for_each_example(tmp_path: Path, kind: Any, error: Any, words: str) -> None:
    refused(tmp_path, error, words, kind=kind, at_once=False)


def test_hyperparameter_search(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(ConfigurationError, match=r"hyperparameter_search[\s\S]*public data"):
        trainer.hyperparameter_search(n_trials=2)
    assert trainer.ledger.steps == 0


def test_unfreezing_in_the_middle_is_refused_before_the_step_is_paid(tmp_path: Path) -> None:
    class Unfreeze(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.requires_grad_(True)

    model: Any = classifier()
    model.distilbert.requires_grad_(False)
    trainer = make(tmp_path, model, parts={"callbacks": [Unfreeze()]})
    with pytest.raises(PreflightError, match="preflight did not see"):
        trainer.train()
    assert trainer.ledger.steps == trainer.state.global_step == 2


class DoubledForSequenceClassification(DistilBertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output


def test_a_model_whose_own_loss_is_another_is_refused(tmp_path: Path) -> None:
    model = DoubledForSequenceClassification(classifier().config)
    refused(tmp_path, UnsupportedModelError, "as its loss of one example", model, at_once=False)
