"""Rows that a model picks, beside what else it does with the same parameters, and with rows of which it knows less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, parameter, relative_error

WIDTH = 4


def marked(*counts: int, length: int = 6) -> dict[str, Tensor]:
    """Examples of which so many positions are marked."""
    generator = torch.Generator().manual_seed(sum(counts) + 10 * len(counts) + 100 * length)
    mask = torch.zeros(len(counts), length, dtype=torch.long)
    for row, count in zip(mask, counts, strict=True):
        row[torch.randperm(length, generator=generator)[:count]] = 1
    x = torch.randn(len(counts), length, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "mask": mask}


OTHERS = [
    *(marked(2, 1, 3), marked(1, 1, 1), marked(2, 0, 1), marked(0, 0, 0), marked(6, 6), marked(4), marked(0)),
    *(marked(3, 0, 0, 1), marked(2, 0), marked(0, 2), marked(1, 2, 0, 3, 0, 0, length=3), marked(1, 0)),
    *(marked(4, 4, 4, 4, length=4), marked(0, 5, 1), marked(3, 3, 0)),
]


def loss(model: Any, data: Any) -> Tensor:
    found: Tensor = model.function(model, data)
    return found


def summed(rows: Tensor, mask: Tensor) -> Tensor:
    """What the marked ones of each example add up to."""
    owners = torch.arange(len(mask))[:, None].expand_as(mask)[mask.bool()]
    return torch.zeros(len(mask), dtype=rows.dtype).index_add(0, owners, rows)


def refused(function: Callable[..., Any], check: dict[str, Tensor], **members: Any) -> int:
    """How many of `OTHERS` are refused; all others are exact. All of them, if the check is."""
    model = Small(function, **members)
    try:
        certificate = preflight(model, loss, check)
    except HfDpError:
        return len(OTHERS)
    count = 0
    for batch in OTHERS:
        try:
            found = record(model, loss, batch, certificate=certificate)
        except HfDpError:
            count += 1
            continue
        truth = loop(model, loss, batch)
        if float(truth.squared_norms().sum()):
            assert relative_error(found, truth) <= 1e-9
    return count


def test_what_all_examples_share_beside_picked_rows_is_no_row_of_each() -> None:
    """A layer that projects picked rows, whole ones and three prototypes, in batches of three."""

    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"])
        prototypes, rows = m.project(torch.eye(3, WIDTH, dtype=h.dtype)).T, m.project(h[data["mask"].bool()])
        return summed((rows @ prototypes).logsumexp(1), data["mask"]) + (m.project(h.mean(1)) @ prototypes).logsumexp(1)

    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        layers = {"linear": nn.Linear(WIDTH, WIDTH), "project": nn.Linear(WIDTH, 5)}
        assert not refused(function, check, **layers)


def test_what_all_examples_share_is_doubted_where_whole_rows_need_no_gradient() -> None:
    def function(m: Any, data: Any) -> Tensor:
        x = data["x"]
        prototypes, rows = m.project(torch.eye(3, WIDTH, dtype=x.dtype)).T, m.project(x[data["mask"].bool()])
        return summed((rows @ prototypes).logsumexp(1), data["mask"]) + (m.project(x.mean(1)) @ prototypes).logsumexp(1)

    assert refused(function, marked(2, 1, 3), project=nn.Linear(WIDTH, 5))


COPIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "less": lambda m, rows: rows - m.w,
    "at most": lambda m, rows: torch.minimum(rows, m.w),
    "expanded": lambda m, rows: rows.cos() * m.w.expand(len(rows), -1),
    "repeated": lambda m, rows: rows.cos() * m.w.repeat(len(rows), 1),
    "put before": lambda m, rows: torch.cat([m.w[None].expand(len(rows), -1, -1), rows[:, None]], 1).cos().prod(1),
    "as a state": lambda m, rows: m.cell(rows, m.w.expand(len(rows), -1)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_for_picked_rows_are_not_one_of_each_because_there_are_as_many(name: str) -> None:
    """In the check each example had one."""

    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"]).tanh()
        return summed(COPIES[name](m, h[data["mask"].bool()]).square().sum(1), data["mask"]) + h.sum((1, 2))

    cell = {"cell": nn.GRUCell(WIDTH, WIDTH)} if name == "as a state" else {}
    count = refused(function, marked(1, 1, 1), linear=nn.Linear(WIDTH, WIDTH), w=parameter(1, WIDTH), **cell)
    assert 0 < count < len(OTHERS)
