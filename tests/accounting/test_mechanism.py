"""A mechanism: to strict JSON and back, what follows from it, and every number that it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp.accounting import (
    GRADIENT,
    ExampleUnit,
    FlatClipping,
    GaussianNoise,
    Ledger,
    Mechanism,
    PoissonSampling,
    Query,
    Release,
    Share,
    calibrate_noise_multiplier,
    epsilon,
    event_from_dict,
    paid_releases,
    step_event,
)
from hf_dp.accounting.kinds import KINDS
from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError, HfDpError, LedgerError

CONFIG = PrivacyConfig(target_epsilon=4.0)


def mechanism(**changes: Any) -> Mechanism:
    values: dict[str, Any] = {
        "unit": ExampleUnit(number=1000),
        "sampling": PoissonSampling(probability=0.05, expected_batch_size=50),
        "clipping": FlatClipping(norm=math.inf),
        "noise": GaussianNoise(multiplier=0.9),
        "steps": 30,
        "delta": 1e-5,
        "queries": (Query("counts", 2.0), Query("clipped fraction", 50.0)),
        "releases": (Release("presence", step_event(7.0, 1.0), 1), Release("rows", step_event(9.0, 1.0), 5, 7)),
    }
    return Mechanism(**{**values, **changes})


def test_it_goes_to_strict_json_and_back() -> None:
    one = mechanism()
    text = json.dumps(one.to_dict(), allow_nan=False)
    assert Mechanism.from_dict(json.loads(text)) == one
    assert json.dumps(Mechanism.from_dict(json.loads(text)).to_dict()) == text


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for name, item in items for leaf in leaves(item, (*path, name))] or [path]


@pytest.mark.parametrize("wrong", [-1, math.nan, "many", [], 10**400])
def test_every_number_of_it_has_its_range(wrong: Any) -> None:
    for path in leaves(mechanism().to_dict()):
        values = mechanism().to_dict()
        place: Any = values
        for name in path[:-1]:
            place = place[name]
        if path[-1] == "label" and wrong == "many":
            continue
        place[path[-1]] = wrong
        with pytest.raises(LedgerError, match="What to do"):
            Mechanism.from_dict(values)


@pytest.mark.parametrize("wrong", [{}, "", None, {"queries": 1}])
@pytest.mark.parametrize("name", ["queries", "releases"])
def test_lists_of_it_are_lists(name: str, wrong: Any) -> None:
    with pytest.raises(LedgerError, match="this is no mechanism"):
        Mechanism.from_dict({**mechanism().to_dict(), name: wrong})


@pytest.mark.parametrize(
    "change",
    [
        {"queries": (Query("presence", 1.0),)},
        {"queries": (Query(GRADIENT, 1.0),)},
        {"queries": tuple(Query(f"counts {i}", 2.0) for i in range(17))},
        {"releases": tuple(Release(f"rows {i}", step_event(9.0, 1.0), 1) for i in range(17))},
        {"queries": (Query("| **epsilon 0.1** |", 1.0),)},
        {"steps": 0},
        {"delta": 1.0},
        {"reproducible": 1},
    ],
)
def test_what_is_ambiguous_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(HfDpError, match="What to do"):
        mechanism(**change)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Share("rows", 1.0, 1), lambda: Share("rows", 0.5, 0), lambda: Share("rows", 0.5, 1, 0),
        lambda: Query("counts", 0.0), lambda: Query("counts", math.inf), lambda: ExampleUnit(number=0),
        lambda: PoissonSampling(probability=0.0, expected_batch_size=1), lambda: GaussianNoise(multiplier=-1.0),
        lambda: PoissonSampling(probability=0.1, expected_batch_size=1, kind="shuffled"), lambda: FlatClipping(norm=0),
    ],
)  # fmt: skip
def test_terms_out_of_range_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="What to do"):
        make()


def test_a_step_is_one_event_whose_precision_is_that_of_its_queries() -> None:
    one = mechanism()
    assert one.step_event == dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(0.9))
    noises = one.noise_multipliers
    assert list(noises) == [GRADIENT, "counts", "clipped fraction"]
    assert sum(noise**-2 for noise in noises.values()) == pytest.approx(0.9**-2, rel=1e-12)
    assert noises["counts"] / noises[GRADIENT] == pytest.approx(2.0, rel=1e-12)
    assert one.noise_multiplier_of("clipped fraction") / noises[GRADIENT] == pytest.approx(50.0, rel=1e-12)
    assert mechanism(queries=()).noise_multipliers == {GRADIENT: 0.9}
    assert one.noise_multiplier_of("rows") == 9.0
    assert mechanism(noise=GaussianNoise(multiplier=0)).step_event == dp.NonPrivateDpEvent()


def test_the_planned_cost_is_all_of_it() -> None:
    one, ledger = mechanism(), Ledger()
    for release in one.releases:
        ledger.charge(release.event, release.label, release.times)
    ledger.charge(one.step_event, count=30)
    assert epsilon(one.event, 1e-5) == ledger.epsilon(1e-5)
    assert epsilon(dataclasses.replace(one, releases=one.releases[:1]).event, 1e-5) < ledger.epsilon(1e-5)


def test_a_report_tells_releases_and_queries_by_their_labels() -> None:
    one, ledger = mechanism(), Ledger()
    ledger.charge(one.release("presence").event, "presence")
    ledger.charge(one.step_event, count=3)
    report = one.report(ledger, CONFIG)
    assert report.releases == one.releases[:1]
    assert report.queries == one.noise_multipliers
    assert type(report).from_json(report.to_json()) == report
    for words in (
        "presence          released once: Gaussian noise, 7 times",
        "counts            released in each step",
    ):
        assert words in str(report)


@pytest.mark.parametrize(("steps", "once", "again"), [(0, 0, 0), (1, 1, 1), (7, 1, 1), (8, 1, 2), (30, 1, 5)])
def test_a_release_is_due_before_the_steps_that_need_it(steps: int, once: int, again: int) -> None:
    assert [release.due(steps) for release in mechanism().releases] == [once, again]


def test_shares_are_paid_for_together() -> None:
    budget: Any = {"target_epsilon": 4.0, "target_delta": 1e-5}
    both = paid_releases([Share("presence", 0.2, 1), Share("rows", 0.1, 3)], **budget)
    for release, share in zip(both, (0.2, 0.1), strict=True):
        cost = epsilon(dp.SelfComposedDpEvent(release.event, release.times), 1e-5)
        assert share * 4.0 * 0.99 < cost <= share * 4.0
    for shares, target in (([Share("presence", 0.6, 1), Share("rows", 0.4, 3)], 4.0), ([Share("rows", 0.4, 1)], None)):
        with pytest.raises(ConfigurationError, match="What to do"):
            paid_releases(shares, target_epsilon=target, target_delta=1e-5)


def test_epsilons_are_what_they_were() -> None:
    """Written by an earlier version, and so the same where the same libraries compute."""
    kept = json.loads((Path(__file__).parent / "epsilons.json").read_text())
    alike = {name: version(name) for name in kept["versions"]} == kept["versions"]
    tolerance = 1e-12 if alike else 1e-3
    for case in kept["epsilons"]:
        event = event_from_dict(case["event"])
        for accountant in ("pld", "rdp"):
            found = epsilon(event, case["delta"], accountant)
            assert found == pytest.approx(case[accountant], rel=tolerance), case
    for case in kept["noises"]:
        noise = case.pop("noise_multiplier")
        assert calibrate_noise_multiplier(**case) == pytest.approx(noise, rel=tolerance)


def test_each_kind_of_event_has_words_and_a_name() -> None:
    assert len({kind.name for kind in KINDS}) == len({kind.event for kind in KINDS}) == len(KINDS)
