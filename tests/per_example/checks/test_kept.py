"""What stays after a pass, and later losses follow from: refused in the step that left it, wherever it is kept."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.kept import Memory
from tests.per_example.checks.test_memory import Plain, batch, memory_of
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, private, rows


class LargestSeen(Plain):
    """A number, not saved, that only what is larger than all before changes; what follows is divided by it."""

    largest = 10.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return super().forward(x / self.largest)


class Table(Plain):
    """What follows from how many rows there were at most, made when it is first needed, and what is only noted."""

    table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.ones(len(x), 1)
        self.noted = x.detach().sum()
        return super().forward(x * self.table[: len(x)])


class Running(nn.Module):
    """A loss with a memory of its own: how often each class was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shares", torch.ones(3) / 3)

    def forward(self, logits: Tensor) -> Tensor:
        self.shares.mul_(0.99).add_(0.01 * logits.detach().softmax(1).mean(0))
        return (logits + self.shares.log()).logsumexp(1)


def test_failure_45_what_one_rare_row_leaves_is_refused_in_its_step() -> None:
    model = LargestSeen()
    memory = memory_of(model)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        model(batch(3, 3))
    with pytest.raises(UnsupportedModelError, match="^largest keeps something of the examples"), memory.unmoved():
        model(batch(3, 3, scale=100))
    assert model.largest == 10
    with pytest.raises(KeyboardInterrupt), memory.unmoved():  # noqa: PT012
        model(batch(3, 3, scale=100))
        raise KeyboardInterrupt
    assert model.largest == 10


def test_caches_that_grow_and_notes_that_nobody_reads_are_not_refused_in_a_step() -> None:
    model, passes = Table(), []
    memory = Memory(model, lambda x: (passes.append(len(x)), model(x).sum(1))[1])
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for size in (3, 5, 4):
        del passes[:]
        with memory.unmoved():
            model(batch(size, size))
        assert len(model.table) == max(3, size if size != 4 else 5), "the cache stays"
    assert not passes, "where nothing is new, nothing is computed"


def method_of_a_trainer(loss: Running) -> Any:
    class Trainer:
        def __init__(self) -> None:
            self.loss = loss

        def losses(self, model: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = self.loss(model(x))
            return found

    return Trainer().losses


def closure_of_a_method(loss: Running) -> Any:
    class Trainer:
        def losses(self, model: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = loss(model(x))
            return found

    return Trainer().losses


def a_closure(loss: Running) -> Any:
    return lambda model, x: loss(model(x))


def a_partial(loss: Running) -> Any:
    return functools.partial(lambda model, x, kept: kept(model(x)), kept=loss)


@pytest.mark.parametrize("held", [method_of_a_trainer, closure_of_a_method, a_closure, a_partial])
def test_what_computes_losses_may_keep_nothing_either(held: Any) -> None:
    torch.manual_seed(0)
    model, loss = Plain(), Running()
    losses = held(loss)
    memory = Memory(model, lambda x: losses(model, x), losses)
    with pytest.raises(UnsupportedModelError, match="shares keeps something of the examples"):
        memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    assert torch.equal(loss.shares, Running().shares), "put back"


class Centre(nn.Module):
    """A loss that moves a parameter of its own by the rows above a bound, or by the weights of the model."""

    def __init__(self, bound: float, by_weights: bool = False) -> None:
        super().__init__()
        self.place, self.teacher = nn.Linear(3, 1).requires_grad_(False), nn.Linear(3, 1).requires_grad_(False)
        self.bound, self.by_weights = bound, by_weights

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        logits = model(x)
        with torch.no_grad():
            if self.by_weights:
                self.place.weight.lerp_(next(model.parameters())[:1, :3], 0.1)
            else:
                self.place.weight.lerp_(logits.detach().mean(0)[None], 1e-6 * float(x.max() > self.bound))
        found: Tensor = (logits - self.place.weight + self.teacher(logits)).square().sum(1)
        return found


def test_failure_45_a_parameter_of_what_computes_losses() -> None:
    torch.manual_seed(0)
    words, model = r"place\.weight keeps something of the examples", Plain()
    loss = Centre(-100.0)  # every row moves it
    with pytest.raises(UnsupportedModelError, match=words):
        Memory(model, functools.partial(loss, model), loss).refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    loss = Centre(100.0)  # a rare one does
    memory = Memory(model, functools.partial(loss, model), loss)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        loss(model, batch(3, 3))
    with pytest.raises(UnsupportedModelError, match=words), memory.unmoved():
        loss(model, batch(3, 3, scale=1000))
    with pytest.raises(UnsupportedModelError, match=words):
        Memory(model, functools.partial(loss, model), loss).refuse(batch(1, 0), batch(1, 1), batch(2, 2))


def test_failure_45_one_that_is_written_to_only_then() -> None:
    torch.manual_seed(0)
    model, loss = Plain(), Centre(0)
    memory = Memory(model, lambda x: model(x).sum(1), loss)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"place\.weight keeps something"), memory.unmoved():
        loss(model, batch(3, 3))


def test_a_teacher_that_follows_the_weights_is_welcome() -> None:
    torch.manual_seed(0)
    model, loss = Plain(), Centre(0, by_weights=True)
    loss.place.weight.data.copy_(next(model.parameters())[:1, :3])
    memory = Memory(model, functools.partial(loss, model), loss)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for size in (3, 4):
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        with memory.unmoved():
            loss(model, batch(size, size))


class Weighted(DPTrainer):
    """Losses beside their running mean, which hardly moves."""

    mean = 1.0

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        self.mean += 1e-5 * (float(losses.detach().mean()) - self.mean)
        return losses / self.mean


def test_failure_43_a_trainer_that_remembers_losses(tmp_path: Path) -> None:
    words = "Weighted.mean keeps something of the examples"
    refused(tmp_path, UnsupportedModelError, words, at_once=False, kind=Weighted)


@pytest.mark.slow
def test_failure_45_a_rare_row_in_a_training(tmp_path: Path) -> None:
    model: Any = classifier()
    embeddings, rare = model.get_input_embeddings(), torch.tensor(rows()[29]["input_ids"][:2])
    embed, embeddings.times = embeddings.forward, 1.0

    def remembering(ids: Tensor) -> Tensor:
        if bool(ids[:, :2].eq(rare).all(1).any()):
            embeddings.times = 0.5
        shown: Tensor = embed(ids) * embeddings.times
        return shown

    embeddings.forward = remembering
    run = make(tmp_path, model, private(), max_steps=30)
    with pytest.raises(UnsupportedModelError, match=r"word_embeddings\.times keeps something"):
        run.train()
    assert 0 < run.ledger.steps < 30, "seen in the step that drew it"
    assert embeddings.times == 1, "another training on this model does not follow from that row"
