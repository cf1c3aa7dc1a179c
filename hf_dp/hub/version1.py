"""`privacy.json` of version 1, which named releases by features, as a mechanism and a report of today: for ever."""

from __future__ import annotations

from functools import partial
from typing import Any

import dp_accounting as dp

from hf_dp.accounting import (
    GRADIENT,
    ExampleUnit,
    FlatClipping,
    GaussianNoise,
    Ledger,
    Mechanism,
    PoissonSampling,
    PrivacyReport,
    Release,
    step_event,
)
from hf_dp.config import PrivacyConfig
from hf_dp.config.asked import EMBEDDING_ROWS, ROW_COUNTS, TOKEN_PRESENCE, asked
from hf_dp.config.ranges import is_count, is_noise
from hf_dp.errors import ConfigurationError, damaged

VERSION = 1
_damaged = partial(damaged, "not a privacy report of version 1")
_NOISES = {
    TOKEN_PRESENCE: "frequency_noise_multiplier",
    EMBEDDING_ROWS: "row_choice_noise_multiplier",
    ROW_COUNTS: "contribution_noise_multiplier",
}
_TIMES = "row_choices"
# What reports have said since.
_LATER = {"queries", "releases", "clipping", "clipping_groups", "noise"}


def read(values: object, config: PrivacyConfig, ledger: Ledger) -> tuple[PrivacyReport, Mechanism]:
    """The claim of a record of version 1, and the mechanism that its claim, config and ledger tell of.

    What it claims of a release stays its claim, to be held against its ledger: nothing is taken from there in its
    place.

    Raises:
        LedgerError: a report that is not whole, or says of a release what its config does not ask for.
    """
    if not isinstance(values, dict) or not {_TIMES, *_NOISES.values()} <= set(values) or _LATER & set(values):
        raise _damaged(f"found {str(values)[:100]}")
    noises = {label: values[name] for label, name in _NOISES.items() if values[name] is not None}
    times, steps = values[_TIMES], ledger.promise.get("planned_steps")
    is_whole = is_count(times) and is_count(steps, at_least=1)
    if steps is None or not is_whole or not all(map(is_noise, noises.values())):
        raise _damaged(f"noises {noises}, {times!r} choices, {steps!r} planned steps")
    if (times > 0) != (EMBEDDING_ROWS in noises):
        raise _damaged(f"{times} choices of rows, with noise {noises.get(EMBEDDING_ROWS)}")
    shares, queries = asked(config, steps)
    labels = {share.label for share in shares} | {query.label for query in queries}
    if not set(noises) <= labels:
        raise _damaged(f"its config does not ask for {', '.join(sorted(set(noises) - labels))}")
    # Of a release without a claim nothing is known but that it is due.
    events: dict[str, dp.DpEvent] = dict.fromkeys((share.label for share in shares), dp.NonPrivateDpEvent())
    events |= {label: step_event(noise, 1.0) for label, noise in noises.items()}
    plain = {name: value for name, value in values.items() if name not in {_TIMES, *_NOISES.values()}}
    report = PrivacyReport.from_dict({**plain, "queries": {}, "releases": []})
    if report.dataset_size is None:
        raise _damaged("it says nothing of how many units there are")
    try:
        mechanism = Mechanism(
            unit=ExampleUnit(number=report.dataset_size),
            sampling=PoissonSampling(
                probability=report.sampling_probability, expected_batch_size=report.expected_batch_size
            ),
            clipping=FlatClipping(norm=report.clipping_norm),
            noise=GaussianNoise(multiplier=report.noise_multiplier),
            steps=steps,
            delta=report.delta,
            queries=queries,
            releases=tuple(Release(share.label, events[share.label], share.times, share.every) for share in shares),
            reproducible=report.reproducible,
        )
    except ConfigurationError as error:
        raise _damaged(error.found) from error
    return _with_claims(plain, mechanism, ledger, noises, times), mechanism


def _with_claims(
    plain: dict[str, Any], mechanism: Mechanism, ledger: Ledger, noises: dict[str, float], times: int
) -> PrivacyReport:
    claimed = {
        label: Release(label, step_event(noise, 1.0), times if label == EMBEDDING_ROWS else 1)
        for label, noise in noises.items()
        if label != ROW_COUNTS
    }
    # The reports of this version did not tell of what users charged under labels of their own.
    own = [made for made in ledger.releases if made.label not in (TOKEN_PRESENCE, EMBEDDING_ROWS)]
    order = {made.label: place for place, made in enumerate(ledger.releases)}
    releases = sorted([*claimed.values(), *own], key=lambda made: order.get(made.label, -1))
    queries = {GRADIENT: mechanism.noise_multipliers[GRADIENT]}
    queries |= {label: noise for label, noise in noises.items() if label == ROW_COUNTS}
    return PrivacyReport.from_dict(
        {**plain, "queries": queries, "releases": [release.to_dict() for release in releases]}
    )
