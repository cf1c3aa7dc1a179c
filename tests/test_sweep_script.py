"""The sweep over architectures: what it says of some, and the page that it writes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    LayoutLMv3Config,
    LayoutLMv3ForTokenClassification,
    Lfm2MoeConfig,
    Mamba2Config,
    OPTConfig,
    SwinConfig,
)

from scripts import sweep
from scripts.batches import batch_for
from scripts.shrinking import NotMadeError, small_config, small_model


@pytest.mark.parametrize(
    ("head", "name", "beginning"),
    [
        ("causal_lm", "opt", "exact"),
        ("causal_lm", "trocr", "exact"),
        ("sequence", "bert", "exact"),
        ("image", "resnet", "exact"),
        ("segmentation", "segformer", "exact"),
        ("causal_lm", "lfm2_moe", "exact"),
        ("causal_lm", "xglm", "exact"),
        ("token", "layoutlmv3", "exact"),
        ("image", "dinat", "not made"),
    ],
)
@pytest.mark.slow
def test_what_is_said_of_one(head: str, name: str, beginning: str) -> None:
    assert sweep.judge_class(name, sweep.classes_of(head)[name], head).startswith(beginning)


@pytest.mark.parametrize(("name", "kind"), [("opt", "OPTForCausalLM"), ("xglm", "XGLMForCausalLM")])
@pytest.mark.slow
def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    """Where gradients are twice as long as those of single examples; also of one that knows no float64."""
    record = sweep.judging.record

    def doubled(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        found = record(model, *args, **kwargs)
        for name, uses in found.factors.items():
            found.factors[name] = [use.scaled(2.0) for use in uses]
        return found

    monkeypatch.setattr(sweep.judging, "record", doubled)
    assert sweep.judge_class(name, kind, "causal_lm").startswith("WRONG")


def test_a_model_that_stays_large_is_not_made() -> None:
    class Large(torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(3000, 3000))

    with pytest.raises(NotMadeError, match="stays large"):
        small_model(Large, OPTConfig, "causal_lm")


def test_what_is_tried_keeps_each_kind_of_layer() -> None:
    config = small_config(GPTNeoConfig, (), {})
    assert config.attention_layers == ["global", "local"]
    assert config.num_layers == 2
    mixed = small_config(Lfm2MoeConfig, ("layer_types",), {"layer_types": ["conv", "full_attention"]})
    assert mixed.layer_types == ["conv", "full_attention"]
    assert mixed.num_hidden_layers == 2


def test_what_is_tried_has_whole_heads_in_each_stage_and_sets_nothing_that_is_fixed() -> None:
    config = small_config(SwinConfig, ("patch_size",), {"image_size": 64, "depths": [1, 2, 1, 2]})
    assert config.embed_dim == 8 * config.num_heads[0]
    assert config.hidden_size == 8 * config.embed_dim
    assert config.depths == [1, 2, 1, 2]
    assert config.image_size == 64
    assert small_config(Mamba2Config, ("layer_types",), {"num_heads": 8}).layer_types == ["linear_attention"] * 2


def test_what_a_model_is_told_beside_its_texts() -> None:
    config = LayoutLMv3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=48,
        coordinate_size=6,
        shape_size=4,
        vocab_size=40,
        input_size=32,
    )
    batch = batch_for("token", LayoutLMv3ForTokenClassification(config), 3)
    assert batch.keys() == {"input_ids", "attention_mask", "bbox", "pixel_values", "labels"}
    assert (batch["bbox"][..., 2:] > batch["bbox"][..., :2]).all()
    assert batch["bbox"].max() < 1000


def test_the_page_counts_and_names_them() -> None:
    said = {"a": "exact 2e-16", "b": "refused: it is batch normalisation.", "c": "not made: KeyError", "d": "exact 0"}
    written = sweep.page({"image": said})
    assert "A star" not in written
    assert "| image | 2 | 1 | 1 |" in written
    assert "- **image**: a, d" in written
    assert "- b (image): it is batch normalisation." in written
    assert written.endswith("## Not made\n\n- **image**: c\n")
    assert sweep.page({"image": {"a": "exact 0"}}).endswith("## Not made\n\n")
    told = sweep.page({"causal_lm": {"a": "exact 2e-16", "b": "exact 3e-16 ForMaskedLM"}})
    assert "- **causal_lm**: a, b*\n" in told
    assert 'A star: after `model.loss_type = "ForMaskedLM"`' in told
