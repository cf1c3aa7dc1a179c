"""What an editor is told: the arguments of the trainer behind, in their order, and the promise."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import Trainer

from hf_dp import DPTrainer, DPTrainerMixin
from hf_dp.training.signature import OURS, of_trainer


def told(of: Any) -> list[tuple[str, Any, Any]]:
    """Names, defaults and kinds, without `self`."""
    found = inspect.signature(of).parameters.values()
    return [(one.name, one.default, one.kind) for one in found if one.name != "self"]


def test_dp_trainer_shows_trainers_arguments_and_its_own() -> None:
    assert [one for one in told(DPTrainer) if one[0] not in OURS] == told(Trainer)
    assert tuple(name for name, _, _ in told(DPTrainer)[-2:]) == OURS
    assert told(DPTrainer) == told(of_trainer), "what a type checker sees, of the installed version of Transformers"
    assert DPTrainer.__init__ is DPTrainerMixin.__init__, "and nothing runs in its place"


def test_so_does_a_class_of_ones_own_and_one_that_takes_more() -> None:
    class Subclass(DPTrainer):
        pass

    class Own(DPTrainer):
        def __init__(self, ours: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    assert told(Subclass) == told(DPTrainer)
    assert [name for name, _, _ in told(Own)] == ["ours", "kwargs"]


def test_trainers_of_trl_show_theirs() -> None:
    trl = pytest.importorskip("trl")
    for behind in (trl.SFTTrainer, trl.DPOTrainer):
        kind = type("DP", (DPTrainerMixin, behind), {})
        assert [one for one in told(kind) if one[0] not in OURS] == told(behind)
        assert {name for name, _, _ in told(kind)} > set(OURS)
