"""All examples in one row, or in fewer rows than there are examples: no row is an example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp.per_example.followed.picked import Picked
from tests.per_example.test_picked_rows_elsewhere import OTHERS, WIDTH, layers, marked, refused

# Each row holds several examples, or parts of two.
FEWER: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda h: h.view(1, -1)[0].view_as(h),
    "two": lambda h: torch.stack([h.view(2, -1)[0], h.view(2, -1)[1]]).view_as(h),
    "apart": lambda h: torch.stack(h.view(2, -1).unbind()).view_as(h),
    "more": lambda h: torch.stack([*h.view(4, -1)]).view_as(h),
    "under one": lambda h: h[None][0],
    "each beside the others": lambda h: torch.cat([h.view(1, -1), h.view(1, -1).sin()], 1)[0].view(2, *h.shape).sum(0),
}


@pytest.mark.parametrize("name", FEWER)
def test_all_examples_in_fewer_rows_are_exact_or_refused(name: str) -> None:
    """It was an error of Python."""

    def function(m: Any, data: Any) -> Tensor:
        return m.other(FEWER[name](m.linear(data["x"]).tanh())).square().sum((1, 2))  # type: ignore[no-any-return]

    refused(function, marked(1, 1, 1), [marked(1, 1, 1), marked(2, 1, 0, 0, 3)], **layers())


def each(h: Tensor) -> int:
    return h[0].numel()


def at(h: Tensor, order: list[int]) -> Tensor:
    return (torch.tensor(order)[:, None] * each(h) + torch.arange(each(h))).flatten()


def parts(h: Tensor, order: list[int]) -> list[Tensor]:
    return [h.view(1, -1)[:, i * each(h) : (i + 1) * each(h)] for i in order]


def written(h: Tensor, order: list[int], by_copying: bool) -> Tensor:
    into = torch.zeros_like(h)
    for place, row in enumerate(parts(h, order)):
        if by_copying:
            into.view(1, -1)[:, place * each(h) : (place + 1) * each(h)].copy_(row)
        else:
            into.view(1, -1)[:, place * each(h) : (place + 1) * each(h)] = row
    return into


# Of examples that lie beside one another.
PUT: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "slices": lambda h, order: torch.cat(parts(h, order), 1),
    "slices below": lambda h, order: torch.cat(parts(h, order)),
    "slices stacked": lambda h, order: torch.stack(parts(h, order)),
    "pieces": lambda h, order: torch.cat([h.view(1, -1).split(each(h), 1)[i] for i in order], 1),
    "apart": lambda h, order: torch.stack([h.view(1, len(h), -1).unbind(1)[i] for i in order]),
    "narrowed": lambda h, order: torch.cat([h.view(1, -1).narrow(1, i * each(h), each(h)) for i in order], 1),
    "gathered": lambda h, order: h.view(1, -1).gather(1, at(h, order)[None]),
    "index": lambda h, order: h.view(1, -1)[:, at(h, order)],
    "index of all": lambda h, order: h.view(-1)[at(h, order)],
    "selected": lambda h, order: h.view(1, -1).index_select(1, at(h, order)),
    "rolled": lambda h, order: h.view(1, -1).roll(-order[0] * each(h), 1),
    "flat": lambda h, order: torch.cat([h.view(1, -1)[0].split(each(h))[i] for i in order]),
    "tokens": lambda h, order: h.view(1, -1, WIDTH)[:, at(h[..., 0], order)],
    "tokens under two": lambda h, order: h.view(1, 1, -1, WIDTH)[..., at(h[..., 0], order), :],
    "copied to places": lambda h, order: torch.zeros_like(h).view(1, -1).index_copy(1, at(h, order), h.view(1, -1)),
    "added to places": lambda h, order: h.new_zeros(1, h.numel()).index_add_(1, at(h, order), h.view(1, -1)),
    "scattered": lambda h, order: h.new_zeros(1, h.numel()).scatter(1, at(h, order)[None], h.view(1, -1)),
    "set": lambda h, order: written(h, order, by_copying=False),
    "copied": lambda h, order: written(h, order, by_copying=True),
}


@pytest.mark.parametrize("name", PUT)
def test_failure_133_examples_in_one_row_that_are_put_in_another_order_are_refused(name: str) -> None:
    """In the check all have as many marks, so they stay where they are."""

    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order = sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)
        rows = m.other(PUT[name](h, order).view_as(h)).square().sum((1, 2))
        return torch.stack([rows[order.index(i)] for i in range(len(mask))])

    assert refused(function, marked(1, 1, 1), **layers())


@pytest.mark.parametrize(
    ("pick", "is_one"),
    [
        (lambda x: x.view(1, -1).gather(1, torch.arange(24)[None]).view_as(x), False),
        (lambda x: x.view(1, -1).cos().view_as(x), None),
        (lambda x: x.view(1, -1)[0].view_as(x), None),
        (lambda x: x[:1].sin()[..., :3], None),
        (lambda x: torch.arange(6.0)[None][:, :2].expand(3, -1) * x[..., 0], None),
    ],
)
def test_what_is_known_of_one_row(pick: Callable[[Tensor], Tensor], is_one: bool | None) -> None:
    x = torch.randn(3, 2, 4)
    with Picked([x], 3) as picked:
        assert picked.has_one_of_each(pick(x)) is is_one


def test_positions_of_one_example_are_picked_as_before() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        rows = [h[i : i + 1][:, mask[i]].sum(1) for i in range(len(h))]
        return m.other(torch.cat(rows)).square().sum(1)  # type: ignore[no-any-return]

    square = [batch for batch in OTHERS if batch["mask"].shape[1] % len(batch["mask"])]
    assert not refused(function, marked(2, 1, 3), square, **layers())


def test_rows_of_parts_of_examples_are_not_one_of_each() -> None:
    """Of three examples in four rows the second is no example's."""
    x = torch.randn(3, 4, 2)
    with Picked([x], 3) as picked:
        made = torch.stack([*x.view(4, -1)][1:])
        assert picked.has_one_of_each(made) is False


@pytest.mark.parametrize("asks", [False, True])
def test_asking_what_a_view_is_of_leaves_unknown_nothing_that_was_known(asks: bool) -> None:
    """As is done for experts: with as many points in time as examples, features cut after that were anybody's."""
    with Picked([x := torch.randn(4, 4, 6)], 4) as picked:
        whole = x * 2
        rows = whole.view(16, 6)
        assert not asks or rows._base is whole
        first, second = whole.split([4, 2], -1)
        assert picked.has_one_of_each(first) is not False
        assert picked.has_one_of_each(second) is not False
