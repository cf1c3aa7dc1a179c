"""While a trainer trains privately, no optimizer but its own moves the weights of its model, and nothing writes into
what is saved beside them.

A loop of one's own holds its weights against those of its latest step; what callbacks of a trainer write into weights
is not looked at, since some of it is nothing but averages of them. An optimizer has gradients, and these come of data,
as statistics do.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.memory import buffers_told, told_of
from hf_dp.per_example.checks.state import is_saved
from hf_dp.per_example.checks.values import NOTHING
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
        self._buffers: dict[str, Any] | None = None  # until the first step begins
        if model is not None:
            _AT_WORK.add(self)

    @property
    def model(self) -> nn.Module | None:
        """Where others are asked about."""
        return None if self._model is None else self._model()

    def forget(self) -> None:
        """Others may move them again; what was written into them by then is not forgotten."""
        # An accelerator that is lost answers nothing, which must not hide the reason.
        with suppress(RuntimeError):
            if (model := self.model) is not None and (written := self._written()):
                modules = dict(model.named_modules())
                for name, was in written.items():
                    path, _, last = name.rpartition(".")
                    # That of the buffer, which what an adapter is merged into has too.
                    holder, place = (modules[path], last) if path in modules else (model, name)
                    _SPOILT.setdefault(holder, {}).setdefault(place, was)
        _AT_WORK.discard(self)

    def written(self) -> str | None:
        """The name of a saved buffer that something has changed, added or taken away since the first step began."""
        return next(iter(self._written()), None)

    def _written(self) -> dict[str, Any]:
        """By their names, what such buffers were: checksums."""
        if (model := self.model) is None or (then := self._buffers) is None:
            return {}
        now = buffers_told(model, then)
        found = {
            name: then[name][2] if name in then else NOTHING
            for name in sorted({*then, *now}, key=lambda name: (name in then and name in now, name))
            if name not in then or name not in now or then[name][2] != now[name][2]
        }
        if not found:  # What was written and is the same is not summed up again.
            self._buffers = now
        return found

    def refuse_written(self) -> None:
        """See `refuse_other_buffers`, of a step. In shards nothing is noted: ranks would look together."""
        if (model := self.model) is not None and self._buffers is None and not is_sharded(model):
            self._buffers = buffers_told(model, {})
        _refuse("a private step", self.written())

    def refuse(self, other: torch.optim.Optimizer, *, asks: bool) -> None:
        """See `refuse_others`; `asks` for gradients that are not there yet."""
        model = self.model
        if model is None or self.depth or other is self._optimizer:
            return
        own = {id(p): name for name, p in model.named_parameters()}
        held = (p for group in other.param_groups for p in group["params"])
        moved = (p for p in held if p.grad is not None or (asks and p.requires_grad))
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
# By module its buffers that were changed in a training which has ended, and what they were: checksums.
_SPOILT: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def closure_of(args: Any, kwargs: Any) -> Any:
    """What a call of an optimizer's `step` was given to compute gradients with."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def refuse_others(optimizer: Any, closure: Any) -> None:
    """Before an optimizer steps: refuses that it moves weights of a training that another one is held to
    (`ConfigurationError`)."""
    for one in list(_AT_WORK):
        one.refuse(optimizer, asks=closure is not None)


def refuse_other_buffers(model: Any) -> None:
    """Refuses to save a model with buffers that something else than its training has changed, since the first step
    (`ConfigurationError`)."""
    found = (name for one in list(_AT_WORK) if one.model is model and (name := one.written()) is not None)
    _refuse("saving a model", next(found, None) or _spoilt(model))


def refuse_spoilt(model: Any) -> None:
    """Refuses to train what could not be saved (`ConfigurationError`)."""
    _refuse("training a model", _spoilt(model))


def _spoilt(model: Any) -> str | None:
    """The name of a buffer that is not again what it was before something changed it in a training that has ended."""
    for path, holder in model.named_modules() if _SPOILT and model is not None else ():
        for name, was in _SPOILT.get(holder, {}).items():
            if _told(holder, name) != was:
                return f"{path}.{name}".lstrip(".")
    return None


def _told(holder: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    owner = dict(holder.named_modules()).get(path)
    if owner is None or last not in owner._buffers or not is_saved(owner, last):
        return NOTHING
    return told_of(owner._buffers[last])


def _refuse(what: str, name: str | None) -> None:
    if name is not None:
        raise ConfigurationError(
            f"{what}, after something else than the private training has changed the saved buffer {name}.",
            why="it goes out with the model, and what a callback computes of private data (statistics of a norm, say) "
            "has no noise and is in no ledger.",
            fix="leave saved buffers alone while the training is at work, and write into a copy of the model "
            "(copy.deepcopy); register what need not be saved with persistent=False. Where it has happened, load "
            "the model anew, or resume from a checkpoint. A model that is saved without a record, by its "
            "save_pretrained(), makes no promise.",
        )
