"""TRL's RewardTrainer behind DPTrainerMixin: the loss of each pair by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.data.pairs import both, rows_of_pairs
from hf_dp.losses.tokens import accurate
from hf_dp.training.behind.pairs import Pairs


class Reward(Pairs):
    """Of RewardTrainer."""

    name = "RewardTrainer"

    def losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Bradley and Terry 1952; centred as in Eisenstein et al. 2023, arXiv:2312.09244, eq. 2, if asked."""
        inputs = {name: value for name, value in rows_of_pairs(batch).items() if name != "margin"}
        chosen, rejected = both(accurate(model(**inputs).logits).squeeze(-1))
        losses = -F.logsigmoid(chosen - rejected - batch.get("margin", 0.0))
        coefficient = self.trainer.args.center_rewards_coefficient
        return losses if coefficient is None else losses + coefficient * (chosen + rejected).square()
