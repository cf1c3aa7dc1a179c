"""Examples in several micro-batches: norms, sums and losses against those of all their rows at once, and order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import PerExampleGradients, Pieces, Tables, record
from hf_dp.per_example.batch import take
from tests.per_example.small import Small, batch, parameter, square
from tests.per_example.test_grouped import ARCHITECTURES
from tests.zoo import text_batch, tiny


def in_pieces(
    model: nn.Module, loss: Callable[..., Tensor], data: dict[str, Any], cut: list[int], tables: tuple[str, ...] = ()
) -> PerExampleGradients:
    """Of one example, with so many rows in each micro-batch."""
    pieces, start, rows, found = Pieces(tables), 0, sum(cut), []
    for count in cut:
        some = record(model, loss, take(data, range(start, start + count)), tables=tables)
        found.append(pieces.joined(some.grouped([0] * count, start, rows - start - count)))
        start += count
    pieces.refuse_rest()
    assert [each.batch_size for each in found] == [*[0] * (len(cut) - 1), 1]
    return found[-1]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2, tied",
        "LoRA, tied",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ARCHITECTURES
            if name not in ("gpt2, tied", "LoRA, tied")
        ),
    ],
)
def test_pieces_are_the_gradient_of_all_rows(name: str) -> None:
    make, head = ARCHITECTURES[name]
    model, data = make(), text_batch(head, size=6, length=7)
    model.zero_grad()
    truth = sum(per_example_losses(model, take(data, [i])).sum() for i in range(6))
    truth.backward()
    found = in_pieces(model, per_example_losses, data, [3, 1, 2])
    sums = found.weighted_sum(torch.tensor([0.5]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    square_norm = sum(float(g.double().square().sum()) for g in gradients.values())
    assert float(found.squared_norms()) == pytest.approx(square_norm, rel=1e-10)
    assert float(found.losses) == pytest.approx(float(truth.detach()), rel=1e-10)
    error = max(float((sums[name] - g / 2).norm()) for name, g in gradients.items())
    assert error <= 1e-10 * math.sqrt(square_norm)


def test_what_is_added_is_no_longer_than_its_norm_says() -> None:
    """In float32, where rows cancel but for their rounding."""
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 40)).float()
    x = batch(3, 5, 4)["x"].float()
    data = {"x": torch.cat([x, x * (1 + 1e-6)]), "sign": torch.tensor([1.0, 1, 1, -1, -1, -1])}

    def loss(given: Any, some: dict[str, Any]) -> Tensor:
        return given(some["x"]).flatten(1).sum(1) * some["sign"]

    found = in_pieces(model, loss, data, [4, 2])
    added = found.weighted_sum(torch.ones(1))
    length = math.sqrt(sum(float(v.double().square().sum()) for v in added.values()))
    assert 0 < length <= math.sqrt(float(found.squared_norms() + found.rounding()))


def test_tables_are_kept_as_rows_and_long_examples_need_no_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small(lambda m, x: m.w[(x[..., 0] * 99).long() % 5 + 1].cos(), w=parameter(9, 2))
    data = batch(6, 4, 1)
    dense = in_pieces(model, square, data, [2, 3, 1])
    sparse = in_pieces(model, square, data, [2, 3, 1], ("w",))
    monkeypatch.setattr("hf_dp.per_example.gram._self_gram", None)
    assert float(dense.squared_norms()) == pytest.approx(float(sparse.squared_norms()), rel=1e-12)
    assert torch.allclose(dense.weighted_sum(torch.ones(1))["w"], sparse.weighted_sum(torch.ones(1))["w"])
    examples, rows = Tables.of({"w": model.w}).touched(sparse.factors)
    truth = dense.weighted_sum(torch.ones(1))["w"].ne(0).any(1).nonzero().squeeze(1)
    assert (set(examples.tolist()), rows.tolist()) == ({0}, truth.tolist())
    # A frozen row takes no share of the norm.
    kept = torch.arange(9).eq(int(rows[0]))
    alone = sparse.restricted({"w": kept})
    assert float(alone.squared_norms()) == pytest.approx(
        float(dense.weighted_sum(torch.ones(1))["w"][kept].square().sum())
    )


def test_one_row_that_is_not_finite_shows_in_the_whole() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm", size=4)
    data["scale"] = torch.tensor([1.0, math.nan, 1.0, 1.0], dtype=torch.float64)

    def scaled(given: Any, some: dict[str, Any]) -> Tensor:
        return per_example_losses(given, some) * some["scale"]

    assert not bool(in_pieces(model, scaled, data, [2, 2]).squared_norms().isfinite())


def test_whole_examples_pass_as_they_are_and_torn_ones_are_refused() -> None:
    model, data = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4)), batch(3, 5, 4)

    def some(before: int, after: int) -> PerExampleGradients:
        return record(model, square, data).grouped([0, 0, 0], before, after)

    pieces, whole = Pieces(), some(0, 0)
    assert pieces.joined(whole) is whole
    with pytest.raises(HfDpError, match="where 0 rows of an example have come"):
        pieces.joined(some(3, 0))
    pieces.refuse_rest()
    pieces.joined(some(0, 3))
    for other in ((0, 0), (0, 3), (6, 0), (3, 1)):
        with pytest.raises(HfDpError, match="where 3 rows of an example have come"):
            pieces.joined(some(*other))
    with pytest.raises(HfDpError, match="no further rows, where 3 rows"):
        pieces.refuse_rest()
    with pytest.raises(ValueError, match="3 rows for 3, 1 before"):
        record(model, square, data).grouped([0, 1, 0], 1, 0)
