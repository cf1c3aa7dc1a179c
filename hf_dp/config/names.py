"""Names that a promise does not have, and what they are called here. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError

# As papers, Opacus, dp-transformers, fastDP, TensorFlow Privacy and Trainer call them.
_CALLED_HERE = {
    "eps": "target_epsilon",
    "target_eps": "target_epsilon",
    "epsilon": "target_epsilon",
    "budget": "target_epsilon",
    "sigma": "noise_multiplier",
    "noise_scale": "noise_multiplier",
    "noise_level": "noise_multiplier",
    "noise_std": "noise_multiplier",
    "delta": "target_delta",
    "clip": "clipping_norm",
    "c": "clipping_norm",
    "max_norm": "clipping_norm",
    "clip_threshold": "clipping_norm",
    "clipping_threshold": "clipping_norm",
    "clip_norm": "clipping_norm",
    "l2_norm_clip": "clipping_norm",
    "max_grad_norm": "clipping_norm",
    "per_sample_max_grad_norm": "clipping_norm",
    "clipping_mode": "clipping",
    "clipping_fn": "clipping",
    "clipping_style": "clipping",
    "secure_mode": "noise",
    "secure_rng": "noise",
    "noise_type": "noise",
    "mechanism": "noise",
    "noise_seed": "seed",
    "q": "sampling_probability",
    "sampling_prob": "sampling_probability",
    "sample_rate": "sampling_probability",
    "sampling_rate": "sampling_probability",
    "unit_column": "unit",
    "user_column": "unit",
    "user_id": "unit",
    "user_level": "unit",
    "privacy_unit": "unit",
    "max_examples_per_user": "max_examples_per_unit",
    "accounting_mode": "accountant",
    "accountant_type": "accountant",
}
# What is given to the training, and not promised. A name here that looks alike would be another mechanism.
_ELSEWHERE = {
    "the expected batch size is per_device_train_batch_size x gradient_accumulation_steps of TrainingArguments, or "
    "expected_batch_size of PrivateRun": (
        *("batch_size", "expected_batch_size", "logical_batch_size", "lot_size", "train_batch_size"),
    ),
    "a micro-batch has per_device_train_batch_size of TrainingArguments, or micro_batch_size of PrivateRun": (
        *("max_physical_batch_size", "micro_batch_size", "microbatch_size", "num_microbatches"),
    ),
    "the steps follow from num_train_epochs or max_steps of TrainingArguments, or are steps of PrivateRun": (
        *("epochs", "max_steps", "num_epochs", "num_steps", "num_train_epochs", "steps"),
    ),
    "learning_rate is of TrainingArguments, or of your optimizer": ("learning_rate", "lr"),
    "the training dataset is counted; dataset_size is for a number that is secret": (
        *("dataset_len", "n", "num_examples", "num_samples", "sample_size"),
    ),
    "batches are Poisson samples as it is": ("poisson", "poisson_sampling"),
    "gradients are clipped by ghost norms as it is": ("ghost_clipping", "grad_sample_mode"),
}
_WAYS = {name: way for way, names in _ELSEWHERE.items() for name in names}
# Less alike is no slip of the pen: whoever took `max_batch_size` for a batch size would get another mechanism.
_ALIKE = 0.8


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
    told = [f"give {near} for {shown(name)}" for name, near in meant.items() if near is not None]
    told += [f"leave out {shown(name)}: {way}" for name in others if (way := _WAYS.get(_plain(name)))]
    raise ConfigurationError(
        f"{kind} got {', '.join(map(shown, others))}, which it does not have.",
        why="nothing would follow from it, and the promise would not be the one that was meant.",
        fix=f"{'; '.join(told)}." if told else f"use only these: {', '.join(known)}.",
    )


def _meant(name: str, known: list[str]) -> str | None:
    here = _CALLED_HERE.get(_plain(name))
    if here in known:
        return here
    near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=_ALIKE)
    return near[0] if near and _plain(name) not in _WAYS else None


def _plain(name: str) -> str:
    return str(name).lower()
