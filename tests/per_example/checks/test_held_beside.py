"""What trainers, functions and modules that nobody registered keep: looked at as what modules hold is."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.kept import Memory
from tests.per_example.checks.test_held import refused_in_its_step
from tests.per_example.checks.test_kept import Running
from tests.per_example.checks.test_memory import Plain, batch
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, private, rows

LARGEST = 10.0
OF_THIS_FILE = {"largest": 10.0}


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("within", [lambda loss: [loss], lambda loss: {"loss": loss}], ids=["list", "dict"])
@pytest.mark.parametrize("by", ["a model", "what computes losses"])
def test_failure_74_a_module_that_is_held_unregistered(within: Any, by: str) -> None:
    class Holding(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.beside = within(Running()) if by == "a model" else None

        def losses(self, x: Tensor) -> Tensor:
            beside: Any = self.beside
            found: Tensor = beside[0 if isinstance(beside, list) else "loss"](model(x))
            return found

    model = Holding()
    holder: Any = model
    if by != "a model":
        holder = types.SimpleNamespace(beside=within(Running()))
        losses = types.MethodType(Holding.losses, holder)
    else:
        losses = model.losses
    with pytest.raises(UnsupportedModelError, match=r"beside\[(0|loss)\]\.shares keeps something"):
        Memory(model, losses, losses).refuse(batch(1, 0), batch(1, 1), batch(2, 2))


class Kept(DPTrainer):
    """Losses divided by the largest of all so far, in a dict."""

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        kept = vars(self).setdefault("kept", {"largest": 1e-3})
        kept["largest"] = max(kept["largest"], float(losses.detach().max()))
        return losses / kept["largest"]


@pytest.mark.slow
def test_failure_74_a_trainer_that_keeps_the_largest_loss_in_a_dict(tmp_path: Path) -> None:
    # That the examples of one micro-batch share it is seen first, as it happens.
    said = "kept.* keeps something of the examples|in another example of its micro-batch"
    refused(tmp_path, UnsupportedModelError, said, at_once=False, kind=Kept)


class Noting(DPTrainer):
    """Losses that are noted, and read by nobody."""

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        vars(self).setdefault("noted", []).append(losses.detach().mean().item())
        vars(self).setdefault("sums", {})["loss"] = float(losses.detach().sum())
        return losses


@pytest.mark.slow
def test_a_trainer_that_notes_losses_is_welcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make(tmp_path, classifier(), private(), max_steps=3, kind=Noting)
    run.train()
    assert run.ledger.steps == 3
    assert "is made again" not in caplog.text


@pytest.mark.slow
def test_failure_74_a_rare_row_in_a_training(tmp_path: Path) -> None:
    model: Any = classifier()
    embeddings, rare = model.get_input_embeddings(), torch.tensor(rows()[29]["input_ids"][:2])
    embed, embeddings.kept = embeddings.forward, {"times": 1.0}

    def remembering(ids: Tensor) -> Tensor:
        if bool(ids[:, :2].eq(rare).all(1).any()):
            embeddings.kept["times"] = 0.5
        shown: Tensor = embed(ids) * embeddings.kept["times"]
        return shown

    embeddings.forward = remembering
    run = make(tmp_path, model, private(), max_steps=30)
    with pytest.raises(UnsupportedModelError, match=r"word_embeddings\.kept\.times keeps something"):
        run.train()
    assert 0 < run.ledger.steps < 30, "seen in the step that drew it"
    assert embeddings.kept == {"times": 1.0}


def in_a_closure(model: nn.Module) -> Any:
    largest = 10.0

    def losses(x: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, float(x.detach().abs().max()))
        return model(x / largest).sum(1)

    return losses


def in_a_dict_of_a_closure(model: nn.Module) -> Any:
    kept = {"largest": 10.0}

    def losses(x: Tensor) -> Tensor:
        kept["largest"] = max(kept["largest"], float(x.detach().abs().max()))
        return model(x / kept["largest"]).sum(1)

    return losses


def in_a_file(model: nn.Module) -> Any:
    def losses(x: Tensor) -> Tensor:
        global LARGEST
        LARGEST = max(LARGEST, float(x.detach().abs().max()))
        return model(x / LARGEST).sum(1)

    return losses


def in_a_dict_of_a_file(model: nn.Module) -> Any:
    def scaled(x: Tensor) -> Tensor:
        OF_THIS_FILE["largest"] = max(OF_THIS_FILE["largest"], float(x.detach().abs().max()))
        return x / OF_THIS_FILE["largest"]

    return lambda x: model(scaled(x)).sum(1)


@pytest.mark.parametrize("losses", [in_a_closure, in_a_dict_of_a_closure, in_a_file, in_a_dict_of_a_file])
def test_failure_74_what_functions_name(losses: Any) -> None:
    made = losses(model := Plain())
    refused_in_its_step(model, made, "largest|LARGEST", made)
    assert LARGEST == OF_THIS_FILE["largest"] == 10


def in_an_attribute_of_a_function(model: nn.Module) -> Any:
    def losses(x: Tensor) -> Tensor:
        known: Any = losses
        known.largest = max(getattr(known, "largest", 10.0), float(x.detach().abs().max()))
        return model(x / known.largest).sum(1)

    return losses


def in_a_default(model: nn.Module) -> Any:
    def losses(x: Tensor, largest: list[float] = [10.0]) -> Tensor:  # noqa: B006
        largest[0] = max(largest[0], float(x.detach().abs().max()))
        return model(x / largest[0]).sum(1)

    return losses


def in_a_default_by_name(model: nn.Module) -> Any:
    def losses(x: Tensor, *, kept: dict[str, float] = {"largest": 10.0}) -> Tensor:  # noqa: B006
        kept["largest"] = max(kept["largest"], float(x.detach().abs().max()))
        return model(x / kept["largest"]).sum(1)

    return losses


def scaled_by(kept: dict[str, Any], x: Tensor) -> Tensor:
    kept["largest"] = max(kept["largest"], float(x.detach().abs().max()))
    return x / kept["largest"]


def in_an_argument_of_a_partial(model: nn.Module) -> Any:
    scaled = functools.partial(scaled_by, {"largest": 10.0})
    return lambda x: model(scaled(x)).sum(1)


def in_another_file(model: nn.Module) -> Any:
    other = types.ModuleType("of_a_user")
    other.largest = 10.0  # type: ignore[attr-defined]

    def losses(x: Tensor) -> Tensor:
        other.largest = max(other.largest, float(x.detach().abs().max()))  # type: ignore[attr-defined]
        return model(x / other.largest).sum(1)  # type: ignore[attr-defined]

    return losses


def in_a_file_of_what_was_made_a_method(model: nn.Module) -> Any:
    owner = types.SimpleNamespace(model=model)
    owner.scaled = types.MethodType(scaled_of_this_file, owner)
    return types.MethodType(lambda self, x: self.model(self.scaled(x)).sum(1), owner)


class Scaling:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(scaled_by(OF_THIS_FILE, x)).sum(1)  # type: ignore[no-any-return]


def scaled_of_this_file(self: Any, x: Tensor) -> Tensor:
    return scaled_by(OF_THIS_FILE, x)


@pytest.mark.parametrize(
    "losses",
    [
        *(in_an_attribute_of_a_function, in_a_default, in_a_default_by_name, in_an_argument_of_a_partial),
        *(in_another_file, in_a_file_of_what_was_made_a_method, Scaling),
    ],
)
def test_failure_99_what_no_attribute_of_an_object_keeps(losses: Any) -> None:
    made = losses(model := Plain())
    refused_in_its_step(model, made, "largest", made)
    assert OF_THIS_FILE["largest"] == 10
