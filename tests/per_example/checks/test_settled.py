"""Switches that every row turns, first of all: on from the beginning, where the losses are the same either way."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.errors import HfDpError
from tests.per_example.checks.test_memory import FEATURES, Plain
from tests.training.workbench import make


class Warned(Plain):
    """Warns once, as many a model does."""

    has_warned = False

    def __init__(self) -> None:
        super().__init__()
        self.has_warned = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_warned:
            warnings.warn("a setting is deprecated", stacklevel=2)
            self.has_warned = True
        return super().forward(x)


class Otherwise(Plain):
    """What follows the first pass is computed otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x * (2 if self.has_begun else 1))
        self.has_begun = True
        return found


class Begun(Plain):
    """Begins from its first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.scale = False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            self.scale, self.has_begun = float(x.detach().std()), True
        return super().forward(x / self.scale)


class Counting(Plain):
    """Counts passes, and sums rows, where nobody reads it and nothing is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long), persistent=False)
        self.register_buffer("seen", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen = self.seen + x.detach().sum(0)
        return super().forward(x)


class CountingSaved(Counting):
    """The same, saved."""

    def __init__(self) -> None:
        super().__init__()
        self._non_persistent_buffers_set.clear()


class Scaled(Counting):
    """Reads what it has summed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.seen.abs().sum())


class Own(DPTrainer):
    """With a loss for each example."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def trained(model: nn.Module, folder: Path) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(FEATURES, generator=generator).tolist(), "labels": i % 3} for i in range(48)]
    trainer = make(
        folder, model, kind=Own, parts={"train_dataset": data, "data_collator": None}, remove_unused_columns=False
    )
    trainer.train()
    return model


def test_a_model_that_warns_once_is_trained_and_has_warned_from_the_beginning(tmp_path: Path) -> None:
    model = Warned()
    with pytest.warns(UserWarning, match="a setting is deprecated"):
        trained(model, tmp_path)
    assert model.has_warned


@pytest.mark.parametrize("model", [Otherwise(), Begun()])
def test_what_a_first_pass_computes_otherwise_is_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(HfDpError, match=r"change has_begun from False to True|has_begun keeps|scale keeps"):
        trained(model, tmp_path)
    assert not model.has_begun


def test_what_nobody_reads_and_nothing_saves_may_be_counted(tmp_path: Path) -> None:
    trained(Counting(), tmp_path)


@pytest.mark.parametrize(
    ("model", "words"), [(CountingSaved(), "the buffer '(passes|seen)' changes"), (Scaled(), "seen keeps")]
)
def test_what_is_saved_or_read_may_not(model: nn.Module, words: str, tmp_path: Path) -> None:
    with pytest.raises(HfDpError, match=words):
        trained(model, tmp_path)
