"""Arguments of every recipe: a YAML file, flags, or a YAML file and flags that win over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_dp import PrivacyConfig


def parse(recipe: type) -> tuple[Any, TrainingArguments, PrivacyConfig]:
    """The recipe's own arguments, Transformers' and the promise, from the command line."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        values = yaml.safe_load(Path(arguments[0]).read_text(encoding="utf-8"))
        values.pop("recipe", None)  # which script this is, for hf-dp train
        arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))] + arguments[1:]
    parser = HfArgumentParser((recipe, TrainingArguments, PrivacyConfig))
    return parser.parse_args_into_dataclasses(arguments)
