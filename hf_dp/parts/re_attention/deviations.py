"""How much noise there is in each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.parts.embeddings import token_tables


def relative_counts(model: nn.Module, expected_batch_size: float, frequencies: Tensor | None) -> dict[str, Tensor]:
    """B / B_eff of each trainable parameter: how much rarer than once for each example of a batch it is touched.

    Args:
        model: its token embeddings are those that Transformers calls input embeddings.
        expected_batch_size: B.
        frequencies: (V,) share of the examples that contain each token; None where all rows count as dense.

    Returns:
        1 for dense parameters; for row i of a token embedding 1 / p_i, (V, 1), with at least one example in a batch:
        a row that is not touched is not taught anything wrong. Frozen parameters are left out.
    """
    tables = {id(p) for p in token_tables(model)}
    counts: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            counts[name] = torch.ones((), device=p.device)
            if id(p) in tables and frequencies is not None:
                share = frequencies.to(p.device).clamp_min(1 / expected_batch_size)
                counts[name] = (1 / share).clamp_max(expected_batch_size)[:, None].float()
    return counts


def one_step(counts: Mapping[str, Tensor], standard_deviation: float) -> dict[str, Tensor]:
    """The paper's effective error sigma_dp / B_eff, for noise of that standard deviation on the mean gradient."""
    return {name: standard_deviation * count for name, count in counts.items()}


def accumulate_(
    errors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counts: Mapping[str, Tensor],
    standard_deviation: float,
) -> None:
    """Adds to `errors` what one optimizer step has put into each parameter: rate x noise, divided as Adam divides it.

    Momentum m spreads a step's noise over later ones: 1 / (1 - m) of it in all with SGD, all of it with Adam, whose
    preconditioner is taken of the mean second moment. Weight decay, which forgets noise, is left out.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            error = errors.get(names.get(id(p), ""))
            if error is None:
                continue
            injected = float(group["lr"]) * standard_deviation * counts[names[id(p)]]
            error.copy_((error.square() + (injected * _gain(optimizer.state.get(p, {}), group, error)).square()).sqrt())


def _gain(state: Mapping[str, Any], group: Mapping[str, Any], error: Tensor) -> Tensor:
    """Adam's 1 / (sqrt(mean v) + eps), over all elements or over each row; 1 / (1 - momentum) for SGD."""
    second = state.get("exp_avg_sq")
    if second is None:
        return torch.ones_like(error) / (1 - float(group.get("momentum", 0.0)))
    corrected = second.float() / (1 - group["betas"][1] ** float(state["step"]))
    mean: Tensor = corrected.mean(-1, keepdim=True) if error.dim() else corrected.mean()
    gain: Tensor = (mean.sqrt() + group["eps"]).reciprocal()
    return gain


def zeros(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No error yet."""
    return {name: torch.zeros_like(count) for name, count in counts.items()}
