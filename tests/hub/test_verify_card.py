"""What the card says follows from the record, in its words, and is changed nowhere alone."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hf_dp import PrivacyConfig
from hf_dp.accounting import truncated
from hf_dp.hub import verify, write_card
from hf_dp.hub.record import sha256
from hf_dp.parts.re_attention import load_re_attention
from tests.hub.forging import digest_anew, failed, in_card, in_record, in_text, invoke, seal
from tests.noise.contract import needs_randomgen
from tests.training.workbench import make, saved_by
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


def test_a_text_around_the_section_may_be_written(copy: Path) -> None:
    card = copy / "README.md"
    card.write_text(card.read_text().replace("# out", "# My model\n\nIt sorts mail.").replace("\n", "\r\n"), newline="")
    assert verify(copy).private


@pytest.mark.parametrize(
    "words",
    ["x: &x 1\ny: *x", "x: &x {a: [b]}\ny: [*x, *x]\nz: {<<: *x, c: 1}", "x: &delta 1\nx2: 060\nx3: 1:30\nx4: yes"],
)
def test_metadata_of_other_names_may_be_written_with_anchors_and_in_any_form(copy: Path, words: str) -> None:
    in_card("differential_privacy:", f"{words}\ndifferential_privacy:")(copy)
    assert verify(copy).private, failed(copy)


def test_numbers_may_be_written_as_js_yaml_does(copy: Path) -> None:
    """As `1.e-7`, which is the same in both versions of YAML."""
    _, digits, exponent = Decimal(repr(verify(copy).report.delta)).as_tuple()
    in_card(r"delta: 0\S+", f"delta: {''.join(map(str, digits))}.e{exponent}")(copy)
    assert verify(copy).private, failed(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dataset_size", "060"), ("dataset_size", "4_8"), ("dataset_size", "0b110000"), ("dataset_size", "0:48"),
     ("epsilon_pld", r"0:\1"), ("private", "yes"), ("private", "on")],
)  # fmt: skip
def test_failure_157_numbers_that_the_hub_reads_otherwise_are_noticed(copy: Path, name: str, value: str) -> None:
    """The hub reads YAML 1.2, where 060 is 60; of version 1.1, which is read here, that is 48."""
    in_card(rf"{name}: (\S+)", f"{name}: {value}")(copy)
    assert failed(copy).startswith("card, metadata: "), failed(copy)


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\ufeff"])
def test_failure_157_metadata_in_lines_that_the_hub_does_not_know_is_none(copy: Path, end: str) -> None:
    """It reads the block in the quotes, and takes the other for a comment."""
    block = re.search(r"differential_privacy:\n(  .*\n)+", (copy / "README.md").read_text())
    assert block is not None
    told = re.sub(r"epsilon_pld: \S+", "epsilon_pld: 0.01", block[0])
    hidden = block[0].rstrip("\n").replace("\n", end)
    in_text(lambda text: text.replace(block[0], f'# {end}x: "\n{told}# {end}  "{end}{hidden}\n'))(copy)
    assert failed(copy).startswith("card, metadata: "), failed(copy)


def test_the_card_is_the_same_when_it_is_written_twice(copy: Path) -> None:
    once = (copy / "README.md").read_text()
    write_card(copy)
    assert (copy / "README.md").read_text() == once


def test_a_path_is_not_published_as_the_base_model(copy: Path) -> None:
    for base, kept in ((str(copy), False), ("some/where/deep", False), ("someone/model", True)):
        card = copy / "README.md"
        card.write_text(re.sub(r"(base_model: .*\n)?tags:", f"base_model: {base}\ntags:", card.read_text(), count=1))
        write_card(copy)
        assert (f"base_model: {base}" in card.read_text()) == kept, base


@pytest.mark.slow
def test_every_release_is_on_the_card_and_in_the_ledger(tmp_path: Path) -> None:
    from hf_dp import ReAttentionConfig

    privacy = PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig())
    saved_by(tmp_path / "out", tiny("gpt2", "sequence", n_layer=1), privacy)
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert "| token presence | 1 | Gaussian noise" in (tmp_path / "out" / "README.md").read_text()
    assert "re_attention.safetensors" in [check.name for check in found.checks]
    load_re_attention(tiny("gpt2", "sequence", n_layer=1), tmp_path / "out")
    in_record("ledger", "entries", to=lambda entries: entries[1:])(tmp_path / "out")
    assert "epsilon (PLD)" in failed(tmp_path / "out")


def assert_noticed(path: Path, changes: dict[str, Callable[[Path], None]]) -> None:
    """Each change to a copy of what was saved, under a card that fits it, fails by these words."""
    for number, (words, change) in enumerate(changes.items()):
        copy = Path(shutil.copytree(path / "out", path / str(number)))
        change(copy)
        seal(copy)
        assert words in failed(copy)


@pytest.mark.slow
def test_groups_and_their_budgets_are_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    weights = {"*attention*": 3.0, "*": 1.0}
    saved_by(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, clipping="groups", groups=weights))
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert "`*attention*` 0.866, every other parameter 0.5)" in (tmp_path / "out" / "README.md").read_text()
    others = {**weights, "*": 3.0}
    changes = {
        "'*attention*': 0.8660254037844386} claimed, {'*': 0.5": in_record("report", "clipping_groups", "*", to=0.6),
        "groups: {'*': 1.0": in_record("ledger", "promise", "groups", to=others),
        "'*': 3.0, '*attention*': 3.0}, 'kind'": in_record("config", "groups", to=others),
        "'*': 9.0": in_record("mechanism", "clipping", "groups", "*", to=9.0),
    }
    assert_noticed(tmp_path, changes)


def test_another_clipping_rule_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    saved_by(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, clipping="automatic"))
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert found.report.clipping == "automatic"
    assert "1 (automatic: shorter gradients are brought near it too)" in (tmp_path / "out" / "README.md").read_text()
    changes = {
        "clipping: 'flat' claimed, 'automatic' follows": in_record("report", "clipping", to="flat"),
        "clipping: 'automatic' claimed, 'absent' in the ledger": in_record("ledger", "promise", to=without_clipping),
        "'kind': 'flat'} in the config": in_record("config", "clipping", to="flat"),
        "'gamma': 1.0": in_record("mechanism", "clipping", "gamma", to=1.0),
        "{'norm': 1.0, 'kind': 'flat'} in the mechanism": in_record(
            "mechanism", "clipping", to={"norm": 1.0, "kind": "flat"}
        ),
    }
    assert_noticed(tmp_path, changes)


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
@pytest.mark.slow
def test_another_sampling_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    saved_by(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, max_batch_size=10))
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert found.epsilons.keys() == {"pld"}
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("Poisson before truncation to 10", "truncated to 10 of 48", "| not offered for truncated batches |"):
        assert words in card
    assert "epsilon_rdp" not in card
    assert "(PLD) at delta" in invoke("verify", str(tmp_path / "out")).stdout
    assert "truncated to 10 of 48" in invoke("report", str(tmp_path / "out")).stdout.replace("\n", " ")
    plain = {"probability": 8 / 48, "expected_batch_size": 8, "kind": "poisson"}
    event = ("ledger", "entries", 0, "event")
    changes = {
        "follows": in_record("report", "sampling", to="Poisson"),
        "max_batch_size: 10 claimed, 'absent' in the ledger": in_record("ledger", "promise", to=without_cap),
        "'kind': 'poisson'} in the config": in_record("config", "max_batch_size", to=None),
        "'max_batch_size=7 below the expected batch size of 8.' in the config": in_record(
            "config", "max_batch_size", to=7
        ),
        "'kind': 'poisson'} in the mechanism": in_record("mechanism", "sampling", to=plain),
        "'max_batch_size': 11, 'kind'": in_record("mechanism", "sampling", "max_batch_size", to=11),
        "noise of the steps": in_record(*event, "truncated_batch_size", to=20),
        "is not that of the steps": in_record(*event, "dataset_size", to=20),
        "claimed 1, of what this accountant has not": in_record("report", "epsilon_rdp", to=1.0),
        "epsilon (RDP)": in_record("report", "accountant", to="rdp"),
    }
    assert_noticed(tmp_path, changes)


def without_cap(promise: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in promise.items() if name != "max_batch_size"}


def without_clipping(promise: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in promise.items() if name != "clipping"}


@needs_randomgen
@pytest.mark.slow
def test_the_source_of_the_noise_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    saved_by(tmp_path / "out", privacy=PrivacyConfig(noise_multiplier=1.5, noise="chacha20"))
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert (
        "| noise multiplier | 1.5 (Gaussian, from the generator chacha20) |" in (tmp_path / "out/README.md").read_text()
    )
    changes = {
        "noise: 'gaussian' claimed, 'chacha20' follows": in_record("report", "noise", to="gaussian"),
        "noise: 'chacha20' claimed, 'gaussian' in the ledger": in_record("ledger", "promise", "noise", to="gaussian"),
        "noise: 'chacha20' in the mechanism, 'gaussian' in the config": in_record("config", "noise", to="gaussian"),
        "noise: 'gaussian' in the mechanism, 'chacha20' in the config": in_record(
            "mechanism", "noise", "kind", to="gaussian"
        ),
    }
    assert_noticed(tmp_path, changes)


@pytest.mark.slow
def test_an_epsilon_whose_exponential_is_no_float_has_a_card_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=PrivacyConfig(noise_multiplier=0.03))
    trainer.train()
    trainer.save_model()
    assert 750 < trainer.privacy_report().epsilon < float("inf")
    assert "at most exp(epsilon) times" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_without_noise_it_is_consistent_and_not_private(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="adds no noise"):
        run = make(tmp_path / "out", privacy=PrivacyConfig(noise_multiplier=0))
    run.train()
    run.save_model()
    found = verify(tmp_path / "out")
    assert found.consistent, found.checks
    assert not found.private
    assert found.epsilons["pld"] == math.inf
    said = invoke("verify", str(tmp_path / "out"))
    assert said.exit_code == 1
    assert "Consistent, and not private" in said.stdout
    assert json.loads(invoke("verify", str(tmp_path / "out"), "--json").stdout)["claimed_epsilon"] == "inf"


def test_a_card_in_other_words_under_a_new_digest_is_noticed_or_said(copy: Path) -> None:
    in_card(r"at most [0-9.,]+ times \(the", "at most 1.01 times (the")(copy)
    digest_anew(copy)
    in_card(r"record_sha256: .*", f"record_sha256: {sha256(copy / 'privacy.json')}")(copy)
    assert failed(copy) == "words of the card: they do not follow from the record"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"(epsilon, PLD accountant \(tight\)) \| [0-9.]+", r"\1 | 0.1"),
        (r"(epsilon, RDP accountant \(looser\)) \| [0-9.]+", r"\1 | 0.1"),
        (r"\| epsilon, PLD accountant .*\n", ""),
        (r"(\| epsilon, PLD accountant)", r"| epsilon, PLD accountant (by hand) | 0.1 | |\n\1"),
        (r"\| delta \| [0-9.]+", "| delta | 1e-9"),
        (r"\| number of units \| 48", "| number of units | 48.01"),
        (r"\| steps \| 4", "| steps | 1"),
    ],
)
def test_failure_157_numbers_in_words_of_another_version_are_the_records(copy: Path, old: str, new: str) -> None:
    in_record("report", "versions", "hf_dp", to="0.1.0")(copy)
    seal(copy)
    assert verify(copy).private, failed(copy)
    in_card(old, new)(copy)
    digest_anew(copy)
    in_card(r"record_sha256: .*", f"record_sha256: {sha256(copy / 'privacy.json')}")(copy)
    assert failed(copy).startswith("card, numbers: "), failed(copy)


def test_words_of_another_version_are_said_to_be_unchecked(copy: Path) -> None:
    in_record("report", "versions", "hf_dp", to="0.0.1")(copy)
    seal(copy)
    found = verify(copy)
    assert found.consistent
    assert any("in the words of hf_dp 0.0.1" in note for note in found.notes)
    assert not any("privacy section" in line for line in found.proven)
    write_card(copy)
    in_card(r"\*\*What is protected", "Epsilon is 0.1. **What is protected")(copy)
    digest_anew(copy)
    in_card(r"record_sha256: .*", f"record_sha256: {sha256(copy / 'privacy.json')}")(copy)
    assert not any("privacy section" in line for line in verify(copy).proven)
