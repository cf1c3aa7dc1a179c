"""Tensors outside of the model that the losses' gradient reaches: nobody clips theirs, so they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import preflight, record
from tests.per_example.checks.test_memory import FEATURES, Plain
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, private

WORDS = r"outside of the model"


def batch(seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(seed))}


class Centres(DPTrainer):
    """Losses from the distance to centres that a callback moves by their gradient."""

    centres: Any

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        losses: Tensor = super().compute_per_example_loss(model, inputs)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        apart: Tensor = (logits - self.centres[inputs["labels"]]).square().sum(1)
        return losses + apart


class MovesCentres(TrainerCallback):
    """Steps by what the engine leaves there."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            self.trainer.centres -= self.trainer.centres.grad
        self.trainer.centres.grad = None


@pytest.mark.slow
def test_failure_46_centres_that_a_callback_moves(tmp_path: Path) -> None:
    class Its(Centres):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.centres = torch.zeros(3, 3, requires_grad=True)
            self.add_callback(MovesCentres(self))

    error = refused(tmp_path, UnsupportedModelError, WORDS, at_once=False, kind=Its)
    assert "(3, 3)" in error.found


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.slow
def test_centres_without_gradient_or_of_the_model_are_welcome(tmp_path: Path, passes: int) -> None:
    model: Any = classifier()
    model.centres = nn.Parameter(torch.zeros(3, 3))

    class Its(Centres):
        @property
        def centres(self) -> Tensor:
            centres: Tensor = model.centres
            return centres

    class Fixed(Centres):
        centres = torch.zeros(3, 3)

    for kind in (Its, Fixed):
        run = make(tmp_path / kind.__name__, model, private(passes=passes), kind=kind, max_steps=1)
        run.train()
        assert run.ledger.steps == 1
        model = classifier()


def distance(centre: Tensor) -> Any:
    return lambda model, batch: (model(batch["x"]) - centre).square().sum(1)


def through_a_head(head: nn.Module) -> Any:
    return lambda model, batch: head(model(batch["x"])).square().sum(1)


def beside_a_teacher(teacher: nn.Module) -> Any:
    return lambda model, batch: (model(batch["x"]) - teacher(batch["x"])).square().sum(1)


class Checkpointed(Plain):
    """Its first layer is computed again, and multiplied by what is no parameter."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.scale = reentrant, torch.ones(8, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # as `enable_input_require_grads` asks of an embedding
        hidden: Tensor = checkpoint(lambda x: self.first(x) * self.scale, x, use_reentrant=self.reentrant)
        found: Tensor = self.last(torch.relu(hidden))
        return found


def plain(model: nn.Module, batch: Any) -> Tensor:
    losses: Tensor = model(batch["x"]).square().sum(1)
    return losses


@pytest.mark.parametrize(
    ("model", "losses", "shape"),
    [
        (Plain(), distance(torch.zeros(3, requires_grad=True)), r"\(3,\)"),
        (Plain(), distance(nn.Parameter(torch.zeros(3))), r"\(3,\)"),
        (Plain(), through_a_head(nn.Linear(3, 2)), r"\(2,( 3)?"),
        (Plain(), beside_a_teacher(Plain()), r"\(\d"),
        (Checkpointed(True), plain, r"\(8,\)"),
        (Checkpointed(False), plain, r"\(8,\)"),
    ],
    ids=["tensor", "parameter", "head", "teacher", "reentrant", "not reentrant"],
)
def test_failure_46_wherever_it_is_held(model: nn.Module, losses: Any, shape: str) -> None:
    with pytest.raises(UnsupportedModelError, match=shape) as caught:
        preflight(model, losses, batch())
    assert WORDS in caught.value.found


def test_failure_46_one_that_comes_later() -> None:
    model, centre = Plain(), torch.zeros(3, requires_grad=True)
    certificate = preflight(model, plain, batch())
    losses = distance(centre)
    record(model, losses, batch(1), certificate=certificate)
    assert centre.grad is not None
    with pytest.raises(UnsupportedModelError, match=WORDS):
        record(model, losses, batch(2), certificate=certificate)


def test_what_is_made_anew_in_each_pass_is_welcome() -> None:
    class Asking(Plain):
        """Its input asks for a gradient, for checkpoints, and stays where it can be looked at."""

        def forward(self, x: Tensor) -> Tensor:
            self.shown = x.detach().requires_grad_()
            return super().forward(self.shown)

    model, teacher = Asking(), Plain()

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), wanted, reduction="none").sum(1)

    given = batch()
    given["x"].requires_grad_()
    certificate = preflight(model, losses, given)
    for _ in range(2):
        record(model, losses, given, certificate=certificate)
