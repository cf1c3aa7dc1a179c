"""The modules of a model and what is hooked to them: what was checked is what they were then."""

from __future__ import annotations

import inspect
import logging
import operator
import types
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

import hf_dp.ranks as ranks
from hf_dp.per_example.modules import named_modules

logger = logging.getLogger(__name__)

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_THEIRS = ("transformers", "peft")
_ASKING = (".<locals>.make_inputs_require_grads", ".<locals>.make_inputs_require_grad")
OF_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


class Installed:
    """As `model` is now. What it holds besides, `Memory` is asked of; of modules beside it nothing is known."""

    def __init__(self, model: nn.Module) -> None:
        self._names, self._found = _installed(model)

    def is_of(self, model: nn.Module) -> bool:
        """Whether it has these modules still, of the same classes and with the same forward methods, in the same
        places, and the same hooks."""
        names, now = _installed(model)
        if names != self._names or len(now) != len(self._found):
            return False
        return all(map(operator.is_, now, self._found)) or all(map(_is, now, self._found))


def warn_of_change(changed: str | None = None) -> None:
    """Says that what was checked is no more, and is checked again: the value of this name has `changed`, or the model
    has other modules or hooks."""
    if changed is not None:
        ranks.warn(
            logger,
            "%s, which the losses read, is another than when they were checked, so the check before the first step is "
            "made again, as each time that such a value changes.",
            changed,
        )
        return
    ranks.warn(
        logger,
        "The model has other modules, forward methods or hooks than were checked, so the check before the first step "
        "is made again, as each time that there are new ones: what a callback hooks to the model is best there before "
        "train(), and one function. output_hidden_states=True in an evaluation hooks to it once.",
    )


def _installed(model: nn.Module) -> tuple[list[str], list[Any]]:
    """The names of modules, and what there is of each."""
    found = [hook for name in OF_ALL for hook in getattr(of_all, name).values()]
    forwards: dict[type, Any] = {}
    modules = named_modules(model)
    for _, module in modules:
        own, kind = vars(module), type(module)
        if kind not in forwards:
            # Not asked of the class, whose attribute may make another object each time.
            forwards[kind] = inspect.getattr_static(kind, "forward", None)
        found += (module, kind, own.get("forward"), own.get("_compiled_call_impl"), forwards[kind])
        for hooks in filter(None, map(own.__getitem__, _HOOKS)):
            known = list(map(_known, hooks.values()))
            found += [hook for hook in known if not isinstance(hook, str)]
            found += sorted({hook for hook in known if isinstance(hook, str)})
    return [name for name, _ in modules], found


def _known(hook: Any) -> Any:
    """A hook, or the name of one that is hooked once more each time that checkpointing is switched on, as TRL does for
    each step: it asks for gradients of embeddings, however often."""
    name = getattr(hook, "__qualname__", "")
    is_theirs = str(getattr(hook, "__module__", "")).partition(".")[0] in _THEIRS
    return name if is_theirs and name.endswith(_ASKING) else hook


def _is(now: Any, before: Any) -> bool:
    """Methods of one object are made anew each time that they are asked for."""
    return now is before or (isinstance(now, (str, types.MethodType)) and bool(now == before))
