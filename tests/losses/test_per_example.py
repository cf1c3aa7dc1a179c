"""Per-example losses equal the model's own loss on that one example."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForAudioClassification,
    AutoModelForMultipleChoice,
    BertConfig,
    Trainer,
    TrainingArguments,
)

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.losses.heads import classification
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.batch import take
from hf_dp.per_example.checks.padding import check_padding
from tests.architectures import CONFIGS
from tests.zoo import batches_of, text_batch, tiny


def _unpadded(one: dict[str, Tensor]) -> dict[str, Tensor]:
    shown = one["attention_mask"][0].bool()
    return {name: values[:, shown] if values.dim() == 2 else values for name, values in one.items()}


def assert_own(model: nn.Module, batch: dict[str, Tensor], size: int = 3) -> None:
    ours = per_example_losses(model, batch)
    alone = [take(batch, [i]) for i in range(size)]
    if loss_kind(model) == "question_answering":
        alone = [_unpadded(one) for one in alone]
    own = torch.stack([model(**one).loss for one in alone])
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


def test_a_token_beyond_the_vocabulary_is_no_label_of_ctc() -> None:
    """torch reads whatever lies there, or what is not the process's."""
    model, batch = tiny("wav2vec2", "ctc"), batches_of("wav2vec2", "ctc")(3, 900, torch.float64)
    batch["labels"][1, 0] = model.config.vocab_size - 1
    assert bool(per_example_losses(model, batch).isfinite().all())
    batch["labels"][1, 0] = model.config.vocab_size
    with pytest.raises(IndexError, match=f"Target {model.config.vocab_size} is out of bounds"):
        per_example_losses(model, batch)


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("with_mask", [True, False])
@pytest.mark.parametrize("name", ["wav2vec2", pytest.param("hubert", marks=pytest.mark.slow)])
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


def test_a_head_with_other_classes_than_its_config_says_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="num_labels=2, and its logits have 5 numbers for each example"):
        classification(torch.zeros(3, 5), torch.tensor([0, 1, 4]), BertConfig(num_labels=2), 0.0)


def test_failure_63_a_row_of_nothing_but_padding_numbers_adds_nothing() -> None:
    """GPT-2 pools the last token that is not of that number, and of none the first position, whatever lies there."""
    model = tiny("gpt2", "sequence", num_labels=2, attn_pdrop=0.0)
    pad = model.config.pad_token_id
    ids = torch.tensor([[pad] * 4, [7, 8, 9, pad], [pad, pad, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1])}
    losses = per_example_losses(model, batch)
    assert losses[0] == 0
    assert bool(losses[1:].gt(0).all())


@pytest.mark.parametrize("pads", [0, 9])
def test_an_encoder_pools_no_last_token_whatever_its_config_says_of_padding(pads: int) -> None:
    """As where a tokenizer from elsewhere pads with another number than the config names."""
    model = tiny("bert", "sequence").eval()
    model.config.pad_token_id = 0
    ids = torch.tensor([[7, 8, pads, pads], [7, 8, 6, 5]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    losses = per_example_losses(model, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])})
    assert bool(losses.gt(0).all())


def test_mbart_and_a_row_without_labels() -> None:
    """It looks for the last token of each row, and fails where there is none."""
    model, batch = tiny("mbart", "seq2seq"), text_batch("seq2seq")
    whole = per_example_losses(model, batch)
    batch["labels"][0] = -100
    losses = per_example_losses(model, batch)
    assert losses[0] == 0
    torch.testing.assert_close(losses[1:], whole[1:])


def test_failure_67_rows_and_pooled_positions_that_are_hidden_add_nothing() -> None:
    """The last token that is not of the pad's number, where others behind it are shown; and all of a row."""
    model = tiny("gpt2", "sequence", num_labels=2, attn_pdrop=0.0)
    pad = model.config.pad_token_id
    ids = torch.tensor([[7, 8, 9, 9], [7, 8, 9, pad], [7, 8, 9, 9], [7, 8, pad, pad], [7, 8, 9, 9]])
    mask = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0, 1])}
    losses = per_example_losses(model, batch)
    assert losses[:3].tolist() == [0, 0, 0]
    assert bool(losses[3:].gt(0).all())
    check_own_loss(model, batch)


def test_failure_67_choices_of_which_one_is_hidden_add_nothing() -> None:
    kind, values = CONFIGS["bert"]
    model = AutoModelForMultipleChoice.from_config(AutoConfig.for_model(kind, **values)).eval()
    ids = torch.randint(3, 9, (3, 2, 5))
    mask = torch.ones_like(ids)
    mask[0, 1] = 0
    labels = torch.tensor([0, 1, 1])
    losses = per_example_losses(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert losses[0] == 0
    assert bool(losses[1:].gt(0).all())


def test_masks_that_are_added_to_scores_hide_nothing() -> None:
    """Where they are 0 all is shown."""
    model, batch = tiny("bert", "sequence", num_labels=2), text_batch("sequence")
    batch["attention_mask"] = torch.zeros(*batch["input_ids"].shape[:1], 1, *[batch["input_ids"].shape[1]] * 2).double()
    assert bool(per_example_losses(model, {**batch, "labels": torch.tensor([0, 1, 1])}).gt(0).all())


def test_failure_67_a_recording_of_less_than_a_frame_adds_nothing() -> None:
    kind, values = CONFIGS["wav2vec2"]
    config = AutoConfig.for_model(kind, **values, num_labels=2)
    model = AutoModelForAudioClassification.from_config(config).double().eval()
    sounds = text_batch("ctc")["input_values"]
    heard = torch.ones_like(sounds, dtype=torch.long)
    heard[0, 1:] = 0
    losses = per_example_losses(
        model, {"input_values": sounds, "attention_mask": heard, "labels": torch.tensor([0, 1, 1])}
    )
    assert losses[0] == 0
    assert bool(losses[1:].gt(0).all())


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


def test_question_answering_is_the_same_however_far_a_text_is_padded() -> None:
    """The model's own spends probability on padding."""
    model, batch = tiny("bert", "qa"), text_batch("qa")
    batch["start_positions"][1], batch["end_positions"][1] = 0, 5
    wider = {name: F.pad(values, (0, 4)) if values.dim() == 2 else values for name, values in batch.items()}
    assert torch.allclose(per_example_losses(model, batch), per_example_losses(model, wider))
    alone = _unpadded(take(batch, [1]))
    assert len(alone["input_ids"][0]) == 6
    assert torch.allclose(per_example_losses(model, batch)[1], model(**alone).loss)
    assert not torch.allclose(model(**take(wider, [1])).loss, model(**alone).loss)
    check_own_loss(model, wider)
    rows = [_unpadded(take(batch, [i])) for i in (2, 1, 0)]

    def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        width = max(row["input_ids"].shape[1] for row in rows)
        filled = {n: [F.pad(r[n], (0, width - r[n].shape[1])) for r in rows] for n in ("input_ids", "attention_mask")}
        return {n: torch.cat(filled.get(n) or [row[n] for row in rows]) for n in batch}

    check_padding(model, per_example_losses, rows, padded)


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


def test_a_soft_prompt_has_no_labels_and_its_last_position_predicts() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tiny("gpt2", "causal_lm"), config).double()
    batch = text_batch("causal_lm")
    assert_own(model, batch)
    batch["labels"][:, 1:] = -100
    assert bool(per_example_losses(model, batch).gt(0).all())
    with pytest.raises(UnsupportedModelError, match=r"logits \(3, 11, 37\) for labels \(3, 5\)"):
        per_example_losses(model, {**batch, "labels": batch["labels"][:, :5]})
