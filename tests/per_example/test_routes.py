"""Whose rows are, is known after what works on rows and what picks them by number, and after nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.per_example.routes import Routes, followed

B, EACH = 3, 4
ROWS = B * EACH
PERM = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
UNEVEN = torch.tensor([0, 1, 2, 3, 4, 8])


class Sorts(nn.Module):
    """A module as of experts, which shows what it makes."""

    def __init__(self, work: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.matrices, self.work, self.made = nn.Parameter(torch.ones(2, 6, 6)), work, None

    def forward(self, x: Tensor) -> Any:
        self.made = self.work(x)
        return self.made


def order_after(work: Callable[[Tensor], Tensor], is_sorted: bool = True) -> list[int] | None:
    """Where the rows of each example are after `work`, as is found."""
    module, routes, x = Sorts(work), Routes(B), torch.randn(ROWS, 6)
    with followed([module], routes, lambda given: [x], lambda tensor: None):
        module(x)
    assert isinstance(module.made, Tensor)
    found = routes.order(module.made, is_sorted)
    assert "forward" not in module.__dict__
    return None if found is None else [int(i) for i in found]


def sorted_back(index: Tensor) -> list[int]:
    return index.argsort(stable=True).tolist()


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
    "picked by a list": lambda x: x[PERM.tolist()],
    "index_select by name": lambda x: x.index_select(dim=0, index=PERM),
    "for two experts each": lambda x: x.repeat_interleave(2, dim=0)[2 * PERM],
    "laid out for two, and picked": lambda x: x[:, None].expand(-1, 2, -1).reshape(2 * ROWS, 6)[2 * PERM + 1],
    "once more after all": lambda x: x.repeat(2, 1)[PERM + ROWS],
    "picked twice": lambda x: x[PERM.flip(0)][torch.arange(ROWS).flip(0)],
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_rows_are_followed(name: str) -> None:
    assert order_after(BY_ROWS[name]) == sorted_back(PERM)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned around": lambda x: x[PERM].flip(0),
    "rolled": lambda x: x[PERM].roll(1, 0),
    "sums of rows": lambda x: x[PERM].cumsum(0),
    "a norm over rows": lambda x: F.layer_norm(x[PERM], x.shape),
    "a softmax over rows": lambda x: x[PERM].softmax(0),
    "a product of rows": lambda x: torch.ones(ROWS, ROWS) @ x[PERM],
    "written in place": lambda x: x[PERM].index_copy_(0, PERM, torch.ones(ROWS, 6)),
    "written through a view": lambda x: written(x[PERM]),
    "added to others": lambda x: torch.zeros_like(x).index_add(0, PERM.flip(0), x[PERM]),
    "set": lambda x: set_rows(x[PERM]),
    "laid along the other axis": lambda x: torch.ones(ROWS, ROWS) * x[PERM][:, 0],
    "beside rows of others": lambda x: x[PERM] * x[PERM.flip(0)],
    "picked by a mask": lambda x: x[torch.ones(ROWS, dtype=torch.bool)],
    "more of one than of others": lambda x: x[UNEVEN],
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
    assert order_after(OTHERS[name]) is None


def test_rows_in_order_are_read_as_they_are_unless_it_matters() -> None:
    assert order_after(lambda x: x * 2, is_sorted=False) is None
    assert order_after(lambda x: x * 2) == list(range(ROWS))
    assert order_after(lambda x: x[PERM][PERM.argsort()], is_sorted=False) is None
    assert order_after(lambda x: torch.zeros_like(x).index_add_(0, PERM, x[PERM])) == list(range(ROWS))


def test_positions_of_several_experts_are_those_of_their_token() -> None:
    """As Transformers sorts them: two experts for each token, and their numbers with them."""
    chosen = torch.tensor([[1, 0], [0, 1]] * (ROWS // 2))

    def work(x: Tensor) -> Tensor:
        ids, order = chosen.reshape(-1).sort(stable=True)
        return x[order // 2] * ids[:, None].float()

    order = chosen.reshape(-1).sort(stable=True)[1] // 2
    assert order_after(work) == order.argsort(stable=True).tolist()


def test_what_is_in_order_again_is_told() -> None:
    told: list[Tensor] = []
    for work, is_told in ((lambda x: x[PERM][PERM.argsort()], True), (lambda x: x[PERM], False)):
        module, x = Sorts(work), torch.randn(ROWS, 6)
        with followed([module], Routes(B), lambda given, x=x: [x], told.append):
            module(x)
        assert (told == [module.made]) if is_told else not told
        told.clear()


def test_of_a_single_example_all_rows_are_its_own() -> None:
    assert Routes(1).order(torch.ones(3, 2), is_sorted=True).tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_within_a_module_that_sorts_another_takes_no_other_rows_for_rows_in_order() -> None:
    routes, inner = Routes(B), Sorts(lambda x: x)
    with followed([inner], routes, lambda given: [*given], lambda tensor: None):
        rows = torch.randn(ROWS, 6)
        routes.note(rows, routes.in_order(ROWS, rows.device)._replace(rows=PERM))
        inner(rows)
    assert routes.order(rows, is_sorted=True).tolist() == sorted_back(PERM)  # type: ignore[union-attr]


def test_matrices_behind_a_parametrization_are_seen() -> None:
    module = Sorts(lambda x: x[PERM])
    nn.utils.parametrize.register_parametrization(module, "matrices", nn.Identity())
    routes, x = Routes(B), torch.randn(ROWS, 6)
    with followed([module], routes, lambda given: [x], lambda tensor: None):
        module(x)
    assert routes.order(module.made, is_sorted=True) is not None  # type: ignore[arg-type]


def test_modules_that_hold_no_matrices_and_those_of_torch_are_left_alone() -> None:
    forward = nn.Conv1d.forward
    conv, plain = nn.Conv1d(2, 2, 1), nn.Linear(2, 2)
    with followed([conv, plain], Routes(B), lambda given: [], lambda tensor: None):
        assert conv.forward.__func__ is forward  # type: ignore[attr-defined]
        assert "forward" not in plain.__dict__


def test_a_forward_of_its_own_is_put_back_after_an_error() -> None:
    module = Sorts(lambda x: 1 / 0)
    own = module.__dict__["forward"] = module.forward
    with (
        pytest.raises(ZeroDivisionError),
        followed([module], Routes(B), lambda given: [], lambda tensor: None),
    ):
        module(torch.ones(ROWS, 6))
    assert module.__dict__["forward"] == own
