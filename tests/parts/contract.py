"""What every part of a training must keep: each kind has a class of tests that inherits these."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_dp.accounting import GRADIENT, TRAINING_STEP, Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.config.asked import asked
from hf_dp.errors import ConfigurationError
from hf_dp.parts.part import Logs, Part, Setting
from hf_dp.parts.table import PARTS, parts_of
from hf_dp.randomness import Entropy
from tests.certified import once
from tests.training.workbench import STEPS, make, parameters, private, same
from tests.zoo import text_batch, tiny


@dataclass
class Seen:
    """What was seen of a training.

    Attributes:
        trainer: after it.
        drawn: for each stream of noise and its step, what the ledger had charged when its key was drawn.
        logs: all that the part said.
    """

    trainer: Any
    drawn: list[tuple[str, int, Counter[str]]] = field(default_factory=list)
    logs: list[Logs] = field(default_factory=list)


class PartContract:
    """A part, from the promise to a resumed training.

    Attributes:
        kind: of the table.
        settings: of the promise that asks for it.
        streams: of each draw that it makes, its stream and its step (None for any): the label it is charged with.
        released: its logs that follow from releases, without the part's name.
        exact: those that do not.
        refused: settings and training arguments of a training that it refuses, and words of the refusal.
        file: that it saves beside the weights, if any.
    """

    kind: ClassVar[type[Part]]
    settings: ClassVar[dict[str, Any]]
    streams: ClassVar[dict[tuple[str, int | None], str]]
    released: ClassVar[set[str]] = set()
    exact: ClassVar[set[str]] = set()
    refused: ClassVar[tuple[dict[str, Any], dict[str, Any], str]]
    file: ClassVar[str | None] = None

    def model(self) -> nn.Module:
        return tiny("gpt2", "sequence")

    def privacy(self, **changes: Any) -> PrivacyConfig:
        budget = {"noise_multiplier": None, "target_epsilon": 3.0, "accountant": "rdp"}
        return private(**{**budget, **self.settings, **changes})

    def trained(self, path: Path, resume: str | None = None, **promise: Any) -> Seen:
        """A training of few steps that is watched."""
        values = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
        trainer = make(path, self.model(), self.privacy(**promise), **values)
        seen = Seen(trainer)
        with once(), watched(self.kind, seen):
            trainer.train(resume_from_checkpoint=resume)
        return seen

    def test_it_is_in_the_table_and_asked_for_by_its_settings_alone(self) -> None:
        assert PARTS[self.kind.name] is self.kind
        assert self.kind.name in parts_of(self.privacy())
        assert parts_of(private()) == {}

    def test_settings_go_to_json_and_back_and_nothing_else_is_read(self) -> None:
        config = self.privacy()
        assert PrivacyConfig.from_json(config.to_json()) == config
        (name,) = self.settings
        written = json.loads(config.to_json())
        written[name]["another"] = 1
        with pytest.raises(ConfigurationError, match="another"):
            PrivacyConfig.from_json(json.dumps(written))

    def test_what_it_does_not_go_with_is_refused_before_anything_is_spent(self, tmp_path: Path) -> None:
        settings, arguments, words = self.refused
        drawn = mock.Mock(wraps=Entropy.fresh)
        with once(), mock.patch.object(Ledger, "charge") as charge, mock.patch.object(Entropy, "fresh", drawn):
            with pytest.raises(ConfigurationError, match=words):
                make(tmp_path, self.model(), self.privacy(**settings), **arguments).train()
            assert not charge.called
            assert not drawn.called

    def test_under_fsdp2_it_or_what_asks_for_it_is_refused(self) -> None:
        setting, refused = Setting(self.privacy(), is_sharded=True), 0
        for part in parts_of(self.privacy()).values():
            try:
                part.refuse(setting)
            except ConfigurationError as error:
                refused += "FSDP2" in str(error)
        assert refused

    def test_all_that_it_draws_is_asked_for_and_charged_before(self, tmp_path: Path) -> None:
        seen = self.trained(tmp_path)
        assert complaints(self, seen) == []
        assert len(seen.drawn) >= STEPS + len(self.streams)

    def test_negative_control_what_is_drawn_beside_that_is_noticed(self, tmp_path: Path) -> None:
        hook = self.kind.before_step

        def leaking(part: Part, run: Any) -> None:
            hook(part, run)
            run.plan.noise.generator("a secret", run.ledger.steps)

        with mock.patch.object(self.kind, "before_step", leaking):
            found = complaints(self, self.trained(tmp_path))
        assert any("a secret" in words for words in found), found

    def test_negative_control_a_part_that_charges_nothing_is_noticed(self, tmp_path: Path) -> None:
        charge, shares = Ledger.charge, {share.label for share in asked(self.privacy(), STEPS)[0]}
        if not shares:
            pytest.skip("it has nothing to charge beside the steps")

        def free(ledger: Ledger, event: Any, label: str = TRAINING_STEP, count: int = 1) -> None:
            if label not in shares:
                charge(ledger, event, label, count)

        with mock.patch.object(Ledger, "charge", free):
            found = complaints(self, self.trained(tmp_path))
        assert any("before it was charged" in words for words in found), found
        assert any("charged 0 times" in words for words in found), found

    @pytest.mark.slow
    def test_a_resumed_training_is_the_uninterrupted_one_and_releases_nothing_again(self, tmp_path: Path) -> None:
        whole = self.trained(tmp_path)
        resumed = self.trained(tmp_path, str(tmp_path / "checkpoint-2"))
        assert same(parameters(resumed.trainer.model), parameters(whole.trainer.model))
        assert resumed.trainer.privacy_report() == whole.trainer.privacy_report()
        assert {step for _, step, _ in resumed.drawn} == {2, 3}

    def test_saved_and_removed_it_leaves_the_plain_model(self, tmp_path: Path) -> None:
        trainer = self.trained(tmp_path).trainer
        trainer.save_model(str(tmp_path / "saved"))
        assert self.file is None or (tmp_path / "saved" / self.file).exists()
        plain, batch = self.model(), text_batch("sequence")
        assert trainer.model.state_dict().keys() == plain.state_dict().keys()
        plain.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
        for kind in PARTS.values():
            kind.remove(trainer.model)
        with torch.no_grad():
            assert torch.equal(trainer.model.eval()(**batch).logits, plain.eval()(**batch).logits)
        assert [p.requires_grad for p in trainer.model.parameters()] == [p.requires_grad for p in plain.parameters()]

    @pytest.mark.parametrize("withheld", [True, False])
    def test_exact_values_are_logged_unless_they_are_withheld(self, tmp_path: Path, withheld: bool) -> None:
        seen = self.trained(tmp_path, withhold_non_private_logs=withheld)
        assert {name for logs in seen.logs for name in logs.released} == self.released
        assert {name for logs in seen.logs for name in logs.exact} == self.exact
        shown = {name for entry in seen.trainer.state.log_history for name in entry}
        wanted = self.released if withheld else self.released | self.exact
        assert {name for name in shown if name.startswith(f"{self.kind.name}/")} == {
            f"{self.kind.name}/{name}" for name in wanted
        }


@contextmanager
def watched(kind: type[Part], seen: Seen) -> Iterator[None]:
    """What is drawn and logged inside is noted."""
    fresh, logs = Entropy.fresh, kind.logs

    def noted(entropy: Entropy, purpose: str, step: int) -> bytes:
        charged = Counter({label: 0 for _, _, label in seen.trainer.ledger.entries})
        for _, count, label in seen.trainer.ledger.entries:
            charged[label] += count
        seen.drawn.append((purpose, step, charged))
        return fresh(entropy, purpose, step)

    def told(part: Part) -> Logs:
        seen.logs.append(logs(part))
        return seen.logs[-1]

    with mock.patch.object(Entropy, "fresh", noted), mock.patch.object(kind, "logs", told):
        yield


def complaints(contract: PartContract, seen: Seen) -> list[str]:
    """What was released otherwise than `asked` says and the ledger was charged."""
    plan, ledger, found = seen.trainer._run.plan, seen.trainer.ledger, []
    shares, queries = asked(plan.config, STEPS)
    times = {share.label: share.times for share in shares}
    draws: Counter[str] = Counter()
    for stream, step, charged in seen.drawn:
        label = contract.streams.get((stream, step), contract.streams.get((stream, None)))
        if label is None and stream == "noise":
            label = TRAINING_STEP
        if label is None or label not in {TRAINING_STEP, *times, *(query.label for query in queries)}:
            found.append(f"{stream!r} of step {step} was drawn, and nothing asked for it")
            continue
        draws[label] += label in times
        due = draws[label] if label in times else step + 1
        if charged[label if label in times else TRAINING_STEP] < due:
            found.append(f"{stream!r} of step {step} was drawn before it was charged as {label!r}")
    entries = Counter({(label, event): 0 for event, _, label in ledger.entries})
    for event, count, label in ledger.entries:
        entries[label, event] += count
    wanted = {(label, plan.release(label).event): number for label, number in times.items()}
    wanted[TRAINING_STEP, plan.event] = STEPS
    for key in wanted.keys() | entries.keys():
        if entries[key] != wanted.get(key, 0):
            found.append(f"{key[0]!r} was charged {entries[key]} times, not {wanted.get(key, 0)}")
    named = set(plan.report(ledger).queries) - {GRADIENT}
    if named != {query.label for query in queries}:
        found.append(f"each step releases {sorted(named)} beside the gradient")
    return found
