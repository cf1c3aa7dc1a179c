"""The protocol of parts: when each hook is called, what of it is logged, and what parts refuse of one another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch

from hf_dp import OutputBiasConfig, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts import table
from hf_dp.parts.part import Logs, Part, Run, Setting
from hf_dp.parts.table import PARTS, parts_of
from hf_dp.parts.token_frequencies import LABEL, known_frequencies
from hf_dp.training import run as training_run
from tests.training.workbench import make, parameters, private, same

pytestmark = pytest.mark.usefixtures("checked_once")

BUDGET = {"target_epsilon": 3.0, "noise_multiplier": None}
ATTENTION, SPARSE = ReAttentionConfig(), SparseEmbeddingConfig()


class Witness(Part):
    """Notes its hooks, and trains nothing of the embeddings' gradients that it does not see."""

    name = "witness"
    called: ClassVar[list[str]] = []

    @classmethod
    def of(cls, config: PrivacyConfig) -> Witness | None:
        return cls(None)

    def begin(self, run: Run, checkpoint: Path | None, earlier: Part | None) -> None:
        super().begin(run, checkpoint, None)
        self.earlier, self.frequencies = earlier, known_frequencies(run)
        self.spent = len(run.ledger.entries)

    def logs(self) -> Logs:
        return Logs({"released": 1.0}, {"exact": 2.0})

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Part) and callable(vars(Part)[name]) and not name.startswith("_"):
            Witness.called.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def witnessed(monkeypatch: pytest.MonkeyPatch) -> type[Witness]:
    """Every training has it, after the other parts."""
    parts = MappingProxyType({**PARTS, Witness.name: Witness})
    for module in (table, training_run):
        monkeypatch.setattr(module, "PARTS", parts)
    monkeypatch.setattr(Witness, "called", [])
    return Witness


def test_a_promise_without_parts_has_none_and_each_part_has_a_field() -> None:
    assert parts_of(PrivacyConfig(noise_multiplier=1.0)) == {}
    promised = {item.name for item in dataclasses.fields(PrivacyConfig)}
    assert [name for name in PARTS if name not in promised] == ["token_frequencies"]  # asked for by another part
    assert list(parts_of(PrivacyConfig(target_epsilon=1.0, re_attention=ATTENTION))) == [
        "token_frequencies",
        "re_attention",
    ]
    assert list(parts_of(PrivacyConfig(noise_multiplier=1.0, sparse_embeddings=SPARSE))) == ["sparse_embeddings"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OutputBiasConfig, ReAttentionConfig, SparseEmbeddingConfig])
def test_a_setting_that_a_part_does_not_have_is_refused_in_words(kind: Any) -> None:
    first = dataclasses.fields(kind)[0].name
    for make_it in (lambda values: kind(**values), kind.from_dict):
        with pytest.raises(
            ConfigurationError, match=f"{kind.__name__} got '{first}s', which it does not have."
        ) as told:
            make_it({f"{first}s": 1})
        assert f"give {first} for '{first}s'." in str(told.value)
    assert dataclasses.replace(kind()) == kind() == kind.from_dict(kind().to_dict())


def test_hooks_come_in_the_order_of_a_training(tmp_path: Path, witnessed: type[Witness]) -> None:
    trainer = make(tmp_path, max_steps=2, logging_steps=2)
    trainer.train()
    step = ["before_step", "restrict", "after_step", "after_optimizer_step"]
    assert list(dict.fromkeys(witnessed.called)) == [
        "refuse", "settled", "make_optimizer", "install", "checked", "begin", *step, "logs",
    ]  # fmt: skip
    assert [witnessed.called.count(name) for name in ("begin", "before_step", "after_optimizer_step")] == [1, 2, 2]
    assert trainer._run.parts["witness"].earlier is None
    trainer.train()
    # What an earlier training released is asked of its part.
    assert trainer._run.parts["witness"].earlier is not None


@pytest.mark.slow
def test_a_part_that_does_nothing_changes_nothing(tmp_path: Path, witnessed: type[Witness], monkeypatch: Any) -> None:
    found = []
    for folder in ("a", "b"):
        torch.manual_seed(0)
        trainer = make(tmp_path / folder, max_steps=3)
        trainer.train()
        found.append(parameters(trainer.model))
        monkeypatch.undo()
    assert "witness" not in trainer._run.parts
    assert same(*found)


@pytest.mark.parametrize("withheld", [True, False])
def test_what_is_withheld_follows_from_what_a_part_says(
    tmp_path: Path, witnessed: type[Witness], withheld: bool
) -> None:
    trainer = make(tmp_path, privacy=private(withhold_non_private_logs=withheld), max_steps=2, logging_steps=1)
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert {"witness/released", "epsilon"} <= names
    for exact in ("witness/exact", "clipped_fraction", "non_finite_examples", "loss", "train_loss"):
        assert (exact in names) is not withheld


@pytest.mark.slow
def test_frequencies_are_released_once_and_read_by_others(tmp_path: Path, witnessed: type[Witness]) -> None:
    trainer = make(tmp_path, privacy=private(**BUDGET, re_attention=ATTENTION), max_steps=2)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    other = trainer._run.parts["witness"]
    # It begins after the release, and reads the same numbers.
    assert other.spent == 1
    assert other.frequencies is trainer._run.parts["token_frequencies"].shares
    assert trainer._run.parts["re_attention"]._frequencies is other.frequencies


@pytest.mark.parametrize(
    ("config", "is_sharded", "words"),
    [
        ({"re_attention": ATTENTION, "sparse_embeddings": SPARSE}, False, "re_attention together with"),
        ({"re_attention": ATTENTION}, True, "Re-Attention with FSDP2"),
        ({"sparse_embeddings": SPARSE}, True, "sparse embeddings with FSDP2"),
        ({"re_attention": ATTENTION}, False, None),
        ({"sparse_embeddings": SPARSE}, False, None),
    ],
)
def test_what_a_part_does_not_go_with_it_refuses_itself(
    config: dict[str, Any], is_sharded: bool, words: str | None
) -> None:
    privacy = PrivacyConfig(target_epsilon=1.0, **config)
    setting, found = Setting(privacy, is_sharded), []
    for part in parts_of(privacy).values():
        try:
            part.refuse(setting)
        except ConfigurationError as error:
            found.append(str(error))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_parts_that_refuse_each_other_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="re_attention together with sparse_embeddings"):
        make(tmp_path, privacy=private(**BUDGET, re_attention=ATTENTION, sparse_embeddings=SPARSE))
