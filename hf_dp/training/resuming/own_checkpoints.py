"""Checkpoints of a loop of one's own, in the files of Trainer's: written aside by all ranks together, and read."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_dp.ranks as ranks
from hf_dp.config import PrivacyConfig
from hf_dp.errors import LedgerError
from hf_dp.training.adapters import has_adapters, is_mixed, read_adapters
from hf_dp.training.generators import file_of_this_rank, read_generators, save_generators
from hf_dp.training.resuming.checkpoints import STATE_FILE, clear, finish_for, newest_whole, put_in_place, written_aside
from hf_dp.training.resuming.loaded import OPTIMIZER, SCHEDULE
from hf_dp.training.resuming.output_lock import warn_of_others
from hf_dp.training.resuming.renamed import read_renamed
from hf_dp.training.resuming.restoring import damage_is_named, refuse_half, settings_are_kept
from hf_dp.training.resuming.resume import STATE_KEY, SavedRun
from hf_dp.training.saving import with_each_once
from hf_dp.training.tokenizer_settings import tokenizers_as_given

logger = logging.getLogger(__name__)

_WEIGHTS = "model.safetensors"


def write_model(folder: Path, model: Any, tokenizer: Any = None) -> None:
    """Writes weights and what loading them needs: by `save_pretrained`, or without it in one safetensors file."""
    if callable(getattr(model, "save_pretrained", None)) and not is_mixed(model):
        model.save_pretrained(folder)
    else:
        save_file(with_each_once(model.state_dict()), folder / _WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None:
        with tokenizers_as_given(tokenizer):
            tokenizer.save_pretrained(folder)


def write_checkpoint(
    output_dir: Path,
    step: int,
    steps: int,
    micro_batch_size: int,
    saved: Callable[[], SavedRun],
    model: Callable[[Path], None],
    optimizer: Any,
    scheduler: Any,
) -> Path:
    """Writes `checkpoint-STEP`, which is whole or not there. All ranks call it together.

    Args:
        step, steps: how many were taken, and are planned.
        micro_batch_size: for Trainer, which may go on from it.
        saved: what the checkpoint knows of its run; asked for on the first rank.
        model: writes the weights, their record and their card; on the first rank.
        scheduler: None if there is none.

    Raises:
        OSError: with the disk's name, where it is full.
    """
    run_dir, name, is_first = str(output_dir), f"{PREFIX_CHECKPOINT_DIR}-{step}", ranks.rank() == 0
    ranks.warn_of_missing(logger, "save_checkpoint()")
    if is_first:
        clear(run_dir)
    ranks.wait()
    with written_aside(run_dir) as aside:
        folder = aside / name
        folder.mkdir(parents=True, exist_ok=True)
        save_generators(folder)
        if is_first:
            run = saved()
            model(folder)
            torch.save(optimizer.state_dict(), folder / OPTIMIZER)
            torch.save({} if scheduler is None else scheduler.state_dict(), folder / SCHEDULE)
            state = TrainerState(global_step=step, max_steps=steps, train_batch_size=micro_batch_size)
            known = {"saved_ledger": run.record(dataclasses.asdict(state))}
            of_callbacks: Any = {
                STATE_KEY: {"args": {}, "attributes": known},
                "TrainerControl": TrainerControl().state(),
            }
            state.stateful_callbacks = of_callbacks
            state.save_to_json(str(folder / STATE_FILE))
    ranks.wait()
    if is_first:
        put_in_place(run_dir, name)
    ranks.wait()
    return output_dir / name


def found_checkpoint(
    resume_from: str | os.PathLike[str] | bool | None, output_dir: Path | None, privacy: PrivacyConfig
) -> Path | None:
    """The checkpoint to go on from; None to begin. Of `True` the newest whole one in the output directory, if any.

    A training that begins beside checkpoints, of which its promise says nothing, is told of them.

    Raises:
        LedgerError: it is not whole, or of those in the output directory none is.
    """
    if not resume_from or resume_from is True:
        newest = newest_whole(str(output_dir)) if resume_from and output_dir is not None else None
        if newest is None and output_dir is not None:
            warn_of_others(output_dir, privacy)
        return None if newest is None else Path(newest)
    path = Path(resume_from)
    finish_for(path, output_dir)
    refuse_half(str(path))
    return path


def step_of(checkpoint: Path) -> int:
    """How many steps were taken before (`LedgerError` if that cannot be read)."""
    with damage_is_named(str(checkpoint), STATE_FILE):
        return int(TrainerState.load_from_json(str(checkpoint / STATE_FILE)).global_step)


def read_into(checkpoint: Path, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Reads weights, the optimizer's state and the schedule into these; gives back the generators' states.

    What was read is to be held against the checksums of what was saved: names that are missing are no error here.

    Raises:
        LedgerError: with the file that cannot be loaded.
    """
    with damage_is_named(str(checkpoint), "*.safetensors"):
        read_weights(checkpoint, model)
    with damage_is_named(str(checkpoint), "optimizer*", SCHEDULE):
        if (checkpoint / SCHEDULE).is_file():
            kept = torch.load(checkpoint / SCHEDULE, weights_only=True)
            if set(kept) != set({} if scheduler is None else scheduler.state_dict()):
                raise LedgerError(
                    f"{str(checkpoint)!r} was saved {'with another' if kept else 'without a'} scheduler than this run "
                    f"has ({type(scheduler).__name__}).",
                    why="training would not go on as it was planned, and nothing would show it.",
                    fix="begin with the optimizer and the scheduler of the first run.",
                )
            with settings_are_kept(optimizer):
                saved = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
                optimizer.load_state_dict(saved)
            if kept:
                scheduler.load_state_dict(kept)
    with damage_is_named(str(checkpoint), file_of_this_rank()):
        return read_generators(checkpoint)


def read_weights(checkpoint: Path, model: Any) -> None:
    """Reads them from Trainer's files, of a model or of its adapters.

    Raises:
        LedgerError: there are no safetensors.
    """
    if has_adapters(model):
        read_adapters(checkpoint, model)
        return
    device = next(model.parameters()).device
    paths = sorted(checkpoint.glob("model*.safetensors"))
    if not paths:
        raise LedgerError(
            f"{str(checkpoint)!r} has its weights in no model.safetensors.",
            why="a loop of one's own reads no others, and would go on from weights that were not trained.",
            fix="resume with DPTrainer, or from a checkpoint with save_safetensors and whole weights.",
        )
    for path in paths:
        nn.Module.load_state_dict(model, load_file(path, device=str(device)), strict=False)
    if callable(getattr(model, "tie_weights", None)):
        model.tie_weights()
    read_renamed(checkpoint, model)
