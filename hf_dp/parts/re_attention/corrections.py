"""How much attention is corrected: a mean for the logs and, apart from it, the largest for a guard."""

from __future__ import annotations

import torch
from torch import Tensor


class Corrections:
    """Of v_j / 2 in each layer. Nothing leaves the device until it is asked for."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, int]] = {}
        # Of each layer two: with what is no number, and of numbers alone.
        self._largest: dict[str, Tensor] = {}

    def note(self, name: str, of_heads: Tensor) -> None:
        """One pass through the layer `name`: the mean for each example and head (B, H)."""
        mean = of_heads.mean()
        total, count = self._sums.get(name, (torch.zeros_like(mean), 0))
        self._sums[name] = total + mean, count + 1
        # Evaluation makes no gradients, and what it is corrected by says nothing of a step.
        if torch.is_grad_enabled():
            largest = torch.stack([of_heads.amax(), of_heads.nan_to_num(0.0, 0.0, 0.0).amax()])
            self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)

    def take_means(self) -> dict[str, float]:
        """The mean over all passes since it was last taken, for each layer."""
        sums, self._sums = self._sums, {}
        return {name: float(total) / count for name, (total, count) in sums.items()}

    def take_largest(self, *, of_numbers: bool = False) -> dict[str, float]:
        """The largest of an example's head in a pass with gradients since it was last taken; NaN if one was none, or,
        `of_numbers`, of those that were one."""
        largest, self._largest = self._largest, {}
        device = next((value.device for value in largest.values()), None)
        values = (
            torch.stack([value[int(of_numbers)].to(device) for value in largest.values()]).tolist() if largest else []
        )
        return dict(zip(largest, values, strict=True))
