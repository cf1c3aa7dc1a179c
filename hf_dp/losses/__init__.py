"""Losses (B,) in which no denominator is shared between examples."""

from hf_dp.losses.kinds import loss_kind
from hf_dp.losses.one_by_one import own_losses
from hf_dp.losses.own import check_own_loss, known_loss_check
from hf_dp.losses.per_example import per_example_losses
from hf_dp.losses.preferences import PREFERENCE_LOSSES, Preferences, Shape, log_probabilities

__all__ = [
    "PREFERENCE_LOSSES",
    "Preferences",
    "Shape",
    "check_own_loss",
    "known_loss_check",
    "log_probabilities",
    "loss_kind",
    "own_losses",
    "per_example_losses",
]
