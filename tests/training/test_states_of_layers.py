"""Transformers notes states of layers by hooks, which it puts into a model when they are first asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.workbench import classifier, exact, make, pad, rows


@pytest.mark.slow
def test_each_state_is_noted_once_though_the_check_before_the_first_step_asks_first(
    tmp_path: Path, caplog: Any
) -> None:
    model = classifier()
    model.config.output_hidden_states = True
    make(tmp_path, model, exact()).train()
    assert "other modules, forward methods or hooks" not in caplog.text
    with torch.no_grad():
        found = model(**pad(rows()[:2])).hidden_states
    assert len(found) == model.config.num_hidden_layers + 1
