"""The ledger and the words of a record prove its claim, or do not; numbers that prove nothing are refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig, load_report
from hf_dp.accounting import Ledger, sampling_terms, step_event, truncated
from hf_dp.errors import LedgerError
from hf_dp.hub import verify
from hf_dp.hub.record import PrivacyRecord
from hf_dp.randomness import Entropy
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.versions import library_versions
from tests.hub.forging import failed, forged, in_record, invoke, seal
from tests.training.workbench import saved_by

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training whose rows were chosen by a release."""
    path = tmp_path_factory.mktemp("counted") / "out"
    rows = SparseEmbeddingConfig(method="fest", kept_rows=9)
    return saved_by(path, privacy=PrivacyConfig(target_epsilon=3.0, sparse_embeddings=rows))


def test_a_record_goes_to_json_and_back(saved: Path) -> None:
    text = (saved / "privacy.json").read_text()
    record = PrivacyRecord.from_json(text)
    assert record.to_json() == text
    assert record.weights == ["model.safetensors"]
    assert record.ledger.entries[0][0] == step_event(record.report.noise_multiplier, 8 / 48)
    assert '"seed"' not in text


@pytest.mark.parametrize(
    "promise",
    [
        {"noise_multiplier": 10**149},
        {"noise_multiplier": 10**20},
        pytest.param(
            {"noise_multiplier": 1.0, "max_batch_size": 2**62},
            marks=pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it"),
        ),
    ],
)
@pytest.mark.slow
def test_the_largest_whole_numbers_of_a_promise_are_read_again(
    copy: Path, saved: Path, promise: dict[str, Any]
) -> None:
    """What a training was paid for with, its record must say."""
    entropy, config = Entropy(None), PrivacyConfig(target_delta=1e-3, **promise)
    terms = sampling_terms(48, 8, config.to_dict())
    plan = Plan.make(config, sampler_of(terms, 48, entropy), 4, entropy)
    ledger = Ledger(plan.promise)
    ledger.charge(plan.event, count=4)
    old = PrivacyRecord.from_json((saved / "privacy.json").read_text())
    record = dataclasses.replace(
        old, config=config, mechanism=plan.mechanism, ledger=ledger, report=plan.report(ledger)
    )  # fmt: skip
    (copy / "privacy.json").write_text(record.to_json())
    seal(copy)
    assert verify(copy).private, failed(copy)


@pytest.mark.slow
def test_steps_with_other_noise_or_without_sampling_are_no_basis_of_the_claim(copy: Path) -> None:
    report, untouched = load_report(copy), (copy / "privacy.json").read_text()
    true = step_event(report.noise_multiplier, report.sampling_probability)
    forged(copy, [(true, report.steps)])
    assert verify(copy).consistent
    for cheap in (
        dp.GaussianDpEvent(100.0),
        dp.PoissonSampledDpEvent(0.0, dp.GaussianDpEvent(report.noise_multiplier)),
    ):
        for steps in ([(cheap, report.steps)], [(cheap, report.steps - 1), (true, 1)]):
            (copy / "privacy.json").write_text(untouched)
            forged(copy, steps)
            assert "noise of the steps" in {check.name for check in verify(copy).checks if not check.passed}


@pytest.mark.slow
def test_a_release_that_was_promised_is_in_the_ledger(tmp_path: Path) -> None:
    saved_by(tmp_path, privacy=PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig()))
    assert verify(tmp_path).consistent
    report = load_report(tmp_path)
    steps = [(step_event(report.noise_multiplier, report.sampling_probability), report.steps)]
    whole = (tmp_path / "privacy.json").read_text()
    forged(tmp_path, steps, releases=())
    assert "token presence: 0 in the ledger (none), 1 due, 1 planned" in failed(tmp_path)
    # Nor where the mechanism does without it too.
    in_record("mechanism", "releases", to=[])(tmp_path)
    seal(tmp_path)
    assert "what the config asks for: nothing planned, token presence asked" in failed(tmp_path)
    (tmp_path / "privacy.json").write_text(whole)
    (release,) = report.releases
    forged(tmp_path, [(release.event, 1), *steps], releases=report.releases)
    assert "claim and mechanism" in failed(tmp_path), "charged as a step, it is none"


def on_few(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "sampling_probability": 1e-9}


@pytest.mark.parametrize(
    "cheaper",
    [
        on_few,
        lambda event: {**event, "sampling_probability": 0.0},
        lambda event: {"type": "no_op"},
        lambda event: {"type": "self_composed", "count": 0, "event": event},
        lambda event: {"type": "composed", "events": [on_few(event), on_few(on_few(event))]},
        lambda event: {"type": "composed", "events": [on_few(event), {**event, "sampling_probability": 0.5}]},
    ],
    ids=["of few", "of nobody", "nothing", "never", "of few twice", "two of few"],
)
def test_a_release_of_all_units_is_charged_as_one(
    counted: Path, tmp_path: Path, cheaper: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Counts are of all units, and no part of the config draws some for them."""
    copy = Path(shutil.copytree(counted, tmp_path / "copy"))
    assert verify(copy).private, failed(copy)
    places = ("ledger", "entries", 0), ("mechanism", "releases", 0), ("report", "releases", 0)
    for place in places:
        in_record(*place, "event", to=cheaper)(copy)
    record = PrivacyRecord.from_json((copy / "privacy.json").read_text())
    found = record.ledger.epsilons(record.report.delta)
    report = dataclasses.replace(record.report, epsilon=found["pld"], epsilon_rdp=found["rdp"])
    (copy / "privacy.json").write_text(dataclasses.replace(record, report=report).to_json())
    seal(copy)
    assert failed(copy).startswith("embedding rows: 1 in the ledger")


def test_words_that_do_not_follow_from_the_record_are_noticed_under_a_new_digest(copy: Path) -> None:
    in_record("report", "caveats", to=[])(copy)
    seal(copy)
    assert failed(copy).startswith("caveats: left out: Hyper-parameters chosen")


def test_words_that_a_forger_adds_to_those_of_the_record_are_noticed(copy: Path) -> None:
    in_record("report", "caveats", to=lambda caveats: [*caveats, "Correction: epsilon is 0.1."])(copy)
    seal(copy)
    assert failed(copy) == "caveats: added: Correction: epsilon is 0.1."


@pytest.mark.parametrize(
    "change",
    [
        in_record("ledger", "entries", 0, "label", to="training step |\n\n**Epsilon is 0.1.**"),
        in_record("report", "versions", "dp_accounting", to="1 |\n\n**Epsilon is 0.1.**"),
        in_record("report", "versions", to=lambda versions: {**versions, "**Epsilon is 0.1.**": "1"}),
    ],
)
def test_names_and_versions_have_no_room_for_a_claim(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    with pytest.raises(LedgerError):
        verify(copy)


@pytest.mark.parametrize("versions", [{"epsilon": "0.1"}, {"dp_accounting": None}])
def test_failure_157_no_versions_but_of_what_computed_epsilon_are_told(
    copy: Path, versions: dict[str, str | None]
) -> None:
    changed = {**library_versions(), **versions}
    in_record("report", "versions", to={name: version for name, version in changed.items() if version})(copy)
    seal(copy)
    assert failed(copy).startswith("claim and mechanism: versions: missing or unknown "), failed(copy)


@pytest.mark.parametrize("share", [0.01, 1.5])
def test_failure_157_an_rdp_claim_has_no_other_cross_check_beside_it(tmp_path: Path, share: float) -> None:
    saved_by(tmp_path, privacy=PrivacyConfig(target_epsilon=3.0, accountant="rdp"))
    assert verify(tmp_path).private, failed(tmp_path)
    in_record("report", "epsilon_rdp", to=lambda epsilon: share * epsilon)(tmp_path)
    seal(tmp_path)
    assert failed(tmp_path).startswith("epsilon (RDP): claimed"), failed(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("target_epsilon", 90.0), ("target_tpr", 0.99), ("drawn_from", 48)])
def test_failure_157_no_budget_is_claimed_that_nobody_promised(tmp_path: Path, name: str, value: Any) -> None:
    saved_by(tmp_path, privacy=PrivacyConfig(noise_multiplier=1.0))
    assert verify(tmp_path).private, failed(tmp_path)
    in_record("report", to=lambda report: {**report, name: value})(tmp_path)
    seal(tmp_path)
    assert f"claim and mechanism: {name}: {value} claimed, None follows" in failed(tmp_path)


def test_names_of_releases_that_no_config_asks_for_are_said_to_be_the_publishers(copy: Path) -> None:
    record = PrivacyRecord.from_json((copy / "privacy.json").read_text())
    ledger = Ledger(record.ledger.promise)
    for event, count, label in record.ledger.entries:
        ledger.charge(event, label, count)
    ledger.charge(dp.GaussianDpEvent(1e6), "Correction, epsilon is 0.01")
    report = record.mechanism.report(ledger, record.config)
    (copy / "privacy.json").write_text(dataclasses.replace(record, ledger=ledger, report=report).to_json())
    seal(copy)
    found = verify(copy)
    assert found.private, failed(copy)
    assert any("in words of whoever published them: 'Correction, epsilon is 0.01'" in note for note in found.notes)


def nested(depth: int) -> dict[str, Any]:
    event: dict[str, Any] = {"type": "gaussian", "noise_multiplier": 1.0}
    for _ in range(depth):
        event = {"type": "composed", "events": [event]}
    return event


@pytest.mark.parametrize(
    "change",
    [
        in_record("report", "epsilon", to=10**400),
        in_record("report", "expected_batch_size", to=10**400),
        in_record("ledger", "promise", "target_epsilon", to=nested(400)),
    ],
)
def test_numbers_that_nothing_can_be_computed_with_are_refused(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    said = invoke("verify", str(copy))
    assert said.exit_code == 2, said.exception
    assert "What to do:" in said.stderr


@pytest.mark.slow
def test_steps_that_are_as_good_as_never_drawn_prove_no_claim(copy: Path) -> None:
    in_record("ledger", "entries", 0, "event", "sampling_probability", to=5e-324)(copy)
    said = invoke("verify", str(copy))
    assert said.exit_code == 1, said.exception


def test_a_name_twice_in_a_record_is_refused(copy: Path) -> None:
    file = copy / "privacy.json"
    file.write_text(file.read_text().replace('"epsilon":', '"epsilon": 0.1,\n    "epsilon":', 1))
    with pytest.raises(LedgerError, match="a name twice"):
        verify(copy)


def claimed_less(directory: Path, share: float, **versions: str) -> None:
    """The record, and card, of a computation whose epsilons are smaller by this share, under other versions."""
    file = directory / "privacy.json"
    record = PrivacyRecord.from_json(file.read_text())
    report, smaller = record.report, 1 - share
    claims = {"epsilon": report.epsilon * smaller, "epsilon_rdp": report.epsilon_rdp * smaller}
    report = dataclasses.replace(report, **claims, versions={**report.versions, **versions})
    file.write_text(dataclasses.replace(record, report=report).to_json())
    seal(directory)
    text = (directory / "README.md").read_text()
    for name in ("epsilon_pld", "epsilon_rdp"):
        text = re.sub(rf"{name}: (\S+)", lambda found: f"{found[0].split()[0]} {float(found[1]) * smaller!r}", text)
    (directory / "README.md").write_text(text)


@pytest.mark.parametrize("library", ["hf_dp", "dp_accounting"])
def test_other_versions_may_have_computed_a_thousandth_less_and_no_more(copy: Path, library: str) -> None:
    whole = {path: path.read_bytes() for path in (copy / "privacy.json", copy / "README.md")}
    claimed_less(copy, 3e-4, **{library: "0.0.1"})
    found = verify(copy)
    assert found.private, failed(copy)
    told = f"{library} 0.0.1", f"{library} {library_versions()[library]}", "0.1 %"
    assert any(all(words in note for words in told) for note in found.notes), found.notes
    assert found.epsilons["pld"] > found.report.epsilon, "what is said is what follows here"
    for share, versions in ((3e-4, {}), (2e-3, {library: "0.0.1"})):
        for path, content in whole.items():
            path.write_bytes(content)
        claimed_less(copy, share, **versions)
        assert {"epsilon (PLD)", "epsilon (RDP)", "card, metadata"} <= {
            check.name for check in verify(copy).checks if not check.passed
        }


@pytest.mark.parametrize(("share", "versions", "kept"), [
    (3e-4, {"hf_dp": "0.0.1"}, True), (3e-4, {}, False), (2e-3, {"hf_dp": "0.0.1"}, False),
])  # fmt: skip
def test_a_budget_is_kept_to_what_other_versions_compute(
    copy: Path, share: float, versions: dict[str, str], kept: bool
) -> None:
    record = PrivacyRecord.from_json((copy / "privacy.json").read_text())
    target = record.ledger.epsilon(record.report.delta) * (1 - share)
    for place in (("report", "target_epsilon"), ("config", "target_epsilon"), ("ledger", "promise", "target_epsilon")):
        in_record(*place, to=target)(copy)
    in_record("report", "versions", to={**record.report.versions, **versions})(copy)
    seal(copy)
    assert ("budget: spent" not in failed(copy)) is kept
