"""What is switched on around the steps, and what is trained: as it was when the engine was held against the oracle, or
nothing is known."""

from __future__ import annotations

import torch
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.modules import named_parameters, refuse_no_numbers

_TRAINED = "more trained parameters"


def surroundings(model: nn.Module) -> dict[str, object]:
    """What decides in which precision a model computes, but for what it does itself; and what of it is trained.

    Raises:
        ConfigurationError: no gradients can be computed here, or not of this model.
    """
    _refuse_no_gradients()
    named = named_parameters(model)
    refuse_no_numbers(named)
    kinds = sorted({p.device.type for p in named.values()})
    return {
        "another torch.autocast": [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)],
        "another dtype of weights": {name: p.dtype for name, p in named.items()},
        _TRAINED: {name for name, p in named.items() if p.requires_grad},
    }


def refuse_other_surroundings(begun_in: dict[str, object], model: nn.Module) -> None:
    """Refuses a step in other `surroundings` than those that the training began in (`ConfigurationError`)."""
    now = surroundings(model)
    if others := [name for name in begun_in if _differs(now[name], begun_in[name])]:
        raise ConfigurationError(
            f"a private step with {' and '.join(others)} than the training began with{_first(now, begun_in)}.",
            why="that gradients are exact for each example was found out as it was then, and is not known of others.",
            fix="choose the precision, and what is trained, before the training begins, and leave both. What is "
            "unfrozen later, or an adapter that is switched to, is for a training of its own: end this one with "
            "save_model(), and begin another with PrivacyConfig(after=...), which has one budget with it.",
        )


def _differs(now: object, before: object) -> bool:
    """Of weights that are not those of before, others ask; what is frozen later is no longer trained, and no more."""
    if isinstance(now, set) and isinstance(before, set):
        return not now <= before
    if isinstance(now, dict) and isinstance(before, dict):
        return any(before.get(name, dtype) != dtype for name, dtype in now.items())
    return now != before


def _first(now: dict[str, object], before: dict[str, object]) -> str:
    """The name of a parameter that was not trained then."""
    more, known = now[_TRAINED], before[_TRAINED]
    names = sorted(more - known) if isinstance(more, set) and isinstance(known, set) else []
    return f" ({names[0]} the first)" if names else ""


def _refuse_no_gradients() -> None:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise ConfigurationError(
            f"a private training under {mode}.",
            why="torch computes no gradients there.",
            fix="leave it for evaluations, and begin and step outside of it.",
        )
