"""A row that a training would stop at is refused with its error, and with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    DataCollatorWithPadding,
    DistilBertForSequenceClassification,
    TrainingArguments,
    default_data_collator,
)

import hf_dp.data.extremes as extremes
import hf_dp.per_example.checks.state as state
from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.data.failing_rows import NUMBERS, explained_in_a_step, failures_refused, refuse_rows_that_fail
from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from tests.data.test_telling_rows import ROWS, table
from tests.training.refusing import refused
from tests.training.workbench import Rows, a_tokenizer, classifier, pad, rows


def test_a_row_that_fails_is_named_with_its_error() -> None:
    def run(row: dict[str, Any]) -> None:
        if 99 in row["input_ids"]:
            raise IndexError("index out of range")

    with pytest.raises(
        ConfigurationError, match=r"row 1 .counted from 0. of the training data .*IndexError: index out of range"
    ):
        refuse_rows_that_fail(ROWS, [0, 1], [], run)
    with pytest.raises(ConfigurationError, match="a row of the training data"):
        refuse_rows_that_fail(ROWS, [], ROWS, run)
    refuse_rows_that_fail([ROWS[0], ROWS[2]], [0, 1], [ROWS[3]], run)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ZeroDivisionError("none"), ConfigurationError),
        (PreflightError("a", why="b", fix="c"), PreflightError),
        (torch.OutOfMemoryError("no more"), torch.OutOfMemoryError),
        (RuntimeError("[gloo/transport] Connection closed by peer"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_error_of_the_model_is_refused_and_one_that_says_more_stays(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, failures_refused():
        raise error
    assert type(caught.value) is kind
    assert (caught.value is error) == (kind is not ConfigurationError)
    assert str(error) in str(caught.value)
    notes = getattr(caught.value, "__notes__", [])
    assert any("the longest among them" in note for note in notes) == (kind is torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (IndexError("out of range"), True),
        (PreflightError("a", why="b", fix="c"), False),
        (torch.OutOfMemoryError("no more"), False),
        (RuntimeError("[gloo/transport] Connection closed by peer"), False),
    ],
)
def test_in_a_step_an_error_stays_and_says_how_to_go_on(error: Exception, is_told: bool) -> None:
    with pytest.raises(type(error)) as caught, explained_in_a_step():
        raise error
    assert caught.value is error
    assert any("resume_from_checkpoint" in note for note in getattr(error, "__notes__", [])) == is_told


class Kinds(nn.Module):
    """Looks up what its rows name."""

    def forward(self, key: Any, **columns: Any) -> Any:
        return nn.ModuleDict({"a": nn.Linear(1, 1)})[key] if isinstance(key, str) else {"a": 1}[key]


@pytest.mark.parametrize(("key", "may_be_one"), [("b", True), (3, False)])
def test_what_a_model_looks_up_in_vain_need_be_no_column(key: Any, may_be_one: bool) -> None:
    errors = []
    with pytest.raises(ConfigurationError) as caught, failures_refused():
        Kinds()(key)
    errors.append(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        refuse_rows_that_fail(ROWS, [0], [], lambda row: Kinds()(key))
    for error in (*errors, caught.value):
        assert error.fix.startswith("look at Kinds.forward (test_failing_rows.py, line ")
        assert ("remove_unused_columns=False" in error.fix) == may_be_one


class Router(nn.Linear):
    """Gives more than one tensor, as those of phimoe."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


def test_what_peft_cannot_adapt_is_no_fault_of_a_row() -> None:
    adapted = get_peft_model(nn.Sequential(Router(3, 3)), LoraConfig(target_modules=["0"]))
    with pytest.raises(ConfigurationError) as caught:
        refuse_rows_that_fail(ROWS, [0], [], lambda row: adapted(torch.ones(1, 3)))
    assert caught.value.fix.startswith("leave what is a Router out of target_modules")
    with pytest.raises(ConfigurationError, match="leave what is a Router out"), failures_refused():
        adapted(torch.ones(1, 3))


def test_labels_beyond_the_outputs_are_told_how_many_there_must_be() -> None:
    def run(row: Any) -> Tensor:
        return F.cross_entropy(torch.zeros(1, 2), torch.tensor([row["labels"]]))

    with pytest.raises(ConfigurationError, match="Target 2 is out of bounds") as caught:
        refuse_rows_that_fail([{"labels": 0}, {"labels": 2}], [0, 1], [], run)
    assert "num_labels=3 or more" in caught.value.fix


def test_what_fails_of_each_row_is_no_fault_of_the_first() -> None:
    def run(row: Any) -> Tensor:
        return torch.zeros(1, 5).view(-1, 2)

    with pytest.raises(ConfigurationError, match="shape '.-1, 2.' is invalid") as caught:
        refuse_rows_that_fail(ROWS, [0, 1, 2], [], run)
    assert caught.value.fix.startswith("others fail with the same words")
    assert "[...]" not in caught.value.fix
    with pytest.raises(ConfigurationError, match="row 2 ") as caught:
        refuse_rows_that_fail(ROWS, [0, 2, 1, 3], [], lambda row: 1 // (row["labels"]))
    assert caught.value.fix.startswith("correct the row or leave it out")


class Perturbed(DPTrainer):
    """The loss beside one of inputs that are moved along a gradient, as adversarial training has it (FGM)."""

    enables = True

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        x, labels = inputs["x"], inputs["labels"]
        with torch.set_grad_enabled(self.enables or torch.is_grad_enabled()):
            moved = x.clone().requires_grad_()
            fixed = torch.func.functional_call(model, {k: p.detach() for k, p in model.named_parameters()}, moved)
            (gradient,) = torch.autograd.grad(F.cross_entropy(fixed, labels, reduction="sum"), moved)
        return F.cross_entropy(model(x), labels, reduction="none") + F.cross_entropy(
            model(x + gradient), labels, reduction="none"
        )


@pytest.mark.parametrize("enables", [False, True])
def test_a_loss_that_takes_gradients_of_inputs_is_told_how(enables: bool, tmp_path: Path) -> None:
    data = [{"x": torch.randn(3), "labels": i % 2} for i in range(8)]
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=1, use_cpu=True, report_to="none")
    args.remove_unused_columns = False
    trainer = type("T", (Perturbed,), {"enables": enables})(
        model=nn.Linear(3, 2), args=args, train_dataset=data, privacy=PrivacyConfig(noise_multiplier=1.0)
    )
    if enables:
        trainer.train()
        assert trainer.privacy_report().steps == 1
    else:
        with pytest.raises(ConfigurationError, match="does not require grad") as caught:
            trainer.train()
        assert caught.value.fix.startswith("take gradients within the loss under `with torch.enable_grad():`")


def test_targets_that_are_no_classes_are_told_before_torch_reads_what_lies_there() -> None:
    given, one = torch.zeros(4, 1, 3), torch.ones(1, dtype=torch.long)
    run = lambda row: nn.functional.ctc_loss(given, torch.tensor([row["label"]]), 4 * one, one)  # noqa: E731
    with pytest.raises(ConfigurationError, match=r"row 1 .* Target -1 is out of bounds"), failures_refused():
        refuse_rows_that_fail([{"label": [1]}, {"label": [-1]}], [0, 1], [], run)


@pytest.mark.parametrize("of", [list, table])
def test_of_a_row_without_tokens_it_is_said_where_and_of_how_many(of: Any) -> None:
    def run(row: dict[str, Any]) -> None:
        row["input_ids"][0]

    empty = [{**row, "tags": [], "input_ids": row["input_ids"] if i % 2 else []} for i, row in enumerate(ROWS)]
    with pytest.raises(
        ConfigurationError, match=r"row 2 .* nothing in its column 'input_ids' \(3 such rows\), and"
    ) as e:
        refuse_rows_that_fail(of([{"tags": [], **row} for row in empty]), [1, 2], [], lambda row: run(row))
    assert "IndexError" in e.value.found
    assert "dataset.filter(lambda row: len(row['input_ids']) > 0)" in e.value.fix
    assert extremes.empty_rows(table([{"text": ""}, {"text": "a"}]).select([1]), "text") == 0
    assert extremes.empty_rows(table([{"text": 3}]), "text") is None


def test_a_row_that_is_there_twice_is_tried_once() -> None:
    tried: list[Any] = []
    arrays = [{"x": np.arange(3)}, {"x": np.arange(3)}]
    alike = [{**ROWS[0], "labels": value} for value in (1, True, 1.0)]
    refuse_rows_that_fail(ROWS, [0, 1], [ROWS[1], *alike, *arrays], tried.append)
    assert len(tried) == 6, "arrays are not compared, and 1, True and 1.0 are three"


class Late(torch.Tensor):
    """Tells of an error only when it is read, as what an accelerator computes does."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise torch.AcceleratorError("device-side assert triggered")


def test_an_accelerator_that_fails_late_and_then_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(row: dict[str, Any]) -> torch.Tensor:
        return torch.ones(1).as_subclass(Late) if 99 in row["input_ids"] else torch.ones(1)

    def is_dead(*args: Any) -> bool:
        raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(state, "equal", is_dead)
    model = torch.nn.Module()
    model.register_buffer("positions", torch.arange(3))
    with (
        pytest.raises(ConfigurationError, match=r"row 1 .counted from 0. of the training data .*device-side"),
        state.unchanged_state(model),
    ):
        refuse_rows_that_fail(ROWS, [1, 2], [], run)


@pytest.mark.parametrize(
    "error",
    [UnsupportedModelError("this", why="it", fix="that"), torch.OutOfMemoryError("too little"), KeyboardInterrupt()],
)
def test_what_is_not_the_rows_fault_is_not_blamed_on_it(error: BaseException) -> None:
    def run(row: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        refuse_rows_that_fail(ROWS, [0], [], run)
    assert caught.value is error


def of_pictures(examples: list[Any]) -> dict[str, Any]:
    return {**pad(examples), "img": torch.tensor([example["img"] for example in examples])}


TEXTS = [{"text": "a b", **row} for row in rows()]
NAMED = [{**row, "labels": "yes"} for row in rows()]
PICTURES = [{**row, "img": [0.5]} for row in rows()]
PADDED = DataCollatorWithPadding(a_tokenizer({"a", "b"}))


def named(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "labels": [len(text) % 3 for text in batch["text"]]}


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
@pytest.mark.parametrize(
    ("data", "collate", "changes", "words"),
    [
        (TEXTS, PADDED, {"remove_unused_columns": False}, "leave out columns that are no numbers"),
        (NAMED, pad, {}, "of names of labels"),
        ([{"text": "a", "labels": 1} for _ in rows()], PADDED, {"remove_unused_columns": False}, "with the tokenizer"),
        (PICTURES, of_pictures, {}, "remove_unused_columns=False"),
    ],
)
def test_what_a_collator_fails_on_in_all_rows_is_not_blamed_on_one(
    tmp_path: Path, kind: Any, data: Any, collate: Any, changes: dict[str, Any], words: str
) -> None:
    parts = {"data_collator": collate, "train_dataset": kind(data)}
    error = refused(tmp_path, ConfigurationError, "fails on each row by itself", at_once=False, parts=parts, **changes)
    assert words in error.fix
    assert "correct the row" not in error.fix


@pytest.mark.parametrize("collate", [PADDED, default_data_collator])
def test_rows_of_which_only_labels_are_left_are_told_where_inputs_come_from(tmp_path: Path, collate: Any) -> None:
    data = datasets.Dataset.from_list([{"text": "a", "label": 1} for _ in rows()])
    parts = {"data_collator": collate, "train_dataset": data}
    error = refused(tmp_path, ConfigurationError, "", at_once=False, parts=parts)
    assert error.fix.startswith("give the rows inputs: they have nothing but labels left")


def test_a_tokenizer_that_pads_with_nothing_is_told_what_it_could_pad_with(tmp_path: Path) -> None:
    tokenizer = a_tokenizer({"a", "b"})
    tokenizer.pad_token = None
    parts = {"data_collator": DataCollatorWithPadding(tokenizer)}
    error = refused(tmp_path, ConfigurationError, "by itself", at_once=False, parts=parts)
    assert error.fix.startswith("say which token pads: tokenizer.pad_token = tokenizer.eos_token")


def test_rows_of_several_lengths_without_a_collator_are_told_who_pads(tmp_path: Path) -> None:
    error = refused(tmp_path, ConfigurationError, "together", at_once=False, parts={"data_collator": None})
    assert error.fix.startswith("pass processing_class=tokenizer, ")
    assert error.fix.endswith(NUMBERS), "nothing is cut off"


def test_a_row_without_a_label_is_told_how_to_be_left_out(tmp_path: Path) -> None:
    def tensors(batch: Rows) -> dict[str, torch.Tensor]:
        return {**pad(batch), "labels": torch.tensor([row["label"] for row in batch])}

    data = [{"input_ids": row["input_ids"], "label": None if i == 7 else row["labels"]} for i, row in enumerate(rows())]
    parts = {"data_collator": tensors, "train_dataset": datasets.Dataset.from_list(data)}
    error = refused(
        tmp_path, ConfigurationError, "fails on a row by itself .*label is NoneType", at_once=False, parts=parts,
        remove_unused_columns=False,
    )  # fmt: skip
    assert "dataset.filter(lambda row: row['label'] is not None)" in error.fix


def test_a_row_that_is_none_is_to_be_left_out(tmp_path: Path) -> None:
    parts = {"data_collator": pad, "train_dataset": [None if i == 7 else row for i, row in enumerate(rows())]}
    error = refused(
        tmp_path, ConfigurationError, "fails on a row by itself .*it is NoneType", at_once=False, parts=parts
    )
    assert error.fix == "correct the row, or leave it out."


class Named(nn.Module):
    """Its forward names its inputs otherwise than the dataset does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.head(x)
        return found


class Own(DPTrainer):
    """Says what the loss of such a model is."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


class Always(DistilBertForSequenceClassification):
    """Computes its loss whenever it is called."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        return super().forward(input_ids, attention_mask, labels=labels.view(-1))


def test_columns_that_a_forward_does_not_name_are_kept_by_an_argument(tmp_path: Path) -> None:
    error = refused(tmp_path, ConfigurationError, "on each row by itself .*KeyError", Named(), at_once=False, kind=Own)
    assert "remove_unused_columns=False" in error.fix


class Asking(DistilBertForSequenceClassification):
    """Asks by its own words for a column that its signature does not name, as PEFT's Polytropon for `task_ids`."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **more: Any) -> Any:
        if more.pop("task_ids", None) is None:
            raise ValueError("task_ids should not be None.")
        return super().forward(input_ids, attention_mask, labels=labels)


def test_a_column_that_the_model_asks_for_by_itself_is_kept_by_an_argument(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows()])
    data = data.add_column("task_ids", [0] * len(data))
    parts = {"train_dataset": data, "data_collator": DataCollatorWithPadding(a_tokenizer({"a"}))}
    model = Asking(classifier().config)
    error = refused(tmp_path, ConfigurationError, "does not go through .*task_ids", model, at_once=False, parts=parts)
    assert "remove_unused_columns=False" in error.fix


def test_a_model_that_is_not_called_without_labels_is_told_of_its_own_loss(tmp_path: Path) -> None:
    model = Always(classifier().config)
    model.loss_type = "ForSequenceClassification"
    error = refused(tmp_path, ConfigurationError, "does not go through", model, at_once=False)
    assert "called without them" in error.fix
    assert "[...]" not in error.fix
    assert "compute_per_example_loss" in error.fix


def test_columns_that_a_transform_reads_are_kept_by_an_argument(tmp_path: Path) -> None:
    parts = {"train_dataset": datasets.Dataset.from_list(TEXTS).with_transform(named)}
    error = refused(tmp_path, ConfigurationError, r"failed .*KeyError: 'text'", at_once=False, parts=parts)
    assert "remove_unused_columns=False" in error.fix
    assert "with_transform" in error.fix


def test_a_batch_without_names_is_told_how_to_have_them(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(24, 3), torch.zeros(24))
    parts = {"train_dataset": data, "data_collator": torch.utils.data.default_collate}
    error = refused(tmp_path, ConfigurationError, "returned list, not a mapping of names", at_once=False, parts=parts)
    assert "dict of names to tensors" in error.fix
    assert "packing" not in error.fix


def test_a_model_that_takes_no_two_rows_without_padding_is_told_how() -> None:
    said = "model.config.pad_token_id = tokenizer.pad_token_id"
    with pytest.raises(ConfigurationError, match=said), failures_refused():
        raise ValueError("Cannot handle batch sizes > 1 if no padding token is defined.")
