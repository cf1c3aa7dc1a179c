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
    for name, each in _evaluated(trainer):
        if _metric(trainer).startswith(f"eval_{name}_" if name else "") and _is_same(each, trainer.train_dataset):
            raise _chosen(" and ".join(found), "leave these out")


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
        raise _told("leave eval_strategy out")


def refuse_evaluated_in_training(trainer: Any, given: Any, prefix: str) -> None:
    """Refuses an evaluation that a callback asks for, of training data, which is told as above, where logs are withheld
    or early stopping listens.

    Args:
        given: what `evaluate` was given.
        prefix: what stands in front of its metrics.

    Raises:
        ConfigurationError: with what would come of it.
    """
    stops = _stops_early(trainer) and _metric(trainer).startswith(f"{prefix}_")
    if not (trainer.privacy.withhold_non_private_logs or stops):
        return
    data = trainer.eval_dataset if given is None or isinstance(given, str) else given
    data = data.get(given) if isinstance(given, str) and isinstance(data, Mapping) else data
    if isinstance(data, Mapping) or not _is_same(data, trainer.train_dataset):  # of a mapping each comes by itself
        return
    if trainer.privacy.withhold_non_private_logs:
        raise _told("evaluate the training data when train() has ended")
    raise _chosen("EarlyStoppingCallback", "give their metrics another name: evaluate(..., metric_key_prefix='train')")


def _told(way: str) -> ConfigurationError:
    return ConfigurationError(
        "withhold_non_private_logs=True with evaluations of the training data.",
        why="its loss and metrics are exact functions of private data, and would stand in logs and checkpoints, of "
        "which report and card say that they hold none.",
        fix=f"pass an eval_dataset of other rows, whose owners agreed, or {way}; or, if logs and checkpoints are kept "
        "to yourself, leave withhold_non_private_logs out.",
    )


def _chosen(what: str, way: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} with evaluations of the training data.",
        why="which weights, steps and rates come out then follows from private data without noise, and epsilon "
        "would not say so.",
        fix=f"pass an eval_dataset of other rows, whose owners agreed; or {way}.",
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
    if _stops_early(trainer):
        yield "EarlyStoppingCallback"


def _stops_early(trainer: Any) -> bool:
    return any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks)


def _metric(trainer: Any) -> str:
    """What is chosen by, as it is named among metrics."""
    return f"eval_{str(trainer.args.metric_for_best_model or 'loss').removeprefix('eval_')}"


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
