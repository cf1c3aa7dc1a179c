"""Per-example losses equal the model's own loss on that one example, and refuse what they do not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    GPT2DoubleHeadsModel,
    Trainer,
    TrainingArguments,
)

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.losses import tokens as tokenwise
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.batch import take
from tests.zoo import batches_of, text_batch, tiny


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
        *(("bart", head) for head in ("seq2seq", "sequence", "qa")),
        *(("t5", head) for head in ("seq2seq", "sequence", "token", "qa")),
        *((name, head) for name in ("gpt2", "bert") for head in ("multi_label", "regression")),
        *((name, "image") for name in ("vit", "clip", "siglip")),
        ("whisper", "speech"),
        *((name, "choice") for name in ("bert", "roberta")),
        *((name, "image_text") for name in ("llava", "paligemma", "idefics3", "smolvlm")),
    ],
)
def test_equals_the_models_own_loss(name: str, head: str) -> None:
    assert_own(tiny(name, head), batches_of(name, head)(3, 7, torch.float64))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("name", ["wav2vec2", "hubert"])
def test_speech_recognition_by_ctc(name: str, with_mask: bool, reduction: str) -> None:
    model, batch = tiny(name, "ctc", ctc_loss_reduction=reduction), text_batch("ctc")
    batch["labels"][1, 0] = -100
    if not with_mask:
        del batch["attention_mask"]
    certificate = preflight(model, per_example_losses, batch)
    assert_own(model, batch)
    found = record(model, per_example_losses, batch, certificate=certificate)
    truth = loop(model, per_example_losses, batch)
    assert torch.allclose(found.squared_norms(), truth.squared_norms(), rtol=1e-9)


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
    model, batch = tiny(name, "seq2seq"), text_batch("seq2seq")
    batch["labels"] = batch["labels"][:, 1:6].clone()
    assert_own(model, batch)
    prepared = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    with_inputs = per_example_losses(model, {**batch, "decoder_input_ids": prepared})
    assert torch.equal(with_inputs, per_example_losses(model, batch))


@pytest.mark.parametrize(("name", "head"), [("bart", "seq2seq"), ("whisper", "speech")])
def test_decoder_inputs_of_ones_own_are_used(name: str, head: str) -> None:
    model, batch = tiny(name, head), text_batch(head)
    moved = torch.cat([torch.full((3, 1), model.config.decoder_start_token_id), batch["labels"][:, :-1]], 1)
    moved = moved.masked_fill(moved.eq(-100), model.config.pad_token_id)
    same = per_example_losses(model, {**batch, "decoder_input_ids": moved})
    assert torch.allclose(same, per_example_losses(model, batch), rtol=1e-12)
    assert not torch.allclose(same, per_example_losses(model, {**batch, "decoder_input_ids": moved.flip(1)}))


def test_labels_of_a_speech_encoder_decoder_are_not_shifted() -> None:
    model, batch = tiny("whisper", "speech"), text_batch("speech")
    assert loss_kind(model) == "token"
    losses = per_example_losses(model, batch)
    batch["labels"][:, 1:] = -100
    first = per_example_losses(model, batch)
    assert bool(first.gt(0).all())
    assert not torch.equal(first, losses)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("gpt2", head) for head in ("causal_lm", "token", "sequence")),
        *(("bert", head) for head in ("masked_lm", "token", "sequence")),
        *((name, "seq2seq") for name in ("bart", "t5")),
        ("llama", "causal_lm"),
        ("whisper", "speech"),
        ("vit", "image"),
    ],
)
def test_label_smoothing_is_the_trainers(name: str, head: str, tmp_path: Path) -> None:
    """Trainer shifts the labels of causal models, and those alone; it needs the decoder's inputs in the batch."""
    model, batch = tiny(name, head), text_batch(head)
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True))
    ours = per_example_losses(model, batch, label_smoothing=0.1)
    assert not torch.allclose(ours, per_example_losses(model, batch), rtol=1e-3)
    for i in range(3):
        one = take(batch, [i])
        if head in ("seq2seq", "speech"):
            start = torch.tensor([[model.config.decoder_start_token_id]])
            moved = torch.cat([start, one["labels"][:, :-1]], 1)
            one["decoder_input_ids"] = moved.masked_fill(moved.eq(-100), model.config.pad_token_id)
        theirs = trainer.compute_loss(model, one)
        assert torch.allclose(ours[i], theirs, rtol=1e-6)


def test_label_smoothing_leaves_question_answering_alone(tmp_path: Path) -> None:
    """As in Trainer, which smooths a column "labels"."""
    model, batch = tiny("bert", "qa"), text_batch("qa")
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True))
    ours = per_example_losses(model, batch, label_smoothing=0.1)
    assert torch.allclose(ours[0], trainer.compute_loss(model, take(batch, [0])), rtol=1e-9)


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


def test_smoothing_is_refused_where_it_is_not_defined() -> None:
    model = tiny("bert", "sequence", problem_type="regression", num_labels=1)
    with pytest.raises(ConfigurationError, match=r"label_smoothing_factor=0\.1"):
        per_example_losses(model, {**text_batch("sequence"), "labels": torch.randn(3)}, label_smoothing=0.1)


def test_logits_at_other_positions_than_labels_are_refused() -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    with pytest.raises(UnsupportedModelError, match=r"logits \(3, 7, 37\) for labels \(3, 5\)"):
        per_example_losses(model, {**batch, "labels": batch["labels"][:, :5]})


def test_a_soft_prompt_has_no_labels_and_its_last_position_predicts() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny("gpt2", "causal_lm"), config).double()
    batch = text_batch("causal_lm")
    assert_own(model, batch)
    batch["labels"][:, 1:] = -100
    assert bool(per_example_losses(model, batch).gt(0).all())
    with pytest.raises(UnsupportedModelError, match=r"logits \(3, 11, 37\) for labels \(3, 5\)"):
        per_example_losses(model, {**batch, "labels": batch["labels"][:, :5]})


def test_a_model_whose_own_loss_is_another_is_refused() -> None:
    """BartForCausalLM does not shift its labels."""
    model = tiny("bart", "causal_lm")
    with pytest.raises(UnsupportedModelError, match="BartForCausalLM returns .* as its loss of one example"):
        check_own_loss(model, text_batch("causal_lm"))


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
    for make in (AutoModelForSequenceClassification, AutoModelForImageClassification):
        name = "vit" if make is AutoModelForImageClassification else "bert"
        assert loss_kind(tiny(name, "image" if name == "vit" else "sequence")) == "classification"


def test_what_hears_or_sees_is_an_encoder_decoder_only_where_its_config_says_so() -> None:
    class Qwen2AudioForConditionalGeneration(nn.Module):
        config = SimpleNamespace(is_encoder_decoder=False)

    model: Any = Qwen2AudioForConditionalGeneration()
    assert loss_kind(model) == "causal_lm"
    model.config = SimpleNamespace(is_encoder_decoder=True)
    assert loss_kind(model) == "token"


# --- the cross-entropy of many tokens -------------------------------------------------------------------------------


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(4, 6, 11, generator=generator, dtype=dtype)
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    return logits, labels.masked_fill(torch.rand(4, 6, generator=generator) < 0.3, -100).index_fill(
        0, torch.tensor(2), -100
    )


PRODUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.eye(11, dtype=x.dtype)),
    "tanh, which keeps its output": torch.tanh,
    "capped": lambda x: 3 * torch.tanh(x / 3),
    "a leaf": lambda x: x,
    "a view of what tanh keeps": lambda x: torch.tanh(x)[:, 1:],
    "a cast": lambda x: x.to(torch.float32).to(x.dtype),
}


@pytest.mark.parametrize("chunk", [1, 25, 10**6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_values_and_gradients_are_those_of_torch(
    producer: str, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenwise, "_CHUNK", chunk)
    x, labels = tokens()
    found, gradients = [], []
    for ours in (True, False):
        leaf = x.clone().requires_grad_()
        logits = PRODUCERS[producer](leaf)
        few = labels[:, -logits.shape[1] :]
        kept = logits.detach().clone()
        if ours:
            loss = tokenwise.token_losses(logits, few, smoothing)
        else:
            each = F.cross_entropy(logits.mT, few, reduction="none", label_smoothing=smoothing)
            loss = each.sum(1) / few.ne(-100).sum(1).clamp_min(1)
        loss.square().sum().backward()
        found.append(loss.detach())
        gradients.append(leaf.grad)
        if producer in ("a leaf", "tanh, which keeps its output"):
            assert torch.equal(logits, kept)
    assert torch.allclose(*found, rtol=1e-12)
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    assert found[0][2] == 0


def test_no_gradient_of_the_gradient_is_promised() -> None:
    x, labels = tokens()
    leaf = x.requires_grad_()
    loss = tokenwise.token_losses(F.linear(leaf, torch.eye(11, dtype=x.dtype)), labels, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice|once|does not require grad"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_example_whose_logits_are_not_finite_leaves_the_others_alone(value: float) -> None:
    x, labels = tokens()
    x[0, :, 3] = value
    leaf = x.requires_grad_()
    loss = tokenwise.token_losses(F.linear(leaf, torch.eye(11, dtype=x.dtype)), labels, 0.0)
    loss.sum().backward()
    assert not loss[0].isfinite()
    assert loss[1:].isfinite().all()
    assert leaf.grad[1:].isfinite().all()


def test_logits_of_a_recorded_head_are_known_not_to_be_kept() -> None:
    """By the name that autograd gives a recorded use: without it there would be a copy of the logits in memory."""
    seen: list[str] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        seen.append(type(logits.grad_fn).__name__)
        return tokenwise.token_losses(logits, batch["y"], 0.0)

    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(3, 4, 5, generator=generator), "y": torch.randint(7, (3, 4), generator=generator)}
    record(nn.Linear(5, 7), loss, batch)
    assert set(seen) <= set(tokenwise._DOES_NOT_KEEP_ITS_OUTPUT)
