"""What is known, by name, to compute an example's output from others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import NllbMoeConfig, TimeSeriesTransformerConfig
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router
from transformers.models.time_series_transformer.modeling_time_series_transformer import TimeSeriesMeanScaler

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.preflight import check_modules


def scaler(**changes: Any) -> nn.Module:
    made = TimeSeriesMeanScaler(TimeSeriesTransformerConfig(prediction_length=2))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def router() -> nn.Module:
    config = NllbMoeConfig(num_experts=2, hidden_size=4, expert_capacity=2, d_model=4)
    return NllbMoeTop2Router(config)


def voting() -> nn.Module:
    made: nn.Module = type("ZoeDepthMultipleMetricDepthEstimationHeads", (nn.Module,), {})()
    return made


@pytest.mark.parametrize(
    ("module", "named"),
    [(scaler(), "mean of a series"), (router(), "limited capacity"), (voting(), "by the whole batch")],
    ids=["scaler", "router", "voting"],
)
def test_failure_68_what_mixes_rare_rows_is_refused_by_name(module: nn.Module, named: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), module)
    with pytest.raises(UnsupportedModelError, match=f"1 is .*{named}"):
        check_modules(model)


def test_a_scale_of_ones_own_mixes_nothing() -> None:
    check_modules(nn.Sequential(nn.Linear(2, 2), scaler(default_scale=1.0)))
    data, observed = torch.tensor([[[1.0], [3.0]], [[0.0], [0.0]]]), torch.tensor([[[1.0], [1.0]], [[0.0], [0.0]]])
    of_others = [scaler()(factor * data, observed)[2][1] for factor in (1, 10)]
    own = [scaler(default_scale=1.0)(factor * data, observed)[2][1] for factor in (1, 10)]
    assert not torch.equal(*of_others)
    assert torch.equal(*own)
