"""What a loop takes of one example in other ways than by its number, or puts together by other operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, relative_error
from tests.per_example.test_picked_rows_elsewhere import OTHERS, WIDTH, layers, loss, marked, refused

Take = Callable[[Tensor, int], Tensor]
Put = Callable[[list[Tensor], Tensor], Tensor]


def of_order(m: Any, data: Any, take: Take, put: Put, is_raw: bool = False) -> Tensor:
    """Examples in the order of their marks, of which all have as many in the check, and back."""
    h, mask = m.linear(data["x"]).tanh(), data["mask"]
    order = sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)
    rows = m.other(put([take(data["x"] if is_raw else h, i) for i in order], h)).square().sum((1, 2))
    return torch.stack([rows[order.index(i)] for i in range(len(mask))]) + h.sum((1, 2))


def by_number(h: Tensor, i: int) -> Tensor:
    return h[i]


def stacked(rows: list[Tensor], _: Tensor) -> Tensor:
    return torch.stack(rows)


TAKEN: dict[str, Take] = {
    "time first": lambda h, i: h.transpose(0, 1)[:, i],
    "time first, selected": lambda h, i: h.transpose(0, 1).sin().select(1, i),
    "time first, apart": lambda h, i: h.transpose(0, 1).unbind(1)[i],
    "examples last": lambda h, i: h.movedim(0, -1)[..., i],
    "under one": lambda h, i: h[None, i][0],
    "of one batch": lambda h, i: h.unsqueeze(0)[0, i],
    "of copies": lambda h, i: h.expand(2, *h.shape)[0, i],
    "of two": lambda h, i: torch.stack([h, h])[1, i],
    "of rows below": lambda h, i: h.repeat(2, 1, 1)[i + len(h)],
    "by a product": lambda h, i: ((torch.arange(len(h)) == i).to(h.dtype)[:, None, None] * h).sum(0),
    "narrowed": lambda h, i: h.narrow(0, i, 1).squeeze(0),
}


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("name", TAKEN)
def test_failure_121_examples_that_are_taken_in_other_ways_are_refused_in_another_order(
    name: str, is_raw: bool
) -> None:
    def function(m: Any, data: Any) -> Tensor:
        return of_order(m, data, TAKEN[name], stacked, is_raw)

    assert refused(function, marked(1, 1, 1), **layers())


def written(write: Callable[[Tensor, int, Tensor], Tensor | None], is_second: bool = False) -> Put:
    def put(rows: list[Tensor], h: Tensor) -> Tensor:
        into = h.new_zeros(h.shape).transpose(0, 1).contiguous() if is_second else h.new_zeros(h.shape)
        for place, row in enumerate(rows):
            made = write(into, place, row)
            into = into if made is None else made
        return into.transpose(0, 1) if is_second else into

    return put


def done(_: Tensor) -> None:
    """What was written is there."""


def number(place: int) -> Tensor:
    return torch.tensor([place])


def is_at(h: Tensor, place: int) -> Tensor:
    return (torch.arange(len(h)) == place)[:, None, None]


PUT: dict[str, Put] = {
    "beside": lambda rows, h: torch.cat(rows, 1).view(h.shape[1], len(h), -1).transpose(0, 1),
    "deep": lambda rows, h: torch.dstack(rows).movedim(-1, 0),
    "padded": lambda rows, h: sum(
        (F.pad(row[None], (0, 0, 0, 0, k, len(h) - 1 - k)) for k, row in enumerate(rows)), h * 0
    ),
    "blocks": lambda rows, h: (
        torch.block_diag(*rows).view(len(h), h.shape[1], len(h), WIDTH).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    ),
    "lists": written(lambda into, k, row: into.__setitem__([k], row[None])),
    "masks": written(lambda into, k, row: into.__setitem__(torch.arange(len(into)) == k, row)),
    "copied": written(lambda into, k, row: into.index_copy(0, number(k), row[None])),
    "added": written(lambda into, k, row: into.index_add_(0, number(k), row[None])),
    "put": written(lambda into, k, row: into.index_put((number(k),), row[None])),
    "selected": written(lambda into, k, row: into.select_scatter(row, 0, k)),
    "sliced": written(lambda into, k, row: into.slice_scatter(row[None], 0, k, k + 1)),
    "scattered": written(lambda into, k, row: into.scatter(0, torch.full_like(row[None], k).long(), row[None])),
    "chosen": written(lambda into, k, row: torch.where(is_at(into, k), row, into)),
    "product": written(lambda into, k, row: into + is_at(into, k) * row),
    "second": written(lambda into, k, row: into.__setitem__((slice(None), k), row), is_second=True),
    "second, copied": written(lambda into, k, row: done(into[:, k].copy_(row)), is_second=True),
}


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("name", PUT)
def test_failure_121_examples_that_are_put_together_in_other_ways_are_refused_in_another_order(
    name: str, is_raw: bool
) -> None:
    def function(m: Any, data: Any) -> Tensor:
        return of_order(m, data, by_number, PUT[name], is_raw)

    assert refused(function, marked(1, 1, 1), **layers())


def states(m: Any, h: Tensor) -> Tensor:
    """Of a cell, below one another as time goes on."""
    state, made = h.new_zeros(len(h), WIDTH), h.new_zeros(h.shape[1], len(h), WIDTH)
    for t in range(h.shape[1]):
        state = made[t] = m.cell(h[:, t], state)
    return made.transpose(0, 1)


IN_ORDER: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "time first": lambda m, h: torch.stack([h.transpose(0, 1)[:, i] for i in range(len(h))]),
    "second": lambda m, h: torch.stack([h[i].flip(0) for i in range(len(h))], 1).transpose(0, 1),
    "added": lambda m, h: written(lambda into, k, row: done(into[k].add_(row)))([*h], h),
    "added in place": lambda m, h: written(lambda into, k, row: into.__setitem__(k, into[k].add_(row)))([*h], h),
    "second, written": lambda m, h: PUT["second"]([*h], h),
    "states": states,
    "some kinds": lambda m, h: torch.stack([h, h.sin(), h.cos()]).mean(0),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_put_together_in_order_is_exact(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        return m.other(IN_ORDER[name](m, m.linear(data["x"]).tanh())).square().sum((1, 2))  # type: ignore[no-any-return]

    model = Small(function, **layers(), cell=nn.GRUCell(WIDTH, WIDTH))
    certificate = preflight(model, loss, marked(2, 1, 3))
    for batch in (one for one in OTHERS if one["mask"].shape[1] % len(one["mask"])):
        found, truth = record(model, loss, batch, certificate=certificate), loop(model, loss, batch)
        assert relative_error(found, truth) <= 1e-9


def test_one_row_that_an_expert_gives_back_is_no_example_s() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, made = m.linear(data["x"]).tanh(), torch.zeros_like(data["x"].flatten(0, 1))
        at = data["mask"].flatten().nonzero()[:, 0]
        made[at] = m.other(h.flatten(0, 1)[at])
        return m.last(made.view_as(h)).square().sum((1, 2))  # type: ignore[no-any-return]

    batches = [*OTHERS, marked(0, 1, 0), marked(1, 0), marked(0, 0, 0, 1)]
    assert not refused(function, marked(2, 1, 3), batches, **layers(), last=nn.Linear(WIDTH, WIDTH))
