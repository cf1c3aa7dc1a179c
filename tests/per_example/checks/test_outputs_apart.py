"""What a model makes of one example may change no other's gradient, also where it is sure of some, or far off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DistilBertForSequenceClassification

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.outputs_apart import check_outputs_apart
from tests.training.own_loops import begun
from tests.training.workbench import classifier
from tests.zoo import text_batch, tiny

Losses = Callable[[nn.Module, Any], Tensor]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.rand(3, 4, generator=generator), "labels": torch.tensor([0, 1, 2])}


def model() -> nn.Module:
    """As one that has learnt nothing: of all examples it makes about the same."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    nn.init.normal_(made[2].weight, std=0.02)
    return made


def plain(model: nn.Module, inputs: Any) -> Tensor:
    return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def bound_by_the_median(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return torch.minimum(losses, 3 * losses.detach().median())


def skipped_where_one_is_large(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return losses if losses.max() < 5 else losses * 0


def without_those_far_above_the_mean(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return losses * (losses.detach() < losses.detach().mean() + 1)


def only_the_hard_if_there_are_any(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    hard = losses.detach() > 0.3
    return losses * (hard if hard.any() else torch.ones_like(hard))


def more_where_one_is_sure(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(inputs["x"])
    is_sure = outputs.detach().softmax(1).amax(1) > 0.9
    return F.cross_entropy(outputs, inputs["labels"], reduction="none") * (1 + is_sure.float().mean())


def warm_where_one_is_large(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(inputs["x"])
    warmth = outputs.detach().abs().max().clamp(min=5) / 5
    return F.cross_entropy(outputs / warmth, inputs["labels"], reduction="none")


def focused_by_the_least_sure(model: nn.Module, inputs: Any) -> Tensor:
    right = (-plain(model, inputs)).exp()
    power = torch.where(right.detach().min() < 0.1, 3.0, 2.0)
    return -((1 - right) ** power) * right.log()


MIXING: list[Losses] = [
    bound_by_the_median,
    skipped_where_one_is_large,
    without_those_far_above_the_mean,
    only_the_hard_if_there_are_any,
    more_where_one_is_sure,
    warm_where_one_is_large,
    focused_by_the_least_sure,
]


def skipped_where_one_is_no_number(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return losses if losses.isfinite().all() else losses.nan_to_num() * 0


def skipped_where_outputs_are_no_numbers(model: nn.Module, inputs: Any) -> Tensor:
    outputs = model(inputs["x"])
    outputs = outputs.nan_to_num() * 0 if outputs.isnan().any() else outputs
    return F.cross_entropy(outputs, inputs["labels"], reduction="none")


def divided_by_how_many_are_numbers(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    are_numbers = losses.detach().isfinite()
    return losses.where(are_numbers, 0.0) * len(losses) / are_numbers.sum()


def skipped_beyond_a_very_large_bound(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return losses if losses.max() < 1e4 else losses * 0


DIVERGING: list[Losses] = [
    skipped_where_one_is_no_number,
    skipped_where_outputs_are_no_numbers,
    divided_by_how_many_are_numbers,
    skipped_beyond_a_very_large_bound,
]


def held(model: nn.Module, losses: Losses, batch: Any) -> None:
    certificate = preflight(model, losses, batch)
    check_outputs_apart(model, losses, batch, certificate=certificate)


@pytest.mark.parametrize("losses", MIXING, ids=lambda losses: losses.__name__)
def test_failure_122_what_a_model_makes_of_one_example_decides_for_its_micro_batch(losses: Losses) -> None:
    with pytest.raises(PreflightError, match="is another where the model's outputs for other examples are large"):
        held(model(), losses, batch())


@pytest.mark.parametrize("losses", DIVERGING, ids=lambda losses: losses.__name__)
def test_failure_137_nor_what_it_makes_of_one_that_is_no_number(losses: Losses) -> None:
    with pytest.raises(PreflightError, match="outputs for other examples are large, or no numbers"):
        held(model(), losses, batch())


class Diverged(nn.Module):
    """Leaves out its micro-batch, where what its head gives is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.body(x)
        return outputs.nan_to_num() * 0 if outputs.isnan().any() else outputs


def test_failure_137_in_a_model() -> None:
    with pytest.raises(PreflightError, match="outputs for other examples are large, or no numbers"):
        held(Diverged(), plain, batch())


def test_a_term_of_the_batch_that_counts_nothing_yet_is_not_refused_for_what_is_no_number() -> None:
    def losses(model: nn.Module, inputs: Any) -> Tensor:
        outputs = model(inputs["x"])
        term = outputs.mean(0).square().sum()
        return F.cross_entropy(outputs, inputs["labels"], reduction="none") + 0.0 * term

    held(model(), losses, batch())


@pytest.mark.parametrize("is_tuple", [False, True])
def test_failure_122_of_a_model_of_transformers(is_tuple: bool) -> None:
    def losses(model: nn.Module, inputs: Any) -> Tensor:
        inputs = {**inputs, "return_dict": not is_tuple}
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        outputs = (outputs[0] if is_tuple else outputs.logits).float()
        found = F.cross_entropy(outputs.mT, labels, reduction="none").mean(1)
        return torch.minimum(found, 3 * found.detach().median())

    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        held(tiny("gpt2", "causal_lm", torch.float32), losses, text_batch("causal_lm"))


class Bounded(nn.Module):
    """Bounds what its head gives by the largest of the micro-batch, from a number on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.is_own = model(), False

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.body(x)
        largest = outputs.detach().abs()
        largest = largest.amax(1, keepdim=True) if self.is_own else largest.max()
        return outputs * (10 / largest).clamp(max=1)


class BoundedClassifier(DistilBertForSequenceClassification):
    def forward(self, *args: Any, **inputs: Any) -> Any:
        output: Any = super().forward(*args, **inputs)
        output.logits = output.logits * (10 / output.logits.detach().abs().max()).clamp(max=1)
        return output


def test_failure_122_of_what_a_model_decides_behind_its_last_layer() -> None:
    bounded = Bounded()
    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        held(bounded, plain, batch())
    bounded.is_own = True
    held(bounded, plain, batch())


def test_failure_122_of_a_loss_that_calls_the_layers_itself() -> None:
    def losses(model: nn.Module, inputs: Any) -> Tensor:
        outputs = model[2](model[:2](inputs["x"]))  # type: ignore[index, operator]
        outputs = outputs * (10 / outputs.detach().abs().max()).clamp(max=1)
        return F.cross_entropy(outputs, inputs["labels"], reduction="none")

    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        held(model(), losses, batch())


def test_failure_122_of_a_teacher() -> None:
    teacher = model()

    def losses(model: nn.Module, inputs: Any) -> Tensor:
        with torch.no_grad():
            is_sure = teacher(inputs["x"]).softmax(1).amax(1) > 0.6
        return plain(model, inputs) * (1 + is_sure.any())

    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        held(model(), losses, batch())


def test_failure_122_of_a_class_of_ones_own_with_a_known_loss() -> None:
    torch.manual_seed(0)
    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        begun(BoundedClassifier(classifier().config))  # type: ignore[arg-type]


def test_failure_122_in_a_loop_of_ones_own() -> None:
    def losses(model: nn.Module, inputs: Any) -> Tensor:
        found = per_example_losses(model, inputs)
        return found if found.max() < 5 else found * 0

    with pytest.raises(PreflightError, match="outputs for other examples are large"):
        begun(classifier(), loss=losses)


def test_what_each_example_decides_by_itself_is_not_refused() -> None:
    def own(model: nn.Module, inputs: Any) -> Tensor:
        outputs = model(inputs["x"])
        outputs = outputs / (outputs.detach().abs().amax(1, keepdim=True).clamp(min=5) / 5)
        losses = F.cross_entropy(outputs, inputs["labels"], reduction="none", label_smoothing=0.1).clamp(max=3)
        losses = losses * torch.where(losses.detach() < 0.3, 0.0, (1 - (-losses).exp()) ** 2)
        return losses.where(losses.isfinite(), 0.0)

    held(model(), own, batch())


@pytest.mark.parametrize("error", [FloatingPointError, AssertionError, SystemExit])
def test_a_training_that_ends_itself_where_a_loss_is_no_number_is_not_ended_by_the_check(error: Any) -> None:
    def losses(model: nn.Module, inputs: Any) -> Tensor:
        found = plain(model, inputs)
        if not found.isfinite().all():
            raise error("no number")
        return found

    held(model(), losses, batch())


def test_outputs_that_a_loss_does_not_take_are_not_asked_for() -> None:
    def of_shares(model: nn.Module, inputs: Any) -> Tensor:
        return F.binary_cross_entropy(model(inputs["x"])[:, 0], inputs["labels"].clamp(max=1).float(), reduction="none")

    held(nn.Sequential(model(), nn.Sigmoid()), of_shares, batch())


def test_a_model_comes_out_as_it_was() -> None:
    one = model()
    before = {name: value.clone() for name, value in one.state_dict().items()}
    held(one, plain, batch())
    assert not one._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
