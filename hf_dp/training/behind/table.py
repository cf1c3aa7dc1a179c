"""The one table of trainers that may stand behind the mixin and are not Transformers' own."""

from __future__ import annotations

from typing import Any

from hf_dp.training.behind.dpo import Dpo
from hf_dp.training.behind.kto import Kto
from hf_dp.training.behind.reward import Reward
from hf_dp.training.behind.sft import Sft
from hf_dp.training.behind.trl import Trl, Unknown, is_of_trl
from hf_dp.training.behind.usual import Usual

_TRLS: dict[str, type[Trl]] = {kind.name: kind for kind in (Sft, Dpo, Reward, Kto)}


def behind(trainer: Any) -> Usual:
    """What is asked of the first of `trainer`'s classes that is known."""
    # One of TRL that is another one's subclass learns in its own way.
    kind = next(filter(is_of_trl, type(trainer).__mro__), None)
    return Usual(trainer) if kind is None else (_found(kind) or Unknown)(trainer)


def has_known_loss(kind: type) -> bool:
    """Whether `kind` is a trainer of TRL itself, not a subclass of it, whose loss is known example by example."""
    found = _found(kind)
    return found is not None and found.has_known_loss


def _found(kind: type) -> type[Trl] | None:
    module = f"trl.trainer.{kind.__name__.removesuffix('Trainer').lower()}_trainer"
    return _TRLS.get(kind.__name__) if kind.__module__ == module else None
