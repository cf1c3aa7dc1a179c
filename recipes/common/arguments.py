"""Arguments of every recipe: a YAML file, flags, or a YAML file and flags that win over it."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from accelerate.utils import parse_flag_from_env
from transformers import HfArgumentParser, TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.cli.common import REFUSED
from hf_dp.cli.train import settings as read_settings
from hf_dp.errors import ConfigurationError, HfDpError, shortened
from hf_dp.launched import is_first
from hf_dp.places import is_name, nowhere
from hf_dp.training.refusals import private_arguments

# Enough to see that a recipe runs from end to end on a machine: seconds, and no result.
SMOKE = {
    "max_steps": "2",
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "2",
    "logging_steps": "1",
    "save_strategy": "no",
    "max_examples": "64",
}
# Each says the same in two ways: a flag takes the place of either in the file.
_ONE_OF = (
    ("target_epsilon", "noise_multiplier"),
    ("target_epsilon", "target_tpr"),
    ("target_tpr", "noise_multiplier"),
    ("max_steps", "num_train_epochs"),
)
# For recipes that make it themselves.
OWN_OPTIMIZER = dict.fromkeys(
    ("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), "the recipe has an optimizer of its own"
)
# What sizes and shares must be, in whichever recipe has them.
_AT_LEAST_1 = (
    *("max_examples", "max_test_examples", "max_length", "max_new_tokens", "max_tokens_per_micro_batch"),
    *("passage_length", "width", "layers", "lora_rank", "lora_layers", "longest", "targets"),
)
_ABOVE_0 = ("temperature", "head_noise", "head_scale", "head_learning_rate", "comparison_learning_rate")
_BELOW_1 = ("average", "evaluation_share", "genre_share")
_FILES = {
    "a model": ("config.json", "adapter_config.json"),
    "a tokenizer": ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.spm", "adapter_config.json"),
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


@dataclass(kw_only=True)
class TextArguments:
    """What recipes know whose rows are as long as their texts."""

    max_tokens_per_micro_batch: int | None = field(
        default=None, metadata={"help": "Of the rows that are computed at once, padding included, unless it is one."}
    )
    average: float = field(
        default=0.0, metadata={"help": "Decay of the moving average of weights that training ends with; 0: none."}
    )


@dataclass(kw_only=True)
class Comparison:
    """What recipes of language models know that train once more without privacy."""

    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train once more with the ordinary Trainer, for the gap to it."}
    )
    comparison_learning_rate: float | None = field(
        default=None, metadata={"help": "Of that training; left out: learning_rate, which is one for private training."}
    )


class _Parser(HfArgumentParser):
    """Says in one line what is wrong: above it the usage of some hundred flags would hide that.

    Args:
        recipe: as of `parse`.
        file: where settings were read from, and their names.
    """

    def __init__(self, recipe: type, file: tuple[str, Collection[str]] = ("", ())) -> None:
        # What is short for one flag today is short for two with the next version of Transformers.
        super().__init__((recipe, TrainingArguments, PrivacyConfig, CommonArguments), allow_abbrev=False)
        self._file = file

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, which would say the names alone."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(next((part for part in unknown if part.startswith("--")), unknown[0])))
        return found

    def error(self, message: str) -> NoReturn:
        """As argparse's; of many processes the first says it."""
        said = f"{self.prog}: error: {' '.join(shortened(message).split()).rstrip('.')}. All flags: --help\n"
        self.exit(2, said if is_first() else None)

    def _unknown(self, part: str) -> str:
        if not part.startswith("--"):
            return f"{part!r} belongs to no flag"
        name, flags = _as_setting(part), {_as_setting(flag) for flag in self._option_string_actions}
        begun = sorted(flag for flag in flags if flag.startswith(name))
        near = [f"--{one}" for one in (begun if 0 < len(begun) < 4 else difflib.get_close_matches(name, sorted(flags)))]
        path, settings = self._file
        is_of_file = name in settings
        return f"no such {'setting' if is_of_file else 'flag'}: {name if is_of_file else part.partition('=')[0]}" + (
            f" (in {path})" * is_of_file + f"; the nearest: {', '.join(near)}" * bool(near)
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(one) for one in action.choices]
            near = difflib.get_close_matches(str(value), known)
            listed = f"the nearest: {', '.join(near)}" if near else f"there are: {', '.join(known)}"
            raise argparse.ArgumentError(action, f"no such value: {value!r}; {listed}")


def _as_setting(flag: str) -> str:
    return flag.lstrip("-").partition("=")[0].replace("-", "_")


def _in_words(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """A refusal that ends a script is said as `hf-dp train` says it: a traceback would stand above it."""
    if isinstance(error, HfDpError):
        print(f"Refused: {error}", file=sys.stderr)
        raise SystemExit(REFUSED)  # of a hook it is heeded
    sys.__excepthook__(kind, error, traceback)


def parse(recipe: type) -> tuple[Any, TrainingArguments, PrivacyConfig]:
    """The recipe's own arguments, Transformers' and the promise, from the command line.

    Args:
        recipe: a dataclass that has `max_examples: int | None = None`: how many examples of each split to use. It may
            have `IN_PLACE_OF`, arguments of its own with those of others that they take the place of, and
            `DECIDES_ITSELF`, arguments of others with what decides it here.

    Raises:
        ConfigurationError: arguments that Transformers, the promise or the recipe refuses, or that nothing would heed;
            FSDP, asked for by them or by `accelerate launch`.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _in_words
    flags = sys.argv[1:]
    settings: dict[str, str | list[str]] = {}
    path = ""
    if flags and flags[0].endswith((".yaml", ".yml")):
        path = flags.pop(0)
        settings = _of_file(path)
    parser = _Parser(recipe, (path, settings.keys()))
    asked = parser.parse_args([*_as_flags(settings), *flags])
    if asked.smoke:
        settings.pop("num_train_epochs", None)
        settings |= SMOKE
    if (asked.bf16 or asked.bf16_full_eval) and not (asked.use_cpu or torch.accelerator.is_available()):
        # Where there is nothing else, Transformers trains on the CPU, but in 16 bits only if it is asked to.
        settings["use_cpu"] = "true"
    settings = _reconciled(settings, _given(recipe, flags), recipe)
    try:
        made, training, privacy, common = parser.parse_args_into_dataclasses([*_as_flags(settings), *flags])
        attention = None if common.re_attention is None else json.loads(common.re_attention)
    except ConfigurationError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OSError, ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"{error}.",
            why="no training could begin with these arguments.",
            fix="change what it names; --help lists all of them.",
        ) from error
    if training.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ConfigurationError(
            "a recipe under FSDP.",
            why="recipes score a model before it is in shards, and some sample from it at the end, one process alone: "
            "with shards that fails, or waits for the others for ever, after the budget is spent.",
            fix="train under DDP (accelerate launch or torchrun without FSDP); or train in shards with DPTrainer in a "
            "script of your own, and sample from the saved model in one process.",
        )
    private_arguments(training, privacy)  # what it refuses, DPTrainer would refuse when the model is made
    _refuse_sizes(made)
    _refuse_paths(made, training)
    if privacy.withhold_non_private_logs and getattr(made, "compare_without_privacy", False):
        raise ConfigurationError(
            "--withhold_non_private_logs and --compare_without_privacy.",
            why="the training without privacy logs losses of the private data, and its results are made of that data.",
            fix="leave one of them out.",
        )
    if getattr(made, "comparison_learning_rate", None) is not None and not made.compare_without_privacy:
        raise ConfigurationError(
            f"--comparison_learning_rate {made.comparison_learning_rate} without --compare_without_privacy.",
            why="it is the rate of a training that would not take place.",
            fix="add --compare_without_privacy true, or leave it out.",
        )
    return made, training, privacy.replace(seed=common.privacy_seed, re_attention=attention)


def _of_file(path: str) -> dict[str, str | list[str]]:
    values = read_settings(Path(path))
    values.pop("recipe", None)  # which script this is, for hf-dp train
    # None is the default, as if left out.
    said = {name: _as_said(value) for name, value in values.items() if value is not None}
    found = {name.replace("-", "_"): value for name, value in said.items()}
    if len(found) < len(said):
        raise ConfigurationError(
            f"{path} has a setting twice, spelt with _ and with -.",
            why="one of the two values would not be heeded.",
            fix="leave one of them out.",
        )
    return found


def _as_said(value: Any) -> str | list[str]:
    if isinstance(value, list):
        return list(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _as_flags(values: Mapping[str, str | list[str]]) -> list[str]:
    parts = ((name, [value] if isinstance(value, str) else value) for name, value in values.items())
    return [part for name, said in parts for part in (f"--{name}", *said)]


def _given(recipe: type, flags: list[str]) -> set[str]:
    """The names of the arguments in `flags`, however they are spelt; no number of steps says nothing of steps."""
    parser = _Parser(recipe)
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    found = vars(parser.parse_args(flags))
    return {name for name in found if name != "max_steps" or found[name] > 0}


def _reconciled(file: dict[str, str | list[str]], flags: set[str], recipe: type) -> dict[str, str | list[str]]:
    """The file's settings, without those that a flag says in another way.

    Raises:
        ConfigurationError: two that contradict, or one that the recipe would not heed.
    """
    if "max_steps" not in _given(recipe, _as_flags(file)):
        file.pop("max_steps", None)
    decided: dict[str, str] = getattr(recipe, "DECIDES_ITSELF", {})
    for name in (name for name in decided if name in flags or name in file):
        raise ConfigurationError(
            f"--{name} with this recipe.", why="nothing here would heed it.", fix=f"leave it out: {decided[name]}."
        )
    instead: dict[str, tuple[str, ...]] = getattr(recipe, "IN_PLACE_OF", {})
    for one, other in [*_ONE_OF, *((own, other) for own, others in instead.items() for other in others)]:
        pair = {one, other}
        if pair <= flags or (pair <= file.keys() and not pair & flags):
            raise ConfigurationError(
                f"--{one} and --{other}.", why="one takes the place of the other.", fix="leave one of them out."
            )
        # What an argument of the recipe takes the place of may stay in the file: it is not asked for.
        said = pair & flags - (instead.keys() & {one})
        gone = pair - said if said else set()
        file = {name: value for name, value in file.items() if name not in gone}
    # Of several places those of a flag would be more, not others.
    return {name: value for name, value in file.items() if name not in flags}


def _refuse_sizes(recipe: Any) -> None:
    found = {name: getattr(recipe, name, None) for name in (*_AT_LEAST_1, *_ABOVE_0, *_BELOW_1)}
    for name, value in found.items():
        if value is None:
            continue
        if name in _AT_LEAST_1:
            wrong, rule = value < 1, "at least 1"
        elif name in _ABOVE_0:
            wrong, rule = not 0 < value < math.inf, "above 0, and finite"
        else:
            wrong, rule = not 0 <= value < 1, "at least 0, and below 1"
        if wrong:
            raise ConfigurationError(
                f"--{name} {value}.", why=f"it must be {rule}.", fix="correct it, or leave it out for the default."
            )


def _refuse_paths(recipe: Any, training: TrainingArguments) -> None:
    for name in ("encoder", "model"):
        given = getattr(recipe, name, None)
        if given is None or given == "scratch":
            continue
        path = Path(given)
        # os.path's functions say no of what is too long for a name.
        there = os.path.isdir(given)
        missing = [what for what, files in _FILES.items() if not (there and any(any(path.glob(f)) for f in files))]
        if (os.path.exists(given) or not is_name(given)) and missing:
            lacks = f"{given!r} is no directory with {missing[0]}" if there else nowhere(given, "")
            raise ConfigurationError(
                f"--{name}: {lacks}.",
                why="the recipe reads the model and its tokenizer from there.",
                fix="give one that save_pretrained of both wrote, or OWNER/NAME on the hub.",
            )
    output = Path(str(training.output_dir))
    if os.path.isfile(next((place for place in (output, *output.parents) if os.path.exists(place)), output)):
        raise ConfigurationError(
            f"--output_dir {str(output)!r} is a file, or lies below one.",
            why="the model would be saved there, after the budget is spent.",
            fix="give a directory, or a name that is free.",
        )
