"""How often each token is seen: one private release of the presence histogram."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.errors import ConfigurationError
from hf_dp.plan import Plan

LABEL = "token presence"
# Seeded noise differs from that of every training step.
_STEP = -1
# In standard deviations of the noise.
_STANDS_OUT = 3.0


def release_token_frequencies(
    examples: Iterable[Tensor], vocabulary_size: int, clipping_norm: float, plan: Plan, ledger: Ledger
) -> Tensor:
    """The share of examples that contain each token, with Gaussian noise.

    Each example's 0/1 vector of the tokens in it is clipped to `clipping_norm`, so that adding or removing one moves
    the sum by no more than that in l2 norm.

    Args:
        examples: the token ids of each example, of any shape; negative ids are left out.
        vocabulary_size: V.
        clipping_norm: the sensitivity of the sum.
        plan: what the release costs, and its noise.
        ledger: charged before the noisy counts exist; a refusal charges nothing.

    Returns:
        (V,) float32 in [1/n, 1]. Tokens that do not stand out from the noise share their mean.

    Raises:
        ConfigurationError: an id that is not below `vocabulary_size`.
    """
    assert plan.frequency_event is not None
    assert plan.frequency_noise_multiplier is not None
    n = plan.sampler.dataset_size
    total = torch.zeros(vocabulary_size, dtype=torch.float64)
    for ids in examples:
        present = ids.flatten().unique().cpu()
        present = present[present >= 0]
        if len(present) and int(present[-1]) >= vocabulary_size:
            raise ConfigurationError(
                f"token id {int(present[-1])} in the training data, for an embedding of {vocabulary_size} rows.",
                why="the model cannot embed it.",
                fix="resize the embeddings, or use the tokenizer that belongs to the model.",
            )
        total[present] += min(1.0, clipping_norm / max(1, len(present)) ** 0.5)
    deviation = plan.frequency_noise_multiplier * clipping_norm
    ledger.charge(plan.frequency_event, LABEL)
    if ranks.rank() == 0:
        plan.noise.add_([total], deviation, _STEP)
    # One release: every rank counted the same, and only rank 0's noise is ever seen.
    ranks.from_first_(total)
    # Of tokens that do not stand out from the noise, the mean is known far better than each.
    in_doubt = total <= _STANDS_OUT * deviation
    shares = torch.where(in_doubt, total[in_doubt].mean() if bool(in_doubt.any()) else 0.0, total) / n
    return shares.clamp(1 / n, 1.0).float()
