"""What tests remember of the check before the first step is remembered of the same alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp import DPTrainer, ReAttentionConfig
from hf_dp.parts.re_attention import ReAttention
from tests import certified
from tests.training.workbench import classifier, make, pad, private, rows


class Twice(DPTrainer):
    """Another loss."""

    def compute_per_example_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return 2 * super().compute_per_example_loss(model, inputs)


def changed(what: str) -> Any:
    """A model with one thing in it that the check looks at."""
    model = classifier(dropout=0.3 if what == "dropout" else 0.1)
    if what == "frozen":
        model.classifier.weight.requires_grad_(False)
    elif what == "hooked":
        model.classifier.register_forward_hook(lambda *_: None)
    elif what == "replaced":
        model.classifier.forward = lambda x: x
    elif what == "mode":
        model.distilbert.eval()
    elif what == "problem":
        model.config.problem_type = "multi_label_classification"
    elif what == "Re-Attention":
        ReAttention(model, ReAttentionConfig(token_frequencies="uniform"))
    return model


KINDS = ("dropout", "frozen", "hooked", "replaced", "mode", "problem", "Re-Attention")
OTHERS: dict[str, dict[str, Any]] = {
    **{what: {"model": changed(what)} for what in KINDS},
    "dtype": {"model": classifier(torch.bfloat16)},
    "loss": {"kind": Twice},
    "smoothing": {"label_smoothing_factor": 0.1},
}


def test_what_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def check(model: Any, loss: Any, batch: Any, **options: Any) -> str:
        made.append(batch)
        return "its result"

    def asked(batch: Any = first, tables: Any = (), **changes: Any) -> int:
        """How often the check was made of a trainer like this."""
        made.clear()
        trainer = make(tmp_path, **{"model": changed("nothing"), **changes})
        assert remembering(trainer.model, trainer._loss, batch, tables=tables) == "its result"
        return len(made)

    monkeypatch.setattr(certified, "_known", {})
    remembering = certified.remembering(check)
    assert asked() == 1
    assert asked(max_steps=9, learning_rate=0.5, privacy=private(clipping_norm=9.0)) == 0
    assert [asked(pad(rows(4, seed=1))), asked(tables=("a",))] == [1, 1]
    assert {what: asked(**changes) for what, changes in OTHERS.items()} == dict.fromkeys(OTHERS, 1)
    assert asked() == 0
    before = changed("nothing")
    make(tmp_path / "before", before, max_steps=1).train()
    before.save_pretrained(tmp_path / "before")
    loaded = type(before).from_pretrained(tmp_path / "before").train()
    assert [asked(model=before), asked(model=loaded)] == [0, 0]


first = pad(rows(4))


def test_refusals_and_checks_that_change_the_model_are_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def refuse(*_: Any) -> None:
        made.append("refused")
        raise ValueError

    def change(model: Any, *_: Any) -> None:
        made.append("changed")
        model.dropout.p += 0.1

    monkeypatch.setattr(certified, "_known", {})
    for _ in range(2):
        trainer = make(tmp_path)
        with pytest.raises(ValueError):  # noqa: PT011 - it is the one above
            certified.remembering(refuse)(trainer.model, trainer._loss, first)
        certified.remembering(change)(trainer.model, trainer._loss, first)
    assert made == ["refused", "changed"] * 2


def test_trainings_ask_what_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "_known", {})
    found = []
    for _ in range(2):
        with certified.once():
            make(tmp_path, max_steps=1).train()
        found.append(len(certified._known))
    # Of the model, of strangers, of the padding, of lengths in between, and of rows with other labels.
    assert found == [5, 5]


def test_workers_share_what_they_have_found_but_nothing_of_the_tests_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def check(*_: Any, **__: Any) -> list[float]:
        made.append("made")
        return [0.5]

    def found_by_a_worker() -> Any:
        monkeypatch.setattr(certified, "_known", {})
        trainer = make(tmp_path)
        return certified.remembering(check)(trainer.model, trainer._loss, first)

    monkeypatch.setattr(certified, "shared", tmp_path)
    assert [found_by_a_worker(), found_by_a_worker(), len(made)] == [[0.5], [0.5], 2]
    check.__module__, check.__qualname__ = "hf_dp.per_example.checks.preflight", "check"
    assert [found_by_a_worker(), found_by_a_worker(), len(made)] == [[0.5], [0.5], 3]
