"""What a trainer of one's own does to batches before the model sees them is held to what collators are held to."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from hf_dp import DPTrainer, DPTrainerMixin
from hf_dp.errors import ConfigurationError
from tests.training.refusing import refused
from tests.training.workbench import exact, make, pad_for_language, parameters, private, rows, same
from tests.zoo import tiny

OF_ONE_WIDTH = rows(low=6, high=6)


class Preparing(DPTrainer):
    """Another `_prepare_inputs`."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self.prepared(dict(super()._prepare_inputs(inputs)))

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        weights = inputs.pop("weights", 1)
        losses: Tensor = super().compute_per_example_loss(model, inputs) * weights
        return losses


class Balanced(Preparing):
    """Weights by how often a label is there in the micro-batch."""

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "weights": 1 / torch.bincount(inputs["labels"], minlength=3)[inputs["labels"]]}


class Mixing(Preparing):
    """Now and then a token of another row."""

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ids = inputs["input_ids"]
        return {**inputs, "input_ids": torch.where(torch.rand(ids.shape) < 0.3, ids[torch.randperm(len(ids))], ids)}


class Together(Preparing):
    """All rows backwards, or none."""

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "input_ids": inputs["input_ids"].flip(1)} if torch.rand(()) < 0.5 else inputs


class EachByItself(Preparing):
    """Each row backwards, or not."""

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ids = inputs["input_ids"]
        backwards = torch.rand(len(ids), 1) < 0.5
        return {**inputs, "input_ids": torch.where(backwards, ids.flip(1), ids)}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Balanced, "with Preparing._prepare_inputs, gives an example another row when other examples are beside it"),
        (Mixing, "with Preparing._prepare_inputs, gives an example another row"),
        (Together, "with Preparing._prepare_inputs, makes one random choice for all rows of a batch"),
    ],
)
def test_failure_49_what_mixes_rows(tmp_path: Path, kind: type[Any], words: str) -> None:
    refused(tmp_path, ConfigurationError, words, at_once=False, kind=kind, parts={"train_dataset": OF_ONE_WIDTH})


class Inputs(Trainer):
    """A Trainer of one's own, which is made private afterwards."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return Mixing.prepared(self, dict(super()._prepare_inputs(inputs)))  # type: ignore[arg-type]


class Input(Trainer):
    """The same by the other method."""

    def _prepare_input(self, data: Any) -> Any:
        found = super()._prepare_input(data)
        is_batch = isinstance(found, dict) and "input_ids" in found
        return Mixing.prepared(self, found) if is_batch else found  # type: ignore[arg-type]


class Wrapped(Trainer):
    """Which says of itself that it is Trainer's."""

    @functools.wraps(Trainer._prepare_inputs)
    def _prepare_inputs(self, inputs: Any) -> Any:
        return Mixing.prepared(self, dict(super()._prepare_inputs(inputs)))  # type: ignore[arg-type]


class Attribute(Trainer):
    """The same by an attribute in the method's place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        usual = self._prepare_inputs

        def prepared(inputs: Any) -> Any:
            return Mixing.prepared(self, dict(usual(inputs)))  # type: ignore[arg-type]

        self._prepare_inputs = prepared  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("base", "owner"), [(Inputs, "Inputs"), (Input, "Input"), (Wrapped, "Wrapped"), (Attribute, "Private")]
)
def test_failure_49_what_a_trainer_behind_the_mixin_mixes(tmp_path: Path, base: Any, owner: str) -> None:
    kind: Any = type("Private", (DPTrainerMixin, base), {})
    words = f"with {owner}._prepare_input"
    refused(tmp_path, ConfigurationError, words, at_once=False, kind=kind, parts={"train_dataset": OF_ONE_WIDTH})


@pytest.mark.slow
def test_random_choices_for_each_row_are_welcome(tmp_path: Path) -> None:
    run = make(tmp_path, None, private(), EachByItself, {"train_dataset": OF_ONE_WIDTH}, max_steps=1)
    run.train()
    assert run.ledger.steps == 1


@pytest.mark.slow
def test_what_changes_nothing_trains_the_same_padded_on_the_left_too(tmp_path: Path) -> None:
    collate = functools.partial(pad_for_language, side="left")
    ends = []
    for kind in (DPTrainer, Preparing):
        run = make(
            tmp_path / kind.__name__, tiny("gpt2", "causal_lm", n_layer=1), exact(), kind, {"data_collator": collate},
            max_steps=1,
        )  # fmt: skip
        run.train()
        ends.append(parameters(run.model))
    assert same(*ends)
