"""Rates and batches that recipes choose: noise carries a weight no further in many steps, and few rows are enough."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.accounting import ExampleUnit


def adam(part, **changes):
    """The optimizer of classify with adapters, for so many steps."""
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "classifier": nn.Linear(3, 2)})
    values = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 8, "world_size": 1}
    training = {"gradient_accumulation_steps": 1, "learning_rate": 3e-3, **values, **changes}
    recipe = SimpleNamespace(method="lora", head_learning_rate=1e-2, head_scale=2.0)
    privacy = PrivacyConfig(noise_multiplier=1.0)
    arguments, unit = SimpleNamespace(**training), ExampleUnit(number=4800)
    return part("classify").make_optimizer(model, recipe, arguments, privacy, unit, n=4800), model


@pytest.mark.parametrize(
    ("given", "divided"), [({"max_steps": 1}, 1), ({"max_steps": 60}, 1), ({"max_steps": 240}, 2), ({}, math.sqrt(10))]
)
def test_rates_of_an_encoder_are_of_so_many_steps(given, divided, part):
    optimizer, _ = adam(part, **given)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3e-3 / divided, 5e-3 / divided])


@pytest.mark.parametrize(
    ("labels", "given", "bound"), [(2, None, 4.0), (3, None, 1.5), (2, 0.1, 1.0), (77, 0.1, 38.5), (3, 0.2, 6.0)]
)
def test_the_bound_on_a_head_s_rate_follows_labels_and_temperature(labels, given, bound, part):
    """Of two labels both are others by default (docs/results.md); of more they are as they were."""
    model = nn.ModuleDict({"encoder": nn.Linear(3, 3), "classifier": nn.Linear(3, labels)})
    recipe = SimpleNamespace(method="head", head_noise=1e6, temperature=given)
    sizes = {"max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "world_size": 1}
    arguments = SimpleNamespace(learning_rate=0.5, **sizes)
    privacy = PrivacyConfig(noise_multiplier=1.0)
    made = part("classify").make_optimizer(model, recipe, arguments, privacy, ExampleUnit(number=80), n=80)
    assert made.param_groups[0]["lr"] == pytest.approx(bound)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.slow
def test_noise_alone_moves_weights_as_far_in_six_hundred_steps_as_in_sixty(bounded, part):
    moved = []
    for steps in (60, 600):
        torch.manual_seed(0)
        # A control: without the bound it is the square root of ten times as far.
        optimizer, model = adam(part, max_steps=steps if bounded else 60)
        before = model["encoder"].weight.detach().clone()
        for _ in range(steps):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        moved.append(float((model["encoder"].weight.detach() - before).norm()))
    assert (moved[1] < 2 * moved[0]) is bounded


@pytest.mark.parametrize(
    ("n", "promise", "batch"),
    [
        (4000, {}, (1000, 4)),
        (3016, {}, (754, 4)),
        (1780, {}, (890, 2)),
        (999, {}, (999, 1)),
        (10, {"dataset_size": 9000}, (1000, 4)),
    ],
)
def test_a_batch_is_no_larger_than_the_data_whose_size_is_public(n, promise, batch, part, tmp_path):
    given = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1000, gradient_accumulation_steps=4, use_cpu=True
    )
    made = part("common.rates").within(given, PrivacyConfig(target_epsilon=1, **promise), n)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == batch
