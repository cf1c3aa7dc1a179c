"""What every clipping rule must keep: each kind has a class of tests that inherits these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import ClippingTerms, Mechanism
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.clipping.rule import ClippingRule
from hf_dp.clipping.table import RULES, rule_of
from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.per_example import record
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.plan import Plan
from tests.training.workbench import assert_resumes_as_it_was, private

DTYPES = [torch.float32, torch.float64]
# What a kind needs besides, of a model with weights and biases.
SETTINGS: dict[str, dict[str, Any]] = {"groups": {"groups": {"*weight": 3.0, "*": 1.0}}}
NORMS = [1e-6, 0.1, 1.0, 3.0, 1e6]


def promise(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(**{"target_epsilon": 4.0, "accountant": "rdp", "clipping_norm": 0.5, **changes})


def plan_of(config: PrivacyConfig) -> Plan:
    entropy = Entropy(config.seed)
    return Plan.make(config, PoissonBatchSampler.of(1000, 50, entropy), 10, entropy)


def squares(norm: float, dtype: torch.dtype) -> Tensor:
    """Squared norms over the whole range, and the hostile ones: nothing, the smallest, the largest, and about C."""
    generator = torch.Generator().manual_seed(0)
    chance = (10 ** (torch.rand(10_000, generator=generator, dtype=torch.float64) * 24 - 12)).to(dtype)
    limits = torch.finfo(dtype)
    about = torch.tensor([norm**2 * (1 + k * limits.eps) for k in range(-9, 10)], dtype=torch.float64).to(dtype)
    corners = torch.tensor([0.0, limits.smallest_normal / 1024, limits.tiny, limits.max / 2], dtype=dtype)
    return torch.cat([chance, about, corners])


def largest_share(rule: ClippingRule, dtype: torch.dtype) -> float:
    """The longest scaled norm in units of the sensitivity, where a squared norm may be larger by its rounding."""
    squared = squares(rule.sensitivity, dtype)
    shares = []
    for relative in (0.0, 1e-3, 0.9):
        rounding = squared * relative
        found = rule.coefficients(squared, rounding)
        assert found.dtype == dtype
        assert bool((found >= 0).all())
        shares.append(float((found.double() * (squared.double() + rounding.double()).sqrt()).max()))
    return max(shares) / rule.sensitivity


def largest_move(rule: ClippingRule) -> float:
    """How far the sum moves where one example is replaced by nothing, or removed, in units of the sensitivity."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3, dtype=torch.float64)
    rows = torch.randn(8, 5, dtype=torch.float64) * torch.logspace(-6, 6, 8, dtype=torch.float64)[:, None]
    weights = torch.ones(8, dtype=torch.float64)

    def summed(rows: Tensor, weights: Tensor) -> Tensor:
        total = ClippedSum(model, rule)
        total.add(record(model, lambda m, b: m(b["x"]).square().sum(1) * b["weight"], {"x": rows, "weight": weights}))
        return torch.cat([gradient.flatten() for gradient in total.gradients.values()])

    whole, moves = summed(rows, weights), []
    for i in range(8):
        others = torch.arange(8) != i
        without, nothing = summed(rows[others], weights[others]), summed(rows, weights * others)
        assert torch.allclose(without, nothing, rtol=1e-12, atol=1e-12 * rule.sensitivity)
        moves.append(float((whole - without).norm()))
    return max(moves) / rule.sensitivity


class TooLong(ClippingRule):
    """A rule whose coefficients are half as large again."""

    def __init__(self, rule: ClippingRule) -> None:
        super().__init__(rule.terms)
        self.rule = rule

    def scales(self, norms: Tensor, bound: float) -> Tensor:
        return 1.5 * self.rule.scales(norms, bound)


class ClippingRuleContract:
    """A kind of clipping, from the promise to a resumed training.

    Attributes:
        kind: of the config, the terms and the table.
        written: the terms of C = 0.5 in JSON.
    """

    kind: ClassVar[Any]
    written: ClassVar[dict[str, Any]]

    def rule(self, norm: float = 0.5) -> ClippingRule:
        return rule_of(self.terms(norm))

    def terms(self, norm: float = 0.5) -> ClippingTerms:
        terms: ClippingTerms = terms_from_dict("clipping", {**self.written, "norm": norm})
        return terms

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("norm", NORMS)
    def test_no_scaled_norm_exceeds_the_sensitivity_in_floating_point(self, dtype: torch.dtype, norm: float) -> None:
        rule = self.rule(norm)
        assert rule.sensitivity == rule.terms.sensitivity == norm
        assert 0.99 < largest_share(rule, dtype) <= 1
        assert largest_share(TooLong(rule), dtype) > 1.4

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_failure_14_what_is_not_finite_gets_zero_by_selection(self, bad: float, dtype: torch.dtype) -> None:
        good, zero = torch.tensor([1.0, 4.0, 9.0], dtype=dtype), torch.zeros(3, dtype=dtype)
        spoilt = good.where(torch.tensor([True, False, True]), bad)
        for found in (self.rule().coefficients(spoilt, zero), self.rule().coefficients(good, spoilt)):
            assert bool(found.isfinite().all())
            assert found[1] == 0
            assert bool((found[[0, 2]] > 0).all())
        assert torch.equal(self.rule().coefficients(spoilt, zero)[[0, 2]], self.rule().coefficients(good, zero)[[0, 2]])

    def test_neighbours_move_the_sum_by_at_most_c(self) -> None:
        assert 0.99 < largest_move(self.rule()) <= 1 + 1e-9
        assert largest_move(TooLong(self.rule())) > 1.4

    def test_terms_go_to_json_and_back_and_nothing_else_is_read(self) -> None:
        plan = plan_of(promise(clipping=self.kind, **SETTINGS.get(self.kind, {})))
        assert plan.mechanism.clipping == self.terms()
        assert isinstance(plan.clipping, RULES[self.kind])
        assert json.loads(json.dumps(plan.mechanism.to_dict()))["clipping"] == self.written
        assert Mechanism.from_dict(plan.mechanism.to_dict()) == plan.mechanism
        assert PrivacyConfig.from_json(plan.config.to_json()) == plan.config
        for name in self.written:
            with pytest.raises(ConfigurationError, match="clipping"):
                terms_from_dict("clipping", {key: value for key, value in self.written.items() if key != name})
        for wrong in ({"norm": 0}, {"norm": math.nan}, {"norm": "many"}, {"extra": 1}, {"kind": "other"}):
            with pytest.raises(ConfigurationError):
                terms_from_dict("clipping", {**self.written, **wrong})

    def test_a_step_costs_what_its_noise_costs_whatever_the_rule(self) -> None:
        plan, flat = plan_of(promise(clipping=self.kind, **SETTINGS.get(self.kind, {}))), plan_of(promise())
        assert plan.event == flat.event
        assert plan.noise_multiplier == flat.noise_multiplier
        assert plan.noise_standard_deviation == flat.noise_standard_deviation == plan.noise_multiplier * 0.5

    @pytest.mark.slow
    @pytest.mark.usefixtures("checked_once")
    def test_a_resumed_training_is_the_uninterrupted_one_and_keeps_its_rule(self, tmp_path: Path) -> None:
        def promised(kind: Any) -> PrivacyConfig:
            return private(clipping_norm=0.5, clipping=kind, **SETTINGS.get(kind, {}))

        others = map(promised, RULES.keys() - {self.kind})
        assert_resumes_as_it_was(tmp_path, promised(self.kind), others, "clipping", LedgerError)
