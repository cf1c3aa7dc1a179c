"""Loops of one's own around PrivateRun, begun, run and stopped after one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_dp import PrivacyConfig, PrivateRun
from tests.training.workbench import EXPECTED, MICRO, classifier, pad, private, rows

STEPS = 7  # of which 6 are an epoch


def a_run(model: nn.Module, privacy: PrivacyConfig | None = None, **changes: Any) -> PrivateRun:
    values = {"expected_batch_size": EXPECTED, "micro_batch_size": MICRO, "steps": STEPS, **changes}
    data, collate = values.pop("dataset", rows()), values.pop("collate", pad)
    return PrivateRun(model, data, privacy or private(), collate, **values)


def begun(model: nn.Module, privacy: PrivacyConfig | None = None, resume: Any = None, **changes: Any) -> Any:
    """A run, its optimizer (with a state) and its scheduler."""
    run = a_run(model, privacy, **changes)
    optimizer = run.make_optimizer(lambda trained: torch.optim.Adam(trained, lr=0.01))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.begin(optimizer, scheduler, resume_from_checkpoint=resume)
    return run, optimizer, scheduler


def loop(run: PrivateRun, optimizer: Any, scheduler: Any, save_at: int = 0, until: int = 0) -> None:
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        scheduler.step()
        if run.global_step == save_at:
            run.save_checkpoint()
        if run.global_step == until:
            break


def after_one_step() -> Any:
    """A run after its first step, and what is in hand then."""
    model = classifier(n_layers=1)
    run = a_run(model, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    batches = run.batches()
    batch = next(batches)
    run.step(batch)
    return model, run, optimizer, batches, batch
