"""Dirac canaries: each has a parameter of its own, which nothing but its gradient and the noise moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction

# The column of a row that says which canary it is, and of one that says whether it is there.
PLACE, THERE = "place", "there"
# The length of a canary's gradient, before it is clipped.
_LENGTH = 100.0


class WithDirac(nn.Module):
    """A model with one more parameter for each of `number` canaries, which the model itself does not see.

    Clipping makes the gradient of a canary that is there C in its own direction; no two share a direction, so that each
    is seen through the noise alone (Nasr et al. 2023, arXiv:2302.07956, section 4: the strongest canaries known).

    Attributes:
        model: what is trained besides.
        places: (number, 1), zero at the start; what each has become is its canary's score.
    """

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        self.model, self.places = model, nn.Embedding(number, 1)
        nn.init.zeros_(self.places.weight)

    @property
    def config(self) -> Any:
        """Of the model."""
        return self.model.config

    def forward(self, place: Tensor, there: Tensor) -> Tensor:
        """(B,): what is learnt of canaries (B,); 0 for rows that are none, which are not `there`."""
        found: Tensor = self.places(place)[:, 0] * there
        return found


def with_dirac(loss: LossFunction) -> LossFunction:
    """The loss of `WithDirac`, from that of the model in it; rows have columns `PLACE` (int) and `THERE` (0 or 1)."""

    def losses(model: Any, batch: Batch) -> Tensor:
        rest: dict[str, Any] = {name: value for name, value in batch.items() if name not in (PLACE, THERE)}
        total: Tensor = loss(model.model, rest) - _LENGTH * model(batch[PLACE], batch[THERE])
        return total

    return losses


def placed(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The two columns of a list of rows, for a collator."""
    return {
        PLACE: torch.tensor([row[PLACE] for row in rows], dtype=torch.int64),
        THERE: torch.tensor([row[THERE] for row in rows], dtype=torch.float32),
    }
