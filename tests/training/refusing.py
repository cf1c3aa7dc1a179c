"""Makes a trainer, trains, and asserts that this was refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hf_dp.errors import HfDpError
from tests.training.workbench import classifier, make, parameters, same


def refused(
    path: Path,
    error: type[HfDpError],
    words: str,
    model: nn.Module | None = None,
    *,
    at_once: bool = True,
    **given: Any,
) -> HfDpError:
    """Makes and trains; asserts that it was refused, at the trainer's construction where that is promised."""
    model = classifier() if model is None else model
    before = parameters(model)
    trainer: Any = None
    with pytest.raises(error) as caught:  # noqa: PT012
        trainer = make(path, model, **given)
        trainer.train()
    assert re.search(words, caught.value.found), caught.value.found
    assert caught.value.why
    assert caught.value.fix
    assert (trainer is None) == at_once
    if trainer is not None:
        assert trainer.ledger.steps == 0
        assert trainer.ledger.entries == ()
    assert same(before, parameters(model))
    return caught.value
