"""A training that is saved in the middle and resumed, and what its checkpoint says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.training.workbench import Rows, classifier, make, private, rows

# Step 6 is made and charged in the killed process, and lost with it; the last checkpoint is of step 4, in the first
# epoch's middle (an epoch has 6 steps).
STEPS, SAVED, KILLED = 7, 4, 6


def trainer(path: Path | str, data: Rows | None = None, seed: int | None = None, **changes: Any) -> Any:
    """Dropout and AdamW, so that the generators' and the optimizer's states matter."""
    withheld = changes.pop("withhold_non_private_logs", False)
    promise = {
        "seed": seed, "clipping_norm": changes.pop("clipping_norm", 1.0), "withhold_non_private_logs": withheld
    }  # fmt: skip
    target = changes.pop("target_epsilon", None)
    privacy = private(**promise, **({"noise_multiplier": None, "target_epsilon": target} if target else {}))
    values = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "optim": "adamw_torch", **changes}
    parts = {"train_dataset": rows() if data is None else data}
    if "eval_strategy" in changes:
        parts["eval_dataset"] = rows(8, seed=5)
    return make(path, classifier(dropout=0.1), privacy, parts=parts, learning_rate=1e-2, **values)


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to / "out")
    return to / "out"


def edit_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / f"checkpoint-{SAVED}" / "trainer_state.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))


def saved_ledger(state: dict[str, Any]) -> dict[str, Any]:
    return state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"]
