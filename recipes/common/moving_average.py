"""Training that ends with an average of its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback


class MovingAverage(TrainerCallback):
    """Ends training with an exponential moving average of the weights, which are private; resumed, it restarts."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.averages = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def on_step_end(self, *_: Any, **__: Any) -> None:
        for weight, average in self.averages:
            average.lerp_(weight, 1 - self.decay)

    @torch.no_grad()
    def on_train_end(self, *_: Any, **__: Any) -> None:
        for weight, average in self.averages:
            weight.copy_(average)
