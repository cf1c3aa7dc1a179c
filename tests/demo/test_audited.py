"""hf-dp audit: what it prints, writes and answers; and a whole one, honest and with a third of the noise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hf_dp.accounting import PrivacyReport
from hf_dp.audit import one_run
from hf_dp.audit.outcome import Audit
from hf_dp.audit.seen import Seen
from hf_dp.cli import app
from hf_dp.demo import audited
from hf_dp.demo.audit_figure import draw
from hf_dp.demo.messages import generate
from hf_dp.demo.model import new_model, train_tokenizer
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from hf_dp.noise.source import NoiseSource
from hf_dp.randomness import Entropy

pytestmark = pytest.mark.usefixtures("checked_once")

REPORT = PrivacyReport(
    epsilon=1.5, delta=1e-5, noise_multiplier=1.0, clipping_norm=1.0, sampling_probability=1.0, steps=2,
    accountant="pld", dataset_size=240, expected_batch_size=240,
)  # fmt: skip
SMALL = ("--canaries", "3000", "--texts", "100", "--steps", "2")


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, ["audit", *args], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def found(right: int) -> audited.Audited:
    inside = np.r_[np.ones(right), np.zeros(100 - right)]
    return audited.Audited(REPORT, Audit(attacks={"loss": one_run(inside, 1 - inside, delta=1e-5)}))


@pytest.mark.parametrize(("right", "code"), [(60, 0), (100, 1)])
def test_bounds_are_printed_beside_the_claim_and_one_above_it_is_the_answer(
    monkeypatch: pytest.MonkeyPatch, right: int, code: int
) -> None:
    made = found(right)
    monkeypatch.setattr(audited, "audited", lambda *args, **numbers: made)
    told = invoke()
    assert told.exit_code == code
    assert ("A low bound says nothing" in told.output) == (code == 0)
    assert ("A bound is above the claim, which is wrong with confidence 95%." in told.output) == (code == 1)
    assert "all with confidence 95% together" in told.output
    assert "at most 1.5" in told.output
    strict = invoke("--json")
    assert strict.exit_code == code
    values = json.loads(strict.stdout)
    assert values["holds"] == (code == 0)
    assert values["audit"]["attacks"]["loss"]["epsilon"] == made.audit.epsilon
    assert Audit.from_dict(values["audit"]["attacks"]) == made.audit


@pytest.mark.parametrize(("p", "code"), [(0.3, 0), (1e-9, 1)])
def test_what_steps_do_otherwise_is_told_and_is_the_answer_too(
    monkeypatch: pytest.MonkeyPatch, p: float, code: int
) -> None:
    seen = (Seen(what="noise on bias", found="0.1 of the standard deviation that is charged", p=p),)
    made = dataclasses.replace(found(60), seen=seen)
    monkeypatch.setattr(audited, "audited", lambda *args, **numbers: made)
    told = invoke()
    assert told.exit_code == code
    assert "No bound is above the claim" in told.output
    assert ("Steps do what is charged, in all of 1 tests" in told.output) == (code == 0)
    assert ("otherwise than is charged: noise on bias: 0.1 of the standard" in told.output) == (code == 1)
    strict = json.loads(invoke("--json").stdout)
    assert strict["holds"] == (code == 0)
    assert strict["seen"] == [dataclasses.asdict(seen[0])]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(found(80).audit, 1.5, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--canaries", "4"), "4 canaries"),
        (("--canaries", "200000"), "200000 canaries"),
        (("--confidence", "0.1"), "confidence="),
        (("--delta", "0.5"), "delta=0.5 with"),
        (("--model", "here"), "--model and --data, one without the other"),
        (("--model", "here", "--data", "none.csv"), "no file"),
    ],
)
def test_what_would_prove_nothing_is_refused_before_anything_is_trained(options: tuple[str, ...], said: str) -> None:
    refused = invoke(*options)
    assert refused.exit_code == 2
    assert said in " ".join(refused.output.split())


@pytest.mark.slow
def test_a_whole_audit_and_one_with_a_third_of_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wrong by chance in one of a million.
    told = invoke(*SMALL, "--epsilon", "2", "--confidence", "0.999999", "--output", str(tmp_path / "honest"))
    assert told.exit_code == 0, told.output
    assert told.stderr == "", "of the trainings inside"
    assert "Steps do what is charged" in told.output
    assert verify(tmp_path / "honest").private
    add = NoiseSource.add_
    monkeypatch.setattr(NoiseSource, "add_", lambda self, t, size, *args, **kw: add(self, t, size / 3, *args, **kw))
    told = invoke(*SMALL, "--epsilon", "2", "--output", str(tmp_path / "less"))
    assert told.exit_code == 1, told.output
    checked = verify(tmp_path / "less")
    assert not checked.private
    assert [check.name for check in checked.checks if not check.passed] == ["audit and claim"]


@pytest.mark.slow
def test_a_whole_audit_of_adapters_on_a_model_and_texts_from_files(tmp_path: Path) -> None:
    messages = generate(public=100, private=30, evaluation=1, canaries=1, seed=1)
    tokenizer = train_tokenizer(messages.public)
    for part in (new_model(tokenizer, width=32, layers=1), tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"said": text}) for text in messages.private))
    given = ("--model", str(tmp_path / "model"), "--data", str(tmp_path / "texts.jsonl"), "--text-column", "said")
    few = ("--examples", "20", "--output", str(tmp_path / "out"), "--json", "--confidence", "0.999999")
    told = invoke(*SMALL, *given, *few)
    assert told.exit_code == 0, told.output
    values = json.loads(told.stdout)
    assert values["report"]["dataset_size"] == 3000 + 100 + 20
    assert values["audit"]["attacks"][audited.DIRAC]["epsilon"] > 0
    assert verify(tmp_path / "out").private


@pytest.mark.slow
def test_a_whole_audit_of_noise_from_a_usual_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the weights alone it looks honest; the attack that knows seeds is hardly ever wrong."""
    fresh = Entropy.fresh

    def public(self: Entropy, purpose: str, step: int) -> bytes:
        return fresh(self if self.reproducible else Entropy(42), purpose, step)

    monkeypatch.setattr(Entropy, "fresh", public)
    numbers: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "steps": 2, "sampled": 1.0, "dirac": 1000, "tokens": 60}
    made = audited.audited(None, **numbers, confidence=0.95)
    assert not made.holds
    assert made.audit.best == audited.PUBLIC
    found = made.audit.attacks[audited.PUBLIC]
    assert found.right > 0.9 * found.guesses  # as many are guessed in as out, whatever the coins say
    assert made.audit.attacks[audited.DIRAC].epsilon < 4


@pytest.mark.parametrize("sampled", [0.0, -1.0, 2.0, float("nan")])
def test_a_share_that_is_none_is_refused_before_anything_is_trained(sampled: float) -> None:
    numbers: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "steps": 2, "dirac": 1000, "tokens": 60}
    with pytest.raises(ConfigurationError, match="a share of .* of all units"):
        audited.audited(None, **numbers, sampled=sampled, confidence=0.95)
