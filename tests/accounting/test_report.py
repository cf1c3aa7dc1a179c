"""The report: strict JSON and back, and plain words where there is no privacy."""

import dataclasses
import json
import math

import pytest

from hf_dp.accounting import MANY_ALIKE, STANDARD_CAVEATS, PrivacyReport, standard_caveats
from hf_dp.errors import LedgerError
from hf_dp.versions import library_versions


@pytest.fixture
def report():
    return PrivacyReport(
        epsilon=7.99, delta=4e-5, noise_multiplier=0.76, clipping_norm=1.0, sampling_probability=0.0512, steps=200,
        accountant="pld", dataset_size=10003, expected_batch_size=512.0, target_epsilon=8.0, epsilon_rdp=8.9,
    )  # fmt: skip


def test_a_private_report_says_what_was_promised(report):
    text = str(report)
    assert report.private
    assert "NOT PRIVATE" not in text
    for said in ("epsilon 7.99", "4e-05", "budget of 8", "one training example", "replace one by nothing", "n public",
                 "Poisson", "0.0512", "512 of 10003", "0.76", "200", "PLD", "8.9"):  # fmt: skip
        assert said in text
    for caveat in STANDARD_CAVEATS:
        assert caveat.split()[0] in text


def test_no_noise_is_not_private(report):
    bare = dataclasses.replace(report, epsilon=math.inf, epsilon_rdp=math.inf)
    assert not bare.private
    assert str(bare).startswith("NOT PRIVATE. No finite epsilon")
    assert bare.to_dict()["epsilon"] == "inf"
    assert PrivacyReport.from_json(bare.to_json()) == bare


def test_a_known_seed_is_not_private_whatever_epsilon_says(report):
    seeded = dataclasses.replace(report, reproducible=True)
    assert not seeded.private
    assert str(seeded).startswith("NOT PRIVATE. A seed was given")
    assert "if the noise were secret" in str(seeded)


def test_round_trip_through_strict_json(report):
    values = json.loads(report.to_json())
    assert values["private"] is True
    assert values["versions"] == library_versions()
    assert values["versions"]["dp_accounting"][0].isdigit()
    assert PrivacyReport.from_dict(values) == report
    assert PrivacyReport.from_json(report.to_json()).caveats == STANDARD_CAVEATS
    without = dataclasses.replace(report, target_epsilon=None, epsilon_rdp=None)
    assert PrivacyReport.from_json(without.to_json()) == without
    assert "cross-check" not in str(without)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "7.99"},
        {"epsilon": None},
        {"delta": -1},
        {"steps": 2.5},
        {"steps": -1},
        {"accountant": "gdp"},
        {"reproducible": "no"},
        {"caveats": None},
        {"unknown": 1},
        {"private": False},
        {"epsilon": "inf"},
    ],
)
def test_a_report_that_is_not_whole_is_refused(report, change):
    with pytest.raises(LedgerError, match="not a privacy report"):
        PrivacyReport.from_dict({**report.to_dict(), **change})


@pytest.mark.parametrize("text", ["", "[]", "{}", "{'a': 1}"])
def test_text_that_is_no_report_is_refused(text):
    with pytest.raises(LedgerError, match="not a privacy report"):
        PrivacyReport.from_json(text)


def test_a_report_that_readers_would_read_in_two_ways_is_refused(report: PrivacyReport) -> None:
    text = report.to_json()
    steps = f'"steps": {report.steps}'
    assert steps in text
    for changed in (f'{steps}, "st\\u0065ps": {report.steps}', '"steps": ' + "9" * 5000):
        with pytest.raises(LedgerError, match="not a privacy report"):
            PrivacyReport.from_json(text.replace(steps, changed))
    with pytest.raises(LedgerError, match="not a privacy report"):
        PrivacyReport.from_json("[" * 100_000)


def test_what_equal_widths_meet_is_no_caveat_but_of_trainings_before() -> None:
    told = {
        (widths, before): MANY_ALIKE in standard_caveats(withholds_logs=True, equal_widths=widths, goes_on=before)
        for widths in (False, True)
        for before in (False, True)
    }
    assert told == {(False, False): True, (False, True): True, (True, False): False, (True, True): True}
