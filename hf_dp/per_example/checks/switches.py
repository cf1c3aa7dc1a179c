"""Random effects that one number decides for all examples, known by the names of what switches them off."""

from __future__ import annotations

import logging

from torch import nn

import hf_dp.ranks as ranks

logger = logging.getLogger(__name__)

# By names that families share: the ends of attributes of modules and configs, and what they are when off.
_SWITCHES = {"layerdrop": 0.0, "apply_spec_augment": False}
_SPEC_AUGMENT = ("mask_time_prob", "mask_feature_prob")


def switch_off(model: nn.Module) -> list[str]:
    """Switches off LayerDrop and SpecAugment, whose coins fall for a whole micro-batch.

    Returns:
        What was switched off, with the value that it had.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    found: dict[str, None] = {}
    for owner in [*configs.values(), *model.modules()]:
        values = dict(vars(owner))
        switches = {n: off for n in values for end, off in _SWITCHES.items() if n.endswith(end)}
        if "apply_spec_augment" not in values:
            # There it is on wherever it masks anything.
            switches |= {n: 0.0 for n in _SPEC_AUGMENT if n in values}
        for name, off in switches.items():
            is_on = isinstance(values[name], (bool, int, float)) and values[name] != off
            if is_on:
                setattr(owner, name, off)
                found[f"{name}={values[name]}"] = None
    return list(found)


def warn_of(off: list[str]) -> None:
    """Says what was switched off, once."""
    ranks.warn(
        logger,
        "Switched off for private training: %s. It draws one random number for all examples of a micro-batch, and "
        "clipping bounds what each example adds only where examples have numbers of their own.",
        ", ".join(off),
    )
