"""How often each token is seen: one private release of the presence histogram, or public knowledge."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config.asked import TOKEN_PRESENCE
from hf_dp.errors import ConfigurationError
from hf_dp.step.plan import Plan

LABEL = TOKEN_PRESENCE
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
    release, n = plan.release(LABEL), plan.sampler.dataset_size
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
    deviation = release.noise_multiplier * clipping_norm
    ledger.charge(release.event, release.label)
    if ranks.rank() == 0:
        plan.noise.add_([total], deviation, _STEP)
    # One release: every rank counted the same, and only rank 0's noise is ever seen.
    ranks.from_first_(total)
    # Of tokens that do not stand out from the noise, the mean is known far better than each.
    in_doubt = total <= _STANDS_OUT * deviation
    shares = torch.where(in_doubt, total[in_doubt].mean() if bool(in_doubt.any()) else 0.0, total) / n
    return shares.clamp(1 / n, 1.0).float()


def public_token_frequencies(path: Path, vocabulary_size: int, tokenizer: Any) -> Tensor:
    """The share of examples that contain each token, in public data.

    Args:
        path: a JSON file with one share for each token id, or texts, one public example in each line.
        vocabulary_size: V.
        tokenizer: of the model, to read texts; None where there are none.

    Returns:
        (V,) float32 in [0, 1].

    Raises:
        ConfigurationError: a file that is neither, or texts without a tokenizer that belongs to the model.
    """
    try:
        text = path.read_text(encoding="utf-8")
        shares = torch.tensor(json.loads(text)) if path.suffix == ".json" else _shares(text, vocabulary_size, tokenizer)
        if shares.shape != (vocabulary_size,) or not bool(((shares >= 0) & (shares <= 1)).all()):
            raise ValueError(f"{tuple(shares.shape)} numbers for {vocabulary_size} tokens, or a number outside [0, 1]")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"public_frequencies={str(path)!r} ({error}).",
            why="the noise of each row of the embedding follows from how often it is touched.",
            fix=f"give a JSON file (.json) with a list of {vocabulary_size} numbers in [0, 1], or a file with a public "
            "example in each line and, as the trainer's processing_class, the model's tokenizer.",
        ) from error
    return shares.float()


def _shares(text: str, vocabulary_size: int, tokenizer: Any) -> Tensor:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines or not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise ValueError("no texts" if not lines else "texts, and no tokenizer")
    counts = torch.zeros(vocabulary_size)
    for ids in tokenizer(lines)["input_ids"]:
        present = torch.tensor(ids).unique()
        if len(present) and int(present[-1]) >= vocabulary_size:
            raise ValueError(f"the tokenizer's id {int(present[-1])}, for an embedding of {vocabulary_size} rows")
        counts[present.long()] += 1
    return counts / len(lines)
