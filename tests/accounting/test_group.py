"""A person with several rows: epsilon beside closed forms, integrals, another composition, and an attack."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as distributions
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from hf_dp.accounting import (
    ColumnExamplesUnit,
    FlatClipping,
    GaussianNoise,
    Mechanism,
    PoissonSampling,
    Query,
    epsilon,
    event_from_dict,
    event_to_dict,
    in_words,
    step_event,
    truncated,
)
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.accounting.group import Group
from hf_dp.accounting.risk import group_epsilons, groups_in_words
from hf_dp.errors import LedgerError
from tests.accounting.exact import gaussian_delta

RUNS = {
    "one release": dp.GaussianDpEvent(2.0),
    "sampled": dp.SelfComposedDpEvent(step_event(0.8, 0.05), 40),
    "and a release": dp.ComposedDpEvent([dp.GaussianDpEvent(8.0), dp.SelfComposedDpEvent(step_event(1.0, 0.2), 20)]),
}


@pytest.mark.parametrize("run", RUNS)
def test_one_row_is_the_run_itself_and_more_rows_cost_more(run: str) -> None:
    found = [group_epsilon(RUNS[run], 1e-5, rows) for rows in (1, 2, 8)]
    assert found[0] == pytest.approx(epsilon(RUNS[run], 1e-5), rel=1e-4)
    assert all(fewer < more for fewer, more in itertools.pairwise(found))  # type: ignore[operator]
    # What cards said before, "k times", is too little: delta stays as it is.
    assert found[-1] > 8 * found[0]  # type: ignore[operator]


@pytest.mark.parametrize("rows", [2, 16])
def test_of_gaussian_noise_it_is_the_closed_form(rows: int) -> None:
    """With `rows` times the sensitivity."""
    true = optimize.brentq(lambda eps: gaussian_delta(rows * math.sqrt(3) / 9.0, eps) - 1e-6, 0, 200)
    found = group_epsilon(dp.SelfComposedDpEvent(dp.GaussianDpEvent(9.0), 3), 1e-6, rows)
    assert true <= found * (1 + 1e-9)  # type: ignore[operator]
    assert found == pytest.approx(true, rel=2e-3)


@pytest.mark.parametrize(("q", "sigma", "rows"), [(0.3, 0.7, 3), (0.05, 0.8, 16)])
def test_of_a_single_step_it_is_the_integral(q: float, sigma: float, rows: int) -> None:
    x, width = np.linspace(-10 * sigma, rows + 10 * sigma, 100_001, retstep=True)
    weights = stats.binom.pmf(range(rows + 1), rows, q)
    mixed = sum(p * stats.norm.pdf(x, j, sigma) for j, p in enumerate(weights)) * width
    alone = stats.norm.pdf(x, 0, sigma) * width

    def excess(eps: float) -> float:
        one, other = mixed - math.exp(eps) * alone, alone - math.exp(eps) * mixed
        return max(np.maximum(one, 0).sum(), np.maximum(other, 0).sum()) - 1e-4

    true = optimize.brentq(excess, 0, 300, xtol=1e-9)
    found = group_epsilon(step_event(sigma, q), 1e-4, rows)
    assert true * (1 - 1e-6) <= found <= true + 0.03  # type: ignore[operator]


@pytest.mark.slow
def test_many_steps_are_what_another_composition_finds() -> None:
    """The library's accountant of the same mixtures: its grid is fixed, its thresholds are found one by one."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=0.01)
    other = accountant.compose(dp.SelfComposedDpEvent(Group(0.05, 0.8, 4).event, 40)).get_epsilon(1e-5)
    assert group_epsilon(RUNS["sampled"], 1e-5, 4) == pytest.approx(other, rel=1e-3)


def test_losses_are_those_of_the_library() -> None:
    one = Group(0.1, 0.7, 5)
    drawn = [float(j) for j in range(6)]
    theirs = distributions.from_mixture_gaussian_mechanism(
        0.7, drawn, list(stats.binom.pmf(range(6), 5, 0.1)), value_discretization_interval=0.05
    )
    for loss, pmf in zip(one.losses(0.05), (theirs._pmf_remove, theirs._pmf_add), strict=True):
        dense = pmf.to_dense_pmf()
        assert loss.lowest == dense._lower_loss
        assert np.abs(loss.masses - np.asarray(dense._probs)).max() < 1e-9


def test_no_attack_on_a_person_does_better_and_one_charged_for_fewer_rows_is_found_out() -> None:
    """100,000 games of ten steps: how much more likely is what came out where the person's four rows were in?"""
    q, sigma, rows, steps, games, delta = 0.2, 1.0, 4, 10, 100_000, 0.05
    rng, losses = np.random.default_rng(0), np.zeros(100_000)
    weights = np.log(stats.binom.pmf(range(rows + 1), rows, q))
    for _ in range(steps):
        seen = rng.normal(0, sigma, games) + rng.binomial(rows, q, games)
        each = [p + (j * seen - j**2 / 2) / sigma**2 for j, p in enumerate(weights)]
        losses += np.logaddexp.reduce(each, axis=0)

    def shown(of_rows: int) -> float:
        """delta at the epsilon that so many rows are charged, less five standard errors."""
        eps = group_epsilon(dp.SelfComposedDpEvent(step_event(sigma, q), steps), delta, of_rows)
        above = np.maximum(0, -np.expm1(eps - losses))
        return float(above.mean() - 5 * above.std() / math.sqrt(games))

    assert delta * 0.9 < shown(rows) + 0.003
    assert shown(rows) < delta
    assert shown(rows - 1) > delta


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
def test_what_is_not_known_is_said_and_not_guessed() -> None:
    capped = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(1.0), 1000, 0.1, 150), 10)
    assert group_epsilon(dp.ComposedDpEvent([dp.GaussianDpEvent(9.0), capped]), 1e-5, 65) is None
    assert "how much is not computed for these batches." in groups_in_words(dict.fromkeys((2, 4)))


def test_it_is_told_rounded_up() -> None:
    found = group_epsilons(dp.GaussianDpEvent(10.0), 1e-5, 0.0)
    assert found == {rows: epsilon(dp.GaussianDpEvent(10.0 / rows), 1e-5) for rows in (2, 4, 8, 16)}
    said = groups_in_words(found)
    assert said.endswith("at the same delta epsilon is 0.726 for 2, 1.56 for 4, 3.39 for 8 and 7.62 for 16 of them.")
    assert 0.725 < found[2] <= 0.726  # type: ignore[operator]


def test_what_has_no_noise_or_too_little_protects_nobody_and_nothing_costs_nothing() -> None:
    for event in (dp.NonPrivateDpEvent(), *(step_event(10.0**-power, 0.1) for power in (12, 30, 60))):
        assert group_epsilon(event, 1e-5, 4) == math.inf
    assert group_epsilon(dp.NoOpDpEvent(), 1e-5, 4) == 0
    assert group_epsilon(step_event(1e9, 0.1), 1e-5, 4) < 1e-6  # type: ignore[operator]


APART = [ColumnExamplesUnit(number=50, column="user", max_examples=k, examples=100) for k in (2, 4)]


@pytest.mark.parametrize("unit", APART, ids=lambda unit: f"k={unit.apart}")
def test_units_whose_examples_are_drawn_by_themselves_are_charged_as_composed_by_hand(unit: ColumnExamplesUnit) -> None:
    """In the words of dp_accounting alone: its event, with a binomial number of draws, in its own accountant."""
    q, sigma, steps, k = 0.05, 1.1, 60, unit.apart
    sampling = PoissonSampling(probability=q, expected_batch_size=5.0)
    charged = dp.SelfComposedDpEvent(sampling.event(dp.GaussianDpEvent(sigma), unit), steps)
    chances = [math.comb(k, j) * q**j * (1 - q) ** (k - j) for j in range(k + 1)]
    by_hand = dp.dp_event.MixtureOfGaussiansDpEvent(sigma, list(range(k + 1)), chances)
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=0.01)
    other = accountant.compose(dp.SelfComposedDpEvent(by_hand, steps)).get_epsilon(1e-5)
    assert epsilon(charged, 1e-5) == pytest.approx(other, rel=1e-3)
    # What a person with so many rows is told of the training by examples.
    assert epsilon(charged, 1e-5) == group_epsilon(dp.SelfComposedDpEvent(step_event(sigma, q), steps), 1e-5, k)
    assert group_epsilon(charged, 1e-5, 2) == pytest.approx(
        group_epsilon(dp.SelfComposedDpEvent(step_event(sigma, q), steps), 1e-5, 2 * k), rel=1e-9
    )
    assert group_epsilon(charged, 1e-5, 64) is None
    told = groups_in_words({2: 1.5, 4: 3.0, 8: None, 16: None})
    assert told.endswith("at the same delta epsilon is 1.5 for 2 and 3 for 4 of them; of more it is not computed.")
    found = event_from_dict(json.loads(json.dumps(event_to_dict(charged), allow_nan=False)))
    assert found == charged
    assert f"of at most {k} examples of one unit" in in_words(charged)


# How far j draws move the counts and, with a look at their noisy sum, the gradient, each in units of its bound.
ADAPTIVE: dict[str, Any] = {
    "as far as both may": lambda j, seen: (j, j + 0 * seen),
    "rows that survive alone": lambda j, seen: (j, np.where(seen > 0.5, j, 0.0)),
    "back and forth": lambda j, seen: (j if j < 2 else -j, np.where(seen > 0, -j, j)),
}


@pytest.mark.parametrize("moved", ADAPTIVE)
def test_two_queries_of_a_step_of_which_the_second_follows_from_the_first_cost_no_more_than_one(moved: str) -> None:
    """DP-AdaFEST's, by integrals over both, where two rows of a unit are drawn each by itself."""
    q, counts, gradient, k = 0.3, 2.0, 1.2, 2
    unit = ColumnExamplesUnit(number=50, column="user", max_examples=k, examples=100)
    together = (counts**-2 + gradient**-2) ** -0.5
    sampling = PoissonSampling(probability=q, expected_batch_size=30.0)
    mechanism = Mechanism(
        unit=unit, sampling=sampling, clipping=FlatClipping(norm=1.0), noise=GaussianNoise(multiplier=together),
        steps=1, delta=1e-3, queries=(Query("counts of rows", counts / gradient),),
    )  # fmt: skip
    assert mechanism.noise_multipliers == {"gradient": pytest.approx(1.2), "counts of rows": pytest.approx(2.0)}
    chances = list(stats.binom.pmf(range(k + 1), k, q))
    assert mechanism.step_event == dp.dp_event.MixtureOfGaussiansDpEvent(
        together, [0.0, 1.0, 2.0], [pytest.approx(p, rel=1e-12) for p in chances]
    )
    first, width = np.linspace(-18, 18, 801, retstep=True)
    x1, x2 = first[:, None], np.linspace(-11, 11, 601)
    cell = width * (x2[1] - x2[0])

    def density(j: int) -> Any:
        a, b = ADAPTIVE[moved](j, x1)
        return stats.norm.pdf(x1, a, counts) * stats.norm.pdf(x2, b, gradient) * cell

    alone, mixed = density(0), sum(p * density(j) for j, p in enumerate(chances))
    shown = []
    for rows in (k, 1):
        eps = group_epsilon(step_event(together, q), 0.01, rows)
        assert eps is not None
        shown.append(max(np.maximum(p - math.exp(eps) * o, 0).sum() for p, o in ((mixed, alone), (alone, mixed))))
    assert shown[0] <= 0.01 * (1 + 1e-6)
    if moved == "as far as both may":
        assert shown[0] > 0.0099
        assert shown[1] > 0.02  # Charged as for a single row it would be untrue.


def test_one_example_of_each_unit_costs_what_an_example_costs() -> None:
    unit = ColumnExamplesUnit(number=50, column="user", max_examples=1, examples=50)
    sampling = PoissonSampling(probability=0.1, expected_batch_size=5.0)
    assert sampling.event(dp.GaussianDpEvent(1.1), unit) == step_event(1.1, 0.1)
    whole = PoissonSampling(probability=1.0, expected_batch_size=100.0)
    assert whole.event(dp.GaussianDpEvent(4.0), APART[1]) == step_event(1.0, 1.0)
    assert whole.event(dp.NonPrivateDpEvent(), APART[1]) == dp.NonPrivateDpEvent()


@settings(max_examples=30)
@given(q=st.floats(1e-12, 1, exclude_max=True), rows=st.integers(2, 128))
@example(q=0.9999999851572743, rows=5)
@example(q=math.nextafter(1, 0), rows=3)
def test_a_record_gives_back_the_probability_that_was_charged(q: float, rows: int) -> None:
    found = Group.of(Group(q, 0.9, rows).event)
    assert found is not None
    assert (found.rows, found.noise) == (rows, 0.9)
    assert found.probability == pytest.approx(q, rel=1e-12)


@pytest.mark.parametrize(
    ("noise", "drawn", "chances"),
    [
        (1.0, [0.0, 1.0, 2.0], [0.81, 0.18, 0.02]),
        (1.0, [0.0, 1.0, 2.0], [0.82, 0.17, 0.01]),
        (1.0, [0.0, 1.0, 3.0], [0.81, 0.18, 0.01]),
        (1.0, [0.0, 2.0], [0.5, 0.5]),
        (1.0, [0.0], [1.0]),
        (1.0, [], []),
        (1.0, [0.0, 1.0], [1.0]),
        (1.0, [0.0, 1.0], [1.0, 0.0]),
        (1.0, [0.0, 1.0], [1.5, -0.5]),
        (1.0, [0.0, 1.0], [math.nan, 0.5]),
        (1.0, [0.0, 1.0], [math.inf, 0.5]),
        (1.0, [0.0, 1.0], ["0.5", 0.5]),
        (-1.0, [0.0, 1.0], [0.5, 0.5]),
        (1.0, [float(j) for j in range(200)], list(map(float, stats.binom.pmf(range(200), 199, 0.5)))),
    ],
    ids=str,
)
def test_a_mixture_that_no_sampling_of_examples_makes_is_not_known(noise: float, drawn: list, chances: list) -> None:
    event = dp.dp_event.MixtureOfGaussiansDpEvent(noise, drawn, chances)
    for use in (lambda: epsilon(event, 1e-5), lambda: event_to_dict(event)):
        with pytest.raises(LedgerError, match="not known here"):
            use()
