"""Neighbours: one example replaced by nothing moves the clipped sum by at most C, whatever the gradients are."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp.accounting.terms import TERMS
from hf_dp.clipping.rule import ClippingRule
from hf_dp.clipping.table import RULES, rule_of
from hf_dp.losses import per_example_losses
from hf_dp.noise.grid import ROUNDING
from hf_dp.per_example import Dense, Outer, PerExampleGradients, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.step.clipped_sum import ClippedSum
from tests.zoo import text_batch, tiny

EXPONENTS = st.integers(-18, 18)
KINDS = st.sampled_from(sorted(RULES))
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
# Rounding of one sum relative to its size, in its own dtype: what no summation in floating point can be better than.
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5}


class Model(nn.Module):
    """A lookup, a norm, a nonlinear layer and a projection that may be tied to the lookup."""

    def __init__(self, seed: int, width: int, is_tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.norm = nn.Embedding(9, width), nn.LayerNorm(width)
        self.inner, self.head = nn.Linear(width, width), nn.Linear(width, 9)
        if is_tied:
            self.head.weight = self.table.weight
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        logits: Tensor = self.head(hidden + torch.tanh(self.inner(self.norm(hidden))))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"]).float() if model.head.bias.dtype == torch.bfloat16 else model(batch["ids"])
    each = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return each.view(batch["ids"].shape).mean(1) * batch["scale"].to(logits.dtype)


def rule(kind: str, norm: float) -> ClippingRule:
    given = {"groups": {"table.*": 2, "*bias": 1, "*": 3}} if kind == "groups" else {}
    return rule_of(TERMS["clipping"][kind](norm=norm, **given))


def clipped(
    model: nn.Module, batch: Batch, split: list[list[int]], norm: float, kind: str = "flat"
) -> dict[str, Tensor]:
    total = ClippedSum(model, rule(kind, norm))
    for index in split:
        if index:
            total.add(record(model, loss, take(batch, index)))
    return total.gradients


def l2(values: Any) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in values))


@settings(max_examples=60)
@given(data=st.data(), dtype=DTYPES, is_tied=st.booleans(), seed=st.integers(0, 99), kind=KINDS)
def test_one_example_moves_the_sum_by_at_most_c(
    data: st.DataObject, dtype: torch.dtype, is_tied: bool, seed: int, kind: str
) -> None:
    size, length = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    width = data.draw(st.integers(1, 7))
    norm = 10.0 ** data.draw(st.integers(-3, 3))
    exponents = data.draw(st.lists(EXPONENTS, min_size=size, max_size=size))
    cuts = sorted(data.draw(st.sets(st.integers(1, size - 1))))
    removed = data.draw(st.integers(0, size - 1))
    model = Model(seed, width, is_tied, dtype)
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "ids": torch.randint(0, 9, (size, length), generator=generator),
        "labels": torch.randint(0, 9, (size, length), generator=generator),
        "scale": torch.tensor([10.0**e for e in exponents], dtype=torch.float64),
    }
    split = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    full = clipped(model, batch, split, norm, kind)
    without = clipped(model, batch, [[i for i in part if i != removed] for part in split], norm, kind)
    alone = clipped(model, batch, [[removed]], norm, kind)
    # In its place, an example that adds nothing.
    nothing = {**batch, "scale": batch["scale"].clone()}
    nothing["scale"][removed] = 0
    zeroed = clipped(model, nothing, split, norm, kind)
    slack = SLACK[next(iter(full.values())).dtype]
    assert all(v.isfinite().all() for v in full.values())
    assert l2(alone.values()) <= norm
    assert l2(full[k].double() - without[k].double() for k in full) <= norm + slack * (l2(full.values()) + norm)
    assert l2(zeroed[k].double() - without[k].double() for k in full) <= slack * (l2(full.values()) + norm)


def test_rounding_of_sums_takes_less_room_than_noise_on_a_grid_leaves_it() -> None:
    """All gradients alike, so that the sum is as long as it can be; see test_long_sums.py for more of them."""
    torch.manual_seed(0)
    model, size, left_out = Model(0, 6, True, torch.float32), 512, 3
    batch = {name: values.expand(size, -1) for name, values in {"ids": torch.tensor([[1, 2, 3]])}.items()}
    batch |= {"labels": batch["ids"], "scale": torch.full((size,), 100.0)}
    split = [list(range(start, start + 32)) for start in range(0, size, 32)]
    full = clipped(model, batch, split, 1.0)
    without = clipped(model, batch, [[i for i in part if i != left_out] for part in split], 1.0)
    assert l2(full.values()) > 0.99 * size
    assert l2(full[k].double() - without[k].double() for k in full) <= 1 + ROUNDING
    # Negative control.
    coarse = [{k: v.bfloat16().double() for k, v in sums.items()} for sums in (full, without)]
    assert l2(coarse[0][k] - coarse[1][k] for k in full) > 1 + ROUNDING


@settings(max_examples=80)
@given(
    dtype=DTYPES,
    positions=st.integers(1, 12),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    scales=st.tuples(EXPONENTS, EXPONENTS),
    cancelled=st.integers(0, 17),
    kind=st.sampled_from(["one use", "between positions", "between uses", "between instantiated uses"]),
    norm=st.integers(-3, 3),
    clipping=KINDS,
)
@example(torch.float32, 12, (20, 20), (9, 9), 7, "between positions", 0, "flat")
@example(torch.float32, 12, (20, 20), (9, 9), 7, "between instantiated uses", 0, "flat")
@example(torch.float64, 12, (20, 20), (18, 0), 15, "between uses", 0, "automatic")
@example(torch.float32, 2, (2, 2), (-18, 18), 0, "one use", -3, "automatic")
def test_one_contribution_is_at_most_c_where_huge_terms_cancel(
    dtype: torch.dtype,
    positions: int,
    widths: tuple[int, int],
    scales: tuple[int, int],
    cancelled: int,
    kind: str,
    norm: int,
    clipping: str,
) -> None:
    """A norm far below its terms is mostly rounding; the bound is on what is summed, not on what was meant."""
    generator = torch.Generator().manual_seed(positions)
    left, right = (
        (torch.randn(2, positions, n, generator=generator, dtype=torch.float64) * 10.0**e).to(dtype)
        for n, e in zip(widths, scales, strict=True)
    )
    nearly = 1 + 10.0**-cancelled * torch.randn(2, positions, 1, generator=generator, dtype=torch.float64)
    opposite = (-left.double() * nearly).to(dtype)
    uses: list[Any] = [Outer(Dense(left), Dense(right))]
    if kind == "between positions":
        uses = [Outer(Dense(torch.cat([left, opposite], 1)), Dense(torch.cat([right, right], 1)))]
    elif kind != "one use":
        uses.append(Outer(Dense(opposite), Dense(right)))
    if kind == "between instantiated uses":
        uses = [uses[0].instantiated(), uses[1]]
    weight = nn.Parameter(torch.zeros(widths, dtype=dtype))
    gradients = PerExampleGradients(torch.zeros(2), {"w": uses}, {"w": weight})
    coefficients = rule(clipping, 10.0**norm).coefficients(gradients.squared_norms(), gradients.rounding())
    for i in range(2):
        only = torch.zeros_like(coefficients).index_fill_(0, torch.tensor([i]), 1.0) * coefficients
        assert l2(gradients.weighted_sum(only).values()) <= 10.0**norm * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_tied", [True, False])
def test_failure_01_the_clipped_norm_of_a_tied_weight_is_exactly_c(is_tied: bool, dtype: torch.dtype) -> None:
    """Not 13 % above it, as where the second use's norm replaces the first's; and not below it either."""
    model = Model(0, 7, is_tied, dtype)
    batch = {"ids": torch.randint(0, 9, (4, 5)), "labels": torch.randint(0, 9, (4, 5)), "scale": torch.full((4,), 1e3)}
    for i in range(4):
        assert math.isclose(l2(clipped(model, batch, [[i]], 0.7).values()), 0.7, rel_tol=1e-4)


def of_example(gradients: PerExampleGradients, i: int, norm: float) -> dict[str, Tensor]:
    coefficients = rule("flat", norm).coefficients(gradients.squared_norms(), gradients.rounding())
    return gradients.weighted_sum(coefficients * torch.eye(len(coefficients), dtype=coefficients.dtype)[i])


@functools.cache
def recorded(head: str) -> tuple[nn.Module, Batch, PerExampleGradients]:
    """A model, a batch and what is recorded of it, once for all that is drawn."""
    model, batch = tiny("gpt2", head), text_batch(head)
    return model, batch, record(model, per_example_losses, batch)


@settings(max_examples=15)
@given(kept=st.integers(0, 5), seed=st.integers(0, 99))
def test_failure_03_labels_of_b_leave_the_clipped_gradient_of_a_bit_identical(kept: int, seed: int) -> None:
    model, batch, plain = recorded("causal_lm")
    batch = {name: value.clone() for name, value in batch.items()}
    before = of_example(plain, 0, 0.5)
    generator = torch.Generator().manual_seed(seed)
    batch["labels"][1] = torch.randint(3, 37, batch["labels"][1].shape, generator=generator)
    batch["labels"][1, kept:] = -100
    batch["labels"][2] = -100
    after = of_example(record(model, per_example_losses, batch), 0, 0.5)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_failure_14_nan_and_inf_leave_others_bit_identical(bad: float, dtype: torch.dtype) -> None:
    model = Model(1, 6, True, dtype)
    batch = {"ids": torch.randint(0, 9, (4, 5)), "labels": torch.randint(0, 9, (4, 5)), "scale": torch.ones(4)}
    plain = record(model, loss, batch)
    batch["scale"] = torch.tensor([1.0, bad, 1.0, 1.0])
    poisoned = record(model, loss, batch)
    for i in (0, 2, 3):
        one, other = of_example(plain, i, 0.5), of_example(poisoned, i, 0.5)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not any(bool(v.any()) for v in of_example(poisoned, 1, 0.5).values())


@pytest.mark.few(1)
@settings(max_examples=15)
@given(extra=st.integers(1, 9))
@pytest.mark.parametrize("head", ["causal_lm", "sequence", pytest.param("token", marks=pytest.mark.slow)])
def test_failure_16_extra_padding_leaves_norms_unchanged(head: str, extra: int) -> None:
    model, batch, narrow = recorded(head)
    wide = dict(batch)
    for name, value in batch.items():
        if value.dim() == 2:
            wide[name] = nn.functional.pad(value, (0, extra), value=-100 if name == "labels" else 0)
    wider = record(model, per_example_losses, wide)
    assert torch.allclose(narrow.squared_norms(), wider.squared_norms(), rtol=1e-10)
    assert torch.allclose(narrow.losses, wider.losses, rtol=1e-12)
