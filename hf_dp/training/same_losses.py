"""Do all ranks compute the same of the same rows? Data, model and settings may agree, and a collator or a loss not."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.data.failing_rows import failures_refused
from hf_dp.data.first_seen import left_as_it_was
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.state import put_back, uncompiled
from hf_dp.per_example.sharding import is_sharded, reshard
from hf_dp.randomness import key_global_state, unchanged_global_state
from hf_dp.training.engine import Engine

_ROWS = 4
# Far above what other hardware rounds otherwise, also in 16 bits, and below what another loss of a row is.
_TOLERANCE = 0.01
# A GPU may add up in another order at a second look.
_SAME = 0.001


def check_together(engine: Engine) -> None:
    """`Engine.check`, on ranks that have the same losses of the same few rows. All call it together.

    Before it, since shards are not whole where each rank has other rows: its own errors would blame a rule for it.
    Rows, collators and losses that draw numbers find these seeded alike; what comes out otherwise at a second look all
    the same is not compared.

    Raises:
        UnsupportedModelError, ConfigurationError: those of `Engine.check`; or, on all ranks, that they differ.
    """
    if ranks.world_size() > 1:
        _refuse_other_losses(engine)
    engine.check()


def _refuse_other_losses(engine: Engine) -> None:
    key = ranks.secret_from_first(secrets.token_bytes(32))
    engine.model.train()
    dataset: Any = engine.loader.dataset
    collate: Any = engine.loader.collate_fn
    memory, losses = engine.looks()
    with uncompiled(), unchanged_global_state(), put_back(engine.model), torch.no_grad():
        # As if no row had been seen: what keeps something of its first ones, the check would not see it begin.
        with memory.restored(), left_as_it_was(dataset.dataset, collate):
            looks = [_losses(engine.model, dataset, losses, key) for _ in range(2)]
        reshard(engine.model)
    pairs = zip(*looks, strict=True)
    table = ranks.gathered([one if math.isclose(one, other, rel_tol=_SAME) else math.nan for one, other in pairs])
    far = (table - table[0]).abs() > _TOLERANCE * table[0].abs().clamp(min=1)
    if odd := [str(rank) for rank, rows in enumerate(far.tolist()) if any(rows)]:
        raise ConfigurationError(
            f"rank {', '.join(odd)} has not the same losses as rank 0, of the same rows of train_dataset.",
            why="the ranks would add up gradients of different losses, or of rows that are collated in other ways.",
            fix="start every rank with the same script: the same collator (and its tokenizer), the same loss, and the "
            "same code of the model.",
        )


def _losses(model: nn.Module, dataset: Any, losses: Callable[[list[Any]], Tensor], key: bytes) -> list[float]:
    """Of rows from all over the data, each by itself; NaN where one fails, of which the check says more."""
    last, found = len(dataset) - 1, list[float]()
    for number, index in enumerate(sorted({i * last // (_ROWS - 1) for i in range(_ROWS)})):
        key_global_state(key, number)
        try:
            with failures_refused():
                found.append(float(losses([dataset[index]]).sum()))
        except Exception:
            # FSDP2 begins no other forward pass before this one has ended.
            if is_sharded(model):
                raise
            found.append(math.nan)
    return found
