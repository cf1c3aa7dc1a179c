"""What configurations hold, which are saved with a model, and how it is put back."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dp.per_example.checks.state import Attributes, values_of
from hf_dp.per_example.checks.switches import switches_of
from hf_dp.per_example.checks.values import NOTHING, same

# What Transformers itself notes there in a pass, which follows from the kind of the labels.
_NOTED = {
    "problem_type": ("regression", "single_label_classification", "multi_label_classification"),
    "use_cache": (True, False),
}


def put_back_settings(model: nn.Module, before: Attributes) -> list[str]:
    """Makes what configurations hold what it was `before`; the names of what was otherwise. What is switched off for
    private training stays so."""
    off = {(id(owner), name): value for owner, name, value in switches_of(model)}
    changed = list[str]()
    for path, holder, values in before:
        if isinstance(holder, nn.Module):
            continue
        now = values_of(holder)
        for name in {**values, **now}:
            was, found = values.get(name, NOTHING), now.get(name, NOTHING)
            is_noted = isinstance(found, (str, bool)) and found in _NOTED.get(name, ())
            is_known = is_noted or _are_same(off.get((id(holder), name), NOTHING), found)
            if is_known or _are_same(was, found):
                continue
            if was is NOTHING:
                delattr(holder, name)
            else:
                setattr(holder, name, was)
            changed.append(f"{path}.{name}")
    return changed


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_same(value, other[key]) for key, value in one.items())
    return same(one, other)
