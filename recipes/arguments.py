"""Arguments of every recipe: a YAML file, flags, or a YAML file and flags that win over it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_dp import PrivacyConfig


@dataclass
class PromiseArguments:
    """What of the promise has no flag of its own."""

    re_attention: str | None = field(
        default=None,
        metadata={"help": "Fields of ReAttentionConfig: a mapping in YAML, JSON as a flag; {} for all defaults."},
    )
    privacy_seed: int | None = field(
        default=None,
        metadata={"help": "Batches and noise from this seed, to compare settings: such a run is not private."},
    )


def parse(recipe: type) -> tuple[Any, TrainingArguments, PrivacyConfig]:
    """The recipe's own arguments, Transformers' and the promise, from the command line."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        values = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
        values.pop("recipe", None)  # which script this is, for hf-dp train
        given = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in values.items()}
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)] + arguments[1:]
    parser = HfArgumentParser((recipe, TrainingArguments, PrivacyConfig, PromiseArguments))
    made, training, privacy, besides = parser.parse_args_into_dataclasses(arguments)
    attention = None if besides.re_attention is None else json.loads(besides.re_attention)
    return made, training, privacy.replace(seed=besides.privacy_seed, re_attention=attention)
