"""The global generators' states, kept in a checkpoint and put back: dropout under a seed goes on as it would have."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import safe_globals

import hf_dp.ranks as ranks


def file_of_this_rank() -> str:
    """As Trainer names it."""
    return f"rng_state_{ranks.rank()}.pth" if ranks.world_size() > 1 else "rng_state.pth"


def save_generators(folder: Path) -> None:
    """Writes the states of `torch`, `numpy` and `random` in this process, as Trainer does."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        is_one = ranks.world_size() == 1
        states["cuda"] = torch.cuda.get_rng_state() if is_one else torch.cuda.get_rng_state_all()
    torch.save(states, folder / file_of_this_rank())


def read_generators(folder: Path) -> dict[str, Any]:
    """What `save_generators` wrote; nothing where it was written by other ranks."""
    path = folder / file_of_this_rank()
    if not path.is_file():
        return {}
    with safe_globals():
        states: dict[str, Any] = torch.load(path, weights_only=True)
    return states


def put_back(states: dict[str, Any]) -> None:
    """Sets the global generators to `states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.random.set_rng_state(states["cpu"])
    of_cuda = states.get("cuda")
    if of_cuda is not None and torch.cuda.is_available():
        if isinstance(of_cuda, list):
            torch.cuda.set_rng_state_all(of_cuda)
        else:
            torch.cuda.set_rng_state(of_cuda)
