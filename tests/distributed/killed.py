"""A private run for torchrun: `killed.py OUTPUT [RANK STEP]`, in which that rank dies in the middle of that step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import hf_dp.ranks as ranks
from hf_dp import PrivacyConfig
from hf_dp.aggregate import ClippedSum
from tests.distributed.tasks import EXPECTED, MICRO, STEPS, built, collator_of
from tests.e2e.workbench import make, rows


def main(output: str, victim: int = -1, last: int = -1) -> None:
    """Trains with noise from the operating system, from the last checkpoint if there is one."""
    honest = ClippedSum.meet

    def meet(self: ClippedSum, step: int) -> None:
        if ranks.rank() == victim and step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(self, step)

    ClippedSum.meet = meet  # type: ignore[method-assign]
    changes: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // MICRO // 2, "max_steps": STEPS,
        "save_strategy": "steps", "save_steps": 2, "ddp_backend": "gloo",
    }  # fmt: skip
    parts = {"train_dataset": rows(), "data_collator": collator_of("bert")}
    run = make(Path(output), built("bert"), PrivacyConfig(target_epsilon=8.0), parts=parts, **changes)
    run.train(resume_from_checkpoint=any(Path(output).glob("checkpoint-*")) or None)
    run.save_model(f"{output}/final")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
