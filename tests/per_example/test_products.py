"""Products of 16-bit factors as tensor cores make them: as good as after a cast, and what they cut is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Dense, OneHot, Outer, PerExampleGradients, products, record
from hf_dp.per_example.doubt import Doubt, unsure
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.ieee import _IN_FEWER_BITS, _sums_in_float32
from hf_dp.per_example.norms import squared_norms
from tests.zoo import text_batch, tiny

Multiply = Callable[[Tensor, Tensor], Tensor]


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.1}


def exactly(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left.float(), right.float())


def cutting(left: Tensor, right: Tensor, group: int = 16, extra: int = 2) -> Tensor:
    """So many products at once: they and the sum are aligned to the largest of them, cut there, added and cut again.

    Hopper's; Ampere's with 8 and 1 (Khattak and Mikaitis, arXiv:2512.07004).
    """
    total = torch.zeros(len(left), left.shape[1], right.shape[2], dtype=torch.float64)
    for one, other in zip(left.double().split(group, 2), right.double().split(group, 1), strict=True):
        parts = torch.cat([one.unsqueeze(3) * other.unsqueeze(1), total.unsqueeze(2)], 2)
        exponents = torch.frexp(parts.abs().amax(2, keepdim=True))[1] - 1
        units = torch.ldexp(torch.ones_like(total).unsqueeze(2), exponents - 23 - extra)
        total = ((parts / units).trunc() * units).sum(2)
        near = total.float()
        total = near.where(near.abs() <= total.abs(), torch.nextafter(near, torch.zeros_like(near))).double()
    return total.float()


def ampere(left: Tensor, right: Tensor) -> Tensor:
    return cutting(left, right, 8, 1)


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[Multiply], None]:
    """Lets the CPU multiply 16-bit factors like this."""

    def begin(multiply: Multiply) -> None:
        monkeypatch.setattr(products, "_has_tensor_cores", lambda device, dtype: True)
        monkeypatch.setattr(products, "_to_float32", multiply)
        # Which would cast them, to keep few in its cache.
        monkeypatch.setattr("hf_dp.per_example.gram.answers_at_once", lambda device: False)
        products._adds_in_place.cache_clear()

    return begin


def dense(batch: int, positions: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Dense:
    return Dense(torch.randn(batch, positions, size).to(dtype))


def truth(use: Factors) -> Tensor:
    """(B, p, d), float64."""
    if isinstance(use, PerExample):
        return use.values.double()
    left, right = (
        s.values.double() if isinstance(s, Dense) else nn.functional.one_hot(s.ids, s.size).double()
        for s in (use.left, use.right)
    )
    return use.scale * torch.einsum("btp,btd->bpd", left, right)


def gradients(uses: list[Factors]) -> PerExampleGradients:
    shape = truth(uses[0]).shape
    return PerExampleGradients(torch.zeros(shape[0]), {"w": uses}, {"w": nn.Parameter(torch.zeros(shape[1:]))})


SHAPES = [
    (3, 1, 3, 5),
    (3, 7, 8, 2),
    (2, 130, 5, 3),
    (2, 3, 2100, 4),
    (2, 2, 6, 4200),
    (40, 130, 2, 2),
    (1, 1, 1, 1),
    (1, 700, 3, 5),
]


@pytest.mark.parametrize("multiply", [exactly, cutting])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_sums_in_every_shape(
    shape: tuple[int, int, int, int], dtype: torch.dtype, multiply: Multiply, on_cores: Callable[[Multiply], None]
) -> None:
    torch.manual_seed(0)
    batch, positions, p, d = shape
    one = Outer(dense(batch, positions, p, dtype), dense(batch, positions, d, dtype), 0.5)
    lookup = Outer(OneHot(torch.randint(0, p, (batch, positions)), p), dense(batch, positions, d, dtype))
    coefficients = torch.rand(batch)
    cast = gradients([one]).weighted_sum(coefficients)["w"]
    on_cores(multiply)
    for uses in ([one], [one, lookup], [one.transposed.transposed, one.instantiated()]):
        each = sum((truth(use) for use in uses), start=torch.zeros(batch, p, d, dtype=torch.float64))
        found, rounding = squared_norms(list(uses))
        exact = each.square().sum((1, 2))
        assert bool(((found - exact).abs() <= rounding).all())
        assert bool((rounding <= 1e-2 * exact * positions).all())
        total = gradients(list(uses)).weighted_sum(coefficients)["w"].double()
        expected = torch.einsum("b,bpd->pd", coefficients.double(), each)
        assert float((total - expected).norm()) <= 3e-5 * float(each.norm())
    assert torch.allclose(gradients([one]).weighted_sum(coefficients)["w"], cast, rtol=1e-3, atol=1e-4 * positions)


def contributions(uses: list[Factors], norm: float) -> list[float]:
    """The l2 norm of what each example adds by itself."""
    made = gradients(uses)
    coefficients = Flat(FlatClipping(norm=norm)).coefficients(made.squared_norms(), made.rounding())
    alone = (made.weighted_sum(coefficients * one)["w"] for one in torch.eye(len(coefficients)))
    return [float(total.double().norm()) for total in alone]


def hostile(seed: int) -> list[Factors]:
    """Long sums of one sign, and such as cancel between positions or between uses."""
    torch.manual_seed(seed)
    positions, p, d = 1 + seed % 5, [3, 700, 1500][seed % 3], [2, 30][seed % 2]
    left, right = dense(2, positions, p).values.abs(), dense(2, positions, d).values * 100
    nearly = (-left.float() * (1 + 10.0 ** -(seed % 6) * torch.randn(2, positions, 1))).bfloat16()
    if seed % 4 == 0:
        return [Outer(Dense(left), Dense(right))]
    if seed % 4 == 1:
        return [Outer(Dense(torch.cat([left, nearly], 1)), Dense(torch.cat([right, right], 1)))]
    uses: list[Factors] = [Outer(Dense(left), Dense(right)), Outer(Dense(nearly), Dense(right))]
    return [uses[0].instantiated(), uses[1]] if seed % 4 == 2 and isinstance(uses[0], Outer) else uses


@pytest.mark.parametrize("multiply", [exactly, cutting])
def test_one_contribution_is_at_most_c(multiply: Multiply, on_cores: Callable[[Multiply], None]) -> None:
    on_cores(multiply)
    for seed in range(24):
        norm = 10.0 ** (seed % 7 - 3)
        assert max(contributions(hostile(seed), norm)) <= norm * (1 + 1e-12)


def test_what_is_instantiated_is_normed_as_it_is_summed(on_cores: Callable[[Multiply], None]) -> None:
    """However long its sums are, and whatever is cut off them: it is one product, and no doubt about its norm."""
    lengths: list[int] = []

    def noted(left: Tensor, right: Tensor) -> Tensor:
        lengths.append(left.shape[2])
        return cutting(left, right)

    on_cores(noted)
    torch.manual_seed(0)
    positions = 3 * products.CUT_BLOCK
    one = Outer(Dense(dense(2, positions, 3).values.abs()), Dense(dense(2, positions, 5).values.abs()))
    whole = one.settled()
    assert isinstance(whole, PerExample)
    assert lengths == [positions]
    norms, rounding = squared_norms([whole])
    assert bool(((norms - whole.values.double().square().sum((1, 2))).abs() <= rounding).all())
    assert bool((rounding <= 1e-5 * norms).all())
    assert 1 - 1e-4 < max(contributions([whole], 1.0)) <= 1
    # Beside other uses it is one of those that are added; and one that is kept as factors is cut into blocks.
    nearly = Outer(Dense((-one.left.tensor.float() * (1 + 1e-2 * torch.randn(2, positions, 1))).bfloat16()), one.right)
    lookup = Outer(OneHot(torch.randint(0, 3, (2, 4)), 3), dense(2, 4, 5))
    for others in ([nearly.settled()], [nearly], [nearly, lookup]):
        assert max(contributions([whole, *others], 1.0)) <= 1 + 1e-12
    lengths.clear()
    nearly.instantiated()
    assert lengths == [products.CUT_BLOCK] * 3


@pytest.mark.parametrize(("multiply", "extra"), [(cutting, 2), (ampere, 1)])
def test_one_is_at_most_c_where_all_products_but_the_largest_are_cut_off(
    multiply: Multiply, extra: int, on_cores: Callable[[Multiply], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cores(multiply)
    side = torch.full((1, 1, 1024), 1.4 * 2 ** (-12 - extra / 2))
    side[..., :: products.CUT_BLOCK] = 1.0
    uses: list[Factors] = [Outer(Dense(side.bfloat16()), Dense(side.bfloat16()))]
    assert 1 - 1e-4 < max(contributions(uses, 1.0)) <= 1
    monkeypatch.setattr("hf_dp.per_example.lengths.unsure", lambda *given: 0.0)
    assert max(contributions(uses, 1.0)) > 1 + 5e-7


@pytest.mark.parametrize("multiply", [None, exactly, cutting])
@pytest.mark.parametrize("size", [1, 2, 300, 4096])
def test_failure_26_one_row_of_thousands_moves_a_sum_of_16_bit_factors_by_at_most_c(
    size: int, multiply: Multiply | None, on_cores: Callable[[Multiply], None]
) -> None:
    torch.manual_seed(size)
    if multiply is not None:
        on_cores(multiply)
    lengths = 10.0 ** (4 * torch.rand(size, 1, 1) - 2)
    left = Dense((torch.randn(size, 3, 4) * lengths).bfloat16())
    made = gradients([Outer(left, dense(size, 3, 6)), PerExample(torch.randn(size, 4, 6) * lengths)])
    coefficients = Flat(FlatClipping(norm=1.0)).coefficients(made.squared_norms(), made.rounding())
    whole = made.weighted_sum(coefficients)["w"].double()
    # Nearly all are cut, and all in one direction would be `size` long.
    slack = 1e-5 * float(coefficients.sum())
    for i in {0, size // 2, size - 1}:
        without = coefficients.index_fill(0, torch.tensor([i]), 0.0)
        moved = float((whole - made.weighted_sum(without)["w"].double()).norm())
        assert 0 < moved <= 1 + slack
    # Rounded to bf16 it would move by more: the control.
    if size == 4096:
        many = torch.stack([made.weighted_sum(coefficients)["w"] * k for k in (1.0, 64.0)])
        assert float((many.bfloat16().double() - many.double()).norm()) > 0.05


def test_a_model_in_bf16(on_cores: Callable[[Multiply], None]) -> None:
    model = tiny("llama_tied", "causal_lm", torch.bfloat16, num_hidden_layers=1)
    batch = text_batch("causal_lm", dtype=torch.float32)
    cast = record(model, per_example_losses, batch)
    on_cores(cutting)
    found = record(model, per_example_losses, batch)
    assert torch.allclose(found.squared_norms(), cast.squared_norms(), rtol=1e-4)
    assert bool((found.squared_norms() - cast.squared_norms()).abs().le(found.rounding()).all())
    ones = torch.ones(len(found.losses))
    for name, total in cast.weighted_sum(ones).items():
        assert torch.allclose(found.weighted_sum(ones)[name], total, rtol=1e-3, atol=1e-5 * float(total.norm()))


def test_elsewhere_factors_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; into float64 sums; where one factor has more bits."""
    left, right = dense(2, 5, 3), dense(2, 5, 4)
    assert torch.equal(products.inner(left.values.mT, right.values), exactly(left.values.mT, right.values))
    assert not products._has_tensor_cores(torch.device("cpu"), torch.bfloat16)
    assert Doubt.of(left.values, right.values) == Doubt((3, 4))
    found = unsure(Doubt((3, 4)), torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(torch.as_tensor(found), torch.full((2,), (3 + 4) / 2 + (7 + 5) / products.SHORT_BLOCK + 5))

    def never(left: Tensor, right: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(products, "_has_tensor_cores", lambda device, dtype: True)
    monkeypatch.setattr(products, "_to_float32", never)
    products.inner(left.values.mT, right.values.float())
    out = torch.zeros(3, 4, dtype=torch.float64)
    products.add_weighted_(out, left.values, right.values, torch.ones(2), 1.0)
    assert torch.allclose(out, truth(Outer(left, right)).sum(0))
    half = torch.zeros(3, 4)
    products.add_weighted_(half, left.values.half(), right.values.half(), torch.ones(2), 1.0)
    assert torch.allclose(half, truth(Outer(left, right)).sum(0).float(), rtol=1e-2, atol=1e-2)


InPlace = Callable[[Tensor, Tensor, Tensor, float], Any]


def right_way(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    out.add_(torch.matmul(left.float(), right.float()), alpha=scale)


def transposed(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    out.view(-1).add_((scale * left.float() @ right.float()).flatten())


def without_scale(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    out.add_(torch.matmul(left.float(), right.float()))


def of_the_first(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    left, right = (left[:1], right[:1]) if out.dim() == 3 else (left, right)
    out.add_(torch.matmul(left.float(), right.float()), alpha=scale)


@pytest.mark.parametrize(
    ("in_place", "used"),
    [(None, []), (right_way, [2, 3]), (transposed, [3]), (without_scale, []), (of_the_first, [2])],
)
def test_a_product_is_added_as_it_is_made_where_that_is_right(
    in_place: InPlace | None, used: list[int], on_cores: Callable[[Multiply], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cores(exactly)
    if in_place is not None:
        monkeypatch.setattr(products, "_add_in_place", in_place)
    assert [n for n in (2, 3) if products._adds_in_place(torch.device("cpu"), torch.bfloat16, n)] == used
    left, right = dense(3, 5, 4), dense(3, 5, 6)
    expected = 0.5 * truth(Outer(left, right)).sum(0)
    for first, second, total in ((left, right, expected), (right, left, expected.T)):
        out = torch.zeros(total.shape)
        products.add_weighted_(out, first.values, second.values, torch.ones(3), 0.5)
        assert torch.allclose(out.double(), total, rtol=1e-5, atol=1e-6)
    wide = dense(3, 4, 2 * products.CUT_BLOCK + 7).values
    found = products.inner(wide, wide.mT).double()
    assert torch.allclose(found, wide.double() @ wide.double().mT, rtol=1e-5, atol=1e-3)
    products._adds_in_place.cache_clear()


@pytest.mark.parametrize("limit", [0, 5 * 120 + 1, 7 * 120, 1 << 26])
@pytest.mark.parametrize("length", [1, 8, 9, 40, 41, 100, 0])
def test_blocks_are_multiplied_together_or_one_by_one(
    length: int, limit: int, on_cores: Callable[[Multiply], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def noted(left: Tensor, right: Tensor) -> Tensor:
        calls.append(left.shape[2])
        return exactly(left, right)

    on_cores(noted)
    monkeypatch.setattr(products, "_TOGETHER", limit)
    torch.manual_seed(0)
    rows, columns = (torch.randint(-8, 9, (3, n, length)).bfloat16() for n in (3, 4))
    laid_out = {
        "rows": (rows, columns.mT), "columns": (rows.mT.contiguous().mT, columns.mT.contiguous()),
        "itself": (rows, rows.mT), "part": (rows.repeat(1, 1, 2)[..., :length], columns.mT),
    }  # fmt: skip
    for name, (left, right) in laid_out.items():
        for known in (None, torch.full((3, 3, right.shape[2]), 7.0)):
            expected = left.float() @ right.float() + (0 if known is None else 7)
            calls.clear()
            # Whole numbers, of which no order of adding them up changes anything.
            assert torch.equal(products.inner(left, right, 8, known), expected), name
            assert all(call <= 8 for call in calls)
            if name == "rows" and length == 100 and known is None:
                # Twelve blocks and a half, of 36 numbers and of copies as long as 84.
                assert len(calls) == {0: 13, 5 * 120 + 1: 4, 7 * 120: 3, 1 << 26: 2}[limit]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_blocks_of_nothing_are_nothing(shape: tuple[int, int], on_cores: Callable[[Multiply], None]) -> None:
    on_cores(exactly)
    rows = torch.ones(*shape, 80).bfloat16()
    assert products.inner(rows, rows.mT, 8).shape == (shape[0], shape[1], shape[1])


def test_cublas_is_asked_for_whole_sums_and_left_as_it_was() -> None:
    cublas: Any = torch.backends.cuda.matmul
    before = {name: getattr(cublas, name) for name in _IN_FEWER_BITS}
    with _sums_in_float32([name for name, value in before.items() if value]):
        assert not any(getattr(cublas, name) for name in _IN_FEWER_BITS)
    assert {name: getattr(cublas, name) for name in _IN_FEWER_BITS} == before
    assert any(before.values())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_cores_cut_no_more_than_is_counted(shape: tuple[int, int, int, int]) -> None:
    device, (batch, positions, p, d) = torch.device("cuda"), shape
    assert products._has_tensor_cores(device, torch.bfloat16)
    assert all(products._adds_in_place(device, torch.bfloat16, dimensions) for dimensions in (2, 3))
    torch.manual_seed(0)
    left, right = dense(batch, positions, p).values, dense(batch, positions, d).values
    exact = truth(Outer(Dense(left), Dense(right))).square().sum((1, 2))
    found, rounding = squared_norms([Outer(Dense(left.to(device)), Dense(right.to(device)))])
    assert bool(((found.cpu() - exact).abs() <= rounding.cpu()).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("narrow", [0, 1, 8, 15, 16, 40])
@pytest.mark.parametrize("shape", [(2, 3, 33), (2, 20, 33), (40, 7), (0, 20, 5), (2, 20, 0), (3, 2, 9, 5)])
def test_a_narrow_product_is_what_it_is_with_its_sides_exchanged(
    shape: tuple[int, ...], narrow: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, matrix = torch.randn(shape, dtype=torch.float64).to(dtype), torch.randn(narrow, shape[-1]).to(dtype).T
    found = products.times(rows, matrix)
    assert found.shape == (*shape[:-1], narrow)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.allclose(found.double(), rows.double() @ matrix.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if len(shape) == 3:
        other = torch.randn(shape[0], shape[1], narrow).to(dtype)
        made = products.inner(rows.mT, other)
        assert made.is_contiguous()
        expected = rows.double().mT @ other.double()
        assert torch.allclose(made.double(), expected, rtol=TOLERANCE[dtype] / 100, atol=1e-5)


def test_in_16_bits_a_narrow_product_is_as_autograd_makes_it() -> None:
    """Whose rows are rounded as they are beside others, whatever their number."""
    rows, matrix = torch.randn(4, 20, 33).bfloat16(), torch.randn(33, 8).bfloat16()
    assert torch.equal(products.times(rows, matrix), rows @ matrix)
    assert torch.equal(products.times(rows[:1], matrix), products.times(rows, matrix)[:1])
