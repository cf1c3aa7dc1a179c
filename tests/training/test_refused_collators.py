"""Collators that mix examples, and padding that changes one, are refused at the start or in the step that shows it."""

from __future__ import annotations

import dataclasses
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
    default_data_collator,
)

from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from tests.architectures import VOCABULARY
from tests.training.refusing import refused
from tests.training.workbench import draws, make, pad, pad_for_language, rows
from tests.zoo import image_text_batch, tiny


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


def test_of_a_collator_in_trainers_own_the_users_is_named(tmp_path: Path) -> None:
    refused(
        tmp_path, ConfigurationError, "collator flattened returned", at_once=False, parts={"data_collator": flattened}
    )


def fnet() -> nn.Module:
    """It mixes all positions, padding included, and takes no mask."""
    config = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 20, "max_position_embeddings": 40}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model("fnet", vocab_size=VOCABULARY, **config))


def without_mask_for_language(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: value for name, value in pad_for_language(examples).items() if name != "attention_mask"}


@pytest.mark.slow
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


def of_kinds(*usual: str) -> list[Any]:
    """All kinds; those that are not usual are slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in usual)) for kind in KINDS]


@pytest.mark.parametrize(("kind", "form"), KNOWN)
@pytest.mark.parametrize("where", [0, 337, 799])
@pytest.mark.slow
def test_failure_30_one_long_row_wherever_it_is(tmp_path: Path, where: int, kind: str, form: str) -> None:
    data = rows(800, low=6, high=6)
    data[where]["input_ids"] = list(range(3, 33))
    given = {"parts": parts_of(kind, form, data), "remove_unused_columns": False}
    refused(tmp_path, PreflightError, "in a batch", fnet(), at_once=False, **given)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "form", "length"),
    [
        pytest.param(kind, form, length, marks=[pytest.mark.slow] * ((form, length) != ("a column of text", 30)))
        for length in (30, 3)
        for kind, form in UNKNOWN
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
@pytest.mark.slow
def test_failure_30_a_row_longer_than_any_before_is_looked_at_before_it_counts(tmp_path: Path, workers: int) -> None:
    """Phi-3's longrope: one row above a threshold gives all beside it other frequencies."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    data = rows(400, low=4, high=9)
    early = {i for step in draws(7, 2, n=400) for i in step} | {i * 399 // 31 for i in range(32)}
    late = next(i for step in draws(7, n=400)[2:] for i in step if i not in early)
    data[late]["input_ids"] = list(range(3, 23))
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 16, "num_hidden_layers": 1}
    models = [tiny("phi3", "causal_lm", torch.float32, **changes) for _ in range(2)]
    parts = {"data_collator": pad_for_language, "train_dataset": Lazy(data)}
    trainer = make(tmp_path, models[0], parts=parts, dataloader_num_workers=workers)
    with pytest.raises(PreflightError, match="in a batch|inv_freq is another"):
        trainer.train()
    assert 2 <= trainer.ledger.steps == trainer.state.global_step < 4
    for row in data:
        row["input_ids"] = row["input_ids"][:16]
    assert make(tmp_path, models[1], parts={**parts, "train_dataset": Lazy(data)}).train().global_step == 4


@pytest.mark.slow
def test_failure_30_a_long_row_where_all_are_of_one_width(tmp_path: Path) -> None:
    """Positions that follow the mask tell a model which row is the longest."""
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "original_max_position_embeddings": 16}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}}
    changes = {**rope, "original_max_position_embeddings": 16, "num_hidden_layers": 1}
    model = tiny("phi3", "causal_lm", torch.float32, **changes)

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


@pytest.mark.parametrize("kind", of_kinds("a Hugging Face dataset"))
@pytest.mark.slow
def test_failure_30_rows_of_one_length_have_no_padding(tmp_path: Path, kind: str) -> None:
    parts = {"data_collator": without_mask_for_language, "train_dataset": KINDS[kind](rows(low=6, high=6))}
    assert make(tmp_path, fnet(), parts=parts).train().global_step == 4


@pytest.mark.parametrize("kind", of_kinds("with a transform"))
@pytest.mark.slow
def test_failure_30_one_width_for_all_micro_batches_is_a_way_out(tmp_path: Path, kind: str) -> None:
    def wide(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {k: v[:-1] for k, v in without_mask_for_language([*examples, {"input_ids": [3] * 12}]).items()}

    parts = {"data_collator": wide, "train_dataset": KINDS[kind](rows())}
    assert make(tmp_path, fnet(), parts=parts).train().global_step == 4


@pytest.mark.slow
def test_padding_that_changes_an_example_under_a_random_collator(tmp_path: Path) -> None:
    def masked(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = without_mask([{"input_ids": e["input_ids"], "labels": e["input_ids"]} for e in examples])
        hidden = torch.rand(batch["input_ids"].shape) < 0.5
        return {"input_ids": batch["input_ids"].masked_fill(hidden, 1), "labels": batch["labels"]}

    model = tiny("bert", "masked_lm", torch.float32, num_hidden_layers=1)
    refused(tmp_path, PreflightError, "padd|in a batch", model, at_once=False, parts={"data_collator": masked})


def test_failure_29_a_random_collator_that_mixes_rows(tmp_path: Path) -> None:
    def cut_and_mixed(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = pad(examples)
        others = batch["input_ids"][torch.randperm(len(examples))]
        hidden = torch.rand(batch["input_ids"].shape) < 0.3
        return {**batch, "input_ids": torch.where(hidden, others, batch["input_ids"])}

    parts = {"data_collator": cut_and_mixed}
    refused(tmp_path, ConfigurationError, "cut_and_mixed gives an example another row", at_once=False, parts=parts)


def test_rows_without_a_picture_beside_rows_with_one_are_refused_in_words(tmp_path: Path) -> None:
    """A batch without any goes through by itself; one with both fails inside the model."""
    whole = image_text_batch("idefics3", 24, 9, torch.float32, images=1)
    seen = [{name: value[i] for name, value in whole.items()} for i in range(24)]
    blind = {"input_ids": torch.full((9,), 5), "labels": torch.full((9,), 5), "pixel_values": None}

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        given = [torch.zeros(1, 3, 8, 8) if one["pixel_values"] is None else one["pixel_values"] for one in examples]
        texts = {name: torch.stack([one[name] for one in examples]) for name in ("input_ids", "labels")}
        return texts | ({"pixel_values": torch.stack(given)} if any(bool(one.any()) for one in given) else {})

    error = refused(
        tmp_path,
        ConfigurationError,
        r"the check before the first step failed in the model.*\(RuntimeError: cannot reshape",
        tiny("idefics3", "image_text", torch.float32),
        at_once=False,
        parts={"data_collator": collate, "train_dataset": [*seen[:12], blind, *seen[12:]]},
        remove_unused_columns=False,
    )
    assert "such as a picture" in error.fix


def popped(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    labels = [example.pop("labels") for example in examples]
    return {**pad(examples), "labels": torch.tensor(labels)}


def ended(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    for example in examples:
        assert 2 not in example["input_ids"]
        example["input_ids"].append(2)
    return pad(examples)


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        ("a list", popped),
        ("a Hugging Face dataset", popped),
        ("a torch dataset", popped),
        ("a Hugging Face dataset", ended),
    ],
)
@pytest.mark.parametrize("most", [None, 40])
@pytest.mark.slow
def test_collators_that_change_their_rows_train(tmp_path: Path, kind: str, collate: Any, most: int | None) -> None:
    parts = {"data_collator": collate, "train_dataset": KINDS[kind](data := rows()), "max_tokens_per_micro_batch": most}
    run = make(tmp_path, parts=parts, remove_unused_columns=False)
    run.train()
    assert run.ledger.steps == 4
    assert data == rows()
