"""Arguments of every recipe: a YAML file, flags, or a YAML file and flags that win over it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import parse_flag_from_env
from transformers import HfArgumentParser, TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError

# Enough to see that a recipe runs from end to end on a machine: seconds, and no result.
SMOKE = {
    "max_steps": "2",
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "2",
    "logging_steps": "1",
    "save_strategy": "no",
    "max_examples": "64",
}


@dataclass
class CommonArguments:
    """What every recipe knows beside its own arguments, Transformers' and the promise's."""

    smoke: bool = field(
        default=False,
        metadata={"help": "Two steps on a few examples, to see in seconds that all is in place; other flags win."},
    )
    re_attention: str | None = field(
        default=None,
        metadata={"help": "Fields of ReAttentionConfig: a mapping in YAML, JSON as a flag; {} for all defaults."},
    )
    privacy_seed: int | None = field(
        default=None,
        metadata={"help": "Batches and noise from this seed, to compare settings: such a run is not private."},
    )


def parse(recipe: type) -> tuple[Any, TrainingArguments, PrivacyConfig]:
    """The recipe's own arguments, Transformers' and the promise, from the command line.

    Args:
        recipe: a dataclass that has `max_examples: int | None = None`: how many examples of each split to use.

    Raises:
        ConfigurationError: arguments that Transformers, the promise or the recipe refuses; FSDP, asked for by them or
            by `accelerate launch`.
    """
    flags, settings = sys.argv[1:], []
    if flags and flags[0].endswith((".yaml", ".yml")):
        values = yaml.safe_load(Path(flags.pop(0)).read_text(encoding="utf-8"))
        values.pop("recipe", None)  # which script this is, for hf-dp train
        settings = _as_flags(
            {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in values.items()}
        )
    parser = HfArgumentParser((recipe, TrainingArguments, PrivacyConfig, CommonArguments))
    if parser.parse_args(settings + flags).smoke:
        settings += _as_flags(SMOKE)
    try:
        made, training, privacy, common = parser.parse_args_into_dataclasses(settings + flags)
        attention = None if common.re_attention is None else json.loads(common.re_attention)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(
            f"{error}.", why="no training could begin with these arguments.", fix="--help lists them all."
        ) from error
    if training.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ConfigurationError(
            "a recipe under FSDP.",
            why="recipes score a model before it is in shards, and some sample from it at the end, one process alone: "
            "with shards that fails, or waits for the others for ever, after the budget is spent.",
            fix="train under DDP (accelerate launch or torchrun without FSDP); or train in shards with DPTrainer in a "
            "script of your own, and sample from the saved model in one process.",
        )
    return made, training, privacy.replace(seed=common.privacy_seed, re_attention=attention)


def _as_flags(values: dict[str, str]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", value)]
