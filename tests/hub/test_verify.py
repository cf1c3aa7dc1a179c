"""What was saved verifies; each value, file and card that is changed is noticed, and what is unknown is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dp import load_report
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.hub import verify
from hf_dp.hub.record import sha256
from tests.hub.forging import failed, in_card, in_record, in_weights, invoke, seal

pytestmark = pytest.mark.usefixtures("checked_once")


def test_what_was_saved_verifies_and_so_do_its_checkpoints(saved: Path) -> None:
    for directory in (saved, saved / "checkpoint-2", saved / "checkpoint-4"):
        found = verify(directory)
        assert found.private, found.checks
        assert found.epsilons["pld"] == pytest.approx(found.report.epsilon)
    assert load_report(saved / "checkpoint-2").steps == 2
    assert load_report(str(saved)) == load_report(saved)


def test_the_command_says_what_is_proven_and_what_is_not(saved: Path) -> None:
    said = invoke("verify", str(saved))
    assert said.exit_code == 0
    for words in ("Verified: epsilon 2.9997 (PLD), 4.4773 (RDP)", "Proven:", "Not proven", "secret noise"):
        assert words in said.stdout
    values = json.loads(invoke("verify", str(saved), "--json").stdout)
    assert values["private"] is True
    assert values["claimed_epsilon"] == pytest.approx(values["recomputed_epsilon"]["pld"])
    assert all(check["passed"] for check in values["checks"])


# Each changes one thing, or several so that they fit each other; what must be noticed stands beside it.
TAMPERED: dict[str, tuple[list[Callable[[Path], None]], str]] = {
    "weights": ([in_weights], "model.safetensors: SHA-256"),
    "weights gone": ([lambda d: (d / "model.safetensors").unlink()], "model.safetensors: named in the record"),
    "weights, with digest": (
        [in_weights, lambda d: in_record("files", "model.safetensors", to=sha256(d / "model.safetensors"))(d)],
        "card, metadata: record_sha256",
    ),
    "config.json": ([lambda d: (d / "config.json").write_text("{}")], "config.json: SHA-256"),
    "other weights beside": (
        [lambda d: shutil.copy(d / "model.safetensors", d / "model-00001-of-00002.safetensors")],
        "other files: not named in the record: model-00001-of-00002.safetensors",
    ),
    "a pickle beside": ([lambda d: (d / "pytorch_model.bin").write_bytes(b"")], "pytorch_model.bin"),
    "an adapter beside": ([lambda d: (d / "adapter_config.json").write_text("{}")], "adapter_config.json"),
    "code beside": ([lambda d: (d / "modeling.py").write_text("")], "modeling.py"),
    "claimed epsilon": ([in_record("report", "epsilon", to=1.0), seal], "epsilon (PLD): claimed 1, recomputed 2.99"),
    "claimed epsilon, RDP": ([in_record("report", "epsilon_rdp", to=1.0), seal], "epsilon (RDP)"),
    "claimed epsilon, a little": ([in_record("report", "epsilon", to=lambda e: e * 0.9999), seal], "epsilon (PLD)"),
    "delta": ([in_record("report", "delta", to=1e-2), seal], "delta: 0.01 claimed"),
    "delta, everywhere": (
        [in_record("report", "delta", to=0.02), in_record("ledger", "promise", "delta", to=0.02), seal],
        "epsilon (PLD)",
    ),
    "delta above 1/n": ([in_record("report", "delta", to=0.5), seal], "delta: delta=0.5"),
    "n": ([in_record("report", "dataset_size", to=4800), seal], "sampling probability"),
    "n, everywhere": (
        [
            in_record("report", "dataset_size", to=4800),
            in_record("ledger", "promise", "dataset_size", to=4800),
            in_record("report", "sampling_probability", to=8 / 4800),
            seal,
        ],
        "sampling probability: expected batch 8 of n = 4800, charged with 0.166667",
    ),
    "a step less": ([in_record("ledger", "entries", 0, "count", to=3), seal], "steps: claimed 4, in the ledger 3"),
    "more noise in the ledger": (
        [in_record("ledger", "entries", 0, "event", "event", "noise_multiplier", to=2.0), seal],
        "epsilon (PLD): claimed 2.99",
    ),
    "a release left out": ([in_record("ledger", "entries", to=[]), seal], "epsilon (PLD)"),
    "a release added": (
        [in_record("ledger", "entries", to=lambda e: [*e, {**e[0], "label": "token presence", "count": 1}]), seal],
        "budget",
    ),
    "the seed": ([in_record("ledger", "promise", "reproducible", to=True), seal], "reproducible: False claimed"),
    "clipping norm": ([in_record("report", "clipping_norm", to=0.1), seal], "clipping_norm: 0.1 claimed, 1.0 follows"),
    "clipping norm, everywhere but in the config": (
        [
            in_record("report", "clipping_norm", to=0.1),
            in_record("mechanism", "clipping", "norm", to=0.1),
            in_record("ledger", "promise", "clipping_norm", to=0.1),
            seal,
        ],
        "clipping: {'norm': 0.1, 'kind': 'flat'} in the mechanism, {'norm': 1.0, 'kind': 'flat'} in the config",
    ),
    "noise in the mechanism": (
        [in_record("mechanism", "noise", "multiplier", to=2.0), seal], "calibrated_noise_multiplier: 2.0 claimed"
    ),
    "a release that nothing asks for": (
        [
            in_record("mechanism", "releases", to=[
                {"label": "rows", "event": {"type": "gaussian", "noise_multiplier": 9.0}, "times": 1, "every": None}
            ]),
            seal,
        ],
        "what the config asks for: rows planned, nothing asked",
    ),
    "config": ([in_record("config", "target_epsilon", to=1.0), seal], "target_epsilon"),
    "adjacency": ([in_record("report", "adjacency", to="replace one"), seal], "neighbouring datasets: replace one"),
    "unit": ([in_record("report", "unit", to="one person")], "card, metadata: unit 'one training example'"),
    "caveats": ([in_record("report", "caveats", to=[])], "card, metadata: record_sha256"),
    "card, text": ([in_card(r"\| delta \| 0.01415", "| delta | 1e-9")], "card, text: the privacy section is changed"),
    "card, text gone": (
        [in_card(r"(?s)<!-- hf_dp privacy begins.*privacy ends -->", "")],
        "card, text: the privacy section is changed or missing",
    ),
    "card, a second section": (
        [lambda d: (d / "README.md").write_text((d / "README.md").read_text() * 2)], "card, text"
    ),
    "card, epsilon": ([in_card(r"epsilon_pld: \S+", "epsilon_pld: 0.5")], "card, metadata: epsilon_pld 0.5, not 2.99"),
    "card, epsilon RDP": ([in_card(r"epsilon_rdp: \S+", "epsilon_rdp: 0.5")], "card, metadata: epsilon_rdp"),
    "card, metadata twice": (
        [in_card("differential_privacy:", "differential_privacy: {epsilon_pld: 0.1}\ndifferential_privacy:")],
        "card, metadata: differential_privacy is",
    ),
    "card, epsilon twice": (
        [in_card("  epsilon_pld:", "  epsilon_pld: 0.1\n  epsilon_pld:")], "card, metadata: differential_privacy is"
    ),
    "card, metadata gone": ([in_card("differential_privacy:", "privacy:")], "card, metadata: differential_privacy is"),
    "card, broken YAML": ([in_card("tags:", "tags: [")], "card, metadata"),
    "no card": ([lambda d: (d / "README.md").unlink()], "card: there is no README.md"),
}  # fmt: skip


@pytest.mark.parametrize("case", TAMPERED)
@pytest.mark.slow
def test_tampering_is_noticed(copy: Path, case: str) -> None:
    changes, noticed = TAMPERED[case]
    for change in changes:
        change(copy)
    assert noticed in failed(copy)
    said = invoke("verify", str(copy))
    assert said.exit_code == 1
    assert "Not verified." in said.stdout
    assert "Proven:" not in said.stdout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_record("version", to=3), "version 3; this release reads versions up to 2"),
        (in_record("ledger", "version", to=2), "version 2 was written by another release"),
        (in_record("ledger", "entries", 0, "event", "type", to="quantum"), "unknown event type"),
        (in_record("report", "accountant", to="gdp"), "not a privacy report"),
        (in_record("files", to={"model.safetensors": "abc"}), "SHA-256"),
        (in_record("config", to={"seed": 1}), "holds a seed"),
        (in_record("config", to={"future": 1}), "config is not a promise"),
        (in_record("format", to="something else"), "does not begin"),
        (lambda d: (d / "privacy.json").write_text("{"), "not strict JSON"),
        (lambda d: (d / "privacy.json").write_text('{"earlier": {"epsilon": 1e999}}'), "1e999 is larger than any"),
        (lambda d: (d / "privacy.json").unlink(), "there is no privacy.json"),
    ],
)
def test_what_is_not_known_is_refused_and_not_guessed(copy: Path, change: Callable[[Path], None], words: str) -> None:
    change(copy)
    with pytest.raises(LedgerError, match=words):
        load_report(copy)
    said = invoke("verify", str(copy))
    assert said.exit_code == 2
    assert words in said.stderr
    assert "What to do:" in said.stderr
    assert not said.stdout


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for name, item in value.items() for leaf in leaves(item, (*path, name))]
    if isinstance(value, list) and value:
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def other_than(value: Any) -> list[Any]:
    """A plausible value, and some of other types."""
    text = "f" * 64 if len(str(value)) == 64 else "something else"
    plausible = {bool: not value, int: 5, float: 0.75, str: text, type(None): 2, list: ["x"], dict: {"x": 1}}
    others = (plausible[type(value)], "inf", -1, [], {}, None, True)
    return [other for other in others if (type(other), other) != (type(value), value)]


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.slow
def test_any_value_of_the_record_that_is_changed_is_noticed(copy: Path, everything: bool) -> None:
    """Each becomes a plausible one, and one of the others in turn or all of them."""
    text = (copy / "privacy.json").read_text()
    for number, path in enumerate(leaves(json.loads(text))):
        value = json.loads(text)
        for name in path:
            value = value[name]
        plausible, *others = other_than(value)
        for other in (plausible, *(others if everything else [others[number % len(others)]])):
            (copy / "privacy.json").write_text(text)
            in_record(*path, to=lambda _, other=other: other)(copy)
            with contextlib.suppress(HfDpError):
                assert not verify(copy).consistent, (path, other)


@pytest.mark.slow
def test_what_a_forger_can_change_who_writes_the_card_anew(copy: Path) -> None:
    """Words, and what describes the run without entering epsilon. No number that epsilon follows from."""
    text, card = (copy / "privacy.json").read_text(), (copy / "README.md").read_text()
    believed = set()
    for path in leaves(json.loads(text)):
        value = json.loads(text)
        for name in path:
            value = value[name]
        if path == ("card_sha256",):
            continue
        for other in other_than(value):
            (copy / "privacy.json").write_text(text)
            (copy / "README.md").write_text(card)
            in_record(*path, to=lambda _, other=other: other)(copy)
            with contextlib.suppress(HfDpError, TypeError, AttributeError):  # a card cannot be written from everything
                seal(copy)
            with contextlib.suppress(HfDpError):
                if verify(copy).consistent:
                    believed.add(".".join(str(name) for name in path if isinstance(name, str)))
    assert believed == {
        "report.versions.hf_dp", "report.versions.dp_accounting",
        "report.epsilon_rdp",  # left out: it is on the card all the same
    }  # fmt: skip
