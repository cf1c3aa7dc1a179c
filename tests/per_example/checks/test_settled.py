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


class ByDefault(Plain):
    """Has warned in an attribute that its class has first."""

    has_warned = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_warned:
            self.has_warned = True
        return super().forward(x)


class Unset(Plain):
    """Has warned in an attribute that is not there first."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "has_warned"):
            self.has_warned = "yes"
        return super().forward(x)


class Far(Plain):
    """Tells of numbers that are far, which few rows hold."""

    def __init__(self) -> None:
        super().__init__()
        self.has_far, self.kind = False, "near"

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(self.scaled(x))
        if x.detach().abs().max() > 2:
            self.has_far = True
        self.kind = "far" if x.detach().abs().max() > 2 else "near"
        return found

    def scaled(self, x: Tensor) -> Tensor:
        return x


class FarThenOther(Far):
    """Computes with what was told."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2 if self.has_far else x


class NearThenOther(Far):
    """Computes near rows with what was told of rows before, and turns it first."""

    def forward(self, x: Tensor) -> Tensor:
        was, self.has_far = self.has_far, bool(x.detach().abs().max() > 1.5)
        return Plain.forward(self, x * 2 if was and not self.has_far else x)


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


class OneOfTwo(Plain):
    """Computes far rows otherwise where one of two switches alone is on, and turns both."""

    def __init__(self) -> None:
        super().__init__()
        self.has_far = self.has_near = False

    def forward(self, x: Tensor) -> Tensor:
        far = bool(x.detach().abs().max() > 2)
        differ = self.has_far != self.has_near
        self.has_far, self.has_near = self.has_far or far, self.has_near or not far
        return super().forward(x * 2 if far and differ else x)


@pytest.mark.parametrize("kind", [ByDefault, Unset, Far])
def test_what_rows_switch_and_no_loss_follows_from_may_stay_so(kind: type[nn.Module], tmp_path: Path) -> None:
    trained(kind(), tmp_path)


@pytest.mark.parametrize("kind", [FarThenOther, NearThenOther, OneOfTwo])
def test_what_few_rows_switch_and_losses_follow_from_is_refused(kind: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(HfDpError, match="has_(far|near)"):
        trained(kind(), tmp_path)


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
