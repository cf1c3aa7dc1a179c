"""While a trainer trains privately, no optimizer but its own moves the weights of its model, and nothing writes into
what is saved beside them.

A loop of one's own holds its weights against those of its latest step; what callbacks of a trainer write into weights
is not looked at, since some of it is nothing but averages of them. An optimizer has gradients, and these come of data,
as statistics do.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.memory import buffers_told
from hf_dp.per_example.sharding import is_sharded


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
        self._buffers: dict[str, Any] | None = None  # until the first step
        if model is not None:
            _AT_WORK.add(self)

    @property
    def model(self) -> nn.Module | None:
        """Where others are asked about."""
        return None if self._model is None else self._model()

    def forget(self) -> None:
        """Others may move them again; what was written into them by then is not forgotten."""
        if self.model is not None and (name := self.written()) is not None:
            modules = dict(self.model.named_modules())
            # That of the buffer, which what an adapter is merged into has too.
            _SPOILT[modules.get(name.rpartition(".")[0], self.model)] = name
        _AT_WORK.discard(self)

    def note(self) -> None:
        """What is saved beside the weights is as it should be. Not noted in shards, where ranks would look together."""
        if (model := self.model) is not None and not is_sharded(model):
            self._buffers = buffers_told(model, self._buffers or {})

    def written(self) -> str | None:
        """The name of a saved buffer that something has changed, added or taken away since."""
        if (model := self.model) is None or self._buffers is None:
            return None
        then, now = self._buffers, buffers_told(model, self._buffers)
        others = (name for name in sorted({*then, *now}) if name not in now or name not in then)
        changed = (name for name in sorted(then.keys() & now.keys()) if then[name][2] != now[name][2])
        return next(others, None) or next(changed, None)

    def refuse_written(self) -> None:
        """See `refuse_other_buffers`, of a step."""
        _refuse("a private step", self.written())

    def refuse(self, other: torch.optim.Optimizer) -> None:
        """See `refuse_others`."""
        model = self.model
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
# By module the name of its buffer that was changed in a training which has ended.
_SPOILT: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def refuse_others(optimizer: Any) -> None:
    """Before an optimizer steps: refuses that it moves weights of a training that another one is held to
    (`ConfigurationError`)."""
    for one in list(_AT_WORK):
        one.refuse(optimizer)


def refuse_other_buffers(model: Any) -> None:
    """Refuses to save a model with buffers that something else than its training has changed, since the latest step
    (`ConfigurationError`)."""
    found = [name for one in list(_AT_WORK) if one.model is model and (name := one.written()) is not None]
    found += [_SPOILT[module] for module in model.modules() if module in _SPOILT] if _SPOILT else []
    _refuse("saving a model", next(iter(found), None))


def _refuse(what: str, name: str | None) -> None:
    if name is not None:
        raise ConfigurationError(
            f"{what}, after something else than the private training has changed the saved buffer {name}.",
            why="it goes out with the model, and what a callback computes of private data (statistics of a norm, say) "
            "has no noise and is in no ledger.",
            fix="leave saved buffers alone while the training is at work, and write into a copy of the model "
            "(copy.deepcopy); register what need not be saved with persistent=False. A model that is saved without a "
            "record, by its save_pretrained(), makes no promise.",
        )
