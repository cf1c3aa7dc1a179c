"""Random effects that one number decides for all examples, known by the names of what switches them off."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError

logger = logging.getLogger(__name__)

# By names that families share: the ends of attributes of modules and configs, and what they are when off.
_SWITCHES = {"layerdrop": 0.0, "apply_spec_augment": False}
_SPEC_AUGMENT = ("mask_time_prob", "mask_feature_prob")


class Switches:
    """What was switched off for private training, in modules and configs, and must stay so."""

    def __init__(self) -> None:
        self._off: list[tuple[Any, str, Any, str]] = []
        self._settled: list[tuple[Any, str]] = []

    def turn_off(self, owner: Any, name: str, off: Any, said: str) -> str:
        """Gives `owner` the value `off` by this name; `said` is what it was, in words."""
        setattr(owner, name, off)
        self._off.append((owner, name, off, said))
        return said

    def settle(self, owner: Any, name: str) -> None:
        """Gives `owner` from the beginning what each pass gives it by this name: True."""
        setattr(owner, name, True)
        self._settled.append((owner, name))

    def put_off_again(self) -> None:
        """After what has put back values as they were before."""
        for owner, name in self._settled:
            setattr(owner, name, True)
        for owner, name, off, _ in self._off:
            setattr(owner, name, off)

    def refuse_on_again(self) -> None:
        """Before a step.

        Raises:
            ConfigurationError: something has switched one on.
        """
        for owner, name, off, said in self._off:
            if getattr(owner, name, off) != off:
                raise ConfigurationError(
                    f"{said} was switched off for private training, and {name} is {getattr(owner, name)!r} again.",
                    why="it draws one random number for all examples of a micro-batch, and clipping bounds what each "
                    "example adds only where examples have numbers of their own.",
                    fix="leave it off: set it where the model is made, if at all, and not in a callback or the loop.",
                )


def switches_of(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """(the module or config, the name, what it is when off) of each, be it on or off."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found: list[tuple[Any, str, Any]] = []
    for owner in [*configs.values(), *model.modules()]:
        values = vars(owner)
        found += [(owner, n, off) for end, off in _SWITCHES.items() for n in values if n.endswith(end)]
        if "apply_spec_augment" not in values:
            # There it is on wherever it masks anything.
            found += [(owner, name, 0.0) for name in _SPEC_AUGMENT if name in values]
    return found


def is_on(owner: Any, name: str, off: Any) -> bool:
    """Whether a switch is."""
    value = getattr(owner, name, off)
    return isinstance(value, (bool, int, float)) and value != off


def switch_off(model: nn.Module, switches: Switches | None = None) -> list[str]:
    """Switches off LayerDrop and SpecAugment, whose coins fall for a whole micro-batch.

    Returns:
        What was switched off, with the value that it had.
    """
    found, switches = dict[str, None](), switches or Switches()
    for owner, name, off in switches_of(model):
        if is_on(owner, name, off):
            found[switches.turn_off(owner, name, off, f"{name}={getattr(owner, name)}")] = None
    return list(found)


def warn_of(off: list[str]) -> None:
    """Says what was switched off, once."""
    ranks.warn(
        logger,
        "Switched off for private training: %s. It draws one random number for all examples of a micro-batch, and "
        "clipping bounds what each example adds only where examples have numbers of their own.",
        ", ".join(off),
    )
