"""Methods of a Trainer that would run in place of the private ones."""

from __future__ import annotations

from typing import Any

from hf_dp.errors import ConfigurationError
from hf_dp.training.behind.table import has_known_loss

_PREPARING = "_prepare_inputs", "_prepare_input"
_OF_A_STEP = "training_step", "get_train_dataloader", "get_batch_samples"
_INSTEAD = (
    "it would run instead of the private one: what is drawn, clipped, noised and counted, and whether rows are mixed, "
    "would be its affair, and nobody's to check."
)


class Preparing:
    """What makes batches of rows as a training begins: methods, wherever they stand, and the collator of the loader."""

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._by = _preparing(trainer, loader)

    def refuse_another(self, trainer: Any, loader: Any) -> None:
        """Refuses a step whose batches are made by something else (`ConfigurationError`)."""
        refuse_methods_of_its_own(trainer)
        now = _preparing(trainer, loader)
        for name in (name for name, found in self._by.items() if found != now[name]):
            raise ConfigurationError(
                f"a private step with another {name} than the training began with.",
                why="that it mixes no rows, and keeps nothing of them, was found out of the one that there was then.",
                fix="put it there before train(), and leave it; let it go by a number that it reads, which is looked "
                "at again where it changes.",
            )


def _preparing(trainer: Any, loader: Any) -> dict[str, list[Any]]:
    places = [vars(trainer), *(vars(kind) for kind in type(trainer).__mro__)]
    found = {name: [held[name] for held in places if name in held] for name in _PREPARING}
    return {**found, "collator": [loader.collate_fn]}


def refuse_methods_of_its_own(trainer: Any) -> None:
    """Refuses a trainer that has such a method itself, where its class has ours (`ConfigurationError`)."""
    if (name := next((name for name in _OF_A_STEP if name in vars(trainer)), None)) is not None:
        raise ConfigurationError(
            f"a trainer with a {name} of its own, put on the object.",
            why=_INSTEAD,
            fix="leave it as it is: what is to be done to batches goes into the data collator or _prepare_inputs, a "
            "loss into compute_per_example_loss, and what only looks on into a callback.",
        )


def refuse_overrides(trainer: Any, mixin: type, base: type) -> None:
    """Refuses a Trainer whose own methods would bypass the private step, or whose loss or generation would be ignored.

    Raises:
        ConfigurationError: with the method and the class that defines it.
    """
    for method in _OF_A_STEP:
        owner = _owner(trainer, method)
        if owner is not mixin and not issubclass(mixin, owner):
            raise ConfigurationError(
                f"{owner.__name__}.{method} comes before DPTrainerMixin's.",
                why=_INSTEAD,
                fix="do not override it: what is to be done to batches goes into the data collator or _prepare_inputs, "
                "and a loss into compute_per_example_loss. Where a trainer behind the mixin has it, put DPTrainerMixin "
                "first: class MyTrainer(DPTrainerMixin, MyBaseTrainer).",
            )
    behind = [
        kind for kind in type(trainer).__mro__ if "get_batch_samples" in vars(kind) and not _is_known(kind, mixin)
    ]
    if behind:
        raise ConfigurationError(
            f"{behind[0].__name__}.get_batch_samples stands behind DPTrainerMixin's, which calls it.",
            why="it could make other rows of a logical batch, or one of several, and nothing would look at them.",
            fix="leave it out; what is to be done to batches goes into the data collator or _prepare_inputs.",
        )
    owner = _owner(trainer, "_get_train_sampler")
    if owner is not base:
        raise ConfigurationError(
            f"{owner.__name__} chooses its own training sampler.",
            why="a weighted or ordered sampler draws examples with other probabilities than are accounted for.",
            fix="leave the sampler to hf_dp; to balance classes, weight the per-example loss.",
        )
    has_own_loss = _owner(trainer, "compute_per_example_loss") is not mixin
    # In evaluation the mixin asks the one behind it, or the own loss.
    owner = _owner(trainer, "compute_loss", but=mixin)
    is_known = owner is base or has_known_loss(owner)
    if not (has_own_loss or (is_known and trainer.compute_loss_func is None)):
        name = "compute_loss_func" if is_known else f"{owner.__name__}.compute_loss"
        raise ConfigurationError(
            f"{name} gives one loss for the whole batch.",
            why="clipping needs each example's own loss; training would silently use another loss than yours.",
            fix="also override compute_per_example_loss(model, inputs) to return one loss for each example.",
        )
    if getattr(trainer.args, "predict_with_generate", False) and _owner(trainer, "prediction_step", mixin) is base:
        raise ConfigurationError(
            f"predict_with_generate=True, and {type(trainer).__name__} does not generate.",
            why="compute_metrics would get logits in place of texts, and mostly fail at the first evaluation, when "
            "budget is spent.",
            fix="put the mixin in front of the trainer that generates, class DPSeq2SeqTrainer(DPTrainerMixin, "
            "Seq2SeqTrainer): pass; or leave predict_with_generate out.",
        )


def _is_known(kind: type, mixin: type) -> bool:
    return issubclass(mixin, kind) or kind.__module__.startswith(("transformers.", "trl."))


def _owner(trainer: Any, method: str, but: type | None = None) -> type:
    """The class whose `method` is used, or would be without `but` and what it is made of."""
    kinds = [kind for kind in type(trainer).__mro__ if but is None or not issubclass(but, kind)]
    return next(kind for kind in kinds if method in vars(kind))
