"""Autograd Functions that compute from parameters alone: operations on constants, as any other (LoHa's products).

A Function does not show what it is given to whoever watches operations. One that gets data besides is left as it is:
the gradient that reaches a parameter through it is seen, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.watched import WatchedParameter, flatten


class Applied:
    """What a Function computes, as an operation with its name.

    Args:
        kind: the class of the Function.
        apply: of it, as torch has it.
    """

    def __init__(self, kind: Any, apply: Callable[..., Any]) -> None:
        self._kind, self._apply = kind, apply
        self.__module__, self.__qualname__ = kind.__module__, kind.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self._kind, *args, **kwargs)


@contextmanager
def functions_seen() -> Iterator[None]:
    """Inside, a Function of parameters alone, and of numbers, is called as an operation that its rule is asked for."""
    kept = torch.autograd.Function.__dict__["apply"]
    plain = kept.__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = flatten((args, kwargs))
        watched = [a for a in given if isinstance(a, WatchedParameter)]
        if not watched or not all(_is_constant(a) for a in given):
            return plain(cls, *args, **kwargs)

        return watched[0].source.watch.call(Applied(cls, plain), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = kept  # type: ignore[method-assign]


def _is_constant(value: Any) -> bool:
    """Not of what may have a row for each example, nor code, as reentrant checkpoints are given."""
    if isinstance(value, Tensor):
        return isinstance(value, WatchedParameter) or (value.dim() == 0 and not value.requires_grad)
    return not callable(value)
