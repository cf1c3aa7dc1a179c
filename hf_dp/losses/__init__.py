"""Losses (B,) in which no denominator is shared between examples."""

from hf_dp.losses.kinds import is_causal, loss_kind
from hf_dp.losses.own import check_own_loss
from hf_dp.losses.per_example import per_example_losses

__all__ = ["check_own_loss", "is_causal", "loss_kind", "per_example_losses"]
