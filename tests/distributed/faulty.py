"""A private run for a launcher of two processes: `faulty.py OUTPUT FAULT RANK`, in which that rank fails in a step.

`sound` is a fault that does not happen; it goes on from the last checkpoint, if there is one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import hf_dp.launched as launched
import hf_dp.ranks as ranks
from hf_dp.step.clipped_sum import ClippedSum
from tests.distributed.gang import ON_GPU
from tests.distributed.tasks import trainer

# The checkpoint is of step 2; counted from 0, this is the fourth.
STEP = 3


class Raises(TrainerCallback):
    """Fails in a step of its own rank."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP:
            raises()


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises() -> None:
    raise OSError("a row that cannot be read")


def happens(fault: str, run: Any) -> None:
    """Arranges that it does, on this rank."""
    if fault == "callback":
        run.add_callback(Raises())
    elif fault == "collator":
        collate = run.data_collator
        # After the checks before the first step, which have words of their own for it.
        run.data_collator = lambda rows: raises() if run.state.global_step else collate(rows)
    elif fault == "save":
        save = run._save_rng_state
        run._save_rng_state = lambda folder: dies() if run.state.global_step > 2 else save(folder)
    elif fault in ("meet", "release"):
        honest = getattr(ClippedSum, fault)

        def last(self: ClippedSum, *args: Any) -> None:
            if run.ledger.steps == STEP + (fault == "release"):
                dies()
            honest(self, *args)

        setattr(ClippedSum, fault, last)


def finished(output: str, fault: str = "sound", victim: int = -1) -> None:
    """Trains, from the last checkpoint if there is one, and saves."""
    secret = {"noise_multiplier": None, "target_epsilon": 8.0, "seed": None}
    values: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    if fault == "workers":
        secret, values["dataloader_num_workers"] = {}, 2
    if fault == "refused":
        values["max_grad_norm"] = 5.0
        # However slow the machine is, the launcher ends the second process before it speaks.
        launched._TURN = 120.0
    run = trainer(output, "bert", 2, secret, **values)
    if ranks.rank() == victim:
        happens(fault, run)
    run.train(resume_from_checkpoint=any(Path(output).glob("checkpoint-*")))
    run.save_model(f"{output}/final")


def main(*arguments: Any) -> None:
    if ON_GPU in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    finished(*arguments)
    # Left to the interpreter's end, gloo's threads now and then abort it.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
