"""Per-example losses equal the model's own loss on that one example, and refuse what they do not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    BartForCausalLM,
    GPT2DoubleHeadsModel,
)
from transformers.trainer_pt_utils import LabelSmoother

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.per_example.batch import take
from tests.zoo import VOCABULARY, text_batch, tiny

TINY_SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 1, "num_heads": 2,
           "dropout_rate": 0.0, "decoder_start_token_id": 0},
    "bart": {"vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
             "max_position_embeddings": 40, "dropout": 0.0, "decoder_start_token_id": 2, "bos_token_id": 1,
             "eos_token_id": 2},
}  # fmt: skip


def assert_own(model: nn.Module, batch: dict[str, Tensor], size: int = 3) -> None:
    ours = per_example_losses(model, batch)
    own = torch.stack([model(**take(batch, [i])).loss for i in range(size)])
    assert ours.shape == (size,)
    assert torch.allclose(ours, own.to(ours.dtype), rtol=1e-6, atol=1e-6)
    check_own_loss(model, batch)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, "causal_lm") for name in ("gpt2", "llama", "gemma2", "opt", "gpt_neox", "qwen3")),
        *((name, "masked_lm") for name in ("bert", "roberta", "distilbert")),
        *((name, head) for name in ("gpt2", "bert", "llama") for head in ("sequence", "token", "qa")),
        ("distilbert", "sequence"),
        ("opt", "sequence"),
        ("vit", "image"),
    ],
)
def test_equals_the_models_own_loss(name: str, head: str) -> None:
    assert_own(tiny(name, head), text_batch(head))


@pytest.mark.parametrize(
    ("problem", "labels", "count"),
    [
        ("regression", torch.tensor([0.5, -1.0, 2.0]), 1),
        ("regression", torch.randn(3, 4), 4),
        ("single_label_classification", torch.tensor([0, 2, 3]), 4),
        ("multi_label_classification", torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]), 4),
        (None, torch.tensor([0.5, -1.0, 2.0]), 1),
        (None, torch.tensor([0, 2, 3]), 4),
        (None, torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1]]), 4),
    ],
)
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_three_problem_types(name: str, problem: str | None, labels: Tensor, count: int) -> None:
    model = tiny(name, "sequence", num_labels=count, problem_type=problem, attn_pdrop=0.0)
    batch = {**text_batch("sequence"), "labels": labels}
    model.eval()
    assert_own(model, batch)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoder(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **TINY_SEQ2SEQ[name])).eval()
    batch = text_batch("causal_lm")
    batch["labels"] = batch["labels"][:, 1:6].clone()
    assert_own(model, batch)
    prepared = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    with_inputs = per_example_losses(model, {**batch, "decoder_input_ids": prepared})
    assert torch.equal(with_inputs, per_example_losses(model, batch))


@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal_lm"), ("bert", "masked_lm"), ("bert", "token")])
def test_label_smoothing_is_the_trainers(name: str, head: str) -> None:
    model, batch = tiny(name, head), text_batch(head)
    ours = per_example_losses(model, batch, label_smoothing=0.1)
    smoother = LabelSmoother(epsilon=0.1)
    for i in range(3):
        one = take(batch, [i])
        labels = one.pop("labels")
        theirs = smoother(model(**one), labels, shift_labels=head == "causal_lm")
        assert torch.allclose(ours[i], theirs, rtol=1e-6)


@pytest.mark.parametrize(("name", "head"), [("gpt2", "causal_lm"), ("bert", "masked_lm"), ("bert", "token")])
def test_an_example_without_labels_has_loss_and_gradient_zero(name: str, head: str) -> None:
    model, batch = tiny(name, head), text_batch(head)
    full = per_example_losses(model, batch)
    batch["labels"][1] = -100
    losses = per_example_losses(model, batch)
    assert losses[1] == 0
    assert torch.equal(losses[[0, 2]], full[[0, 2]])
    losses[1].backward()
    assert all(p.grad is None or not bool(p.grad.any()) for p in model.parameters())
    check_own_loss(model, batch)


def test_question_answering_ignores_answers_beyond_the_text() -> None:
    model, batch = tiny("bert", "qa"), text_batch("qa")
    batch["start_positions"][1] = batch["end_positions"][1] = 99
    losses = per_example_losses(model, batch)
    assert losses[1] == 0
    assert torch.allclose(losses[0], model(**take(batch, [0])).loss)


def test_failure_03_the_losses_of_others_do_not_move_with_ones_labels() -> None:
    """A denominator shared over the batch would let one example's length rescale its neighbours."""
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    before = per_example_losses(model, batch)
    batch["labels"][0, 3:] = -100
    batch["num_items_in_batch"] = torch.tensor([2, 2, 2])
    after = per_example_losses(model, batch)
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_losses_are_in_float32_at_least() -> None:
    batch = text_batch("causal_lm")
    assert per_example_losses(tiny("gpt2", "causal_lm", torch.bfloat16), batch).dtype == torch.float32
    assert per_example_losses(tiny("gpt2", "causal_lm", torch.float64), batch).dtype == torch.float64


# --- refusals -------------------------------------------------------------------------------------------------------


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


def test_speech_is_refused_by_name() -> None:
    config = AutoConfig.for_model("whisper", vocab_size=VOCABULARY, d_model=8, encoder_layers=1, decoder_layers=1,
                                  encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8,
                                  decoder_ffn_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                  decoder_start_token_id=1)  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="WhisperForConditionalGeneration"):
        loss_kind(AutoModelForSpeechSeq2Seq.from_config(config))


def test_smoothing_is_refused_where_it_is_not_defined() -> None:
    model = tiny("bert", "sequence", problem_type="regression", num_labels=1)
    with pytest.raises(ConfigurationError, match=r"label_smoothing_factor=0\.1"):
        per_example_losses(model, {**text_batch("sequence"), "labels": torch.randn(3)}, label_smoothing=0.1)


def test_logits_at_other_positions_than_labels_are_refused() -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    with pytest.raises(UnsupportedModelError, match=r"logits \(3, 7, 37\) for labels \(3, 5\)"):
        per_example_losses(model, {**batch, "labels": batch["labels"][:, :5]})


def test_a_model_whose_own_loss_is_another_is_refused() -> None:
    """BartForCausalLM does not shift its labels."""
    torch.manual_seed(0)
    model = BartForCausalLM(AutoConfig.for_model("bart", **TINY_SEQ2SEQ["bart"]))
    with pytest.raises(UnsupportedModelError, match="BartForCausalLM returns .* as its loss of one example"):
        check_own_loss(model, text_batch("causal_lm"))


def test_own_loss_with_dropout_compares_the_same_masks() -> None:
    model = tiny("bert", "sequence", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    state = torch.get_rng_state()
    check_own_loss(model, text_batch("sequence"))
    assert torch.equal(state, torch.get_rng_state())


def test_auto_classes_are_known() -> None:
    assert loss_kind(tiny("gpt2", "causal_lm")) == "causal_lm"
    assert loss_kind(tiny("bert", "masked_lm")) == "token"
    for make in (AutoModelForSequenceClassification, AutoModelForImageClassification):
        name = "vit" if make is AutoModelForImageClassification else "bert"
        assert loss_kind(tiny(name, "image" if name == "vit" else "sequence")) == "classification"
