"""Whose rows are, is known after what works on rows and what picks them by number, and after nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.per_example.followed.following import Following, in_experts
from hf_dp.per_example.followed.picking import Operation
from hf_dp.per_example.followed.routes import Routes
from hf_dp.per_example.rule import Axis

B, EACH = 3, 4
ROWS = B * EACH
PERM = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))


class Sorts(nn.Module):
    """A module as of experts, which shows what it makes."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.matrices, self.work, self.made = nn.Parameter(torch.ones(2, 6, 6)), work, None

    def forward(self, x: Tensor) -> Any:
        self.made = self.work(x)
        return self.made


def owners_after(work: Callable[[Tensor], Any], enter: bool = False) -> list[int] | None:
    """Whose each row is after `work`, as is found: inside experts, or where nothing was known before."""
    module, routes, x = Sorts(work), Routes(B), torch.randn(ROWS, 6)
    if enter:
        for places in (PERM, PLACES, UNDER):
            routes.note_made(Operation("argsort", torch.argsort, (), {}, places), unseen=False)
        with Following(routes, lambda source: routes.in_order(len(source), source.device)):
            module(x)
    else:
        with in_experts([module], routes, lambda given: [x], lambda tensor: None):
            module(x)
    assert isinstance(module.made, Tensor)
    assert "forward" not in module.__dict__
    found = routes.of(module.made)
    return None if found is None else found.tolist()


def is_restored_after(work: Callable[[Tensor], Tensor]) -> bool:
    module, routes, x = Sorts(work), Routes(B), torch.randn(ROWS, 6)
    with in_experts([module], routes, lambda given: [x], lambda tensor: None):
        made = module(x)
    return routes.is_restored(made)


OWNERS = torch.arange(B).repeat_interleave(EACH)
SORTED = OWNERS[PERM].tolist()


BY_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: F.silu(x[PERM] * 2 + 1).clamp(max=3),
    "halves": lambda x: F.gelu(x[PERM].chunk(2, dim=-1)[0]) * x[PERM][..., 3:],
    "every other": lambda x: x[PERM][..., ::2].sigmoid(),
    "a norm": lambda x: x[PERM] * x[PERM].pow(2).mean(-1, keepdim=True).rsqrt(),
    "linear": lambda x: F.linear(x[PERM], torch.ones(5, 6)),
    "another norm": lambda x: F.layer_norm(x[PERM], (6,)),
    "in place": lambda x: x[PERM].add_(1),
    "in another shape": lambda x: x[PERM].view(ROWS, 2, 3).sum(1),
    "weighted by as many": lambda x: x[PERM] * x[:, :1][PERM],
    "index_select": lambda x: x.index_select(0, PERM),
    "picked with all features": lambda x: x[PERM, :],
    "index_select by name": lambda x: x.index_select(dim=0, index=PERM),
    "for two experts each": lambda x: x.repeat_interleave(2, dim=0)[2 * PERM],
    "laid out for two, and picked": lambda x: x[:, None].expand(-1, 2, -1).reshape(2 * ROWS, 6)[2 * PERM + 1],
    "once more after all": lambda x: x.repeat(2, 1)[PERM + ROWS],
    "picked twice": lambda x: x[PERM.flip(0)][torch.arange(ROWS).flip(0)],
}


def test_rows_are_followed_by_a_list_too_where_a_module_sorts_them() -> None:
    assert owners_after(lambda x: x[PERM.tolist()]) == SORTED
    assert owners_after(lambda x: x[PERM.tolist()], enter=True) is None


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_are_followed(name: str) -> None:
    assert owners_after(BY_ROWS[name]) == SORTED
    assert owners_after(BY_ROWS[name], enter=True) == SORTED


MASK = OWNERS.ne(1) & (torch.arange(ROWS) > 1)
PLACES = MASK.nonzero().squeeze(1)
UNDER = PLACES.argsort(descending=True)

PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: x[MASK],
    "mask, and some features": lambda x: x[MASK, ::2],
    "numbers": lambda x: x[PLACES],
    "numbers under a new axis": lambda x: x[None, PLACES].reshape(-1, 6),
    "numbers beside others": lambda x: x.view(ROWS, 2, 3)[PLACES, torch.zeros_like(PLACES)],
    "picked twice": lambda x: x[PLACES[UNDER]][UNDER.argsort()],
    "in pieces": lambda x: torch.cat([x[:4], x[4:].split(4)[1]])[2:],
    "in chunks": lambda x: torch.cat([x.chunk(3)[0][2:], x.chunk(3)[2]]),
    "as often as they say": lambda x: x.repeat_interleave(MASK.long(), 0),
    "through a matrix": lambda x: x[MASK] @ torch.ones(6, 2),
    "beside a number for each": lambda x: torch.ones(len(PLACES), 1) * x[MASK],
    "in longer rows, and shorter": lambda x: x[MASK].view(-1, 2, 3).reshape(-1, 3)[::2],
    "written": lambda x: written_at(torch.zeros(ROWS, 6), PLACES, x[PLACES])[MASK],
    "where they are": lambda x: torch.where(MASK)[0][:, None].float(),
    "where they are, below one another": lambda x: MASK[:, None].nonzero()[:, :1],
    "beside one another": lambda x: torch.cat([x[MASK], x[PLACES] * 2], -1),
    "of ids": lambda x: F.embedding((x[:, :1] * 0).long()[MASK], torch.ones(3, 6)).flatten(1),
}


@pytest.mark.parametrize("name", PICKED)
def test_rows_are_followed_where_one_example_has_more_than_another(name: str) -> None:
    assert owners_after(PICKED[name], enter=True) == OWNERS[MASK].tolist()


BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "picked": lambda x: x[PERM][PERM.argsort()],
    "added": lambda x: torch.zeros_like(x).index_add_(0, PERM, x[PERM]),
    "added to what was there": lambda x: x.index_add(0, PLACES, x[MASK]),
    "set": lambda x: written_at(torch.empty(ROWS, 6), PERM, x[PERM]),
    "set by a mask": lambda x: written_at(torch.zeros(ROWS, 6), MASK, x[MASK]),
    "set among the sorted": lambda x: written_at(torch.empty_like(x[PERM]), PERM, x[PERM]),
    "copied": lambda x: torch.zeros(ROWS, 6).index_copy(0, PERM, x[PERM]),
    "put": lambda x: torch.zeros(ROWS, 6).index_put((PERM,), x[PERM]),
    "scattered": lambda x: torch.zeros(ROWS, 6).scatter_add(0, PERM[:, None].expand(-1, 6), x[PERM]),
    "added twice, beside as many in another order": lambda x: (
        x[PERM],
        torch.zeros(ROWS, 6).index_add(0, PERM.repeat(2), x[PERM].repeat(2, 1)),
    )[1],
    "scattered by a mask": lambda x: torch.zeros(ROWS, 6).masked_scatter(MASK[:, None], x[MASK]),
    "summed for each example": lambda x: torch.zeros(B, 6).index_add(0, OWNERS[MASK], x[MASK]),
}


@pytest.mark.parametrize("name", BACK)
def test_rows_that_come_to_their_own_examples_are_in_order_again(name: str) -> None:
    assert is_restored_after(BACK[name])


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "added": lambda x: torch.zeros_like(x).index_add_(0, PERM, x),
    "set by another mask, in part": lambda x: written_at(torch.zeros(ROWS, 6), (MASK.flip(0), 0), x[MASK][:, 0]),
    "scattered by another mask": lambda x: torch.zeros(ROWS, 6).masked_scatter(MASK.flip(0)[:, None], x[MASK]),
    "scattered and added": lambda x: x[PERM].scatter(
        0, torch.arange(ROWS)[:, None].expand(-1, 6), x[PERM.flip(0)], reduce="add"
    ),
    "two in one place": lambda x: written_at(x[PERM], torch.tensor([0, 0]), x[torch.arange(ROWS)[[0, ROWS - 1]]]),
    "summed for others": lambda x: torch.zeros(B, 6).index_add(0, OWNERS[MASK].flip(0), x[MASK]),
    "laid out over more": lambda x: x[MASK].expand(len(PLACES), len(PLACES), 6),
    "through as many matrices": lambda x: x[MASK].unsqueeze(1) @ torch.ones(len(PLACES), 6, 2),
    "some columns of one row for all": lambda x: x[MASK].sum(0, keepdim=True).expand(len(PLACES), 6),
    "written by others": lambda x: written_at(x[MASK], slice(0, 2), torch.ones(2, 6)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_comes_to_others_is_nobodys(name: str) -> None:
    assert not is_restored_after(WRONG[name])
    assert owners_after(WRONG[name], enter=True) is None


def written_at(target: Tensor, index: Any, rows: Tensor) -> Tensor:
    target[index] = rows
    return target


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned around": lambda x: x[PERM].flip(0),
    "rolled": lambda x: x[PERM].roll(1, 0),
    "sums of rows": lambda x: x[PERM].cumsum(0),
    "a norm over rows": lambda x: F.layer_norm(x[PERM], x.shape),
    "a softmax over rows": lambda x: x[PERM].softmax(0),
    "a product of rows": lambda x: torch.ones(ROWS, ROWS) @ x[PERM],
    "written in place": lambda x: x[PERM].index_copy_(0, PERM, torch.ones(ROWS, 6)),
    "written through a view": lambda x: written(x[PERM]),
    "added to others": lambda x: torch.zeros_like(x).index_add(0, PERM.flip(0)[1:], x[PERM][1:]),
    "set": lambda x: set_rows(x[PERM]),
    "joined with rows of others": lambda x: torch.cat([x[PERM], x[PERM.flip(0)]], 1),
    "laid along the other axis": lambda x: torch.ones(ROWS, ROWS) * x[PERM][:, 0],
    "beside rows of others": lambda x: x[PERM] * x[PERM.flip(0)],
    "transposed": lambda x: x[PERM][:, :, None].expand(-1, -1, ROWS).transpose(0, 2),
    "sorted by their numbers": lambda x: x[PERM].sort(0)[0],
}


def written(x: Tensor) -> Tensor:
    x.view(-1).copy_(torch.ones(ROWS * 6))
    return x


def set_rows(x: Tensor) -> Tensor:
    x[0] = 0
    return x


@pytest.mark.parametrize("name", OTHERS)
def test_after_anything_else_nobody_knows(name: str) -> None:
    assert owners_after(OTHERS[name]) is None


def test_rows_in_order_are_read_as_they_are_unless_it_matters() -> None:
    routes, rows = Routes(B), torch.randn(ROWS, 6)
    routes.note(rows, routes.in_order(ROWS, rows.device))
    assert routes.order(rows, is_sorted=False) is None
    order = routes.order(rows, is_sorted=True)
    assert order is not None
    assert order.at.tolist() == order.back.tolist() == list(range(ROWS))


def test_an_order_leads_through_as_many_rows_of_each_and_back() -> None:
    routes, rows = Routes(B), torch.randn(5, 2)
    routes.note(rows, torch.tensor([2, 0, 2, 2, 0]))
    order = routes.order(rows, is_sorted=False)
    assert order is not None
    assert order.used is not None
    axis = Axis(B, "routed", order)
    led = axis.led(rows)
    assert torch.equal(led.view(B, 3, 2)[0, :2], rows[[1, 4]])
    assert torch.equal(led.view(B, 3, 2)[1], torch.zeros(3, 2))
    assert torch.equal(led.view(B, 3, 2)[2], rows[[0, 2, 3]])
    assert torch.equal(axis.as_before(led), rows)
    assert order.used.tolist() == [True, True, False, False, False, False, True, True, True]
    assert torch.equal(axis.spread(rows), led * order.used[:, None])


def test_of_no_rows_each_example_has_zeros() -> None:
    routes, rows = Routes(B), torch.randn(0, 2)
    routes.note(rows, torch.zeros(0, dtype=torch.long))
    order = routes.order(rows, is_sorted=False)
    assert order is not None
    axis = Axis(B, "routed", order)
    assert torch.equal(axis.led(rows), torch.zeros(B, 2))
    assert axis.as_before(torch.ones(B, 4)).shape == (0, 4)


def test_positions_of_several_experts_are_those_of_their_token() -> None:
    """As Transformers sorts them: two experts for each token, and their numbers with them."""
    chosen = torch.tensor([[1, 0], [0, 1]] * (ROWS // 2))

    def work(x: Tensor) -> Tensor:
        ids, order = chosen.reshape(-1).sort(stable=True)
        return x[order // 2] * ids[:, None].float()

    order = chosen.reshape(-1).sort(stable=True)[1] // 2
    assert owners_after(work) == OWNERS[order].tolist()


def test_what_is_in_order_again_is_told() -> None:
    told: list[Tensor] = []
    for work, is_told in ((lambda x: x[PERM][PERM.argsort()], True), (lambda x: x[PERM], False)):
        module, x = Sorts(work), torch.randn(ROWS, 6)
        with in_experts([module], Routes(B), lambda given, x=x: [x], told.append):
            module(x)
        assert (told == [module.made]) if is_told else not told
        told.clear()


def test_of_a_single_example_all_rows_are_its_own() -> None:
    order = Routes(1).order(torch.ones(3, 2), is_sorted=True)
    assert order is not None
    assert order.at.tolist() == [0, 1, 2]


def test_within_a_module_that_sorts_another_takes_no_other_rows_for_rows_in_order() -> None:
    routes, inner = Routes(B), Sorts(lambda x: x)
    with in_experts([inner], routes, lambda given: [*given], lambda tensor: None):
        rows = torch.randn(ROWS, 6)
        routes.note(rows, OWNERS[PERM])
        inner(rows)
    assert routes.of(rows).tolist() == SORTED  # type: ignore[union-attr]


def test_matrices_behind_a_parametrization_are_seen() -> None:
    module = Sorts(lambda x: x[PERM])
    nn.utils.parametrize.register_parametrization(module, "matrices", nn.Identity())
    routes, x = Routes(B), torch.randn(ROWS, 6)
    with in_experts([module], routes, lambda given: [x], lambda tensor: None):
        module(x)
    assert routes.order(module.made, is_sorted=True) is not None  # type: ignore[arg-type]


def test_modules_that_hold_no_matrices_and_those_of_torch_are_left_alone() -> None:
    forward = nn.Conv1d.forward
    conv, plain = nn.Conv1d(2, 2, 1), nn.Linear(2, 2)
    with in_experts([conv, plain], Routes(B), lambda given: [], lambda tensor: None):
        assert conv.forward.__func__ is forward  # type: ignore[attr-defined]
        assert "forward" not in plain.__dict__


def test_a_forward_of_its_own_is_put_back_after_an_error() -> None:
    module = Sorts(lambda x: 1 / 0)
    own = module.__dict__["forward"] = module.forward
    with (
        pytest.raises(ZeroDivisionError),
        in_experts([module], Routes(B), lambda given: [], lambda tensor: None),
    ):
        module(torch.ones(ROWS, 6))
    assert module.__dict__["forward"] == own
