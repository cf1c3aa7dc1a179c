"""What an attacker computes of each canary: the higher, the likelier that it was trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction


def by_loss(before: nn.Module, after: nn.Module, loss: LossFunction, batches: Iterable[Batch]) -> Tensor:
    """How far training lowered each canary's loss (m,). Black box.

    Args:
        before, after: the model with its initial and with its released weights.
        batches: of canaries as they are when they are in, whether they were or not.
    """
    with torch.no_grad():
        before.eval()
        after.eval()
        return torch.cat([loss(before, batch) - loss(after, batch) for batch in batches])


def by_gradient(model: nn.Module, moved: Mapping[str, Tensor], loss: LossFunction, canaries: Iterable[Batch]) -> Tensor:
    """How far the weights moved along each canary's own gradient (m,). White box: it needs a single step's sums, or all
    of them where weights move little.

    Args:
        model: with the weights at which the gradients are taken.
        moved: what descended, by parameter name: initial less released weights, or the noisy gradients.
        canaries: each a batch of one.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for batch in canaries:
        gradients = torch.autograd.grad(loss(model.eval(), batch).sum(), list(parameters.values()), allow_unused=True)
        pairs = [(g, moved[name]) for name, g in zip(parameters, gradients, strict=True) if g is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g, _ in pairs))
        found.append(sum(float((g * along).sum()) for g, along in pairs) / (norm or 1.0))
    return torch.tensor(found, dtype=torch.float64)
