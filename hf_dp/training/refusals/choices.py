"""What a training chooses, or tells, by its evaluations: not by those of the data that it trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import EarlyStoppingCallback

from hf_dp.data.repeated import are_in_both
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import unchanged_global_state

_FIRST = 4
# What Trainer gives the evaluated metric to: by the argument, and by the class of a user's own.
BY_METRICS = {"reduce_lr_on_plateau": "ReduceLROnPlateau", "greedy": "GreedyLR"}


def refuse_choices_by_training_data(trainer: Any) -> None:
    """Refuses a Trainer that chooses weights, steps or rates by evaluations of its training data.

    Only data that is the training data, or begins with the same rows, or has some of the very same, is told for it.

    Raises:
        ConfigurationError: with what chooses.
    """
    found = list(_choices(trainer))
    if not found:
        return
    metric = str(trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    for name, each in _evaluated(trainer):
        if metric.startswith(f"{name}_" if name else "") and _is_same(each, trainer.train_dataset):
            raise ConfigurationError(
                f"{' and '.join(found)} with evaluations of the training data.",
                why="which weights, steps and rates come out then follows from private data without noise, and epsilon "
                "would not say so.",
                fix="pass an eval_dataset of other rows, whose owners agreed; or leave these out.",
            )


def refuse_told_of_training_data(trainer: Any) -> None:
    """Refuses a Trainer that withholds its losses and evaluates its training data, which is told as above.

    Raises:
        ConfigurationError: it would be evaluated in training.
    """
    args = trainer.args
    evaluates = args.eval_on_start or str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    if not (trainer.privacy.withhold_non_private_logs and evaluates):
        return
    if any(_is_same(each, trainer.train_dataset) for _, each in _evaluated(trainer)):
        raise ConfigurationError(
            "withhold_non_private_logs=True with evaluations of the training data.",
            why="its loss and metrics are exact functions of private data, and would stand in logs and checkpoints, of "
            "which report and card say that they hold none.",
            fix="pass an eval_dataset of other rows, whose owners agreed, or leave eval_strategy out; or, if logs and "
            "checkpoints are kept to yourself, leave withhold_non_private_logs out.",
        )


def _evaluated(trainer: Any) -> list[tuple[str, Any]]:
    """What is evaluated, by its name in front of its metrics, if it has one."""
    data = trainer.eval_dataset
    return list(data.items()) if isinstance(data, Mapping) else [("", data)]


def _choices(trainer: Any) -> Iterator[str]:
    if trainer.args.load_best_model_at_end:
        yield "load_best_model_at_end=True"
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "best":
        yield "save_strategy='best'"
    kind = trainer.args.lr_scheduler_type
    if (name := str(getattr(kind, "value", kind))) in BY_METRICS:
        yield f"lr_scheduler_type={name!r}"
    yield from {one.__name__ for one in type(trainer.lr_scheduler).__mro__} & {*BY_METRICS.values()}
    if any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
        yield "EarlyStoppingCallback"


def _is_same(evaluated: Any, trained: Any) -> bool:
    if evaluated is trained or evaluated is None:
        return evaluated is not None
    try:
        n = min(len(evaluated), len(trained), _FIRST)
        with unchanged_global_state():
            begins_alike = n == _FIRST and all(_is_same_row(evaluated[i], trained[i]) for i in range(n))
            return begins_alike or are_in_both(evaluated, trained)
    except (LookupError, TypeError, ValueError):
        return False


def _is_same_row(one: Any, other: Any) -> bool:
    """Whether both say the same, where one may have further columns (whose it is, say)."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return repr(one) == repr(other)
    names = one.keys() & other.keys()
    has_all = bool(names) and len(names) in (len(one), len(other))
    return has_all and all(repr(one[name]) == repr(other[name]) for name in names)
