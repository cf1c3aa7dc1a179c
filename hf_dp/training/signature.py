"""What an editor and `help` are told of a trainer's arguments: those of the trainer behind it, and the promise."""

from __future__ import annotations

import inspect
from collections.abc import Callable

OURS = ("privacy", "max_tokens_per_micro_batch")


def tell(kind: type, mixin: type) -> None:
    """Gives a class behind `mixin` the signature of the trainer behind it, with the promise; `inspect` reads it."""
    made = kind.__init__  # type: ignore[misc]
    if made is mixin.__init__:  # type: ignore[misc]
        behind = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
        made = next(vars(one)["__init__"] for one in behind if "__init__" in vars(one))
        parts = [one for one in _parameters(made) if one.name not in OURS]
        ours = [one for one in _parameters(mixin.__init__) if one.name in OURS]  # type: ignore[misc]
        at = next((i for i, one in enumerate(parts) if one.kind is one.VAR_KEYWORD), len(parts))
        told = [*parts[:at], *ours, *parts[at:]]
    else:
        told = _parameters(made)
    kind.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]


def _parameters(made: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(made).parameters.values())[1:]
