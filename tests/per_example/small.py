"""Small modules written as one function, for tests that need a model which does one odd thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch


class Small(nn.Module):
    """`Small(f, name=parameter_or_module, ...)` computes f(self, x)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)
        torch.manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def batch(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(shape, generator=generator, dtype=torch.float64)}


def square(model: nn.Module, batch: Batch) -> Tensor:
    """The mean square of each example's output."""
    loss: Tensor = model(batch["x"]).square().flatten(1).mean(1)
    return loss


def traced(layer: nn.Linear) -> Any:
    return torch.jit.trace(layer, torch.zeros(1, layer.in_features))


def relative_error(found: Any, truth: Any) -> float:
    """The worse of norms and weighted sums; of a gradient that is nothing but rounding, relative to the whole."""
    weights = torch.linspace(0.3, 1.7, truth.batch_size, dtype=torch.float64)
    norms = float((found.squared_norms() - truth.squared_norms()).norm() / truth.squared_norms().norm())
    ours, sums = found.weighted_sum(weights), truth.weighted_sum(weights)
    least = 1e-3 * torch.stack([v.norm() for v in sums.values()]).norm()
    return max(norms, *(float((ours[k] - v).norm() / v.norm().clamp(min=least)) for k, v in sums.items()))


def in_training(function: Any) -> Small:
    """Without random numbers in eval mode, where engine and oracle are compared."""
    usual = nn.Linear(4, 4)
    return Small(lambda m, x: function(m, x) if m.training else m.linear(x).cos(), linear=usual)
