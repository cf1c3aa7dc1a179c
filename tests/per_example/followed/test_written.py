"""Rows of other examples that are written into what was known: through a view, into a piece, or into one example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, relative_error
from tests.per_example.test_picked_rows_elsewhere import OTHERS, WIDTH, layers, loss, marked, refused

Put = Callable[[Tensor, list[int]], Tensor]


def put_in_another_order(put: Put) -> int:
    """How many batches are refused; in the check all have as many marks, so what is written stays where it is."""

    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order = sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)
        rows = m.other(put(h.clone(), order)).square().sum((1, 2))
        return torch.stack([rows[order.index(i)] for i in range(len(mask))]) + h.sum((1, 2))

    return refused(function, marked(1, 1, 1), **layers())


def into(write: Callable[[Tensor, Tensor], Any], is_new: bool) -> Put:
    def put(h: Tensor, order: list[int]) -> Tensor:
        made = torch.zeros_like(h) if is_new else h.clone()
        write(made, h[order])
        return made

    return put


def each_into(write: Callable[[Tensor, Tensor], Any]) -> Put:
    def put(h: Tensor, order: list[int]) -> Tensor:
        made = torch.zeros_like(h)
        for place, i in enumerate(order):
            write(made[place], h[i])
        return made

    return put


def rows_into(write: Callable[[Tensor, Tensor], Any]) -> Put:
    def put(h: Tensor, order: list[int]) -> Tensor:
        rows = [row.clone() for row in h]
        for row, i in zip(rows, order, strict=True):
            write(row, h[i])
        return torch.stack(rows)

    return put


def flat(c: Tensor, rows: Tensor) -> Tensor:
    return c.view(-1).copy_(rows.view(-1))


def by_tokens(row: Tensor, other: Tensor) -> None:
    for place, token in enumerate(other):
        row[place].copy_(token)


WHOLE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "flat": flat,
    "tokens": lambda c, rows: c.flatten(0, 1).copy_(rows.flatten(0, 1)),
    "time first": lambda c, rows: c.transpose(0, 1).copy_(rows.transpose(0, 1)),
    "some positions": lambda c, rows: c[:, :3].copy_(rows[:, :3]),
    "a feature": lambda c, rows: c[..., 0].copy_(rows[..., 0]),
    "added": lambda c, rows: c.mul_(0).view(-1).add_(rows.view(-1)),
    "set": lambda c, rows: c.view(-1).__setitem__(slice(None), rows.view(-1)),
    "at places": lambda c, rows: c.view(-1, WIDTH).index_put_((torch.arange(c[..., 0].numel()),), rows.view(-1, WIDTH)),
    "by weights": lambda c, rows: c.view(-1).lerp_(rows.view(-1), 1.0),
}
EACH: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "by weights": lambda row, other: row.lerp_(other, torch.ones_like(other).detach()),
    "times what was there": lambda row, other: row.zero_().addcmul_(other, row * 0 + 1),
    "flat": flat,
    "tokens": by_tokens,
}
PUT: dict[str, Put] = {
    **{f"{name}, of new": into(write, True) for name, write in WHOLE.items()},
    **{f"{name}, of known": into(write, False) for name, write in WHOLE.items()},
    **{f"each, {name}": each_into(write) for name, write in EACH.items()},
    **{f"rows, {name}": rows_into(write) for name, write in EACH.items()},
}


@pytest.mark.parametrize("name", PUT)
def test_failure_133_examples_in_another_order_are_refused_where_they_are_written_through_a_view(name: str) -> None:
    assert put_in_another_order(PUT[name]) > 0


BEFORE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "through another view": lambda made, rows: made.transpose(0, 1).copy_(rows.transpose(0, 1)),
    "copied": lambda made, rows: made.copy_(rows),
    "set": lambda made, rows: made.__setitem__(slice(None), rows),
    "set at places": lambda made, rows: made.__setitem__(torch.arange(len(rows)), rows),
    "added": lambda made, rows: made.add_(rows),
}


@pytest.mark.parametrize("name", BEFORE)
def test_views_that_were_made_before_are_doubted_too(name: str) -> None:
    def put(h: Tensor, order: list[int]) -> Tensor:
        made = torch.zeros_like(h)
        tokens = made.view(-1, WIDTH)
        BEFORE[name](made, h[order])
        return tokens.view_as(h)

    assert put_in_another_order(put) > 0


PIECES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "copied": lambda piece, order, h: piece.copy_(piece[order]),
    "set": lambda piece, order, h: piece.__setitem__(slice(None), piece[order]),
    "at places": lambda piece, order, h: piece.index_copy_(0, torch.arange(len(piece)), piece[order]),
    "through a view": lambda piece, order, h: piece.view(-1).copy_(piece[order].view(-1)),
    "added": lambda piece, order, h: piece.mul_(0).add_(h[order.tolist()]),
    "stacked": lambda piece, order, h: piece.copy_(torch.stack([h[i] for i in order.tolist()])),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces_that_others_were_written_into_are_no_longer_whose_they_were(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, last = m.linear(data["x"]).tanh(), len(data["mask"]) - 1
        piece, order = h[list(range(last))], data["mask"].sum(1)[:last].argsort(stable=True)
        if last:
            PIECES[name](piece, order, h)
        rows = m.other(torch.cat([piece, h[[last]]])).square().sum((1, 2))
        return torch.cat([rows[order.argsort()], rows[last:]]) + h.sum((1, 2))

    assert refused(function, marked(1, 1, 1), **layers())


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in place": lambda h, mask: torch.cat([h[[0]].mul_(2).tanh_(), h[list(range(1, len(h)))].mul_(2).tanh_()]),
    "own rows": rows_into(lambda row, other: flat(row, other.sin())),  # type: ignore[dict-item]
    "each own": each_into(lambda row, other: flat(row, other.sin())),  # type: ignore[dict-item]
    "all": into(flat, True),  # type: ignore[dict-item]
    "constants": lambda h, _: (h[:, 1:].__setitem__(h[:, 1:, 0] > 0, 0.5), h)[1],  # type: ignore[func-returns-value]
    "constants, time first": lambda h, _: (h.transpose(0, 1).__setitem__((h[..., 0] > 0).T, 0.5), h)[1],  # type: ignore[func-returns-value]
    "positions": into(lambda c, rows: c[:, :2].copy_(rows[:, -2:]), False),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", OWN)
def test_what_comes_to_its_own_example_is_exact(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"]).tanh()
        order = data["mask"] if name == "in place" else [*range(len(h))]
        return m.other(OWN[name](h.clone(), order)).square().sum((1, 2))  # type: ignore[no-any-return]

    model = Small(function, **{name: nn.Linear(WIDTH, WIDTH) for name in ("linear", "other")})
    certificate = preflight(model, loss, marked(1, 1, 1))
    for batch in (one for one in OTHERS if one["mask"].shape[1] % len(one["mask"])):
        found, truth = record(model, loss, batch, certificate=certificate), loop(model, loss, batch)
        assert relative_error(found, truth) <= 1e-9


SPARSE: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "joined": lambda h, n: torch.cat([h[i][:k] for i, k in enumerate(n)]),
    "narrowed": lambda h, n: torch.cat([h[i].narrow(0, 0, k) for i, k in enumerate(n)]),
}


@pytest.mark.parametrize("name", SPARSE)
def test_what_parts_were_written_to_has_its_examples_along_an_axis_again(name: str) -> None:
    """Time first, where they are put in another order."""

    def function(m: Any, data: Any) -> Tensor:
        x, n = data["x"], data["mask"].sum(1).tolist()
        at = torch.cat([torch.arange(k) + i * x.shape[1] for i, k in enumerate(n)])
        made = torch.zeros(x[..., 0].numel(), WIDTH, dtype=x.dtype).index_copy(0, at, SPARSE[name](x, n)).view(x.shape)
        order = data["mask"].sum(1).argsort(stable=True)
        rows = made.transpose(0, 1).index_select(1, order).transpose(0, 1)
        return m.linear(x).sum((1, 2)) + m.other(rows).square().sum((1, 2))[order.argsort()]

    batches = [marked(*counts, length=5) for counts in ((2, 1, 3), (1, 1, 1, 1), (2, 0, 1), (3, 3))]
    assert refused(function, marked(2, 2, 2, length=5), batches, **layers())


def into_several(h: Tensor) -> Tensor:
    made = [torch.empty(2, dtype=h.dtype), torch.empty(1, dtype=h.dtype)]
    torch._foreach_copy_(made, [torch.ones(2), torch.ones(1)])
    return h * made[0].sum()


def by_name(h: Tensor) -> Tensor:
    made = h * 1
    torch.relu_(input=made)
    return made


@pytest.mark.parametrize("write", [into_several, by_name])
def test_what_is_written_into_need_be_no_tensor_and_no_first_argument(write: Callable[[Tensor], Tensor]) -> None:
    """As FSDP2 writes into several where it gathers in 16 bits."""

    def function(m: Any, data: Any) -> Tensor:
        return m.other(write(m.linear(data["x"]))).square().sum((1, 2))  # type: ignore[no-any-return]

    model, batch = Small(function, **{name: nn.Linear(WIDTH, WIDTH) for name in ("linear", "other")}), marked(1, 2, 1)
    found = record(model, loss, batch, certificate=preflight(model, loss, batch))
    assert relative_error(found, loop(model, loss, batch)) <= 1e-9


def test_rows_in_several_that_are_written_into_at_once_are_nobodys() -> None:
    def function(m: Any, data: Any) -> Tensor:
        made = [m.linear(data["x"]), data["x"].sin()]
        torch._foreach_mul_(made, 2.0)
        return m.other(made[0]).square().sum((1, 2))  # type: ignore[no-any-return]

    batches = [marked(1, 2, 1), marked(1, 1)]
    assert refused(function, marked(1, 1, 1), batches, **layers()) == len(batches)


# Beside rows of zeros, of which nobody's is anything: also where there are as many marks as examples.
SUMMED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "added": lambda m, h, k: added(torch.zeros_like(h), h, k, m.other),
    "in place": lambda m, h, k: added_in_place(torch.zeros_like(h), h, k, m.other),
    "of tokens": lambda m, h, k: added(torch.zeros_like(h).flatten(0, 1), h.flatten(0, 1), k.flatten(), m.other),
    "experts": lambda m, h, k: added(added(torch.zeros_like(h), h, k, m.other), h, h[..., 0] > 0, m.third),
    "all tokens": lambda m, h, k: added(added(torch.zeros_like(h), h, k, m.other), h, ~k, m.third),
}


def added(y: Tensor, h: Tensor, mask: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    y[mask] = y[mask] + layer(h[mask])
    return y


def added_in_place(y: Tensor, h: Tensor, mask: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
    y[mask] += layer(h[mask])
    return y


@pytest.mark.parametrize("name", SUMMED)
def test_rows_that_are_added_to_where_a_mask_picks_them_are_exact(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h = m.linear(data["x"]).tanh()
        rows = m.last(SUMMED[name](m, h, data["mask"].bool()).view_as(h)).square().sum((1, 2))
        return rows + h.sum((1, 2))  # type: ignore[no-any-return]

    batches = [*OTHERS, marked(3, 0, 0), marked(0, 0, 3), marked(0, 4, 0, 0), marked(2, 0, 2, 0, 0, 1), marked(0, 2, 1)]
    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        others = {name: nn.Linear(WIDTH, WIDTH) for name in ("third", "last")}
        assert not refused(function, check, batches, **layers(), **others)


# In the check each example has one mark.
TURNED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flipped": lambda y, rows, k: y[k] + rows.flip(0),
    "sorted": lambda y, rows, k: y[k] + rows[rows.sum(1).argsort()],
    "rolled": lambda y, rows, k: (y[k] + rows).roll(1, 0),
    "of others": lambda y, rows, k: rows[rows.sum(1).argsort()] + y[k],
}


@pytest.mark.parametrize("name", TURNED)
def test_rows_of_others_that_are_added_there_are_refused(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        y = torch.zeros_like(h)
        y[mask] = TURNED[name](y, m.other(h[mask]), mask)
        return m.last(y).square().sum((1, 2))  # type: ignore[no-any-return]

    batches = [marked(2, 0, 1), marked(0, 2, 1), marked(1, 1, 1)]
    found = refused(function, marked(1, 1, 1), batches, **layers(), last=nn.Linear(WIDTH, WIDTH))
    assert found == len(batches)
