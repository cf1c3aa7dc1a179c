"""Losses that are not known are refused by name, and so are labels that the loss has not."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertForSequenceClassification,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2DoubleHeadsModel,
)

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.losses.per_example import left_out
from tests.zoo import text_batch, tiny


def test_a_batch_without_labels_is_refused() -> None:
    batch = text_batch("causal_lm")
    batch.pop("labels")
    with pytest.raises(ConfigurationError, match=r"no 'labels' \(it has attention_mask, input_ids\)"):
        per_example_losses(tiny("gpt2", "causal_lm"), batch)
    with pytest.raises(ConfigurationError, match="start_positions"):
        per_example_losses(tiny("bert", "qa"), batch)


@pytest.mark.parametrize("make", [nn.Linear, lambda *_: GPT2DoubleHeadsModel(tiny("gpt2", "causal_lm").config)])
def test_an_unknown_head_is_refused_by_name(make: Any) -> None:
    model = make(3, 3)
    model.config = getattr(model, "config", None)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__}.*no known per-example loss"):
        loss_kind(model)


def test_smoothing_is_refused_where_it_is_not_defined() -> None:
    model = tiny("bert", "sequence", problem_type="regression", num_labels=1)
    with pytest.raises(ConfigurationError, match=r"label_smoothing_factor=0\.1"):
        per_example_losses(model, {**text_batch("sequence"), "labels": torch.randn(3)}, label_smoothing=0.1)


def test_logits_at_other_positions_than_labels_are_refused() -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    with pytest.raises(UnsupportedModelError, match=r"logits \(3, 7, 37\) for labels \(3, 5\)"):
        per_example_losses(model, {**batch, "labels": batch["labels"][:, :5]})


def test_a_model_whose_own_loss_is_another_is_refused() -> None:
    """BartForCausalLM does not shift its labels. Where that is said of it, its loss is known."""
    model: Any = tiny("bart", "causal_lm")
    batch = text_batch("causal_lm")
    with pytest.raises(UnsupportedModelError, match="BartForCausalLM returns .* as its loss of one example"):
        check_own_loss(model, batch)
    model.loss_type = "ForMaskedLM"
    check_own_loss(model, batch)
    alone = model(**{name: value[:1] for name, value in batch.items()}).loss
    torch.testing.assert_close(per_example_losses(model, batch)[0], alone)


@pytest.mark.parametrize("labels", [[0, 1, 2], [1, 1, 1]])
def test_weights_of_classes_in_a_models_own_loss_are_refused(labels: list[int]) -> None:
    """Of one example the weighted mean is its loss."""

    class Weighted(BertForSequenceClassification):
        weight: Tensor | None = None

        def forward(self, labels: Any = None, **inputs: Any) -> Any:
            found = super().forward(**inputs)
            if labels is not None:
                found.loss = F.cross_entropy(found.logits, labels, weight=self.weight)
            return found

    model = Weighted(tiny("bert", "sequence").config).double()
    batch = {**text_batch("sequence"), "labels": torch.tensor(labels)}
    check_own_loss(model, batch)
    model.weight = torch.ones(model.config.num_labels, dtype=torch.float64)
    check_own_loss(model, batch)
    model.weight[-1] = 50
    with pytest.raises(UnsupportedModelError, match=r"(?s)probably weighs classes.*weight=weight, reduction='none'"):
        check_own_loss(model, batch)


@pytest.mark.parametrize(
    ("own", "is_theirs"),
    [
        (lambda logits, labels, weight: F.mse_loss(logits, labels), True),
        (lambda logits, labels, weight: F.huber_loss(logits, labels, delta=0.02), False),
        (lambda logits, labels, weight: 0.1 * F.l1_loss(logits, labels), False),
        (lambda logits, labels, weight: F.mse_loss(logits, labels) + 0.1 * weight.square().mean(), False),
    ],
    ids=["theirs", "huber", "absolute", "with a term of the weights"],
)
def test_another_loss_is_told_where_losses_are_small(own: Any, is_theirs: bool) -> None:
    class Measures(BertForSequenceClassification):
        def forward(self, labels: Any = None, **inputs: Any) -> Any:
            found = super().forward(**inputs)
            if labels is not None:
                found.loss = own(found.logits.squeeze(-1), labels, self.classifier.weight)
            return found

    config = tiny("bert", "sequence").config
    config.num_labels, config.problem_type = 1, "regression"
    model = Measures(config)
    inputs = {name: value for name, value in text_batch("sequence").items() if name != "labels"}
    near = model.eval()(**inputs).logits.squeeze(-1).detach()
    with nullcontext() if is_theirs else pytest.raises(UnsupportedModelError, match="another loss than that"):
        check_own_loss(model, {**inputs, "labels": near + 0.03})


def hint_for(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_own_loss(model, text_batch("causal_lm"))
    assert "compute_per_example_loss" in caught.value.fix
    assert "PrivateRun(loss=...)" in caught.value.fix
    assert "docs/extending.md" in caught.value.fix
    return f"{caught.value.found} {caught.value.fix}"


def test_the_hint_names_what_is_probable_by_what_is_seen() -> None:
    unshifted = hint_for(tiny("bart", "causal_lm"))
    assert "does not shift" in unshifted
    assert "model.loss_type = 'ForMaskedLM'" in unshifted
    assert "router" not in unshifted
    for changes in ({}, {"router_aux_loss_coef": 1.0}):
        routed = hint_for(tiny("mixtral", "causal_lm", torch.float32, output_router_logits=True, **changes))
        assert "output_router_logits=False" in routed
    other = tiny("gpt2", "causal_lm")
    plain = other.forward

    def doubled(**inputs: Any) -> Any:
        out = plain(**inputs)
        out.loss = None if out.loss is None else 2 * out.loss
        return out

    other.forward = doubled
    assert "another loss" in (hint := hint_for(other))
    assert "router" not in hint


def test_an_adapter_that_adds_a_term_is_named_and_the_way_out_works() -> None:
    def adapter(**changes: Any) -> Any:
        config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM", **changes)
        return peft.get_peft_model(tiny("llama", "causal_lm"), config)

    assert "orth_reg_weight=0" in (hint := hint_for(adapter()))
    assert "router" not in hint
    check_own_loss(adapter(orth_reg_weight=0.0), text_batch("causal_lm"))


def test_a_model_that_cannot_compute_its_own_loss_is_refused() -> None:
    """GIT's expects logits of an image before those of the text."""

    model = tiny("gpt2", "causal_lm")
    plain = model.forward

    def forward(labels: Tensor | None = None, **inputs: Any) -> Any:
        out = plain(**inputs)
        return out if labels is None else F.cross_entropy(out.logits[:, 1:-1].flatten(0, 1), labels.flatten())

    model.forward = forward
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot compute its own loss of one example"):
        check_own_loss(model, text_batch("causal_lm"))


def test_whole_numbers_as_several_labels_are_told_to_be_floats() -> None:
    model = tiny("bert", "sequence", problem_type="multi_label_classification")
    labels = torch.ones(3, model.config.num_labels, dtype=torch.long)
    with pytest.raises(UnsupportedModelError, match="cannot compute its own loss") as caught:
        check_own_loss(model, {**text_batch("sequence"), "labels": labels})
    assert "as floats" in caught.value.fix


def test_a_model_without_a_loss_of_its_own_is_refused() -> None:
    model = tiny("gpt2", "causal_lm")
    plain = model.forward
    model.forward = lambda labels=None, **inputs: plain(**inputs)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel returns no loss of its own for labels"):
        check_own_loss(model, text_batch("causal_lm"))


def test_own_loss_with_dropout_compares_the_same_masks() -> None:
    model = tiny("bert", "sequence", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    state = torch.get_rng_state()
    check_own_loss(model, text_batch("sequence"))
    assert torch.equal(state, torch.get_rng_state())


def test_auto_classes_are_known() -> None:
    assert loss_kind(tiny("gpt2", "causal_lm")) == "causal_lm"
    assert loss_kind(tiny("bert", "masked_lm")) == "token"
    for name, head in (("vit", "image"), ("bert", "sequence"), ("videomae", "video")):
        assert loss_kind(tiny(name, head)) == "classification"


def test_what_hears_or_sees_is_an_encoder_decoder_only_where_its_config_says_so() -> None:
    class Qwen2AudioForConditionalGeneration(nn.Module):
        config = SimpleNamespace(is_encoder_decoder=False)

    model: Any = Qwen2AudioForConditionalGeneration()
    assert loss_kind(model) == "causal_lm"
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert loss_kind(model) == "token"


def test_several_labels_in_whole_numbers_are_told_from_one() -> None:
    model, batch = tiny("bert", "sequence"), text_batch("sequence")
    batch["labels"] = torch.ones(len(batch["labels"]), model.config.num_labels, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="in whole numbers, for one of . classes each") as caught:
        per_example_losses(model, batch)
    assert "multi_label_classification" in str(caught.value)
    batch["labels"] = batch["labels"][:, :1]
    assert per_example_losses(model, batch).shape == (len(batch["labels"]),)


def test_frames_of_a_recording_are_not_asked_for_where_losses_are_of_tokens() -> None:
    """Moonshine counts those of one recording alone."""
    model, batch = tiny("t5", "seq2seq"), text_batch("seq2seq")
    model._get_feat_extract_output_lengths = int
    assert left_out(model, batch) is not None
    check_own_loss(model, batch)


def test_a_model_that_hides_no_token_with_its_cache_is_told_of_it() -> None:
    config = FSMTConfig(
        langs=["a", "b"], src_vocab_size=20, tgt_vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, max_position_embeddings=20, init_std=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = FSMTForConditionalGeneration(config).eval()
    ids = torch.randint(3, 20, (3, 6))
    batch = {"input_ids": ids, "decoder_input_ids": ids.roll(1, 1), "labels": ids}
    if model(**{name: batch[name] for name in ("input_ids", "decoder_input_ids")}).logits.shape[1] == 1:
        pytest.skip("with its cache this version of Transformers gives one position alone, which is refused as such")
    with pytest.raises(UnsupportedModelError, match=r"(?s)Without its cache.*model\.config\.use_cache = False"):
        check_own_loss(model, batch)
    assert model.config.use_cache
    model.config.use_cache = False
    check_own_loss(model, batch)
