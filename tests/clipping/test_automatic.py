"""Automatic clipping: every gradient is scaled by C / (norm + gamma)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hf_dp import PrivacyConfig, PrivacyReport, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import AutomaticClipping, Ledger
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.clipping.automatic import Automatic
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, record
from hf_dp.step.clipped_sum import ClippedSum
from tests.clipping.contract import ClippingRuleContract, plan_of, promise
from tests.training.workbench import STEPS, classifier, make, private, with_lora
from tests.zoo import text_batch, tiny


class TestAutomatic(ClippingRuleContract):
    kind: ClassVar[Any] = "automatic"
    written: ClassVar[dict[str, Any]] = {"norm": 0.5, "gamma": 0.01, "kind": "automatic"}


def test_the_sum_is_that_of_a_loop_over_single_examples() -> None:
    model, batch, c = tiny("gpt2", "causal_lm"), text_batch("causal_lm"), 0.7
    total = ClippedSum(model, Automatic(AutomaticClipping(norm=c)))
    total.add(record(model, per_example_losses, batch))
    truth = loop(model, per_example_losses, batch)
    norms = truth.squared_norms().sqrt()
    for name, expected in truth.weighted_sum(c / (norms + 0.01)).items():
        assert torch.allclose(total.gradients[name], expected, rtol=1e-10, atol=1e-14)
    # Of all that are scaled, those that became shorter.
    assert total.clipped == int((norms > c - 0.01).sum())


def test_short_gradients_are_scaled_up_and_nothing_stays_nothing() -> None:
    norms = torch.tensor([0.0, 1e-6, 0.01, 1.0, 1e6], dtype=torch.float64)
    found = Automatic(AutomaticClipping(norm=2.0)).coefficients(norms.square(), torch.zeros(5, dtype=torch.float64))
    assert torch.allclose(found, 2 / (norms + 0.01), rtol=1e-12)
    assert float(found[0]) <= 200


@pytest.mark.parametrize("gamma", [0, -0.01, 1e-5, 1e5, math.nan, math.inf, "much", None, True])
def test_a_gamma_out_of_range_is_refused(gamma: Any) -> None:
    with pytest.raises(ConfigurationError, match="gamma"):
        terms_from_dict("clipping", {"norm": 1.0, "gamma": gamma, "kind": "automatic"})


@pytest.mark.parametrize("rule", ["Automatic", "", None, 1, "auto"])
def test_a_rule_that_is_not_known_is_refused(rule: Any) -> None:
    with pytest.raises(ConfigurationError, match="clipping="):
        promise(clipping=rule)


def test_an_infinite_norm_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="clipping='automatic' with clipping_norm=inf"):
        PrivacyConfig(noise_multiplier=0, clipping_norm=math.inf, clipping="automatic")
    with pytest.raises(ConfigurationError, match="finite"):
        AutomaticClipping(norm=math.inf)


def test_promise_and_report_say_so_and_those_of_flat_runs_are_as_they_were() -> None:
    automatic, flat = plan_of(promise(clipping="automatic")), plan_of(promise())
    assert automatic.promise == {**flat.promise, "clipping": "automatic"}
    told, plain = (plan.report(Ledger(plan.promise)) for plan in (automatic, flat))
    assert told.to_dict() == {**plain.to_dict(), "clipping": "automatic"}
    assert PrivacyReport.from_json(told.to_json()) == told
    assert "0.5 (automatic: shorter gradients are brought near it too)" in str(told)
    assert "automatic" in str(automatic)
    assert "automatic" not in str(plain) + str(flat) + plain.to_json()
    for wrong in ("flatt", None, [], 1):
        with pytest.raises(LedgerError, match="clipping"):
            PrivacyReport.from_json(json.dumps({**told.to_dict(), "clipping": wrong}))


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (with_lora, {}),
        (classifier, {"sparse_embeddings": SparseEmbeddingConfig(threshold=2.0)}),
        (classifier, {"re_attention": ReAttentionConfig()}),
    ],
    ids=["LoRA", "sparse embeddings", "Re-Attention"],
)
@pytest.mark.slow
def test_a_training_costs_what_it_costs_with_flat_clipping(
    tmp_path: Path, model: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    reports = []
    for clipping in ("flat", "automatic"):
        privacy = private(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", clipping=clipping, **settings)
        trainer = make(tmp_path / clipping, model(), privacy, logging_steps=1)
        trainer.train()
        reports.append(trainer.privacy_report())
        assert trainer.ledger.steps == STEPS
    flat, automatic = (report.to_dict() for report in reports)
    assert automatic == {**flat, "clipping": "automatic"}
