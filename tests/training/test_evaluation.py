"""Evaluation is by the loss that is trained: of one's own too, whatever the model returns besides."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

from hf_dp import DPTrainer, load_report
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.workbench import (
    Clicks,
    Recommender,
    a_tokenizer,
    arguments,
    classifier,
    clicks,
    last_log,
    make,
    pad,
    private,
    rows,
    stack,
)

pytestmark = pytest.mark.usefixtures("checked_once")
OTHERS = rows(10, seed=5)  # of which the last batch of evaluation has two
UNEVEN: dict[str, Any] = {"per_device_eval_batch_size": 4, "max_steps": 2}
EACH = {**UNEVEN, "eval_strategy": "steps", "eval_steps": 1}


class Weighted(DPTrainer):
    """By classes."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs.pop("labels")
        losses: Tensor = (1.0 + labels) * F.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return losses


def mean_of(trainer: Any, data: list[Any], collate: Any) -> float:
    """The mean of the own losses, each example's by itself."""
    model = trainer.model.eval()
    with torch.no_grad():
        losses = [trainer.compute_per_example_loss(model, collate([row])) for row in data]
    return float(torch.cat(losses).mean())


@pytest.mark.slow
def test_a_module_that_returns_no_loss(tmp_path: Path) -> None:
    data = clicks(70)
    parts = {"train_dataset": data[:60], "eval_dataset": data[60:], "data_collator": stack}
    run = make(tmp_path, Recommender(), kind=Clicks, parts=parts, remove_unused_columns=False, **EACH)
    run.train()
    assert last_log(run, "eval_loss") == pytest.approx(mean_of(run, data[60:], stack), rel=1e-5)


@pytest.mark.parametrize("returned", [lambda logits: logits, lambda logits: (logits, logits.argmax(1))])
def test_metrics_are_given_what_the_module_returned(tmp_path: Path, returned: Any) -> None:
    class Returning(Recommender):
        def forward(self, features: Tensor) -> Any:
            return returned(super().forward(features))

    class OfReturned(DPTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            logits = model(inputs["features"])
            logits = logits if isinstance(logits, Tensor) else logits[0]
            return F.cross_entropy(logits, inputs["labels"], reduction="none")

    given: list[Any] = []

    def metrics(evaluated: Any) -> dict[str, float]:
        given.append(evaluated)
        return {"seen": float(len(evaluated.label_ids))}

    data = clicks(10)
    parts = {"eval_dataset": data, "data_collator": stack, "compute_metrics": metrics}
    changes = {"remove_unused_columns": False, "label_names": ["labels"], **UNEVEN}
    run = make(tmp_path, Returning(), kind=OfReturned, parts=parts, **changes)
    found = run.evaluate()
    assert found["eval_seen"] == 10
    assert found["eval_loss"] == pytest.approx(mean_of(run, data, stack), rel=1e-5)
    logits = given[0].predictions if isinstance(given[0].predictions, tuple) else (given[0].predictions,)
    expected = returned(Recommender.forward(run.model, stack(data)["features"]))
    for ours, theirs in zip(logits, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), theirs.detach())


@pytest.mark.parametrize("metrics", [None, lambda evaluated: {"width": evaluated.predictions.shape[1]}])
def test_a_weighted_loss_is_reported_in_place_of_the_models(tmp_path: Path, metrics: Any) -> None:
    run = make(tmp_path, kind=Weighted, parts={"eval_dataset": OTHERS, "compute_metrics": metrics}, **UNEVEN)
    found = run.evaluate()
    assert found["eval_loss"] == pytest.approx(mean_of(run, OTHERS, pad), rel=1e-5)
    assert found.get("eval_width", 3) == 3  # logits alone
    assert found["eval_loss"] > 1.2 * make(tmp_path, run.model, parts={"eval_dataset": OTHERS}).evaluate()["eval_loss"]


def a_sevenfold(self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
    outputs = model(**inputs)
    return (7 * outputs.loss, outputs) if return_outputs else 7 * outputs.loss


class OwnBesides(Weighted):
    compute_loss = a_sevenfold  # type: ignore[assignment]


class OwnBehind(Trainer):
    compute_loss = a_sevenfold  # type: ignore[assignment]


class BehindOwn(DPTrainerMixin, OwnBehind):  # type: ignore[misc]
    compute_per_example_loss = Weighted.compute_per_example_loss


@pytest.mark.parametrize("kind", [OwnBesides, BehindOwn])
@pytest.mark.parametrize("metrics", [None, lambda evaluated: {}])
def test_a_loss_of_evaluation_of_ones_own_is_kept(tmp_path: Path, kind: Any, metrics: Any) -> None:
    parts = {"eval_dataset": OTHERS, "compute_metrics": metrics}
    run = make(tmp_path, kind=kind, parts=parts, **UNEVEN)
    ordinary = Trainer(run.model, arguments(tmp_path, **UNEVEN), eval_dataset=OTHERS, data_collator=pad)
    assert run.evaluate()["eval_loss"] == pytest.approx(7 * ordinary.evaluate()["eval_loss"], rel=1e-5)


def test_a_loss_function_besides_is_kept(tmp_path: Path) -> None:
    def of_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.sum() * 0 + 5.0

    run = make(tmp_path, kind=Weighted, parts={"eval_dataset": OTHERS, "compute_loss_func": of_batch}, **UNEVEN)
    assert run.evaluate()["eval_loss"] == 5.0


@pytest.mark.parametrize("metrics", [None, lambda evaluated: {"sum": float(evaluated.predictions.sum())}])
def test_the_usual_loss_is_evaluated_as_by_trainer(tmp_path: Path, metrics: Any) -> None:
    model, parts = classifier(), {"eval_dataset": OTHERS, "compute_metrics": metrics}
    ours = make(tmp_path, model, parts=parts, **UNEVEN).evaluate()
    ordinary = Trainer(model, arguments(tmp_path, **UNEVEN), data_collator=pad, **parts).evaluate()
    names = {"eval_loss", "eval_sum"} & ordinary.keys()
    assert [ours[name] for name in names] == [ordinary[name] for name in names]


class Called(DPTrainer):
    times = 2

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs.pop("labels")
        outputs = [model(**inputs).logits for _ in range(self.times)]
        logits = sum(outputs) if outputs else model.classifier(model.distilbert(**inputs)[0][:, 0])  # type: ignore[operator]
        return F.cross_entropy(logits, labels, reduction="none")


class CalledNever(Called):
    times = 0


@pytest.mark.parametrize("kind", [Called, CalledNever])
def test_metrics_of_several_outputs_or_none_are_refused(tmp_path: Path, kind: Any) -> None:
    run = make(tmp_path, kind=kind, parts={"eval_dataset": OTHERS}, **UNEVEN)
    assert run.evaluate()["eval_loss"] == pytest.approx(mean_of(run, OTHERS, pad), rel=1e-5)
    run.compute_metrics = lambda evaluated: {}
    with pytest.raises(ConfigurationError, match=f"called the model {kind.times} times") as caught:
        run.evaluate()
    assert "leave compute_metrics out" in caught.value.fix
    assert not run.model._forward_hooks


def test_generated_texts_are_evaluated_beside_a_loss_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Doubled(DPTrainerMixin, Seq2SeqTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return 2 * super().compute_per_example_loss(model, inputs)

    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=37, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    ))  # fmt: skip
    tokenizer = a_tokenizer({f"w{i}" for i in range(35)})
    data = [{"input_ids": r["input_ids"], "attention_mask": [1] * len(r["input_ids"]), "labels": r["input_ids"][:2]}
            for r in rows(10)]  # fmt: skip
    args = Seq2SeqTrainingArguments(
        str(tmp_path), report_to="none", predict_with_generate=True, generation_max_length=4, use_cpu=True,
        per_device_eval_batch_size=4, disable_tqdm=True,
    )  # fmt: skip
    given: dict[str, Any] = {
        "model": model, "args": args, "eval_dataset": data, "processing_class": tokenizer,
        "data_collator": DataCollatorForSeq2Seq(tokenizer, model=model),
        "compute_metrics": lambda evaluated: {"width": float(evaluated.predictions.shape[1])},
    }  # fmt: skip
    found = Doubled(**given, train_dataset=data, privacy=private()).evaluate()
    assert model.generation_config.max_length is None, "as it was before Trainer wrote its defaults there"
    assert "it was put back" not in caplog.text
    ordinary = Seq2SeqTrainer(**given).evaluate()
    assert found["eval_width"] == ordinary["eval_width"] > 0
    assert found["eval_loss"] == pytest.approx(2 * ordinary["eval_loss"], rel=1e-5)


class Counting(nn.Module):
    """Adds up what it is given in evaluation, into what is saved with the model or not."""

    def __init__(self, is_saved: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=is_saved)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen += x.sum().detach()
        return x


@pytest.mark.checked_anew
@pytest.mark.parametrize("is_saved", [True, False])
def test_failure_147_what_a_model_writes_in_evaluation_mode_is_not_saved_with_it(
    tmp_path: Path, is_saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = classifier()
    model.dropout = Counting(is_saved)
    trainer = make(tmp_path, model, parts={"eval_dataset": OTHERS}, **EACH)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert verify(tmp_path / "saved").consistent
    trainer.evaluate()
    assert bool(model.dropout.seen) is not is_saved
    assert caplog.text.count("'dropout.seen', which is saved with the model") == int(is_saved)


class Noting(nn.Module):
    """Writes into the model's configuration what it is given in evaluation."""

    def __init__(self, model: Any, place: str) -> None:
        super().__init__()
        self.of, self.place = [model], place

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            config, seen = self.of[0].config, float(x.detach().sum())
            if self.place == "id2label":
                config.id2label[2] = f"LABEL_{seen}"
            else:
                setattr(config, self.place, str(seen) if self.place == "word" else seen)
        return x


@pytest.mark.checked_anew
@pytest.mark.parametrize("place", ["seen", "word", "initializer_range", "id2label"])
def test_failure_151_what_a_model_writes_into_its_configuration_is_not_saved_with_it(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The check before the first step computes training rows in that mode."""
    model: Any = classifier()
    model.dropout = Noting(model, place)
    before = copy.deepcopy(model.config.to_dict())
    trainer = make(tmp_path, model, parts={"eval_dataset": OTHERS}, **UNEVEN)
    trainer.train()
    assert trainer.ledger.steps == 2
    noted = {**before, "problem_type": "single_label_classification", "use_cache": False}
    assert model.config.to_dict() == noted
    assert "it was put back" not in caplog.text
    trainer.evaluate()
    assert model.config.to_dict() == noted
    assert caplog.text.count("which is saved with the model; it was put back") == 1
    assert "belongs into no configuration" in caplog.text


class Made(nn.Module):
    """Has a table that is saved from its first evaluation on, and knows so."""

    is_made = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.is_made:
            self.register_buffer("table", torch.zeros(()))
            self.is_made = True
        return x if self.training else x + self.table


class Longer(nn.Module):
    """Has a table that is saved, as long as the longest rows so far, and knows how long."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.longest = 4

    def forward(self, x: Tensor) -> Tensor:
        if (length := 4 if self.training else 9) > self.longest:
            self.longest = length
            self.register_buffer("table", torch.zeros(length))
        return x + self.table[length - 1]


@pytest.mark.checked_anew
@pytest.mark.parametrize("kind", [Made, Longer])
def test_a_table_that_evaluations_make_or_let_grow_is_made_anew_in_each(tmp_path: Path, kind: Any) -> None:
    model: Any = classifier()
    model.dropout = kind()
    trainer = make(tmp_path, model, parts={"eval_dataset": OTHERS}, **EACH)
    trainer.train()
    assert trainer.ledger.steps == 2
    shapes = [b.shape for b in model.dropout.buffers()]
    assert shapes == ([torch.Size([4])] if kind is Longer else [])


def test_steps_before_an_evaluation_that_fails_are_not_lost(tmp_path: Path) -> None:
    asked: list[int] = []

    def compute_metrics(predictions: Any) -> dict[str, float]:
        asked.append(len(predictions.label_ids))
        if len(asked) > 1:  # the first is that before the first step
            raise ValueError("of too many rows")
        return {"rows": 1.0}

    trainer = make(tmp_path, parts={"eval_dataset": OTHERS, "compute_metrics": compute_metrics}, **EACH)
    with pytest.raises(ValueError, match="of too many rows") as caught:
        trainer.train()
    assert caught.value.__notes__ == [
        "Private steps that were paid for before this: 1. The model in memory has them, but perhaps the last, and "
        "trainer.save_model(DIRECTORY) saves it with what they cost."
    ]
    trainer.save_model(str(tmp_path / "saved"))
    found = verify(tmp_path / "saved")
    assert found.consistent
    assert load_report(tmp_path / "saved").steps == 1
