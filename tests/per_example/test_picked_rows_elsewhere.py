"""Rows that a model picks, beside what else it does with the same parameters, and with rows of which it knows less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def refused(
    function: Callable[..., Any],
    check: dict[str, Tensor],
    batches: Sequence[dict[str, Tensor]] = OTHERS,
    **members: Any,
) -> int:
    """How many `batches` are refused; all others are exact. All of them, if the check is."""
    model = Small(function, **members)
    try:
        certificate = preflight(model, loss, check)
    except HfDpError:
        return len(batches)
    count = 0
    for batch in batches:
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

    def function(m: Any, data: Any) -> Any:
        h = m.linear(data["x"])
        prototypes, rows = m.project(torch.eye(3, WIDTH, dtype=h.dtype)).T, m.project(h[data["mask"].bool()])
        return summed((rows @ prototypes).logsumexp(1), data["mask"]) + (m.project(h.mean(1)) @ prototypes).logsumexp(1)

    for check in (marked(2, 1, 3), marked(1, 1, 1)):
        layers = {"linear": nn.Linear(WIDTH, WIDTH), "project": nn.Linear(WIDTH, 5)}
        assert not refused(function, check, **layers)


def test_what_all_examples_share_is_doubted_where_whole_rows_need_no_gradient() -> None:
    def function(m: Any, data: Any) -> Any:
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
def test_failure_113_copies_for_picked_rows_are_not_one_of_each_because_there_are_as_many(name: str) -> None:
    """In the check each example had one."""

    def function(m: Any, data: Any) -> Any:
        h = m.linear(data["x"]).tanh()
        return summed(COPIES[name](m, h[data["mask"].bool()]).square().sum(1), data["mask"]) + h.sum((1, 2))

    cell = {"cell": nn.GRUCell(WIDTH, WIDTH)} if name == "as a state" else {}
    count = refused(function, marked(1, 1, 1), linear=nn.Linear(WIDTH, WIDTH), w=parameter(1, WIDTH), **cell)
    assert 0 < count < len(OTHERS)


def layers() -> dict[str, nn.Module]:
    return {"linear": nn.Linear(WIDTH, WIDTH), "other": nn.Linear(WIDTH, WIDTH)}


SORTED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "written into others in part": lambda h, x, order, marks: taken(x, order).index_add(0, few(marks), x[few(marks)]),
    "chosen among others": lambda h, x, order, marks: torch.where(
        marks[order][:, None] > 0, x[torch.where(marks[order] > 0, order, 0)], taken(x, order)
    ),
    "written, and seen as whole ones": lambda h, x, order, marks: (
        torch.zeros_like(x).index_add(0, order.argsort(), x).view_as(h)
    ),
    "copied into a view of whole ones": lambda h, x, order, marks: copied(torch.zeros_like(h), x[order]),
    "copied into all of a view": lambda h, x, order, marks: copied(torch.zeros_like(h), x[order], True),
}


def taken(x: Tensor, order: Tensor) -> Tensor:
    """Rows of which nobody knows whose they are."""
    return torch.take_along_dim(x, order[:, None].expand(-1, WIDTH), 0)


def few(marks: Tensor) -> Tensor:
    """None of them."""
    return (marks > 1).nonzero().squeeze(1)


def copied(whole: Tensor, rows: Tensor, into_all: bool = False) -> Tensor:
    flat = whole.view(-1, WIDTH)
    (flat[:] if into_all else flat).copy_(rows)
    return flat if into_all else whole


@pytest.mark.parametrize("name", SORTED)
def test_failure_114_rows_in_another_order_than_in_the_check_are_refused(name: str) -> None:
    """Marked ones last, where in the check all were, or none."""

    def function(m: Any, data: Any) -> Any:
        h = m.linear(data["x"]).tanh()
        x, marks = h.reshape(-1, WIDTH), data["mask"].reshape(-1)
        order = marks.argsort(stable=True)
        y = m.other(SORTED[name](h, x, order, marks)).tanh().reshape(-1, WIDTH)
        return taken(y, order.argsort()).view(len(h), -1).square().sum(1)

    for check in (marked(6, 6, 6), marked(0, 0, 0)):
        assert refused(function, check, **layers()) >= 5


def test_numbers_that_are_filled_up_pick_rows_of_nobody() -> None:
    """Rows of zeros where an example has fewer are computed with as others: what comes of a bias there is its own."""

    def function(m: Any, data: Any) -> Any:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        places = torch.arange(mask.numel()).view_as(mask)
        index = nn.utils.rnn.pad_sequence([p[marks] for p, marks in zip(places, mask, strict=True)], batch_first=True)
        is_one = (torch.arange(index.shape[1]) < mask.sum(1, keepdim=True)).reshape(-1, 1)
        rows = h.reshape(-1, WIDTH)[index.reshape(-1)] * is_one
        return m.other(rows).tanh().view(len(h), index.shape[1], WIDTH).square().sum((1, 2))

    assert refused(function, marked(3, 3, 3), **layers())


def test_rows_made_to_be_written_to_lie_as_those_that_they_are_made_for() -> None:
    """As many as were picked, by chance as many as examples, of which some stay as they were made."""

    def function(m: Any, data: Any) -> Any:
        mask = data["mask"].bool()
        rows = m.linear(data["x"]).tanh()[mask]
        made, is_positive = rows.new_zeros(len(rows), WIDTH), rows[:, 0] > 0
        made[is_positive] = rows[is_positive] * 2
        return summed(m.other(made).tanh().square().sum(1), mask)

    assert refused(function, marked(1, 1, 1), **layers()) > 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1)])
def test_what_a_checkpoint_computes_again_of_picked_rows(reentrant: bool, counts: tuple[int, ...]) -> None:
    """By a layer that whole rows go through too."""

    def function(m: Any, data: Any) -> Any:
        h = m.linear(data["x"]).tanh()
        rows = checkpoint(m.other, h[data["mask"].bool()], use_reentrant=reentrant)
        return summed(rows.square().sum(1), data["mask"]) + m.other(h.mean(1)).sum(1)

    assert bool(refused(function, marked(*counts), **layers())) == reentrant


def test_a_checkpoint_of_a_function_that_picks_rows_is_refused_by_name() -> None:
    """And not by torch, which finds other tensors than it had kept, where another one is reentrant: then a backward
    pass tells what there is to check."""

    def function(m: Any, data: Any) -> Any:
        h = checkpoint(m.other, m.linear(data["x"]).tanh(), use_reentrant=True)
        return checkpoint(
            lambda h: summed(m.third(h[data["mask"].bool()]).square().sum(1), data["mask"]), h, use_reentrant=False
        )

    model = Small(function, **layers(), third=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(HfDpError, match="a checkpoint"):
        preflight(model, loss, marked(1, 1, 1))


@pytest.mark.parametrize("join", [torch.vstack, torch.cat])
def test_picked_rows_one_by_one_below_another_are_no_row_of_each(join: Callable[[Any], Tensor]) -> None:
    """Nor where there are as many as examples, row i of them being row i again."""

    def function(m: Any, data: Any) -> Any:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        rows = h[mask].logcumsumexp(1)
        rows = join(rows.split(1)) if len(rows) else rows
        return summed(m.other(rows).square().sum(1), mask) + h.sum((1, 2))

    assert refused(function, marked(1, 1, 1), **layers())


TURNED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by numbers twice": lambda rows, back: rows[back][back],
    "written, and seen as several": lambda rows, back: (
        torch.zeros_like(rows).index_add(0, back, rows)[None].expand(2, -1, -1).reshape(-1, WIDTH)
    ),
    "joined, and seen as several": lambda rows, back: (
        torch.cat([torch.zeros_like(rows).index_add(0, back.flip(0), rows)] * 2).view(2, len(rows), WIDTH).sum(0)
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_no_rows_that_are_turned_round_are_exact_or_refused(name: str) -> None:
    """Where no position is marked no example has any."""

    def function(m: Any, data: Any) -> Any:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        rows = h[mask]
        made = TURNED[name](rows, torch.arange(len(rows)).flip(0))[: len(rows)]
        return summed(m.other(made).square().sum(1), mask) + h.sum((1, 2))

    refused(function, marked(1, 1, 1), **layers())


HONEST: dict[str, Callable[[Any, Any], Tensor]] = {
    "a norm's weight first": lambda m, data: summed(
        m.other(m.linear.weight[0] * picked(m, data)).square().sum(1), data["mask"]
    ),
    "by their own numbers": lambda m, data: summed(
        m.other(picked(m, data)[:, None].expand(-1, 2, -1)[torch.arange(int(data["mask"].sum())), 1]).square().sum(1),
        data["mask"],
    ),
    "with their positions": lambda m, data: summed(
        m.linear(picked(m, data) + m.table(data["mask"].nonzero(as_tuple=True)[1])).square().sum(1), data["mask"]
    ),
    "added up": lambda m, data: (
        m.other(
            torch.zeros(len(data["mask"]), WIDTH, dtype=torch.double).index_add(
                0, data["mask"].nonzero()[:, 0], picked(m, data)
            )
        )
        .tanh()
        .sum(1)
    ),
    "written into a copy": lambda m, data: m.other(written(m, data)).square().sum((1, 2)),
}


def picked(m: Any, data: Any) -> Tensor:
    rows: Tensor = m.linear(data["x"]).tanh()[data["mask"].bool()]
    return rows


def written(m: Any, data: Any) -> Any:
    h = m.linear(data["x"]).tanh()
    rows, index = h.reshape(-1, WIDTH), data["mask"].reshape(-1).nonzero().squeeze(1)
    return rows.clone().index_copy(0, index, m.other(rows[index])).view_as(h)


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1)])
def test_picked_rows_are_followed_where_it_is_clear_whose_they_are(name: str, counts: tuple[int, ...]) -> None:
    is_chance = name == "by their own numbers" and counts == (1, 1, 1)  # one of each, in order, by torch.arange(B)
    table = {"table": nn.Embedding(6, WIDTH)} if name == "with their positions" else {}
    assert bool(refused(HONEST[name], marked(*counts), **layers(), **table)) == is_chance
