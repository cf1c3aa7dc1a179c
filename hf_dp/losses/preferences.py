"""Losses of preferences: of each pair of answers by itself, from what a model and a reference make of the two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.losses.outputs import logits_of
from hf_dp.losses.per_example import next_token_labels
from hf_dp.losses.tokens import IGNORED, token_sums


class Preferences(NamedTuple):
    """Of B pairs, (B,) each; a ratio is the log-probability under the model less that under the reference.

    Attributes:
        chosen: log-ratio of the chosen answer.
        rejected: that of the rejected one.
        fluency: the mean log-probability of the chosen answer's tokens under the model.
        chosen_tokens: how many the chosen answer has.
        rejected_tokens: how many the rejected one has.
    """

    chosen: Tensor
    rejected: Tensor
    fluency: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def margin(self) -> Tensor:
        """By how much more the model prefers the chosen answer than the reference does."""
        return self.chosen - self.rejected

    @property
    def margin_by_token(self) -> Tensor:
        """The same of means over the tokens of each answer."""
        return self.chosen / self.chosen_tokens.clamp_min(1) - self.rejected / self.rejected_tokens.clamp_min(1)


class Shape(NamedTuple):
    """The numbers of a loss: `beta` holds the model to the reference, `smoothing` is how often labels are wrong, and
    `temperature` is DiscoPOP's."""

    beta: float
    smoothing: float = 0.0
    temperature: float = 0.05


def _exo(p: Preferences, s: Shape) -> Tensor:
    right, wrong = F.logsigmoid(s.beta * p.margin), F.logsigmoid(-s.beta * p.margin)
    smoothing = torch.tensor(s.smoothing)
    return right.exp() * (right - torch.log1p(-smoothing)) + wrong.exp() * (wrong - torch.log(smoothing))


def _nca(p: Preferences, s: Shape) -> Tensor:
    chosen, rejected = s.beta * p.chosen, s.beta * p.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(p: Preferences, s: Shape) -> Tensor:
    right, wrong = F.logsigmoid(s.beta * p.margin), F.logsigmoid(-s.beta * p.margin)
    return (s.smoothing * wrong - (1 - s.smoothing) * right) / (1 - 2 * s.smoothing)


def _discopop(p: Preferences, s: Shape) -> Tensor:
    margin = s.beta * p.margin
    share = torch.sigmoid(margin / s.temperature)
    return share * torch.exp(-margin) - (1 - share) * F.logsigmoid(margin)


#: By TRL's names: the loss of each pair (B,). None has a term that pairs share.
PREFERENCE_LOSSES: dict[str, Callable[[Preferences, Shape], Tensor]] = {
    # Rafailov et al. 2023, arXiv:2305.18290, eq. 7
    "sigmoid": lambda p, s: -F.logsigmoid(s.beta * p.margin),
    # of means over tokens
    "sigmoid_norm": lambda p, s: -F.logsigmoid(s.beta * p.margin_by_token),
    # Liu et al. 2024, arXiv:2309.06657, eq. 9
    "hinge": lambda p, s: torch.relu(1 - s.beta * p.margin),
    # Azar et al. 2023, arXiv:2310.12036, eq. 17, of means over tokens
    "ipo": lambda p, s: (p.margin_by_token - 1 / (2 * s.beta)).square(),
    # Chowdhury et al. 2024, arXiv:2403.00409
    "robust": _robust,
    # Ji et al. 2024, arXiv:2402.00856, eq. 16
    "exo_pair": _exo,
    # Chen et al. 2024, arXiv:2402.05369
    "nca_pair": _nca,
    # Jung et al. 2024, arXiv:2404.04656, with the threshold 0
    "bco_pair": lambda p, s: -F.logsigmoid(s.beta * p.chosen) - F.logsigmoid(-s.beta * p.rejected),
    # Wu et al. 2024, arXiv:2405.00675, eq. 4.7, with probabilities 1 and 0
    "sppo_hard": lambda p, s: (p.chosen - 0.5 / s.beta).square() + (p.rejected + 0.5 / s.beta).square(),
    # D'Oosterlinck et al. 2024, arXiv:2408.06266, eqs. 7 and 8
    "apo_zero": lambda p, s: 1 - torch.sigmoid(s.beta * p.chosen) + torch.sigmoid(s.beta * p.rejected),
    "apo_down": lambda p, s: torch.sigmoid(s.beta * p.chosen) + 1 - torch.sigmoid(s.beta * p.margin),
    # Lu et al. 2024, arXiv:2406.08414, eq. 5
    "discopop": _discopop,
    # the negative log-likelihood of the chosen answer by itself
    "sft": lambda p, s: -p.fluency,
}


def log_probabilities(model: nn.Module, inputs: Mapping[str, Any], answers: Tensor) -> Tensor:
    """(N,): the log-probability of each row's answer, given what stands before it.

    Args:
        model: a causal language model, or a PEFT model around one.
        inputs: its inputs, (N, T).
        answers: 1 where a token belongs to the answer, (N, T).
    """
    logits = logits_of(model, inputs)
    labels = inputs["input_ids"].masked_fill(answers == 0, IGNORED)
    return -token_sums(logits, next_token_labels(model, labels, logits.shape[1]))
