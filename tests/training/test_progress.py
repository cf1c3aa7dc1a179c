"""What a training says of itself, and how many passes its check takes."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import hf_dp.ranks as ranks
from hf_dp.training.progress import passes_shown
from tests.training.workbench import make, pad_for_language, rows
from tests.zoo import tiny


def adapted() -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1), config)


def test_the_check_of_a_model_without_random_numbers_takes_few_passes(tmp_path: Path) -> None:
    """Most of them of a few rows that are cut short, so that they take as long as few steps of ordinary batches."""
    data = rows(60, low=20, high=30)
    trainer = make(tmp_path, adapted(), parts={"train_dataset": data, "data_collator": pad_for_language})
    trainer.get_train_dataloader()
    passes: Counter[str] = Counter()

    def note(module: Any, args: Any, output: Any) -> None:
        passes.update(forward=1)
        if output.logits.requires_grad:
            output.logits.register_hook(lambda _: passes.update(backward=1))

    trainer.model.register_forward_hook(note)
    trainer._run.engine.check()
    assert passes["forward"] <= 40
    assert passes["backward"] <= 15


@pytest.mark.parametrize(("is_terminal", "is_silent", "rank", "is_shown"), [
    (True, False, 0, True), (False, False, 0, False), (True, True, 0, False), (True, False, 1, False)
])  # fmt: skip
def test_passes_are_counted_on_a_terminal_by_the_first_rank(
    is_terminal: bool, is_silent: bool, rank: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    model = torch.nn.Linear(2, 2)
    with passes_shown(model, is_silent=is_silent):
        found = model(torch.ones(1, 2))
    assert ("Checking before the first step" in terminal.getvalue()) is is_shown
    assert torch.equal(found, model(torch.ones(1, 2)))
    assert not model._forward_pre_hooks
