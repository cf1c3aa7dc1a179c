"""What is known, by name, to compute an example's output from others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import NllbMoeConfig, TimeSeriesTransformerConfig, TrainerCallback
from transformers.integrations.neftune import activate_neftune, neftune_post_forward_hook
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeTop2Router
from transformers.models.time_series_transformer.modeling_time_series_transformer import TimeSeriesMeanScaler

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.preflight import check_modules
from tests.training.workbench import classifier, make


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


def embeddings(hook: Any) -> nn.Module:
    found = nn.Embedding(5, 4)
    found.neftune_noise_alpha = 5.0  # type: ignore[assignment]
    found.register_forward_hook(hook)
    return nn.Sequential(found)


class Noisy:
    def neftune_post_forward_hook(self, module: Any, args: Any, output: Any) -> Any:
        return neftune_post_forward_hook(module, args, output)


HOOKS = {
    "of Transformers": neftune_post_forward_hook,
    "a part": functools.partial(neftune_post_forward_hook),
    "a method": Noisy().neftune_post_forward_hook,
}


@pytest.mark.parametrize("name", HOOKS)
def test_failure_128_noise_that_is_scaled_by_the_padded_width_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^0 is NEFTune's noise \(Embedding\)"):
        check_modules(embeddings(HOOKS[name]))


@pytest.mark.few(1)
@pytest.mark.parametrize("later", [False, True])
def test_it_is_so_whoever_switched_it_on_and_when(later: bool, tmp_path: Path) -> None:
    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                activate_neftune(model, 5.0)

    model = classifier()
    if later:
        trainer = make(tmp_path, model, parts={"callbacks": [Callback()]})
        with pytest.raises(UnsupportedModelError, match="NEFTune's noise"):
            trainer.train()
        assert trainer.ledger.steps == 1
        return
    activate_neftune(model, 5.0)
    with pytest.raises(UnsupportedModelError, match="NEFTune's noise"):
        make(tmp_path, model)
