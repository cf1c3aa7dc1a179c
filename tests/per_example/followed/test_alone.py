"""What a loop in Python takes out of one example after another, and puts together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hf_dp.errors import HfDpError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.followed.picked import Picked
from tests.per_example.small import Small, relative_error
from tests.per_example.test_picked_rows_elsewhere import OTHERS, WIDTH, layers, loss, marked, refused

Rows = Callable[[Tensor, Tensor], Tensor]


def in_order_of_marks(mask: Tensor) -> list[int]:
    return sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)


def each(mask: Tensor) -> list[int]:
    return [int(n) for n in mask.sum(1)]


def written(rows: list[Tensor], into: Tensor, by_copying: bool = False) -> Tensor:
    for place, row in enumerate(rows):
        if by_copying:
            into[place].copy_(row)
        else:
            into[place] = row
    return into


# In the check each example has one.
TAKEN: dict[str, Rows] = {
    "by masks": lambda h, k: torch.cat([h[i][k[i].bool()] for i in range(len(h))]),
    "by masks, side by side": lambda h, k: torch.cat([rows[own.bool()] for rows, own in zip(h, k, strict=True)]),
    "by numbers": lambda h, k: torch.vstack([h[i, k[i].nonzero()[:, 0]] for i in range(len(h))]),
    "one by one": lambda h, k: torch.stack([h[i, j] for i, j in k.nonzero()]),
    "by lengths": lambda h, k: torch.cat([h[i].narrow(0, 0, n) for i, n in enumerate(each(k))]),
    "out of pieces": lambda h, k: torch.cat([rows[0][k[i].bool()].sin() for i, rows in enumerate(h.split(1))]),
    "as spans": lambda h, k: torch.stack([h.select(0, i)[: j + 1].mean(0) for i, j in k.nonzero().tolist()]),
    "written": lambda h, k: written([h[i, j] for i, j in k.nonzero().tolist()], h.new_zeros(int(k.sum()), WIDTH)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_failure_115_rows_that_a_loop_takes_are_not_one_of_each_because_there_are_as_many(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        taken = m.other(TAKEN[name](h, mask)) if mask.any() else h.new_zeros(0, WIDTH)
        return torch.stack([rows.square().sum() for rows in taken.split(each(mask))]) + h.sum((1, 2))

    assert refused(function, marked(1, 1, 1), **layers()) < len(OTHERS)


# In the check all have as many marks, so they stay in order.
PUT: dict[str, Rows] = {
    "stacked": lambda h, k: torch.stack([h[i] for i in in_order_of_marks(k)]),
    "padded": lambda h, k: pad_sequence([h[i] for i in in_order_of_marks(k)], batch_first=True),
    "second": lambda h, k: torch.stack([h[i] for i in in_order_of_marks(k)], 1),
    "tokens": lambda h, k: torch.stack([h[i, t] for i in in_order_of_marks(k) for t in range(h.shape[1])]).view_as(h),
    "written": lambda h, k: written([h[i] for i in in_order_of_marks(k)], torch.zeros_like(h)),
    "copied": lambda h, k: written([h[i] for i in in_order_of_marks(k)], torch.zeros_like(h), by_copying=True),
    "of whole rows": lambda h, k: torch.stack([h.view(-1, WIDTH).split(h.shape[1])[i] for i in in_order_of_marks(k)]),
    "by kind": lambda h, k: torch.cat([h[[i for i in range(len(h)) if few == (int(k[i].sum()) < 2)]].sin()
                                       for few in (True, False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PUT)
def test_failure_115_examples_that_a_loop_puts_in_another_order_are_refused(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        rows = m.other(PUT[name](h, mask)).square()
        rows = rows.sum((0, 2)) if name == "second" else rows.sum((1, 2))
        order = in_order_of_marks(mask)
        if name == "by kind":
            order = sorted(range(len(mask)), key=lambda i: int(mask[i].sum()) >= 2)
        return torch.stack([rows[order.index(i)] for i in range(len(mask))])

    assert refused(function, marked(1, 1, 1), **layers()) < len(OTHERS)


def at_places(k: Tensor, h: Tensor) -> Tensor:
    return k.sum(1).argsort(stable=True)[:, None, None].expand_as(h)


# In the check all have as many marks, so each example is written where it was.
WRITTEN: dict[str, Rows] = {
    "index_copy": lambda h, k: torch.zeros_like(h).index_copy(0, k.sum(1).argsort(stable=True), h),
    "index_add": lambda h, k: torch.zeros_like(h).index_add(0, k.sum(1).argsort(stable=True), h),
    "index_put": lambda h, k: torch.zeros_like(h).index_put((k.sum(1).argsort(stable=True),), h),
    "scatter": lambda h, k: torch.zeros_like(h).scatter(0, at_places(k, h), h),
    "scatter_add": lambda h, k: torch.zeros_like(h).scatter_add(0, at_places(k, h), h),
    "set": lambda h, k: put(torch.zeros_like(h), k.sum(1).argsort(stable=True), h),
}


def put(into: Tensor, places: Tensor, h: Tensor) -> Tensor:
    into[places] = h
    return into


@pytest.mark.parametrize("name", WRITTEN)
def test_failure_116_whole_examples_that_are_written_to_other_places_are_refused(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        rows = m.other(WRITTEN[name](h, mask)).square().sum((1, 2))
        return torch.zeros_like(rows).index_copy(0, torch.arange(len(rows)), rows[mask.sum(1).argsort(stable=True)])

    assert 0 < refused(function, marked(1, 1, 1), **layers()) < len(OTHERS)


def test_failure_116_copies_for_as_many_rows_as_all_have_are_refused_beside_picked_ones() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        rows = torch.cat([h[mask], h[~mask]])
        owners = torch.arange(len(h))[:, None].expand_as(mask)
        found = (m.other.bias.expand_as(rows) - rows).square().sum(1)
        return h.new_zeros(len(h)).index_add(0, torch.cat([owners[mask], owners[~mask]]), found)

    assert refused(function, marked(6, 6, 6), **layers()) == len(OTHERS)


def of_each(h: Tensor, mask: Tensor, make: Rows) -> Tensor:
    return torch.stack([make(h[i], mask[i].bool()) if mask[i].any() else h[i].mean(0) for i in range(len(h))])


# Of as many rows as there are examples as well, each example by itself.
BY_THEMSELVES: dict[str, Rows] = {
    "means": lambda h, k: of_each(h, k, lambda rows, own: rows[own].mean(0)),
    "spans": lambda h, k: of_each(h, k, lambda rows, own: torch.stack(
        [rows[: j + 1].mean(0) for j in own.nonzero()[:, 0].tolist()]).amax(0)),
    "written": lambda h, k: of_each(h, k, lambda rows, own: written([*rows[own]], torch.zeros_like(rows)).sum(0)),
    "other order within": lambda h, k: pad_sequence([torch.cat([rows[own.bool()], rows[~own.bool()]])
                                                     for rows, own in zip(h, k, strict=True)], batch_first=True),
    "written whole": lambda h, k: written([rows.flip(0) for rows in h], torch.zeros_like(h)),
    "some alone": lambda h, k: written([rows * own.any() for rows, own in zip(h, k, strict=True)], torch.zeros_like(h)),
    "positions, last first": lambda h, k: torch.stack([*reversed([*h.transpose(0, 1)])]).transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_what_a_loop_makes_of_each_example_by_itself_is_exact(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        rows = BY_THEMSELVES[name](m.linear(data["x"]).tanh(), data["mask"])
        return m.other(rows).square().flatten(1).sum(1)

    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        model = Small(function, **{name: nn.Linear(WIDTH, WIDTH) for name in ("linear", "other")})
        certificate = preflight(model, loss, check)
        for batch in OTHERS:
            found, truth = record(model, loss, batch, certificate=certificate), loop(model, loss, batch)
            assert relative_error(found, truth) <= 1e-9


def test_rows_that_are_all_of_one_example_are_not_one_of_each() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"]).tanh()
        first = torch.stack([h[0, t % 6] for t in range(len(h))])
        return h.sum((1, 2)) + m.other(first).sum()

    with pytest.raises(HfDpError, match="depends on"):
        record(Small(function, **layers()), loss, marked(1, 1, 1))


def test_failure_115_positions_of_one_example_are_no_examples_because_there_are_as_many() -> None:
    """Halves are exchanged, and what was followed of the rows said whose they are by their places in each example."""

    def exchanged(rows: Tensor) -> Tensor:
        return torch.cat(rows.tensor_split(2)[::-1])

    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        owners = torch.arange(len(h))[:, None].expand_as(mask)
        found = m.other(exchanged(torch.cat([rows[own] for rows, own in zip(h, mask, strict=True)]))).square().sum(1)
        return h.sum((1, 2)).index_add(0, exchanged(owners[mask]), found)

    model = Small(function, **layers())
    certificate = preflight(model, loss, marked(1, 1, 1))
    batch = marked(4, 4, 4, 4, length=4)
    assert relative_error(record(model, loss, batch, certificate=certificate), loop(model, loss, batch)) <= 1e-9


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "stacked": lambda h: torch.stack([row.sin() for row in h]),
    "apart": lambda h: torch.stack([torch.stack([*row]) for row in h]),
    "below": lambda h: torch.cat([row.sin()[None] for row in h]),
    "padded": lambda h: pad_sequence([*h], batch_first=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_the_second_copy_of_two_examples_is_not_the_second_example(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        found = m.other(COPIES[name](h).expand(2, *h.shape)[1][mask.bool()]).square().sum(1)
        return h.sum((1, 2)).index_add(0, torch.arange(len(h))[:, None].expand_as(mask)[mask.bool()], found)

    batches = [marked(2, 1), marked(1, 3), marked(1, 1), marked(2, 0, 1)]
    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        assert not refused(function, check, batches, **layers())


# Without a loop, beside which sizes do not tell which axis the examples have.
BY_SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "repeated": lambda h: h.repeat(2, 1, 1, 1),
    "tiled": lambda h: torch.tile(h, (2, 1, 1, 1)).sin(),
    "weighted": lambda h: h[None] * torch.ones(2, 1, 1, 1, dtype=h.dtype),
    "by a product": lambda h: torch.einsum("btd,k->kbtd", h, torch.ones(2, dtype=h.dtype)),
    "joined": lambda h: torch.cat([h[None], h[None]]).sin(),
}


@pytest.mark.parametrize("name", BY_SIZES)
@pytest.mark.parametrize("is_last", [True, False])
def test_the_second_of_two_kinds_is_not_the_second_of_two_examples(name: str, is_last: bool) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        found = m.other(BY_SIZES[name](h)[1 if is_last else 0][mask.bool()]).square().sum(1)
        return h.sum((1, 2)).index_add(0, torch.arange(len(h))[:, None].expand_as(mask)[mask.bool()], found)

    batches = [marked(2, 1), marked(1, 3), marked(1, 1), marked(2, 0, 1)]
    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        refused(function, check, batches, **layers())


def test_examples_that_a_loop_joins_are_clear_where_there_are_as_many_positions() -> None:
    """As the check itself may have."""

    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"]).tanh()
        rows = torch.stack([h.narrow(0, i, 1)[0] for i in range(len(h))])
        return m.other(torch.stack([rows[i].flip(0) for i in range(len(h))])).square().sum((1, 2))  # type: ignore[no-any-return]

    batches = [marked(2, 1, 3, length=5), marked(1, 1, 1, 1, length=5)]
    assert not refused(function, marked(2, 2, 2, length=5), batches, **layers())


def test_iterating_gives_what_it_gives_elsewhere() -> None:
    rows = torch.arange(6.0).view(3, 2)
    with Picked([rows], 3):
        found = iter(rows)
        assert torch.equal(next(found), rows[0])
        assert [row.tolist() for row in found] == rows[1:].tolist()
