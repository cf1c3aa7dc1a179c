"""A loop of one's own with accelerate, for the processes of a gang."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hf_dp.ranks as ranks
from hf_dp import PrivateRun, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError, HfDpError
from tests.distributed.tasks import (
    EXPECTED,
    MICRO,
    STEPS,
    built,
    collator_of,
    device,
    fresh_accelerator,
    gathered,
    promise,
    rows_of,
)

PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "Re-Attention": {"re_attention": ReAttentionConfig(token_frequencies="uniform")},
    "sparse embeddings": {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)},
}


def started(path: str, name: str, part: str = "none", resume: bool = False) -> Any:
    """A run with noise, its model as accelerate wraps it, the optimizer and the scheduler."""
    fresh_accelerator()
    accelerator = Accelerator(cpu=device().type == "cpu")
    run = PrivateRun(
        built(name), rows_of(name), promise(noise_multiplier=1.0, **PARTS[part]), collator_of(name),
        expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=STEPS, output_dir=path,
    )  # fmt: skip
    optimizer: Any = run.make_optimizer(lambda trained: torch.optim.Adam(trained, lr=0.01))
    model, optimizer = accelerator.prepare(run.model, optimizer)
    scheduler = LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))
    run.begin(optimizer, scheduler, resume_from_checkpoint=resume)
    return run, model, optimizer, scheduler


def looped(path: str, name: str, part: str = "none", save_at: int = 0, resume: bool = False) -> dict[str, Any]:
    """The weights after `STEPS` steps in such a loop."""
    run, model, optimizer, scheduler = started(path, name, part, resume)
    begun_at = run.global_step
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if run.global_step == save_at:
            run.save_checkpoint()
    run.save(f"{path}/final")
    return {
        "parameters": gathered(run.model), "wrapped": type(model).__name__, "report": run.report().to_dict(),
        "begun at": begun_at,
    }  # fmt: skip


def left_by_one(path: str) -> str:
    """What a loop says that one rank leaves early, to save."""
    run, _, optimizer, _ = started(path, "bert")
    try:
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            if torch.distributed.get_rank() == 1:
                run.save_checkpoint()
    except HfDpError as error:
        return str(error)
    finally:
        run.end()
    return ""


def differing(path: str, what: str) -> str:
    """What ranks are told that differ in their weights, or in the size of their batches."""
    fresh_accelerator()
    Accelerator(cpu=device().type == "cpu")
    mine = torch.distributed.get_rank()
    try:
        model = built("bert").to(device())
        if what == "weights":
            nn.init.constant_(next(model.parameters()), mine)
        size = MICRO + mine * (what == "sizes")
        run = PrivateRun(
            model, rows_of("bert"), promise(), collator_of("bert"),
            expected_batch_size=EXPECTED, micro_batch_size=size, steps=STEPS,
        )  # fmt: skip
        run.begin(torch.optim.SGD(model.parameters(), lr=0.1))
    except ConfigurationError as error:
        return str(error)
    return ""


def made_too_early(path: str) -> str:
    """The refusal of a run that was made when there was no process group yet."""
    model = built("bert")
    with mock.patch.object(ranks, "in_group", return_value=False), mock.patch.dict(os.environ, WORLD_SIZE="1"):
        run = PrivateRun(
            model, rows_of("bert"), promise(noise_multiplier=1.0), collator_of("bert"),
            expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=STEPS, output_dir=path,
        )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        run.begin(optimizer)
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
    except ConfigurationError as error:
        return str(error)
    return f"none, and epsilon {run.report().epsilon}"


def with_prepared_schedule(path: str, **options: Any) -> tuple[str, list[float]]:
    """The refusal of a scheduler that accelerate has prepared, if any, and the rates of the steps."""
    fresh_accelerator()
    accelerator = Accelerator(cpu=device().type == "cpu", **options)
    run = PrivateRun(
        built("bert"), rows_of("bert"), promise(noise_multiplier=1.0), collator_of("bert"),
        expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=STEPS,
    )  # fmt: skip
    plain = torch.optim.SGD(run.model.parameters(), lr=0.1)
    schedule: Any = LambdaLR(plain, lambda step: 1 / (1 + step))
    _, optimizer, schedule = accelerator.prepare(run.model, plain, schedule)
    rates = []
    try:
        run.begin(optimizer, schedule)
        for batch in run.batches():
            rates.append(plain.param_groups[0]["lr"])
            run.step(batch)
            optimizer.step()
            schedule.step()
    except ConfigurationError as error:
        return str(error), rates
    return "", rates


def told_of_a_loop(path: str) -> str:
    """What each rank raises where rank 1 moves weights by itself, and the other waits for it."""
    run, *_ = started(path, "bert")
    gone = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer")
    try:
        for batch in run.batches():
            if torch.distributed.get_rank():
                nn.init.zeros_(next(run.model.parameters()))
            with mock.patch("hf_dp.training.private_run.keep_step", side_effect=gone):
                run.step(batch)
    except HfDpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.end()
    return ""
