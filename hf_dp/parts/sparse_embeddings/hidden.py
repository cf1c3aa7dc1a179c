"""Tables that others must not see: Trainer's optimizer, which would move all rows, and DDP's wrapper."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

import hf_dp.ranks as ranks

# What DistributedDataParallel reads off a model that it is to wrap.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@contextmanager
def frozen(tables: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, the tables are not trained."""
    for table in tables:
        table.requires_grad_(False)
    try:
        yield
    finally:
        for table in tables:
            table.requires_grad_(True)


def hide_from_wrapper(model: nn.Module, tables: Mapping[str, nn.Parameter]) -> None:
    """Keeps DDP's wrapper, which is not run, from making a dense gradient of each table.

    What it does besides is done here: every rank gets rank 0's values. A model that trains nothing else is not hidden,
    since DDP wraps no model that has nothing to train.
    """
    hidden = {id(table) for table in tables.values()}
    if ranks.world_size() == 1 or not any(p.requires_grad and id(p) not in hidden for p in model.parameters()):
        return
    for table in tables.values():
        ranks.from_first_(table.detach())
    vars(model)[_IGNORED] = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in hidden}


def show_to_wrapper(model: nn.Module) -> None:
    """Undoes `hide_from_wrapper`, so that a later training without this one gets all gradients reduced."""
    vars(model).pop(_IGNORED, None)
