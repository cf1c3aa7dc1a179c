"""What is printed of a bound is never below it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from hf_dp.figures import at_most, logged, lower, one_in, percent, times, upper

ROOT = Path(__file__).resolve().parents[1]
TO_NEAREST = re.compile(r"\{[^{}]*(?:delta|epsilon)[^{}]*:\.\d+[efg]\}")


@pytest.mark.parametrize(
    ("bound", "digits", "printed"),
    [
        (7.99949, 3, "8"), (2.34564, 5, "2.3457"), (2.3450000001, 4, "2.346"), (0.1, 3, "0.1"), (0.1 + 0.2, 3, "0.3"),
        (8.0, 5, "8"), (0.0, 5, "0"), (math.inf, 5, "inf"), (1e-5, 3, "1e-05"), (3.9811e-05, 3, "3.99e-05"),
        (123456.0, 3, "1.24e+05"), (99.999, 4, "100"),
    ],
)  # fmt: skip
def test_digits_are_cut_upward_and_what_is_exact_stays(bound: float, digits: int, printed: str) -> None:
    assert upper(bound, digits) == printed


def test_no_bound_is_printed_below_itself() -> None:
    for bound in np.random.default_rng(0).lognormal(0, 8, 2000):
        assert bound * (1 - 1e-11) <= float(upper(bound, 4)) <= bound * 1.0011
    for share in np.random.default_rng(0).random(2000):
        assert share - 1e-8 <= float(at_most(share, 2)[:-1]) / 100 <= share + 1.0001e-4


def test_a_share_that_was_given_is_printed_as_it_was() -> None:
    assert [percent(share) for share in (0.001, 0.01, 0.1, 0.07, 0.025)] == ["0.1%", "1%", "10%", "7%", "2.5%"]


def test_noise_is_printed_and_epsilon_logged_as_no_better_than_they_are() -> None:
    assert [lower(noise, 4) for noise in (0.345188, 1.0, 0.0, math.inf)] == ["0.3451", "1", "0", "inf"]
    epsilons = (9.8e-6, 7.99921, 8.0, math.inf)
    assert [logged(bound, 1)["epsilon"] for bound in epsilons] == [9.8e-6, 8.0, 8.0, math.inf]
    assert logged(0.12341, 0.345188) == {"epsilon": 0.1235, "noise_multiplier": 0.3451}
    for bound in np.random.default_rng(0).lognormal(0, 3, 2000):
        assert float(lower(bound, 4)) <= bound * (1 + 1e-11)
        in_log = logged(bound, bound)
        # As Trainer's console has it.
        assert bound * (1 - 1e-11) <= float(f"{in_log['epsilon']:.4g}") == in_log["epsilon"] <= bound * 1.0011
        assert bound * 0.9989 <= float(f"{in_log['noise_multiplier']:.4g}") <= bound * (1 + 1e-11)


def test_no_message_rounds_an_epsilon_or_a_delta_to_the_nearest() -> None:
    assert TO_NEAREST.search('f"spent {report.epsilon:.3g}"')
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for room in ("hf_dp", "recipes")
        for path in sorted((ROOT / room).rglob("*.py"))
        for match in TO_NEAREST.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_what_is_read_in_full_is_rounded_away_from_what_is_promised() -> None:
    factors = (1.0, 1.6487, 99.99, math.exp(8), math.exp(20), math.exp(40))
    assert [times(factor) for factor in factors] == ["1", "1.65", "100", "2,981", "485,200,000", "a 1 with 18 zeros"]
    shares = (0.0141, 1e-5, 3.98e-5, 0.49, 3e-31, 5e-324, 0.0)
    told = ["1 in 70", "1 in 100,000", "1 in 25,120", "1 in 2", "1 in a 1 with 30 zeros", "1 in a 1 with 323 zeros"]
    told += ["never"]
    assert [one_in(share) for share in shares] == told
    for factor in np.random.default_rng(0).lognormal(6, 4, 2000).clip(1, 1e14):
        assert factor * (1 - 1e-11) <= float(times(factor).replace(",", "")) <= factor * 1.011
        assert 1 / factor <= (1 + 1e-11) / float(one_in(1 / factor).removeprefix("1 in ").replace(",", ""))
