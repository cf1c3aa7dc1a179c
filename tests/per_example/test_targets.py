"""Targets of CTC that are no classes: torch reads, and writes, what lies beyond, of other examples too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.checks.strangers import check_strangers
from hf_dp.per_example.targets import targets_in_range

CLASSES, PLACES = 6, 7
Losses = Callable[[nn.Module, Any], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch(labels: list[Any]) -> dict[str, Tensor]:
    x = torch.randn(len(labels), PLACES, 4, generator=torch.Generator().manual_seed(1))
    return {"x": x, "labels": torch.tensor(labels)}


def ctc(model: nn.Module, inputs: Any, targets: Tensor, lengths: Tensor) -> Tensor:
    given = model(inputs["x"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(given, targets, torch.full((len(lengths),), PLACES), lengths, reduction="none")


def joined(model: nn.Module, inputs: Any) -> Tensor:
    """As models of Transformers do it."""
    has_one = inputs["labels"] >= 0
    return ctc(model, inputs, inputs["labels"].masked_select(has_one), has_one.sum(-1))


def padded(model: nn.Module, inputs: Any) -> Tensor:
    return ctc(model, inputs, inputs["labels"], inputs["labels"].ge(0).sum(-1))


def of_one_each(model: nn.Module, inputs: Any) -> Tensor:
    return ctc(model, inputs, inputs["labels"][:, None] + 1, torch.ones_like(inputs["labels"]))


def of_two_digits(model: nn.Module, inputs: Any) -> Tensor:
    labels = inputs["labels"]
    return ctc(model, inputs, torch.stack([labels // 2 + 1, labels % 2 + 1], 1), torch.full_like(labels, 2))


SEVERAL: list[Any] = [[1, 2, 3], [2, 5, -100], [4, -100, -100], [3, 1, -100]]


@pytest.mark.parametrize(
    ("losses", "labels"),
    [(joined, SEVERAL), (padded, SEVERAL), (of_one_each, [0, 1, 2, 3]), (of_two_digits, [*range(4)])],
)
def test_what_users_make_of_labels_is_tried_without_reading_beyond_the_classes(losses: Losses, labels: Any) -> None:
    mine, few = model(), batch(labels)
    certificate = preflight(mine, losses, few)
    check_strangers(mine, losses, few, certificate=certificate)
    found = record(mine, losses, few, certificate=certificate)
    torch.testing.assert_close(found.squared_norms(), loop(mine, losses, few).squared_norms(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("labels", [[[1, 2], [CLASSES, 1], [3, 1]], [[1, 2], [-1, 1], [3, 1]]])
def test_failure_139_no_gradient_is_recorded_of_targets_that_are_no_classes(labels: Any) -> None:
    def all_of_them(model: nn.Module, inputs: Any) -> Tensor:
        return ctc(model, inputs, inputs["labels"], torch.full((len(inputs["labels"]),), 2))

    mine = model()
    certificate = preflight(mine, all_of_them, batch([[1, 2], [2, 1], [3, 1]]))
    with pytest.raises(IndexError, match=f"Target {labels[1][0]} is out of bounds"):
        record(mine, all_of_them, batch(labels), certificate=certificate)


def test_only_what_lengths_say_is_looked_at() -> None:
    given, lengths = torch.zeros(3, 2, CLASSES), torch.tensor([1, 2])
    with targets_in_range():
        F.ctc_loss(given, torch.tensor([[1, -100], [2, 3]]), (3, 3), (1, 2))
        nn.CTCLoss()(given, torch.tensor([1, 2, 3]), torch.tensor([3, 3]), lengths)
        F.ctc_loss(given[:, 0], torch.tensor([5]), torch.tensor(3), torch.tensor(1))
        for targets in (torch.tensor([1, 2, 6]), torch.tensor([[1, 0], [2, -1]])):
            with pytest.raises(IndexError, match="is out of bounds"):
                F.ctc_loss(given, targets, torch.tensor([3, 3]), lengths)
        with pytest.raises(IndexError, match="is out of bounds"):
            F.ctc_loss(given[:, 0], torch.tensor([6]), torch.tensor(3), torch.tensor(1))
    assert not hasattr(torch.ctc_loss, "__wrapped__")
