"""Whatever was released, the record says it, to JSON and back, and its card adds up to the same epsilon."""

from __future__ import annotations

import dataclasses
import json

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.accounting import (
    TRAINING_STEP,
    ExampleUnit,
    FlatClipping,
    GaussianNoise,
    Ledger,
    Mechanism,
    PoissonSampling,
    PrivacyReport,
    epsilon,
    in_words,
    step_event,
)
from hf_dp.accounting.report import _PLAIN
from hf_dp.config import PrivacyConfig
from hf_dp.errors import LedgerError
from hf_dp.hub import PrivacyRecord
from hf_dp.hub.card import metadata, privacy_section

noises = st.floats(0.5, 50)
events = st.recursive(
    st.builds(step_event, noises, st.floats(1e-3, 1.0)) | st.builds(dp.GaussianDpEvent, noises),
    lambda inner: (
        st.builds(dp.SelfComposedDpEvent, inner, st.integers(1, 5))
        | st.lists(inner, min_size=1, max_size=3).map(dp.ComposedDpEvent)
    ),
    max_leaves=4,
)
labels = st.sampled_from([TRAINING_STEP, "token presence", "selection of embedding rows"])
ledgers = st.lists(st.tuples(events, labels, st.integers(1, 50)), min_size=1, max_size=4)


def record_of(charges: list[tuple[dp.DpEvent, str, int]]) -> PrivacyRecord:
    ledger = Ledger({"dataset_size": 1000})
    for charge in charges:
        ledger.charge(*charge)
    report = PrivacyReport(
        epsilon=1.0, delta=1e-4, noise_multiplier=1.0, clipping_norm=1.0, sampling_probability=0.1, steps=ledger.steps,
        accountant="rdp", dataset_size=1000, expected_batch_size=100,
    )  # fmt: skip
    mechanism = Mechanism(
        unit=ExampleUnit(number=1000), sampling=PoissonSampling(probability=0.1, expected_batch_size=100),
        clipping=FlatClipping(norm=1.0), noise=GaussianNoise(multiplier=1.0), steps=10, delta=1e-4,
    )  # fmt: skip
    config = PrivacyConfig(noise_multiplier=1.0, seed=3)
    return PrivacyRecord(
        report=report, config=config, mechanism=mechanism, ledger=ledger, files={}, card_sha256="0" * 64
    )


@settings(max_examples=30)
@given(ledgers)
@pytest.mark.slow
def test_every_ledger_survives_the_record(charges: list[tuple[dp.DpEvent, str, int]]) -> None:
    record = record_of(charges)
    again = PrivacyRecord.from_json(record.to_json())
    assert again.ledger == record.ledger
    assert again.report == record.report
    assert again.to_json() == record.to_json()
    assert again.config == record.config.replace(seed=None), "a seed is not written down"
    assert epsilon(again.ledger.event, 1e-4, "rdp") == record.ledger.epsilon(1e-4, "rdp")


@settings(max_examples=3)
@given(ledgers)
@pytest.mark.slow
def test_every_release_is_told(charges: list[tuple[dp.DpEvent, str, int]]) -> None:
    record = record_of(charges)
    section = privacy_section(record.report, record.ledger, record.config)
    for event, count, label in record.ledger.entries:
        assert f"| {label} | {count} | {in_words(event)} |" in section
    said = metadata(record, "0" * 64)
    assert {
        f"epsilon_{name}": value for name, value in record.ledger.epsilons(record.report.delta).items()
    }.items() <= said.items()


# Without their kinds clipping is flat and noise the usual one, which is held against the mechanism.
NEEDED = [field.name for field in dataclasses.fields(PrivacyReport) if field.name not in _PLAIN]


@given(st.dictionaries(st.sampled_from(NEEDED), st.none()))
def test_half_a_report_is_refused(holes: dict[str, None]) -> None:
    values = json.loads(record_of([(step_event(1.0, 0.1), TRAINING_STEP, 1)]).to_json())
    for name in holes:
        del values["report"][name]
    if holes:
        with pytest.raises(LedgerError, match="not a privacy report"):
            PrivacyRecord.from_json(json.dumps(values))


def test_the_card_says_in_which_steps_the_probability_was_that() -> None:
    """A ledger may go on with other batches: the table of what was released has those before."""

    def sampled(*charges: tuple[float, int]) -> str:
        steps = [(step_event(1.0, q), TRAINING_STEP, count) for q, count in charges]
        # Other releases may stand between them.
        record = record_of([one for step in steps for one in (step, (dp.GaussianDpEvent(50.0), "a count", 1))])
        section = privacy_section(record.report, record.ledger, record.config)
        return next(line for line in section.split("\n") if line.startswith("| sampling |"))

    assert "probability 0.1 in each step, 100 on average" in sampled((0.1, 3), (0.1, 2))
    assert "probability 0.1 in each of the last 2 steps (before them as below" in sampled((0.5, 3), (0.1, 1), (0.1, 1))
    assert "in each of the last 4 steps" in sampled((0.1, 3), (0.5, 2), (0.1, 4))


def test_the_section_says_where_it_ends() -> None:
    """What stands behind it is not taken for a part of it."""
    record = record_of([(step_event(1.0, 0.1), TRAINING_STEP, 1)])
    assert privacy_section(record.report, record.ledger, record.config).split("\n")[-2] == (
        "*Here ends what hf_dp wrote of privacy.*"
    )
