"""The loss of semantic segmentation is the model's own, of each example by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForSemanticSegmentation,
    DPTConfig,
    DPTForSemanticSegmentation,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.still import still_batch_norm

SIDE = 16
IGNORED = 255


def segformer(labels: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=labels,
        hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    model = SegformerForSemanticSegmentation(config).double()
    still_batch_norm(model)
    return model.train()


def beit(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    values = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20, "num_labels": 4}
    config = BeitConfig(
        image_size=SIDE, patch_size=4, num_hidden_layers=4, out_indices=[1, 2, 3, 4], use_auxiliary_head=False,
        drop_path_rate=0.0, **values,
    )  # fmt: skip
    model = BeitForSemanticSegmentation(config).double()
    still_batch_norm(model)
    return model.train()


def images(size: int = 3, labels: int = 4) -> dict[str, Tensor]:
    """The second has few labelled pixels, and the third none."""
    torch.manual_seed(1)
    maps = torch.randint(0, max(2, labels), (size, SIDE, SIDE))
    maps[1, 2:] = IGNORED
    maps[2] = IGNORED
    return {"pixel_values": torch.randn(size, 3, SIDE, SIDE, dtype=torch.float64), "labels": maps}


@pytest.mark.parametrize(("make", "labels"), [(segformer, 4), (beit, 4), (segformer, 1)])
def test_it_is_the_own_loss_of_each_by_itself(make: Any, labels: int) -> None:
    model: Any = make() if labels == 4 else make(labels)
    batch = images(labels=labels)
    assert loss_kind(model) == "semantic_segmentation"
    found = per_example_losses(model, batch).detach()
    for i in (0, 1):
        one = {name: value[i : i + 1] for name, value in batch.items()}
        torch.testing.assert_close(found[i], model(**one).loss, check_dtype=False)
    assert float(found[2]) == 0.0  # Transformers' own mean over no pixel is no number
    check_own_loss(model, batch)


def test_gradients_are_those_of_single_examples() -> None:
    model, batch = segformer(), images()
    found = record(model, per_example_losses, batch, certificate=preflight(model, per_example_losses, batch))
    exact = loop(model, per_example_losses, batch)
    torch.testing.assert_close(found.squared_norms(), exact.squared_norms())
    weights = torch.tensor([0.3, 2.0, 1.0], dtype=torch.float64)
    sums, known = found.weighted_sum(weights), exact.weighted_sum(weights)
    for name, value in sums.items():
        torch.testing.assert_close(value, known[name])
    assert float(found.squared_norms()[2]) == 0.0


def test_a_term_of_an_output_that_is_not_returned_is_refused() -> None:
    model: Any = beit()
    model.config.use_auxiliary_head = True
    with pytest.raises(UnsupportedModelError, match="auxiliary head") as caught:
        per_example_losses(model, images())
    assert "use_auxiliary_head=False" in caught.value.fix


@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.long), torch.zeros(3, SIDE, SIDE)])
def test_labels_that_are_no_maps_are_refused(labels: Tensor) -> None:
    with pytest.raises(ConfigurationError, match="for semantic segmentation"):
        per_example_losses(segformer(), {**images(), "labels": labels})


def test_label_smoothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="label_smoothing_factor"):
        per_example_losses(segformer(), images(), label_smoothing=0.1)


def test_a_model_that_cannot_compute_its_own_loss_says_so() -> None:
    """Transformers' DPT adds a term of an auxiliary head whether there is one or not."""
    config = DPTConfig(
        image_size=SIDE, patch_size=4, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, num_labels=4,
        use_auxiliary_head=False,
    )  # fmt: skip
    model = DPTForSemanticSegmentation(config).double().eval()
    with pytest.raises(UnsupportedModelError, match="cannot compute its own loss of one example"):
        check_own_loss(model, images())
