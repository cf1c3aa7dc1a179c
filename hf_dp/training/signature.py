"""What an editor and `help` are told of a trainer's arguments: those of the trainer behind it, and the promise; and
what is said where one is missing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from transformers import Trainer

from hf_dp.errors import ConfigurationError

OURS = ("privacy", "max_tokens_per_micro_batch")
# What may be given for arguments without a default.
_SUCH_AS = {
    "privacy": "PrivacyConfig(target_epsilon=8.0)",
    "collate": "DataCollatorWithPadding(tokenizer)",
    "expected_batch_size": "512",
    "micro_batch_size": "16",
    "steps": "100",
}
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Made = TypeVar("Made", bound=Callable[..., None])


def all_given(made: Made) -> Made:
    """An `__init__` that says of arguments which it lacks what they may be; Python would name them alone.

    Raises:
        ConfigurationError: with all of them.
    """
    told = inspect.signature(made)
    needed = {name for name, one in told.parameters.items() if one.default is one.empty and one.kind not in _ANY}

    @functools.wraps(made)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        with suppress(TypeError):  # of arguments that there are not: it is raised again below
            given = told.bind_partial(self, *args, **kwargs).arguments
            if missing := [name for name in told.parameters if name in needed - given.keys()]:
                raise ConfigurationError(
                    f"{type(self).__name__} without {', '.join(missing)}.",
                    why="what the guarantee follows from has no default, and is not guessed.",
                    fix=f"give {', '.join(f'{name}={_SUCH_AS.get(name)}' for name in missing)}, for example.",
                )
        made(self, *args, **kwargs)

    return cast("Made", call)


def tell(kind: type, mixin: type) -> None:
    """Gives a class behind `mixin` the signature of the trainer behind it, with the promise; `inspect` reads it.

    Raises:
        ConfigurationError: a trainer is before the mixin.
    """
    _refuse_order(kind, mixin)
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


def _refuse_order(kind: type, mixin: type) -> None:
    before = kind.__mro__[: kind.__mro__.index(mixin)]
    first = next((one for one in before if issubclass(one, Trainer) and not issubclass(one, mixin)), None)
    if first is not None:
        raise ConfigurationError(
            f"{kind.__name__} has {first.__name__} before {mixin.__name__}.",
            why="its steps would run in place of the private ones, without clipping and noise.",
            fix=f"put the mixin first: class {kind.__name__}({mixin.__name__}, {first.__name__}).",
        )


def _parameters(made: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(made).parameters.values())[1:]
