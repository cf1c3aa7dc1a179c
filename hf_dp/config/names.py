"""Names that a promise does not have, and what they are called here. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError

# As papers, Opacus, dp-transformers, fastDP, TensorFlow Privacy and Trainer call them.
_CALLED_HERE = {
    "eps": "target_epsilon",
    "epsilon": "target_epsilon",
    "budget": "target_epsilon",
    "sigma": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "noise_level": "noise_multiplier",
    "noise_std": "noise_multiplier",
    "delta": "target_delta",
    "clip": "clipping_norm",
    "clip_norm": "clipping_norm",
    "l2_norm_clip": "clipping_norm",
    "max_grad_norm": "clipping_norm",
    "per_sample_max_grad_norm": "clipping_norm",
    "clipping_mode": "clipping",
    "clipping_fn": "clipping",
    "clipping_style": "clipping",
    "secure_mode": "noise",
    "sample_rate": "sampling_probability",
    "sampling_rate": "sampling_probability",
    "sample_size": "dataset_size",
    "unit_column": "unit",
    "user_column": "unit",
    "accounting_mode": "accountant",
}


def refuse_unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuses `names` that `kind` does not have; says which of the `known` may be meant.

    Raises:
        ConfigurationError: with all of them.
    """
    known = sorted(known)
    others = [name for name in names if name not in known]
    if not others:
        return
    meant = {name: _meant(name, known) for name in others}
    told = [f"{near} for {shown(name)}" for name, near in meant.items() if near is not None]
    raise ConfigurationError(
        f"{kind} got {', '.join(map(shown, others))}, which it does not have.",
        why="nothing would follow from it, and the promise would not be the one that was meant.",
        fix=f"give {', '.join(told)}." if told else f"use only these: {', '.join(known)}.",
    )


def _meant(name: str, known: list[str]) -> str | None:
    here = _CALLED_HERE.get(str(name).lower())
    if here in known:
        return here
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    return near[0] if near else None
