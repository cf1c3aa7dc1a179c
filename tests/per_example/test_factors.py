"""Factors: inner products and weighted sums equal those of the instantiated gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.norms import all_squared_norms, magnitude_of, squared_norms
from hf_dp.per_example.rows import RowSum

B, T, P, D = 3, 5, 4, 6


def dense(size: int, dtype: torch.dtype = torch.float64, positions: int = T) -> Dense:
    return Dense(torch.randn(B, positions, size, dtype=dtype))


def one_hot(size: int, positions: int = T) -> OneHot:
    return OneHot(torch.randint(0, size, (B, positions)), size)


def rows(side: Dense | OneHot) -> Tensor:
    if isinstance(side, Dense):
        return side.values.double()
    return torch.nn.functional.one_hot(side.ids, side.size).double()


def truth(use: Factors) -> Tensor:
    if isinstance(use, PerExample):
        return use.values.double().reshape(B, P, D)
    return use.scale * torch.einsum("btp,btd->bpd", rows(use.left), rows(use.right))


def uses_of_every_kind() -> dict[str, Factors]:
    torch.manual_seed(0)
    return {
        "dense x dense": Outer(dense(P), dense(D)),
        "scaled": Outer(dense(P), dense(D), scale=-2.5),
        "one position": Outer(dense(P, positions=1), dense(D, positions=1)),
        "more positions": Outer(dense(P, positions=9), dense(D, positions=9)),
        "one-hot x dense": Outer(one_hot(P), dense(D), scale=0.5),
        "dense x one-hot": Outer(dense(P), one_hot(D)),
        "instantiated": PerExample(torch.randn(B, P, D, dtype=torch.float64)),
        "transposed": Outer(dense(D), dense(P), scale=3.0).transposed,
    }


@pytest.mark.parametrize("name", uses_of_every_kind())
def test_one_use(name: str) -> None:
    use = uses_of_every_kind()[name]
    expected, weights = truth(use), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    norms, rounding = squared_norms([use])
    assert torch.allclose(norms, expected.square().sum((1, 2)), rtol=1e-12)
    assert bool((rounding >= 0).all())
    out = torch.ones(P, D, dtype=torch.float64)
    use.add_weighted_(out, weights)
    assert torch.allclose(out, 1 + torch.einsum("b,bpd->pd", weights, expected), rtol=1e-12)
    if isinstance(use, Outer):
        assert torch.allclose(use.instantiated().values, expected, rtol=1e-12)
        assert torch.allclose(truth(use.scaled(-3.0)), -3 * expected)
    index = torch.tensor([2, 0])
    selected = torch.zeros(P, D, dtype=torch.float64)
    use.selected(index).add_weighted_(selected, weights[index])
    assert torch.allclose(selected, torch.einsum("b,bpd->pd", weights[index], expected[index]), rtol=1e-12)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(uses_of_every_kind(), 2)))
def test_failure_01_tied_weight_counts_both_uses(first: str, second: str) -> None:
    """The norm of the sum, not the norm of the last use: cross terms between every two kinds of use."""
    uses = [uses_of_every_kind()[first], uses_of_every_kind()[second].scaled(0.7)]
    norms, _ = squared_norms(uses)
    together = truth(uses[0]) + 0.7 * truth(uses_of_every_kind()[second])
    assert torch.allclose(norms, together.square().sum((1, 2)), rtol=1e-12)


def test_a_lookup_beside_an_instantiated_gradient_takes_no_table_of_its_own() -> None:
    """As of a tied embedding on long examples: a table for each example was most of the time of the norms."""
    table = PerExample(torch.randn(B, 50, D))
    lookup = Outer(OneHot(torch.randint(0, 50, (B, T)), 50), dense(D, torch.float32), 0.5)
    with _Largest() as made, torch.no_grad():
        norms, rounding = squared_norms([table, lookup])
    assert made.numel < table.values.numel() / 2
    expected = (table.values + lookup.instantiated().values).double().square().sum((1, 2))
    assert bool(((norms - expected).abs() <= rounding).all())
    assert bool((rounding < 1e-4 * expected).all())


def test_a_lookup_that_cancels_an_instantiated_gradient() -> None:
    lookup = Outer(one_hot(P), dense(D, torch.float32))
    norms, rounding = squared_norms([PerExample(-lookup.instantiated().values), lookup])
    assert bool((norms >= 0).all())
    assert bool((norms <= rounding).all())
    assert bool((rounding > 0).all())


def test_a_lookup_of_more_digits_beside_an_instantiated_gradient() -> None:
    """The bound on rounding is that of the larger type: so must be what it bounds."""
    table, lookup = PerExample(torch.randn(B, 50, D)), Outer(one_hot(50), dense(D))
    norms, rounding = squared_norms([table, lookup])
    expected = (table.values.double() + lookup.instantiated().values).square().sum((1, 2))
    assert bool(((norms - expected).abs() <= rounding).all())


def test_small_parameters_in_16_bits_have_norms_of_32() -> None:
    values = torch.randn(B, 16, 256).bfloat16()
    ((norms, rounding),) = all_squared_norms([[PerExample(values)]])
    assert bool(((norms - values.double().square().sum((1, 2))).abs() <= rounding).all())


def test_complex_gradients_of_constants_are_as_long_as_they_are() -> None:
    values = torch.complex(torch.tensor([[3.0, 0.0]]), torch.tensor([[4.0, 12.0]]))
    assert magnitude_of(PerExample(values.conj())).item() == pytest.approx(13.0)


def test_of_small_parameters_no_copies_are_made() -> None:
    """Adapters are many, and together as large as all that is trained."""
    values = [torch.randn(B, 16, 256) for _ in range(20)] + [torch.randn(B, 7), torch.randn(B), torch.randn(B, 700)]
    with _Largest() as made:
        total = sum(norms for norms, _ in all_squared_norms([PerExample(one)] for one in values))
    assert made.numel <= 2 * values[0][0].numel()
    assert torch.allclose(total, sum(one.reshape(B, -1).square().sum(1) for one in values))


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made inside, views left out."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


def test_three_uses_that_cancel() -> None:
    a, b = dense(P), dense(D)
    uses: list[Factors] = [Outer(a, b), Outer(a, b, scale=-3.0), Outer(a, b, scale=2.0)]
    norms, rounding = squared_norms(uses)
    assert bool((norms <= rounding).all()), "what is left of a cancelled sum lies within its rounding"


@pytest.mark.parametrize(
    ("positions", "left", "right", "is_small"), [(100, 4, 6, True), (1, 40, 60, False), (2, 3, 3, True)]
)
def test_instantiated_where_that_is_smaller(positions: int, left: int, right: int, is_small: bool) -> None:
    use = Outer(dense(left, positions=positions), dense(right, positions=positions))
    assert isinstance(use.settled(), PerExample) is is_small
    assert torch.allclose(squared_norms([use])[0], squared_norms([use.settled()])[0], rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_tensor_cores_up_to_twice_as_many_numbers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [Outer(dense(60, dtype, positions=n), dense(100, dtype, positions=n)) for n in (18, 19, 38)]
    lookup = Outer(OneHot(torch.randint(0, 9, (B, 2)), 9), dense(4, dtype, positions=2))
    assert [isinstance(use.settled(), PerExample) for use in (*uses, lookup)] == [False, False, True, False]
    on_cores = dtype == torch.bfloat16
    monkeypatch.setattr("hf_dp.per_example.products._has_tensor_cores", lambda device, dtype: True)
    monkeypatch.setattr("hf_dp.per_example.products._to_float32", lambda x, y: torch.bmm(x.float(), y.float()))
    assert [isinstance(use.settled(), PerExample) for use in (*uses, lookup)] == [False, on_cores, True, False]


def test_low_precision_is_accumulated_in_float32() -> None:
    use = Outer(dense(P, torch.bfloat16), dense(D, torch.bfloat16))
    norms, _ = squared_norms([use])
    assert norms.dtype == torch.float32
    assert torch.allclose(norms.double(), truth(use).square().sum((1, 2)), rtol=1e-5)
    assert use.instantiated().values.dtype == torch.float32


@pytest.mark.parametrize("fill", ["constant", "positive", "cancelling"])
@pytest.mark.parametrize("shape", [(4, 70_000, 8), (64, 64, 5_000), (1, 3, 40_000), (16, 16, 16)])
def test_rounding_bounds_the_error_of_a_gram_norm(fill: str, shape: tuple[int, int, int]) -> None:
    """Long float32 sums of one sign drift: 1,000 epsilons at the width of a large vocabulary, were they not blocked."""
    torch.manual_seed(0)
    positions, left, right = shape
    sides = [
        torch.rand(1, positions, n) if fill != "constant" else torch.full((1, positions, n), 0.1) for n in (left, right)
    ]
    if fill == "cancelling" and positions > 1:
        half = positions // 2
        sides[0][:, half:] = -sides[0][:, :half]
        sides[1][:, half:] = sides[1][:, :half] * (1 + 1e-6)
    norm, rounding = squared_norms([Outer(Dense(sides[0]), Dense(sides[1]))])
    exact, _ = squared_norms([Outer(Dense(sides[0].double()), Dense(sides[1].double()))])
    assert abs(float(norm) - float(exact)) <= float(rounding)
    if fill != "cancelling":
        assert float(rounding) <= 1e-3 * float(exact), "a bound that inflates ordinary norms would cost accuracy"


@pytest.mark.parametrize("scale", [0.3, 1.1, 1.3, 22.627])
def test_rows_in_16_bits_that_were_scaled_add_what_their_norm_says(scale: float) -> None:
    for value in torch.linspace(1, 4, 40).tolist():
        use = Outer(OneHot(torch.arange(4)[None], 5), Dense(torch.full((1, 4, 64), value).bfloat16()), scale=scale)
        total = RowSum("table", torch.zeros(5, 64, dtype=torch.bfloat16))
        total.add_(use, 1 / squared_norms([use])[0].sqrt())
        assert float(total.coalesced()[1].double().norm()) == pytest.approx(1, rel=1e-5)


def test_a_long_instantiated_gradient_keeps_its_norm() -> None:
    """One float32 reduction over 4 million entries falls short by 5e-5, more than clipping leaves room for."""
    values = torch.rand(1, 4_000_000, generator=torch.Generator().manual_seed(0))
    norm, rounding = squared_norms([PerExample(values)])
    exact = float(values.double().square().sum())
    assert abs(float(norm) - exact) <= float(rounding)
    assert float(rounding) <= 1e-5 * exact


def test_underflow_is_bounded() -> None:
    """Gram matrices of a side at 1e-23 underflow in float32, although the gradient itself is 1e-4."""
    use = Outer(Dense(torch.full((1, 1, 2), 1e-23)), Dense(torch.full((1, 1, 2), 1e19)))
    norm, rounding = squared_norms([use])
    true = 4 * (1e-23 * 1e19) ** 2
    assert not float(norm + rounding) < true
