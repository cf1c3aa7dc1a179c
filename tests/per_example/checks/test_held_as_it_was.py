"""What is looked at around the check is as it was afterwards, and what cannot be put back is not looked at."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from hf_dp.per_example.checks.held import Held
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.values import same


class Growing(list[float]):
    """A list of a class of its own."""


def test_what_is_not_looked_at_may_become_something_else() -> None:
    owner = SimpleNamespace(begun=datetime.datetime(2026, 1, 1), rows=iter([1, 2]))
    with Held([("", owner)]).put_back():
        owner.begun, owner.rows = None, None
    assert (owner.begun, owner.rows) == (None, None)


def test_a_list_keeps_its_own_items() -> None:
    weight, other = nn.Parameter(torch.ones(2)), torch.zeros(3)
    owner = SimpleNamespace(kept=[weight, other, 0])
    with Held([("", owner)]).put_back():
        owner.kept[2] += 1
        other.add_(1)
        owner.kept.append(5)
    assert owner.kept[0] is weight
    assert owner.kept[1] is other
    assert owner.kept[2:] == [0]
    assert not other.any()


def test_tables_ragged_arrays_and_lists_of_other_classes_stay() -> None:
    ragged = np.array([np.zeros(3), np.ones(4)], dtype=object)
    owner = SimpleNamespace(table=pd.DataFrame({"a": [1, 2]}), ragged=ragged, grown=Growing([1.0]))
    held = Held([("", owner)])
    with held.put_back():
        owner.grown.append(2.0)
    assert type(owner.grown) is Growing
    assert owner.ragged is ragged
    assert same(ragged, ragged.copy())
    assert not same(ragged, np.array([np.zeros(3), np.zeros(4)], dtype=object))


def test_buffers_of_modules_beside_the_model_are_put_back() -> None:
    teacher = nn.BatchNorm1d(2)

    def loss(batch: Any) -> Any:
        return teacher(batch).sum(1)

    memory = Memory(nn.Linear(2, 2), loss, loss)
    with memory.restored():
        teacher(torch.full((3, 2), torch.nan))
    assert teacher.running_mean is not None
    assert teacher.running_mean.isfinite().all()


def test_a_variable_that_a_pass_fills_and_a_default_that_it_adds_are_gone_again() -> None:
    def made() -> Any:
        def loss(batch: Any, scale: float = 1.0) -> Any:
            nonlocal largest
            largest = batch * scale
            loss.__defaults__ = (batch, scale)

        if loss.__defaults__ is None:
            largest = 0
        return loss

    loss = made()
    with Held([("loss", loss)]).put_back():
        loss(3)
    assert loss.__defaults__ == (1.0,)
    with pytest.raises(ValueError, match="empty"):
        dict(zip(loss.__code__.co_freevars, loss.__closure__, strict=True))["largest"].cell_contents  # noqa: B018
