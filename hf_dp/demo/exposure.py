"""How exposed a secret is: the rank of its loss among all secrets it could have been, in bits.

Source: Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer" (2019), arXiv:1802.08232, section 4.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_dp.demo.messages import PIN_DIGITS, Canary

# Of a secret that the model knows nothing about: its rank is uniform, so its exposure is -log2 of a uniform number.
MEAN_EXPOSURE_BY_CHANCE = 1 / math.log(2)
CANDIDATES = 10**PIN_DIGITS
MOST_EXPOSURE = math.log2(CANDIDATES)
_AT_ONCE = 128


def exposure(losses: Tensor, secret: int) -> float:
    """log2 of the number of candidates minus log2 of the secret's rank, in bits.

    Args:
        losses: (N,), of every candidate.
        secret: which candidate is the true one.

    Returns:
        log2(N) if the secret has the smallest loss, 0 if it has the largest. Equal losses share their mean rank, so
        that a model which tells no candidate from another exposes nothing.
    """
    smaller = int((losses < losses[secret]).sum())
    equal = int((losses == losses[secret]).sum())
    rank = 1 + smaller + (equal - 1) / 2
    return math.log2(len(losses)) - math.log2(rank)


def pin_losses(model: Any, tokenizer: PreTrainedTokenizerBase, prefix: str, digits: int = PIN_DIGITS) -> Tensor:
    """The loss of every possible PIN after `prefix`: no candidate is left out.

    Args:
        model: a causal language model.
        tokenizer: in which every digit is a token of its own.
        prefix: of the message.
        digits: in the PIN.

    Returns:
        (10**digits,) float64: entry i is the negative log-likelihood of the PIN with value i.
    """
    digit_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")), device=model.device)
    model.eval()
    losses = torch.zeros(1, dtype=torch.float64, device=model.device)
    with torch.no_grad():
        said = model(**tokenizer(prefix, return_tensors="pt").to(model.device), use_cache=True)
        cache = copy.deepcopy(said.past_key_values)
        # Digit by digit: what begins alike is computed once.
        for more in reversed(range(digits)):
            losses = (losses[:, None] + _digit_losses(said.logits[:, -1], digit_ids)).flatten()
            if more:
                cache.batch_repeat_interleave(10)
                said = model(input_ids=digit_ids.repeat(len(losses) // 10)[:, None], past_key_values=cache)
    return losses


def _digit_losses(logits: Tensor, digit_ids: Tensor) -> Tensor:
    # In float32 many hopeless candidates would tie.
    normalizer = torch.cat([part.double().logsumexp(-1) for part in logits.split(_AT_ONCE)])
    return normalizer[:, None] - logits[:, digit_ids].double()


def exposures(model: Any, tokenizer: PreTrainedTokenizerBase, canaries: list[Canary]) -> list[float]:
    """The exposure of each canary's PIN among all PINs."""
    return [exposure(pin_losses(model, tokenizer, c.prefix, len(c.pin)), int(c.pin)) for c in canaries]


def extracted(model: Any, tokenizer: PreTrainedTokenizerBase, canaries: list[Canary]) -> int:
    """How many PINs the model says outright, decoding greedily after the canary's prefix."""
    return sum(_continuation(model, tokenizer, c) == c.pin for c in canaries)


def _continuation(model: Any, tokenizer: PreTrainedTokenizerBase, canary: Canary) -> str:
    prompt = tokenizer(canary.prefix, return_tensors="pt").to(model.device)
    output = model.eval().generate(
        **prompt, max_new_tokens=len(canary.pin), do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))
