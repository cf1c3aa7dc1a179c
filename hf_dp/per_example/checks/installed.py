"""The modules of a model and what is hooked to them: what was checked is what they were then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

_KNOWN = 4
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_ALL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")


class Installed:
    """As `model` is now. What it holds besides, `Memory` is asked of.

    Args:
        before: where it was otherwise, and checked; of these the latest stay known, so that a hook may come and go.
    """

    def __init__(self, model: nn.Module, before: Installed | None = None) -> None:
        earlier = [] if before is None else before._known
        self._known: list[list[Any]] = [list(_installed(model)), *earlier][:_KNOWN]

    def is_of(self, model: nn.Module) -> bool:
        """Whether it has these modules still, or those of before, of the same classes and forward methods, in the same
        places, and hooks that are the same objects."""
        now = list(_installed(model))
        return any(len(now) == len(known) and all(map(_is, now, known)) for known in self._known)


def _installed(model: nn.Module) -> Iterator[Any]:
    for name in _OF_ALL:
        yield from getattr(of_all, name).values()
    for path, module in model.named_modules():
        own = vars(module)
        yield from (path, module, type(module), own.get("forward"))
        for name in _HOOKS:
            yield from own[name].values()


def _is(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, str) and now == before)
