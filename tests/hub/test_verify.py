"""Every way in which a published claim can be untrue to its files, and what is said to that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp import PrivacyConfig, ReAttentionConfig, load_report
from hf_dp.accounting import Ledger, sampling_terms, step_event, truncated
from hf_dp.accounting.risk import risk
from hf_dp.errors import HfDpError, HubError, LedgerError
from hf_dp.hub import verify, write_card
from hf_dp.hub.record import PrivacyRecord, sha256
from hf_dp.hub.saved import may_be_published
from hf_dp.parts.re_attention import load_re_attention
from hf_dp.randomness import Entropy
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.versions import library_versions
from tests.hub.forging import digest_anew, failed, forged, in_card, in_record, in_weights, invoke, seal
from tests.hub.server import Hub
from tests.noise.contract import needs_randomgen
from tests.training.workbench import make
from tests.zoo import tiny

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


@pytest.mark.parametrize("command", ["verify", "report"])
def test_of_a_checkpoint_in_shards_the_way_to_a_record_is_said(tmp_path: Path, command: str) -> None:
    shards = tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    (shards / "__0_0.distcp").touch()
    for place in (tmp_path, tmp_path / "checkpoint-2"):
        said = invoke(command, str(place))
        assert said.exit_code == 2
        assert "where weights are in FSDP2's shards" in said.stderr
        assert "call save_model" in said.stderr


def test_models_in_folders_of_their_own_are_said(copy: Path) -> None:
    assert any("checked here: checkpoint-2, checkpoint-4. Verify each" in note for note in verify(copy).notes)


def test_names_in_a_record_do_not_lead_out_of_the_folder(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    in_record("files", to={"../outside.safetensors": sha256(tmp_path / "outside.safetensors")})(copy)
    assert "../outside.safetensors: named in the record, but not there" in failed(copy)


def test_a_text_around_the_section_may_be_written(copy: Path) -> None:
    card = copy / "README.md"
    card.write_text(card.read_text().replace("# out", "# My model\n\nIt sorts mail.").replace("\n", "\r\n"), newline="")
    assert verify(copy).private


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


def test_every_release_is_on_the_card_and_in_the_ledger(tmp_path: Path) -> None:
    from hf_dp import ReAttentionConfig

    privacy = PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig())
    run = make(tmp_path / "out", tiny("gpt2", "sequence"), privacy)
    run.train()
    run.save_model()
    found = verify(tmp_path / "out")
    assert found.private, found.checks
    assert "| token presence | 1 | Gaussian noise" in (tmp_path / "out" / "README.md").read_text()
    assert "re_attention.safetensors" in [check.name for check in found.checks]
    load_re_attention(tiny("gpt2", "sequence"), tmp_path / "out")
    in_record("ledger", "entries", to=lambda entries: entries[1:])(tmp_path / "out")
    assert "epsilon (PLD)" in failed(tmp_path / "out")


@pytest.mark.slow
def test_groups_and_their_budgets_are_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    weights = {"*attention*": 3.0, "*": 1.0}
    run = make(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, clipping="groups", groups=weights))
    run.train()
    run.save_model()
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
    for number, (words, change) in enumerate(changes.items()):
        copy = Path(shutil.copytree(tmp_path / "out", tmp_path / str(number)))
        change(copy)
        seal(copy)
        assert words in failed(copy)


def test_another_clipping_rule_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, clipping="automatic"))
    run.train()
    run.save_model()
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
    for number, (words, change) in enumerate(changes.items()):
        copy = Path(shutil.copytree(tmp_path / "out", tmp_path / str(number)))
        change(copy)
        seal(copy)
        assert words in failed(copy)


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
def test_another_sampling_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "out", privacy=PrivacyConfig(target_epsilon=3.0, max_batch_size=10))
    run.train()
    run.save_model()
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
    for number, (words, change) in enumerate(changes.items()):
        copy = Path(shutil.copytree(tmp_path / "out", tmp_path / str(number)))
        change(copy)
        seal(copy)
        assert words in failed(copy)


def without_cap(promise: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in promise.items() if name != "max_batch_size"}


def without_clipping(promise: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in promise.items() if name != "clipping"}


@needs_randomgen
def test_the_source_of_the_noise_is_on_the_card_and_changed_nowhere_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "out", privacy=PrivacyConfig(noise_multiplier=1.5, noise="chacha20"))
    run.train()
    run.save_model()
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
    for number, (words, change) in enumerate(changes.items()):
        copy = Path(shutil.copytree(tmp_path / "out", tmp_path / str(number)))
        change(copy)
        seal(copy)
        assert words in failed(copy)


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


def test_a_sharded_model_is_checked_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    whole = PreTrainedModel.save_pretrained

    def in_shards(self: Any, *args: Any, **options: Any) -> Any:
        return whole(self, *args, **{**options, "max_shard_size": "20KB"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", in_shards)
    run = make(tmp_path / "out")
    run.privacy = PrivacyConfig(target_epsilon=3.0)
    run.train()
    run.save_model()
    names = {check.name for check in verify(tmp_path / "out").checks}
    shards = {path.name for path in (tmp_path / "out").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert {*shards, "model.safetensors.index.json"} <= names
    assert verify(tmp_path / "out").private
    sorted((tmp_path / "out").glob("model-*.safetensors"))[0].write_bytes(b"")
    assert "safetensors: SHA-256" in failed(tmp_path / "out")


def test_what_is_no_place_is_refused(hub: Hub) -> None:
    with pytest.raises(HubError, match="no repository that this token may read"):
        load_report("someone/nothing")
    with pytest.raises(HubError, match="no name of a repository"):
        load_report("not/a/name/at/all")
    hub.fail = lambda method, path: "drop"
    with pytest.raises(HubError, match="could not be read from the hub"):
        load_report("someone/nothing")


@pytest.mark.parametrize("command", ["report", "verify"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["a" * 5000],
        ["\x01"],
        [""],
        ["a/b/c"],
        ["someone/x", "more"],
        ["--nonsense"],
        [],
        ["FILE"],
        ["EMPTY"],
        ["LIST"],
        ["DEEP"],
        ["DIRECTORY"],
        ["EMPTY", "--json"],
        ["LIST", "--json"],
        ["DEEP", "--json"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)
def test_what_cannot_be_read_is_refused_without_a_traceback(
    command: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "DIRECTORY" / "privacy.json").mkdir(parents=True)
    for name, text in {"EMPTY": "", "LIST": "[1]", "DEEP": "[" * 100_000}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "privacy.json").write_text(text)
    said = invoke(command, *arguments)
    assert said.exit_code == 2, said.output
    assert "Traceback" not in said.output
    assert not said.stdout


def test_a_token_that_cannot_be_one_is_refused(hub: Hub) -> None:
    with pytest.raises(HubError, match="letters that no token has"):
        load_report("someone/nothing", token="geheim\u00e4")


def test_a_system_error_is_said_without_a_traceback(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "privacy.json")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for command in ("report", "verify"):
        said = invoke(command, str(copy))
        assert said.exit_code == 2
        assert "PermissionError" in said.stderr
        assert "Traceback" not in said.output


def test_offline_is_said(tmp_path: Path) -> None:
    said = invoke("verify", "someone/nothing")
    assert said.exit_code == 2
    assert "HF_HUB_OFFLINE" in said.stderr


# --- report -----------------------------------------------------------------------------------------------------------


def test_report_reads_a_folder_a_checkpoint_and_an_interrupted_run(saved: Path, copy: Path) -> None:
    said = invoke("report", str(saved))
    assert said.exit_code == 0
    for words in (
        "epsilon 3 at delta",
        "one training example",
        "training step",
        "Poisson sample",
        "How well membership",
    ):
        assert words in said.stdout
    (copy / "privacy.json").unlink()
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert values["source"].endswith("checkpoint-4")
    assert values["report"] == load_report(saved / "checkpoint-4").to_dict()
    assert Ledger.from_dict(values["ledger"]).steps == 4
    assert values["risk"] == risk(Ledger.from_dict(values["ledger"]).event).to_dict()


def test_report_of_a_run_that_is_not_private_tells_no_risk() -> None:
    saved = str(Path(__file__).parent / "version1" / "reproducible")
    values = json.loads(invoke("report", saved, "--json").stdout)
    assert (values["report"]["private"], values["risk"]) == (False, None)
    assert "membership" not in invoke("report", saved).stdout


def test_report_shows_a_run_that_is_newer_than_the_finished_one_beside_it(saved: Path, copy: Path) -> None:
    run = make(copy, privacy=PrivacyConfig(target_epsilon=5.0), save_strategy="steps", save_steps=2, max_steps=2)
    run.train()
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert (values["source"], values["report"]["target_epsilon"]) == (f"{copy}/checkpoint-2", 5.0)
    said = invoke("report", str(copy))
    assert f"{copy}/checkpoint-2, the newest here; {copy} holds an older model" in said.stdout
    run.save_model()
    assert json.loads(invoke("report", str(copy), "--json").stdout)["source"] == str(copy)
    assert "older" not in invoke("report", str(saved)).stdout


def test_report_of_one_run_does_not_ask_the_clock(copy: Path) -> None:
    for name in ("seed-9", "checkpoint-²", "checkpoint-3x"):
        shutil.copytree(copy / "checkpoint-2", copy / name)
    os.utime(copy / "checkpoint-2" / "privacy.json")
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert (values["source"], values["report"]["steps"]) == (str(copy), 4)
    (copy / "privacy.json").unlink()
    (copy / "checkpoint-1").mkdir()
    (copy / "checkpoint-1" / "privacy.json").write_text("damaged")
    os.utime(copy / "checkpoint-1" / "privacy.json", (0, 0))
    assert json.loads(invoke("report", str(copy), "--json").stdout)["source"].endswith("checkpoint-4")


def test_no_name_is_not_this_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    for command in ("report", "verify"):
        said = invoke(command, "")
        assert (said.exit_code, "'' is no directory" in said.stderr) == (2, True)
    assert invoke("verify", ".").exit_code == 0


def test_report_of_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    said = invoke("report", str(tmp_path))
    assert said.exit_code == 2
    assert "there is no privacy.json" in said.stderr
    assert "Traceback" not in said.output


# --- what is saved, and the record ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "rng_state.pth", "rng_state_0.pth", "scheduler.pt", "training_args.bin", "trainer_state.json",
     "runs/x/events", "events.out.tfevents.1", "checkpoint-3/model.safetensors", "_hf_dp_fingerprint_key", ".env",
     "../model.safetensors", "/etc/passwd", "README.md", "privacy.json", ".cache/x.json"],
)  # fmt: skip
def test_what_never_goes_up(name: str) -> None:
    assert not may_be_published(name)


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


def test_a_release_that_was_promised_is_in_the_ledger(tmp_path: Path) -> None:
    run = make(tmp_path, privacy=PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig()))
    run.train()
    run.save_model()
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


def test_a_record_without_the_models_own_weights_is_no_record_of_a_model(copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "re_attention.safetensors")
    digest = sha256(copy / "re_attention.safetensors")
    in_record("files", to={"re_attention.safetensors": digest})(copy)
    seal(copy)
    assert "weights" in {check.name for check in verify(copy).checks if not check.passed}


def test_code_in_a_folder_of_its_own_is_noticed(copy: Path) -> None:
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text("")
    assert "other files" in {check.name for check in verify(copy).checks if not check.passed}


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


def test_any_value_of_the_record_that_is_changed_is_noticed(copy: Path) -> None:
    text = (copy / "privacy.json").read_text()
    for path in leaves(json.loads(text)):
        value = json.loads(text)
        for name in path:
            value = value[name]
        for other in other_than(value):
            (copy / "privacy.json").write_text(text)
            in_record(*path, to=lambda _, other=other: other)(copy)
            with contextlib.suppress(HfDpError):
                assert not verify(copy).consistent, (path, other)


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


def test_steps_that_are_as_good_as_never_drawn_prove_no_claim(copy: Path) -> None:
    in_record("ledger", "entries", 0, "event", "sampling_probability", to=5e-324)(copy)
    said = invoke("verify", str(copy))
    assert said.exit_code == 1, said.exception


def test_a_name_twice_in_a_record_is_refused(copy: Path) -> None:
    file = copy / "privacy.json"
    file.write_text(file.read_text().replace('"epsilon":', '"epsilon": 0.1,\n    "epsilon":', 1))
    with pytest.raises(LedgerError, match="a name twice"):
        verify(copy)


def test_what_lies_beside_a_corpus_would_be_loaded_with_it(copy: Path) -> None:
    folder = copy / "corpus"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"text": "a", "label": "b"}\n')
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    (folder / "privacy.json").write_text(record.with_files(folder, ["corpus.jsonl"]).to_json())
    write_card(folder)
    assert verify(folder).private
    for name in ("train.jsonl", "data/more.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("the private texts")
        assert f"other files: not named in the record: {name}" in failed(folder)
        (folder / name).unlink()


def test_a_card_in_other_words_under_a_new_digest_is_noticed_or_said(copy: Path) -> None:
    in_card(r"= [0-9.]+ times as likely", "= 1.01 times as likely")(copy)
    digest_anew(copy)
    in_card(r"record_sha256: .*", f"record_sha256: {sha256(copy / 'privacy.json')}")(copy)
    assert failed(copy) == "words of the card: they do not follow from the record"


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
