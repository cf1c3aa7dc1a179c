"""Lazy optimizers move rows with a gradient and no others; two are saved, loaded and scheduled as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_dp.config import SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts.sparse_embeddings import LazyRows, RowWiseAdam, with_lazy_rows
from hf_dp.per_example import sparse_gradient


def gradient(p: torch.Tensor, rows: list[int], value: float) -> torch.Tensor:
    return sparse_gradient(torch.tensor(rows), torch.full((len(rows), p.shape[1]), value), p)


def test_row_wise_adam_moves_rows_by_its_formula_and_no_others() -> None:
    p = nn.Parameter(torch.zeros(5, 3))
    optimizer = RowWiseAdam([p], lr=0.1, beta2=0.9, eps=0.0)
    p.grad = gradient(p, [1, 4], 2.0)
    optimizer.step()
    # The first step of Adam has length lr, whatever the gradient.
    torch.testing.assert_close(p.detach()[:, 0], torch.tensor([0.0, -0.1, 0.0, 0.0, -0.1]))
    assert p.detach()[[0, 2, 3]].eq(0).all()
    p.grad = gradient(p, [4], 1.0)
    optimizer.step()
    second = (0.9 * 0.1 * 4 + 0.1 * 1) / (1 - 0.9**2)
    torch.testing.assert_close(p.detach()[4, 0], torch.tensor(-0.1 - 0.1 / second**0.5))
    assert optimizer.state[p]["step"].tolist() == [0, 1, 0, 0, 2]
    assert sum(value.numel() for value in optimizer.state[p].values()) == 2 * len(p)
    p.grad = torch.ones(5, 3)
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["row_wise_adam", "sparse_adam", "sgd"])
def test_two_optimizers_are_saved_loaded_and_scheduled_as_one(kind: Any, dtype: torch.dtype) -> None:
    def make() -> tuple[nn.Parameter, nn.Parameter, Any]:
        table, rest = nn.Parameter(torch.ones(6, 2, dtype=dtype)), nn.Parameter(torch.ones(3))
        config = SparseEmbeddingConfig(optimizer=kind, learning_rate=0.5)
        return table, rest, with_lazy_rows(torch.optim.AdamW([rest], lr=0.1), {"t": table}, config)

    def step(table: nn.Parameter, rest: nn.Parameter, optimizer: Any) -> None:
        table.grad, rest.grad = gradient(table, [2, 3], 1.0).to(dtype), torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        assert table.grad is None
        assert rest.grad is None

    table, rest, optimizer = make()
    assert isinstance(optimizer, LazyRows)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
    for _ in range(2):
        step(table, rest, optimizer)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.025, 0.125]
    assert table.detach()[[0, 1, 4, 5]].eq(1).all()
    assert table.detach()[[2, 3]].ne(1).all()
    other_table, other_rest, other = make()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        other_table.copy_(table)
        other_rest.copy_(rest)
    step(table, rest, optimizer)
    step(other_table, other_rest, other)
    assert torch.equal(other_table, table) or kind == "sparse_adam"
    torch.testing.assert_close(other_table, table)
    assert torch.equal(other_rest, rest)
    with pytest.raises(ConfigurationError, match="without a part"):
        optimizer.load_state_dict(other.rest.state_dict())


def test_an_optimizer_that_would_move_all_rows_is_refused() -> None:
    table, rest = nn.Parameter(torch.ones(6, 2)), nn.Parameter(torch.ones(3))
    config = SparseEmbeddingConfig()
    for wrong in (
        torch.optim.AdamW([table, rest]),
        torch.optim.SGD([{"params": [rest]}, {"params": [table], "weight_decay": 0.1}], lr=0.1),
        torch.optim.SGD([table], lr=0.1, momentum=0.9),
    ):
        with pytest.raises(ConfigurationError, match="holds the embedding table t"):
            with_lazy_rows(wrong, {"t": table}, config)
    plain = torch.optim.SGD([table, rest], lr=0.1)
    assert with_lazy_rows(plain, {"t": table}, config) is plain
    several = with_lazy_rows(torch.optim.SGD([rest], lr=0.3), {"t": table}, config)
    assert [group["lr"] for group in several.param_groups] == [0.3, 0.3]
