"""Epsilon is no less than what sampler, clipping and noise are seen to do costs, by `dp_accounting` alone."""

from __future__ import annotations

import math
import statistics
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp import PrivacyConfig
from hf_dp.accounting import Ledger, sampling_terms
from hf_dp.config.asked import promised
from hf_dp.errors import ConfigurationError
from hf_dp.per_example import record
from hf_dp.randomness import Entropy
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.strategies import cases

# Of which noise is a sample, and the sampler's draws; estimates are off by less than so many standard errors.
PARAMETERS, DRAWS, ERRORS = 10_000, 400, 5

# To calibrate takes most of a second.
noises = st.builds(lambda value: {"noise_multiplier": value}, st.floats(0.5, 5))
budgets = st.one_of(noises, noises, noises, st.builds(lambda value: {"target_epsilon": value}, st.floats(0.5, 10)))
others = st.fixed_dictionaries(
    {},
    optional={
        "clipping_norm": st.floats(1e-3, 1e3), "clipping": st.just("automatic"), "accountant": st.just("rdp"),
        "target_delta": st.floats(1e-9, 1e-3), "dataset_size": st.integers(20, 90),
        "max_batch_size": st.integers(1, 30), "noise": st.just("grid"),
    },
)  # fmt: skip


def planned(n: int, expected: int, steps: int, **promise: Any) -> Plan:
    config, entropy = PrivacyConfig(seed=1, **promise), Entropy(1)
    terms = sampling_terms(n, expected, promised(config))
    return Plan.make(config, sampler_of(terms, n, entropy, is_secret=config.hides_n), steps, entropy, n=n)


def released(plan: Plan, ledger: Ledger, examples: list[Tensor]) -> Tensor:
    """The noisy sum (PARAMETERS,) of one step."""
    model = nn.Linear(PARAMETERS, 1, bias=False)
    batches = [{"x": torch.stack(examples)}] if examples else []
    private_gradient(
        model,
        lambda batch: record(model, lambda model, batch: model(batch["x"]).squeeze(1), batch),
        batches,
        plan,
        ledger,
    )
    assert model.weight.grad is not None
    return model.weight.grad.flatten() * plan.sampler.expected_batch_size


def epsilon_of_what_is_done(plan: Plan, steps: int, delta: float) -> float:
    """A lower bound: of a little less sampling and a little more noise than was seen, where all others add nothing (so
    that of a sampler with a cap it is only how often one is drawn that tells)."""
    noise = released(plan, Ledger(), [])
    one = torch.zeros(PARAMETERS)
    one[0] = 1e4 * plan.clipping.sensitivity + 1e4
    # Under a seed both have the same noise.
    sensitivity = float((released(plan, Ledger(), [one]) - noise).norm())
    sigma = statistics.fmean(noise.double().square().tolist()) ** 0.5 / sensitivity
    n = plan.sampler.dataset_size
    drawn = sum(len(plan.sampler.draw(step)) for step in range(DRAWS)) / (n * DRAWS)
    q = drawn - ERRORS * math.sqrt(drawn * (1 - drawn) / (n * DRAWS))
    sigma *= 1 + ERRORS / math.sqrt(2 * PARAMETERS)
    step = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    return float(
        PLDAccountant(value_discretization_interval=4e-3)
        .compose(dp.SelfComposedDpEvent(step, steps))
        .get_epsilon(delta)
    )


@pytest.mark.fuzzed
@cases(4)
@given(st.integers(20, 60), st.integers(2, 12), st.integers(1, 6), budgets, others)
def test_epsilon_is_at_least_that_of_what_was_done(
    n: int, expected: int, steps: int, budget: dict[str, Any], other: dict[str, Any]
) -> None:
    try:
        plan = planned(n, expected, steps, **budget, **other)
    except ConfigurationError:
        assume(False)
    ledger = Ledger(plan.promise)
    for _ in range(steps):
        released(plan, ledger, [])
    report = plan.report(ledger)
    assert report.epsilon >= epsilon_of_what_is_done(plan, steps, report.delta)
    assert "target_epsilon" not in budget or report.epsilon <= budget["target_epsilon"]


@pytest.mark.parametrize("wrong", ["noise", "sampling", "clipping", "steps"])
def test_what_is_done_otherwise_than_it_is_said_costs_more(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(50, 5, 4, noise_multiplier=1.0)
    said = plan.mechanism.event
    epsilon = Ledger(plan.promise)
    epsilon.charge(said)
    steps = 8 if wrong == "steps" else 4
    if wrong == "noise":
        add = plan.noise.add_
        monkeypatch.setattr(
            plan.noise, "add_", lambda tensors, sigma, *rest, **of: add(tensors, sigma / 2, *rest, **of)
        )
    elif wrong == "sampling":
        monkeypatch.setattr(plan.sampler, "draw", lambda step: list(range(15)))
    elif wrong == "clipping":
        monkeypatch.setattr(plan.clipping, "scales", lambda norms, bound: 2 * bound / norms)
    assert epsilon_of_what_is_done(plan, steps, plan.delta) > epsilon.epsilon(plan.delta)
