"""LoRA over a base in few bits, trained privately: what evaluations and a break leave as it was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dp.hub import verify
from tests import low_bits
from tests.training.workbench import make, pad_for_language, parameters, private, rows, same

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("checked_once")]


@pytest.mark.parametrize("kind", ["bitsandbytes, nf4", "bitsandbytes, int8", "torchao, int8"])
def test_evaluations_and_breaks_change_nothing(tmp_path: Path, kind: str) -> None:
    pytest.importorskip(low_bits.KINDS[kind][0])
    parts = {"train_dataset": rows(), "eval_dataset": rows(8), "data_collator": pad_for_language}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def trainer(name: str, **changes: Any) -> Any:
        model = low_bits.adapted(low_bits.base(kind))
        return make(tmp_path / name, model, private(), parts=parts, max_steps=4, **changes)

    def adapters(trained: Any) -> dict[str, Any]:
        return {name: p for name, p in parameters(trained.model).items() if "lora" in name}

    plain, whole, resumed = trainer("plain"), trainer("whole", **evaluated), trainer("whole", **evaluated)
    plain.train()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(adapters(plain), adapters(whole))
    assert same(adapters(whole), adapters(resumed))
    whole.save_model(str(tmp_path / "final"))
    assert verify(tmp_path / "final").consistent
