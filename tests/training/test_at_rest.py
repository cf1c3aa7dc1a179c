"""While a training runs, what was there before is not searched for garbage; afterwards it is."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import TrainerCallback

from hf_dp.training.at_rest import older_objects_at_rest
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")


class Cycle:
    """Garbage as soon as nobody has it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def at_work(nothing_waits: Callable[[], int]) -> Iterator[None]:
    """The tests' own rest is over for so long, and objects are counted."""
    gc.unfreeze()
    with mock.patch.object(gc, "get_freeze_count", nothing_waits):
        yield
    gc.freeze()


def test_what_was_garbage_before_is_gone_and_what_is_made_inside_is_found() -> None:
    before = gc.get_stats()[2]["collected"]
    Cycle()
    with older_objects_at_rest():
        assert gc.get_stats()[2]["collected"] > before
        assert gc.get_freeze_count()
        inside = Cycle()
        assert any(one is inside for one in gc.get_objects())
        del inside
        assert gc.collect() > 0
    assert not gc.get_freeze_count()


def test_a_rest_of_the_programs_own_is_left_alone() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with older_objects_at_rest():
        pass
    assert abs(gc.get_freeze_count() - count) < 10


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slow
def test_a_training_wakes_them_when_it_ends(tmp_path: Path, fails: bool) -> None:
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(gc.get_freeze_count())
            if fails:
                raise KeyboardInterrupt

    trainer = make(tmp_path, parts={"callbacks": [Looks()]}, max_steps=1)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    else:
        trainer.train()
    assert seen[0] > 1000
    assert not gc.get_freeze_count()
