"""While a trainer trains privately, no optimizer but its own moves the weights of its model.

A loop of one's own holds its weights against those of its latest step; what callbacks of a trainer write into weights
is not looked at, since some of it is nothing but averages of them. An optimizer has gradients, and these come of data.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_dp.errors import ConfigurationError


class Alone:
    """An optimizer that is held to its private steps, and what else must not be moved by another.

    Args:
        optimizer: plain.
        model: that it trains, frozen parameters too; None where others are not asked about.

    Attributes:
        depth: in how many calls of its `step` it is, which may be made of those of others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        self.depth = 0
        self._optimizer = optimizer
        self._model = None if model is None else weakref.ref(model)
        if model is not None:
            _AT_WORK.add(self)

    def forget(self) -> None:
        """Others may move them again."""
        _AT_WORK.discard(self)

    def refuse(self, other: torch.optim.Optimizer) -> None:
        """See `refuse_others`."""
        model = None if self._model is None else self._model()
        if model is None or self.depth or other is self._optimizer:
            return
        own = {id(p): name for name, p in model.named_parameters()}
        moved = (p for group in other.param_groups for p in group["params"] if p.grad is not None)
        if (name := next((own[id(p)] for p in moved if id(p) in own), None)) is not None:
            raise ConfigurationError(
                f"{type(other).__name__}.step() on weights of a private training that is at work ({name}).",
                why="what it moves them by is in no ledger, or in another one, and would be saved under that of this "
                "training. It moved nothing.",
                fix="train them by the trainer alone; in a callback train a copy of the model (copy.deepcopy). What "
                "is to be trained besides, on other data or by another loop, has its turn before or after: a private "
                "training with PrivacyConfig(after=...) has one budget with it.",
            )


_AT_WORK = weakref.WeakSet[Alone]()


def refuse_others(optimizer: Any) -> None:
    """Before an optimizer steps: refuses that it moves weights of a training that another one is held to
    (`ConfigurationError`)."""
    for one in list(_AT_WORK):
        one.refuse(optimizer)
