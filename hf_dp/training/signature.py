"""What an editor, `help` and a type checker are told of a trainer's arguments: Trainer's own, and the promise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalPrediction

from hf_dp.config import PrivacyConfig

_P = ParamSpec("_P")
OURS = ("privacy", "max_tokens_per_micro_batch")


def of_trainer(
    self: Any,
    model: nn.Module | None = None,
    args: TrainingArguments | None = None,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    model_init: Callable[..., nn.Module] | None = None,
    compute_loss_func: Callable[..., Tensor] | None = None,
    compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
    optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
    optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    privacy: PrivacyConfig,
    max_tokens_per_micro_batch: int | None = None,
) -> None:
    """Trainer's arguments, in its order, and those of `DPTrainerMixin`. Nothing calls it."""


def shown_as(_shown: Callable[_P, None], made: Callable[..., None]) -> Callable[_P, None]:
    """`made`, in the eyes of a type checker with other arguments."""
    return cast(Callable[_P, None], made)


def tell(kind: type, mixin: type) -> None:
    """Gives a class behind `mixin` the signature of the trainer behind it, with the promise; `inspect` reads it."""
    made = kind.__init__  # type: ignore[misc]
    if made is mixin.__init__:  # type: ignore[misc]
        behind = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
        made = next(vars(one)["__init__"] for one in behind if "__init__" in vars(one))
        parts = [one for one in _parameters(made) if one.name not in OURS]
        ours = [one for one in _parameters(mixin.__init__) if one.name in OURS]  # type: ignore[misc]
        at = next((i for i, one in enumerate(parts) if one.kind is one.VAR_KEYWORD), len(parts))
        told = [*parts[:at], *ours, *parts[at:]]
    else:
        told = _parameters(made)
    kind.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]


def _parameters(made: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(made).parameters.values())[1:]
