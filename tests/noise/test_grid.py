"""Noise on a grid: its law, to the last digit, and the attack on last digits that it withstands."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.accounting import FLOATING_POINT, Ledger, PrivacyReport, standard_caveats
from hf_dp.accounting.caveats import BEFORE_THE_GRID, SUMS_ON_A_GRID
from hf_dp.audit.hypotheses import epsilon_of_mu
from hf_dp.audit.worlds import two_worlds
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.noise import digits
from hf_dp.noise import grid as grid_module
from hf_dp.noise import source as noise_module
from hf_dp.noise.digits import DIGITS, floors
from hf_dp.noise.grid import ROUNDING, GridNoise
from hf_dp.noise.table import SOURCES
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum
from tests.noise.contract import NoiseSourceContract, needs_randomgen, plan_of
from tests.noise.distribution import normal_p

LEVEL = 1e-6
# Of the grid, the numbers of a row of the table and of the words.
CELL, PLACES, FIRST = 1 / 16, 2**32, 2**15


def numbers(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def accepted(cell: int, place: int) -> Decimal:
    """The probability with which a size of this cell is kept, written down again."""
    x = (Decimal(cell) + Decimal(place) / PLACES) / 16
    return 3178 * (-x * x / 2).exp() / int(digits._COUNTS[cell])


def off_the_grid(values: torch.Tensor, standard_deviation: float) -> float:
    """How far, in steps of the grid, float64 numbers are at most from the middle between two of its points."""
    steps = values.numpy() / standard_deviation * 2.0**DIGITS - 0.5
    return float(np.abs(steps - np.rint(steps)).max())


@needs_randomgen
class TestGrid(NoiseSourceContract):
    kind: ClassVar[Any] = "grid"
    room: ClassVar[float] = 1 + ROUNDING
    many: ClassVar[int] = 2_000_000

    def test_a_tensor_elsewhere_gets_the_noise_that_one_on_the_cpu_gets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What brings its numbers and moves them is replaced: the meta device keeps no values."""
        monkeypatch.setattr(noise_module, "_BLOCK", 1000)
        sums, moved = torch.randn(71, 97, generator=torch.Generator().manual_seed(0)), []
        for there in (torch.empty(71, 97, device="meta"), torch.empty(97, 71, device="meta").t()):
            moved.clear()
            parts = iter(sums.view(-1).split(1000) if there.is_contiguous() else [sums])
            monkeypatch.setattr(GridNoise, "held", lambda self, tensor, parts=parts: next(parts).clone())
            monkeypatch.setattr(GridNoise, "put_back", lambda self, tensor, held: moved.append(held.flatten()))
            self.source().add_([there], 1.0, 0)
            here = sums.clone()
            self.source().add_([here], 1.0, 0)
            assert torch.equal(torch.cat(moved), here.flatten())

    def test_a_tensor_not_in_one_piece_gets_the_noise_of_one_that_is(self) -> None:
        sums = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
        one, other = sums.clone(), sums.t().clone().t()
        for tensor in (one, other):
            self.source().add_([tensor], 1.0, 0)
        assert torch.equal(one, other)
        assert not torch.equal(one, sums)

    def test_all_that_comes_out_lies_on_the_grid_whatever_the_sum(self) -> None:
        sums = [10.0**e * torch.randn(500, dtype=torch.float64) for e in range(-12, 3)]
        for deviation in (0.37, 1e-5, 3e4):
            values = [deviation * tensor for tensor in sums]
            self.source().add_(values, deviation, 0)
            assert off_the_grid(torch.cat(values), deviation) < 0.01
        # Negative control.
        values = [tensor.clone() for tensor in sums]
        SOURCES["chacha20"](Entropy(1)).add_(values, 0.37, 0)
        assert off_the_grid(torch.cat(values), 0.37) > 0.4

    def test_sums_that_are_huge_or_none(self) -> None:
        huge = torch.tensor([1e30, -1e30, math.inf, -math.inf])
        self.source().add_([huge], 1.0, 0)
        assert huge.tolist() == pytest.approx([2.0**26, -(2.0**26)] * 2)
        with pytest.raises(HfDpError, match="not a number"):
            self.source().add_([torch.tensor([1.0, math.nan])], 1.0, 0)

    def test_failure_40_the_last_digits_of_plain_noise_tell_neighbours_apart_and_those_of_this_do_not(self) -> None:
        """A sum of 0, and a neighbour's of 1, with noise of 4 sensitivities: epsilon 1 at delta 1e-5.

        Around 1, float32 numbers are multiples of 2^-24, and so are all values of 1 + noise (Mironov 2012): whatever
        else comes out was 0.
        """
        claim, shown = epsilon_of_mu(1 / 4, 1e-5), {}
        for kind in SOURCES:
            scores = []
            for sum_, seed in ((0.0, 1), (1.0, 2)):
                released = torch.full((20_000,), sum_)
                SOURCES[kind](Entropy(seed)).add_([released], 4.0, 0)
                scores.append((released.double() * 2**24 % 1 != 0).double().tolist())
            shown[kind] = two_worlds(*scores, delta=1e-5, confidence=1 - LEVEL).epsilon
        assert shown.pop("grid") < claim < 1.1
        assert min(shown.values()) > 3 * claim, shown

    @pytest.mark.parametrize("multiplier", [0.1, 1.0, 300.0])
    def test_the_noise_pays_for_what_rounding_adds_to_the_sensitivity(
        self, monkeypatch: pytest.MonkeyPatch, multiplier: float
    ) -> None:
        """2^20 numbers on a grid that is 2^10 times coarser, each of which rounds away from its neighbour's."""
        monkeypatch.setattr(grid_module, "floors", lambda generator, size: np.zeros(size, np.int64))
        monkeypatch.setattr(grid_module, "DIGITS", coarse := DIGITS - 10)
        deviation = self.source().deviation(multiplier, 1.0)
        step = deviation / 2**coarse
        # As far apart as the sensitivity and the sums' own rounding let them be.
        moved = (1 + ROUNDING) / 2**10
        one = (torch.arange(2**20, dtype=torch.float64) % 9 + 0.5 - 1e-6) * step
        other = one + (moved // step + 2e-6) * step
        assert float((one - other).norm()) <= 1 + ROUNDING + 2**-9 * step
        for tensor in (one, other):
            self.source().add_([tensor], deviation, 0)
        apart = float((one - other).norm())
        assert apart * multiplier <= deviation
        # Negative control: without room for the grid it would be too little.
        assert apart * multiplier > multiplier * (moved // step * step * 2**10)

    @pytest.mark.parametrize("multiplier", [2.0**16, 1e6])
    def test_noise_for_which_the_grid_is_too_coarse_is_refused(self, multiplier: float) -> None:
        with pytest.raises(ConfigurationError, match=r"(?s)noise='grid' with a noise multiplier.*chacha20"):
            self.source().deviation(multiplier, 1.0)

    def test_ranks_add_up_their_sums_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is added to a value on the grid takes it off."""
        model, calls = nn.Linear(30, 20).double(), []
        share = torch.randn(704, dtype=torch.float64)

        def sum_(buffer: torch.Tensor) -> None:
            calls.append("sum")
            buffer += share[: len(buffer)]

        monkeypatch.setattr(ranks, "sum_", sum_)
        monkeypatch.setattr(ranks, "from_first_", lambda buffer: calls.append("from first"))
        found = {}
        for kind in ("grid", "chacha20"):
            plan = plan_of(noise=kind, seed=0)
            total = ClippedSum(model, plan.clipping)
            total.release(plan.noise, 0.7, 0)
            found[kind] = off_the_grid(torch.cat([g.flatten() for g in total.gradients.values()]), 0.7)
        assert calls == ["sum", "from first", "sum"]
        assert found["grid"] < 0.01 < found["chacha20"]

    def test_report_says_what_is_left_and_reads_back(self) -> None:
        plan = plan_of(noise="grid")
        told = plan.report(Ledger(plan.promise))
        assert "1.5 (Gaussian, on a grid, from the generator chacha20)" in str(told)
        assert SUMS_ON_A_GRID in told.caveats
        assert FLOATING_POINT not in told.caveats
        assert PrivacyReport.from_json(told.to_json()) == told
        after = standard_caveats(withholds_logs=False, noise="grid", goes_on=True)
        assert after == (*told.caveats, BEFORE_THE_GRID)
        assert BEFORE_THE_GRID not in standard_caveats(withholds_logs=False, noise="chacha20", goes_on=True)


# --- the law of what is drawn -----------------------------------------------------------------------------------------


def cells_p(values: np.ndarray) -> float:
    """Are normals spread over the cells, and over the eighths of each, as they should be?"""
    edges = np.arange(-3, 3 + CELL / 16, CELL / 8)
    found, _ = np.histogram(values, np.concatenate([[-np.inf], edges, [np.inf]]))
    shares = np.diff(stats.norm.cdf(edges), prepend=0, append=1)
    return float(stats.chisquare(found, shares * len(values)).pvalue)


def test_floors_of_normals_are_distributed_as_such_to_the_last_digit() -> None:
    drawn = floors(numbers(0), 400_000)
    values = (drawn + 0.5) * 2.0**-DIGITS
    assert min(cells_p(values), normal_p(values, 1.0)) > 1e-3
    for shift in (0, 8, 24):
        counts = np.bincount((drawn >> shift) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3
    assert np.abs(values).max() < 6


@pytest.mark.parametrize("wrong", ["all are kept", "a cell has too few entries"])
def test_negative_control_a_law_that_is_off_is_rejected(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    if wrong == "all are kept":
        monkeypatch.setattr(digits, "_SURE", np.full_like(digits._SURE, FIRST - 1))
    else:
        monkeypatch.setattr(digits, "_CELLS", np.where(digits._CELLS == 5, np.uint8(6), digits._CELLS))
    assert cells_p((floors(numbers(0), 400_000) + 0.5) * 2.0**-DIGITS) < LEVEL


def test_no_probability_is_above_1_or_taken_for_larger_than_it_is() -> None:
    cells = range(len(digits._COUNTS))
    assert sum(digits._COUNTS) == len(digits._CELLS) == 2**16
    assert np.array_equal(np.bincount(digits._CELLS), digits._COUNTS)
    assert all(accepted(cell, 0) <= 1 for cell in cells)
    assert all(int(digits._SURE[cell]) + Decimal(2) ** -17 < FIRST * accepted(cell, PLACES) or not digits._SURE[cell]
               for cell in cells)  # fmt: skip


def test_rounding_is_far_below_what_is_left_in_doubt() -> None:
    draws = numbers(3)
    for _ in range(300):
        cell, place = int(draws.integers(256)), int(draws.integers(PLACES))
        (found,) = digits._wanted(np.array([cell * PLACES + place]), np.array([cell], np.uint8))
        assert all(
            abs(Decimal(float(found)) - FIRST * accepted(cell, p)) < digits._DOUBT / 4 for p in (place, place + 1)
        )


def test_what_is_open_is_decided_as_it_is_where_nothing_is() -> None:
    """By more digits, which do not matter where the first ones decide."""
    draws = numbers(1)
    for _ in range(150):
        cell, place, first = (int(draws.integers(most)) for most in (200, PLACES, FIRST))
        limit = FIRST * accepted(cell, place)
        if abs(limit - first) > 1 and limit > 1:
            assert digits.is_accepted(cell * PLACES + place, first, draws) == (first < limit)


def test_what_is_open_is_kept_as_often_as_it_should_be() -> None:
    cell, place = 9, 3 * PLACES // 5
    limit = FIRST * accepted(cell, place)
    first, share = int(limit), float(limit % 1)
    draws = numbers(2)
    kept = sum(digits.is_accepted(cell * PLACES + place, first, draws) for _ in range(1500))
    assert 0.2 < share < 0.8
    assert stats.binomtest(kept, 1500, share).pvalue > 1e-3
    assert stats.binomtest(kept, 1500, share / 1.5).pvalue < LEVEL
