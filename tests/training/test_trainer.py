"""DPTrainer as its users meet it: real input, and Trainer's own features."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from hf_dp import DPTrainer, PrivacyConfig, load_report
from hf_dp.errors import ConfigurationError
from tests.training.workbench import (
    STEPS,
    Trajectory,
    a_tokenizer,
    arguments,
    classifier,
    distance,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
def test_text_from_a_csv_is_fine_tuned_within_the_budget(tmp_path: Path) -> None:
    topics = (("refund money card", 0), ("parcel lost delivery", 1))
    with open(tmp_path / "messages.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "label"])
        for i in range(120):
            words, label = topics[i % 2]
            writer.writerow([f"customer-{i}", " ".join(words.split()[: 1 + i % 3]), label])
    data = datasets.load_dataset("csv", data_files=str(tmp_path / "messages.csv"), cache_dir=str(tmp_path))["train"]
    tokenizer = a_tokenizer({word for words, _ in topics for word in words.split()})
    data = data.map(lambda batch: tokenizer(batch["text"]), batched=True)
    config = AutoConfig.for_model(
        "distilbert", vocab_size=len(tokenizer), dim=16, hidden_dim=16, n_layers=1, n_heads=2, num_labels=2
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)

    trainer = DPTrainer(
        model=model,
        args=arguments(tmp_path / "out", max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=3),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        privacy=PrivacyConfig(target_epsilon=8.0, clipping_norm=1.0),
    )
    trainer.train()
    report = trainer.privacy_report()
    trainer.save_model(str(tmp_path / "private-model"))

    assert 7.9 < report.epsilon <= 8.0
    assert report.private
    assert (report.steps, report.dataset_size, report.expected_batch_size) == (30, 120, 12)
    assert report.delta == pytest.approx(120**-1.1)
    saved = load_report(tmp_path / "private-model")
    assert saved == report
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "private-model")
    assert same(parameters(again), parameters(model))


def test_callbacks_schedulers_evaluation_best_model_and_early_stopping(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, max_steps=12, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        lr_scheduler_type="linear", load_best_model_at_end=True, metric_for_best_model="accuracy",
        greater_is_better=True, warmup_steps=2, eval_on_start=True, logging_steps=1,
        parts={
            "eval_dataset": rows(20, seed=1),
            "compute_metrics": lambda p: {"accuracy": 0.5},
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=2), trajectory := Trajectory()],
        },
    )  # fmt: skip
    trainer.train()
    # A constant metric is best at its first sight: two more looks without improvement end the training.
    assert trainer.state.global_step == trainer.ledger.steps == 6 == trainer.privacy_report().steps
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert same(parameters(trainer.model), trajectory.points[2])
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(set(rates)) > 3
    assert [e["eval_accuracy"] for e in trainer.state.log_history if "eval_accuracy" in e] == [0.5] * 4
    assert all("epsilon" not in entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert trainer.predict(rows(5)).predictions.shape == (5, 3)
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert trainer.ledger.steps == 6, "evaluation costs nothing"


def test_evaluation_works_without_training_data_or_a_trainable_parameter(tmp_path: Path) -> None:
    model = classifier().requires_grad_(False)
    trainer = make(tmp_path, model, parts={"train_dataset": None, "eval_dataset": rows(6)})
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    with pytest.raises(ConfigurationError, match="train_dataset"):
        trainer.train()


@pytest.mark.slow
def test_the_same_model_object_generates_afterwards_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    model = tiny("gpt2", "causal_lm", torch.float32, n_layer=1)
    before, names = dict(model.named_parameters()), set(vars(model))
    modules = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    trainer = make(tmp_path, model, parts={"data_collator": pad_for_language})
    trainer.train()
    assert trainer.model is model
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    del model._is_accelerate_prepared  # a flag that every Trainer leaves on its model
    assert set(vars(model)) == names
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == modules
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    model.eval()
    out = model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 5)


def test_the_users_arguments_are_left_alone(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    before = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    trainer = DPTrainer(model=classifier(), args=args, train_dataset=rows(), data_collator=pad, privacy=private())
    trainer.train()
    assert {f.name: getattr(args, f.name) for f in dataclasses.fields(args)} == before
    assert (trainer.args.gradient_accumulation_steps, trainer.args.max_grad_norm) == (1, 0)


CHECKPOINTING = "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else None


def of_language(path: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights after a training of a language model."""
    model = tiny("gpt2", "causal_lm", torch.float32, n_layer=1)
    make(path, model, parts={"data_collator": pad_for_language}, **changes).train()
    return parameters(model)


@pytest.fixture(scope="module")
def without_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return of_language(tmp_path_factory.mktemp("without"))


@pytest.mark.checked_anew
@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_failure_19_checkpointing_changes_nothing(
    tmp_path: Path, reentrant: bool, without_checkpoints: dict[str, torch.Tensor]
) -> None:
    kwargs = {"use_reentrant": reentrant}
    found = of_language(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    assert distance(found, without_checkpoints) < 1e-5


@pytest.mark.checked_anew
@pytest.mark.skipif(CHECKPOINTING is None, reason="this Transformers knows gradient_checkpointing only")
@pytest.mark.slow
def test_failure_19_checkpointing_under_its_newer_name(tmp_path: Path) -> None:
    results = []
    for changes in ({}, {"activation_checkpointing": True}):
        model = classifier()
        make(tmp_path, model, **changes).train()
        results.append(parameters(model))
    assert distance(*results) < 1e-5


@pytest.mark.slow
def test_worker_processes_load_the_same_batches(tmp_path: Path) -> None:
    results = []
    for workers in (0, 2):
        model = classifier()
        data = datasets.Dataset.from_list(rows())
        make(
            tmp_path, model, parts={"train_dataset": data}, dataloader_num_workers=workers, max_steps=8,
            per_device_train_batch_size=1, gradient_accumulation_steps=1,
        ).train()  # fmt: skip
        results.append(parameters(model))
    assert same(*results)


@pytest.mark.parametrize("head", ["sequence", "causal_lm"])
@pytest.mark.slow
def test_label_smoothing_is_that_of_trainer_on_each_example(tmp_path: Path, head: str) -> None:
    model = tiny("gpt2", head, torch.float64, n_layer=1)
    collate = pad if head == "sequence" else pad_for_language
    data = rows(5)
    private_trainer = make(tmp_path, model, parts={"data_collator": collate}, label_smoothing_factor=0.2, max_steps=1)
    private_trainer.train()
    plain = Trainer(model=model, args=arguments(tmp_path, label_smoothing_factor=0.2))
    with torch.no_grad():
        ours = private_trainer.compute_per_example_loss(model, collate(data))
        theirs = torch.stack([plain.compute_loss(model, collate([row])) for row in data])
    assert torch.allclose(ours, theirs, atol=1e-6)


class Masking(DPTrainer):
    """Draws which tokens are seen, in evaluation too: numbers of each example's own."""

    def compute_per_example_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        labels, mask = inputs.pop("labels"), inputs["attention_mask"]
        hidden = model.get_input_embeddings()(inputs["input_ids"]) * torch.rand(mask.shape)[..., None].gt(0.15)
        logits = model(inputs_embeds=hidden, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.slow
def test_a_loss_that_draws_numbers_for_each_example_in_every_mode(tmp_path: Path) -> None:
    trainer = make(tmp_path, kind=Masking, parts={"eval_dataset": rows(8)}, eval_strategy="epoch")
    trainer.train()
    assert trainer.ledger.steps == STEPS


@pytest.mark.slow
def test_optimizer_and_scheduler_of_ones_own(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    make(tmp_path, model, parts={"optimizers": (optimizer, scheduler)}).train()
    assert scheduler.get_last_lr() == [pytest.approx(1e-3 * 0.5**STEPS)]
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.slow
def test_a_model_from_model_init_istrained(tmp_path: Path) -> None:
    trainer = make(tmp_path, parts={"model_init": lambda: classifier()})
    start = parameters(trainer.model)
    trainer.train()
    assert not same(start, parameters(trainer.model))
    assert trainer.ledger.steps == STEPS


def test_arguments_and_promise_are_parsed_side_by_side(tmp_path: Path) -> None:
    parser = HfArgumentParser((TrainingArguments, PrivacyConfig))
    flags = ["--output_dir", str(tmp_path), "--seed", "5", "--target_epsilon", "3", "--clipping_norm", "0.5"]
    args, config = parser.parse_args_into_dataclasses(flags)
    assert (args.seed, config) == (5, PrivacyConfig(target_epsilon=3.0, clipping_norm=0.5))

    values = {"output_dir": str(tmp_path), "seed": 5, "noise_multiplier": 1.5, "withhold_non_private_logs": True}
    (tmp_path / "run.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))
    parsers: list[Callable[[], Any]] = [
        lambda: parser.parse_dict(values), lambda: parser.parse_yaml_file(str(tmp_path / "run.yaml"))
    ]  # fmt: skip
    for parse in parsers:
        args, config = parse()
        assert args.seed == 5
        assert config == PrivacyConfig(noise_multiplier=1.5, withhold_non_private_logs=True)
        assert config.seed is None, "Trainer's public seed must not become the seed of the noise"
