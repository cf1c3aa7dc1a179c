"""The model's own loss of each example by itself, of models that return it in one way or another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import own_losses, per_example_losses
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import relative_error
from tests.zoo import text_batch, tiny


@dataclasses.dataclass
class Output:
    scores: Tensor
    loss: Tensor


RETURNS: dict[str, Any] = {
    "a dataclass": lambda loss, scores: Output(scores, loss),
    "a dictionary": lambda loss, scores: {"scores": scores, "loss": loss},
    "a tuple": lambda loss, scores: (loss, scores),
    "a tuple, the loss last": lambda loss, scores: (scores, loss),
    "the loss alone": lambda loss, scores: loss,
    "the loss, of one entry": lambda loss, scores: {"loss": loss[None]},
}


class Mean(nn.Module):
    """Its loss is a mean over all tokens of a batch."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.table, self.head, self.returned = nn.Embedding(9, 4), nn.Linear(4, 9), returned

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        scores = self.head(self.table(ids).cumsum(1).tanh())
        return self.returned(F.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=0.1), scores)


def tokens(size: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 9, (size, 5), generator=torch.Generator().manual_seed(size))
    return {"ids": ids, "labels": ids.flip(1).masked_fill(ids.eq(0), -100)}


@pytest.mark.parametrize("name", RETURNS)
def test_own_losses_are_exact_however_a_model_returns_them(name: str) -> None:
    torch.manual_seed(0)
    model = Mean(RETURNS[name]).double()
    certificate, batch = preflight(model, own_losses, tokens(3)), tokens(4)
    found = record(model, own_losses, batch, certificate=certificate)
    assert relative_error(found, loop(model, own_losses, batch)) <= 1e-12
    together = model(**{k: v[:1] for k, v in batch.items()})
    torch.testing.assert_close(found.losses[0], own_losses(lambda **_: together, tokens(1))[0].detach())  # type: ignore[arg-type]


def test_of_a_head_that_is_known_they_are_the_losses_of_its_kind() -> None:
    for head, family in (("causal_lm", "gpt2"), ("sequence", "bert"), ("seq2seq", "t5")):
        model, batch = tiny(family, head).eval(), text_batch(head)
        batch = {**batch, "num_items_in_batch": torch.tensor(99)}
        torch.testing.assert_close(own_losses(model, batch).double(), per_example_losses(model, batch).double())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss, scores: {"scores": scores}, "Mean returns no loss of one example"),
        (lambda loss, scores: {"loss": scores}, r"Mean returns numbers \(1, 5, 9\) as its loss of one example"),
    ],
)
def test_a_model_that_returns_no_loss_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        own_losses(Mean(returned), tokens(3))


def test_a_loss_that_an_example_alone_does_not_have_is_refused() -> None:
    """Of one row a model may remember the one before."""

    class Keeping(Mean):
        before = 0.0

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            scores = self.head(self.table(ids))
            loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten()) * (1 + self.before)
            self.before = loss
            return loss

    with pytest.raises((UnsupportedModelError, ConfigurationError)):
        preflight(Keeping(None).double(), own_losses, tokens(3))


def test_what_has_no_rows_is_handed_on_and_a_batch_without_rows_is_refused() -> None:
    def loss(values: Tensor, scale: Tensor, names: list[str], kind: str) -> Tensor:
        assert (len(values), len(names), kind) == (1, 1, "abc")
        return (values * scale).sum()

    batch = {"scale": torch.tensor(2.0), "values": torch.arange(3.0), "names": ["a", "b", "c"], "kind": "abc"}
    assert own_losses(loss, batch).tolist() == [0, 2, 4]  # type: ignore[arg-type]
    for empty in ({}, {"scale": torch.tensor(2.0)}):
        with pytest.raises(ConfigurationError, match="no tensor with a row for each example"):
            own_losses(loss, empty)  # type: ignore[arg-type]


def test_of_a_model_in_shards_they_are_refused_by_name() -> None:
    model = tiny("gpt2", "causal_lm")
    model.__class__ = type("FSDPGPT2", (FSDPModule, type(model)), {})
    with pytest.raises(UnsupportedModelError, match="that FSDP2 keeps in shards"):
        own_losses(model, text_batch("causal_lm", 2, 4))
