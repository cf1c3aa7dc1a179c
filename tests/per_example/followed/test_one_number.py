"""A search that finds one row, whose number is then no list of numbers: `mask.nonzero().squeeze()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import relative_error

Batch = dict[str, Tensor]


class Classified(nn.Module):
    """Of nine classes, the rare ones in clusters; torch's loss hands each cluster the rows of its own."""

    def __init__(self, cutoffs: list[int]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.last = nn.AdaptiveLogSoftmaxWithLoss(16, 9, cutoffs, div_value=2.0)
        torch.manual_seed(0)
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.last(torch.tanh(self.first(x)), labels).output
        return found


def labelled(*labels: int, length: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(len(labels))
    y = torch.tensor(labels).view(-1, length)
    return {"x": torch.randn(*y.shape, 4, generator=generator, dtype=torch.float64), "y": y}


def of_examples(model: Any, data: Any) -> Tensor:
    return -model(data["x"][:, 0], data["y"][:, 0])  # type: ignore[no-any-return]


def of_tokens(model: Any, data: Any) -> Tensor:
    losses: Tensor = model(data["x"].flatten(0, 1), data["y"].flatten())
    return -losses.view(data["y"].shape).mean(1)


def of_others(model: Any, data: Any) -> Tensor:
    """In the order of the labels, which are not."""
    order = data["y"][:, 0].argsort(stable=True)
    return -model(data["x"][order, 0], data["y"][:, 0])  # type: ignore[no-any-return]


EXAMPLES = [
    *(labelled(1, 4, 8), labelled(4, 4, 8), labelled(8, 8, 8), labelled(1, 1, 1), labelled(0, 5, 1), labelled(7)),
    *(labelled(1), labelled(8, 1, 2, 4), labelled(8, 4), labelled(4, 8, 4, 8, 4, 7, 1, 2), labelled(2, 3, 4, 5, 6, 7)),
]
TOKENS = [
    *(labelled(1, 4, 8, 0, 0, 0, 2, 2, 3, length=3), labelled(1, 2, 2, 0, 4, 4, length=3)),
    *(labelled(8, 8, 4, length=3), labelled(8, 1, 4, length=3), labelled(1, 1, 1, length=3)),
    *(labelled(1, 2, 4, 4, 4, 8, 0, 0, 0, length=3), labelled(*range(9), *range(9), length=3)),
]


@pytest.mark.parametrize("cutoffs", [[3, 6], [8], [3, 4]])
def test_clusters_with_one_row_are_exact(cutoffs: list[int]) -> None:
    of_each = (of_examples, labelled(1, 4, 8), EXAMPLES)
    for loss, check, batches in (of_each, (of_tokens, labelled(1, 4, 8, 0, 4, 4, 8, 8, 3, length=3), TOKENS)):
        model = Classified(cutoffs)
        certificate = preflight(model, loss, check)
        for data in batches:
            found = record(model, loss, data, certificate=certificate)
            assert relative_error(found, loop(model, loss, data)) <= 1e-9


@pytest.mark.parametrize("cutoffs", [[3, 6], [8]])
def test_rows_of_others_are_refused(cutoffs: list[int]) -> None:
    with pytest.raises(HfDpError):
        preflight(Classified(cutoffs), of_others, labelled(4, 1, 8))
