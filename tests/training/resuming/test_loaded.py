"""A training goes on with the very weights and moments that its checkpoint was made of, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from hf_dp.data.fingerprint import KEY_FILE
from hf_dp.errors import LedgerError
from hf_dp.training.resuming.loaded import checksums
from tests.training.resuming.resumed import SAVED, copied, edit_state, saved_ledger, trainer

pytestmark = pytest.mark.usefixtures("checked_once")

Spoil = Callable[[Path, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loaded") / "out"
    trainer(path, seed=7).train()
    return path


def not_loaded(name: str) -> Spoil:
    """A method of Trainer that reads nothing, and says nothing of it."""
    return lambda path, patch: patch.setattr(Trainer, name, lambda *args, **kwargs: None)


def in_the_optimizer(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(path: Path, patch: pytest.MonkeyPatch) -> None:
        saved = torch.load(path / "optimizer.pt")
        change(saved["state"][0])
        torch.save(saved, path / "optimizer.pt")

    return spoil


def other_rows(path: Path, patch: pytest.MonkeyPatch) -> None:
    """The same numbers in other places, so that sums and norms are what they were."""
    original = nn.Module.load_state_dict

    def load(self: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        rolled = {name: values.roll(1, 0) if values.ndim == 2 else values for name, values in state.items()}
        return original(self, rolled, *args, **kwargs)

    patch.setattr(nn.Module, "load_state_dict", load)


SPOILT: dict[str, tuple[Spoil, str]] = {
    "no weights": (not_loaded("_load_from_checkpoint"), "weight"),
    "no moments": (not_loaded("_load_optimizer_and_scheduler"), "exp_avg of"),
    "rows of weights in other places": (other_rows, "weight"),
    "one number of a moment": (in_the_optimizer(lambda state: state["exp_avg"].view(-1)[-1:].add_(1e-6)), "exp_avg of"),
    "a moment lost": (in_the_optimizer(lambda state: state.pop("exp_avg_sq")), "exp_avg_sq of"),
    "steps counted again": (in_the_optimizer(lambda state: state["step"].zero_()), "step of"),
}


@pytest.mark.parametrize("case", SPOILT)
@pytest.mark.slow
def test_what_was_not_loaded_as_it_was_saved_is_refused(
    checkpointed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    path, (spoil, name) = copied(checkpointed, tmp_path), SPOILT[case]
    spoil(path / f"checkpoint-{SAVED}", monkeypatch)
    run = trainer(path, seed=7)
    with pytest.raises(LedgerError, match=f"is not what was saved there: .*{name}"):
        run.train(resume_from_checkpoint=f"{path}/checkpoint-{SAVED}")
    assert run.ledger.steps <= SAVED, "spent"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [("sgd", "adamw_torch", "betas"), pytest.param("adamw_torch", "sgd", "mom", marks=pytest.mark.slow)],
)
def test_another_optimizer_is_refused_before_a_step_is_paid_for(
    tmp_path: Path, first: str, second: str, words: str
) -> None:
    trainer(tmp_path, seed=7, optim=first, max_steps=1, save_steps=1).train()
    other = trainer(tmp_path, seed=7, optim=second, save_steps=1)
    with pytest.raises(LedgerError, match=f"the checkpoint's optimizer has no .*{words}"):
        other.train(resume_from_checkpoint=True)
    assert not other.ledger.steps


@pytest.mark.slow
def test_weights_alone_are_compared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, seed=7, save_only_model=True).train()
    resumed = trainer(tmp_path, seed=7)
    resumed.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{SAVED}")
    assert resumed.state.global_step > SAVED
    assert caplog.text.count("has weights alone") == 1
    not_loaded("_load_from_checkpoint")(tmp_path, monkeypatch)
    with pytest.raises(LedgerError, match="is not what was saved there"):
        trainer(tmp_path, seed=7).train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{SAVED}")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_compared_is_said(
    checkpointed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(checkpointed, tmp_path)
    (path / KEY_FILE).unlink()
    edit_state(path, lambda state: saved_ledger(state).pop("values"))
    with caplog.at_level(logging.WARNING):
        trainer(path, seed=7).train(resume_from_checkpoint=f"{path}/checkpoint-{SAVED}")
    assert "could not be compared with what was saved" in caplog.text


def test_checksums_are_of_the_values_in_the_dtype_that_they_were_saved_in() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    exact = checksums(model)
    assert exact.keys() == {"weight"}
    assert checksums(model.double(), like=exact) == exact
    assert checksums(model.bfloat16(), like=exact) != exact, "rounded"
    rounded = checksums(model)
    assert checksums(model.float(), like=rounded) == rounded
    assert checksums(model, like={"weight": "nonsense"}) == checksums(model)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))
    assert checksums(model, like=rounded) != rounded, "the places count"
