"""The private step: what is charged, what is noised, and where its masks come from."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import set_seed

from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.errors import BudgetExceededError
from hf_dp.per_example import record
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient


def make_plan(seed: int | None = None, steps: int = 5, **config: float) -> Plan:
    entropy = Entropy(seed)
    sampler = PoissonBatchSampler.of(100, 10, entropy)
    with pytest.warns(UserWarning, match="not private") if config.get("noise_multiplier") == 0 else nullcontext():
        return Plan.make(PrivacyConfig(seed=seed, **config), sampler, steps, entropy)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def one_step(plan: Plan, model: nn.Module, batches: list[dict[str, Tensor]], ledger: Ledger | None = None) -> Tensor:
    private_gradient(model, lambda b: record(model, loss, b), batches, plan, ledger or Ledger())
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 0])}


def test_dropout_masks_do_not_follow_the_public_seed(model, batch):
    plan = make_plan(noise_multiplier=0)
    torch.manual_seed(1)
    first = one_step(plan, model, [batch])
    torch.manual_seed(1)
    second = one_step(plan, model, [batch])
    assert not torch.equal(first, second)


def test_failure_102_what_a_model_seeds_is_secret_again_in_the_next_micro_batch(model, batch):
    """As where a forward pass makes a random projection of its own from a seed."""
    seen = []

    def seeding(micro_batch):
        seen.append((float(torch.rand(())), float(np.random.rand()), random.random()))
        found = record(model, loss, micro_batch)
        set_seed(0)
        return found

    private_gradient(model, seeding, [batch] * 4, make_plan(noise_multiplier=0), Ledger())
    for numbers in zip(*seen, strict=True):
        assert len(set(numbers)) == 4


def test_failure_102_what_seeds_where_micro_batches_are_prepared_too(model, batch):
    seen = []

    def prepared():
        for _ in range(4):
            seen.append(float(torch.rand(())))
            set_seed(0)
            yield batch

    private_gradient(model, lambda one: record(model, loss, one), prepared(), make_plan(noise_multiplier=0), Ledger())
    assert len(set(seen)) == 4


def test_under_a_privacy_seed_dropout_masks_follow_the_global_seed(model, batch):
    plan = make_plan(seed=3, noise_multiplier=0)
    torch.manual_seed(1)
    first = one_step(plan, model, [batch])
    torch.manual_seed(1)
    assert torch.equal(first, one_step(plan, model, [batch]))


def test_failure_05_an_empty_batch_is_charged_and_gets_noise(model):
    ledger = Ledger()
    gradient = one_step(make_plan(noise_multiplier=1.0), model, [], ledger)
    assert ledger.steps == 1
    assert gradient.ne(0).all()


def test_failure_10_noise_is_on_the_sum_and_the_sum_is_divided_by_the_expected_size(model, batch):
    model.eval()
    quiet = one_step(make_plan(noise_multiplier=0, clipping_norm=math.inf), model, [batch])
    total = record(model, loss, batch).weighted_sum(torch.ones(4))
    expected = torch.cat([g.flatten() for g in total.values()]) / 10
    torch.testing.assert_close(quiet, expected)
    wide = nn.Sequential(nn.Linear(200, 200))
    noise = one_step(make_plan(seed=1, noise_multiplier=2.0, clipping_norm=0.5), wide, [])
    # 40,200 numbers: the sample deviation is within 1.5 % of sigma C / B with overwhelming probability.
    assert abs(float(noise.std()) / (2.0 * 0.5 / 10) - 1) < 0.015


def test_the_budget_is_checked_before_anything_is_computed(model, batch):
    plan = make_plan(steps=1, target_epsilon=8.0)
    ledger = Ledger()
    one_step(plan, model, [batch], ledger)

    def never(_: object) -> None:
        raise AssertionError("a gradient was computed past the budget")

    with pytest.raises(BudgetExceededError, match="as many as were planned"):
        private_gradient(model, never, [batch], plan, ledger)
    assert ledger.steps == 1
