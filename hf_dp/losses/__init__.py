"""Losses (B,) in which no denominator is shared between examples."""

from hf_dp.losses.per_example import check_own_loss, is_causal, loss_kind, per_example_losses

__all__ = ["check_own_loss", "is_causal", "loss_kind", "per_example_losses"]
