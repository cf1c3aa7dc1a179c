"""A private step is what it says: its noise, its sampling, its clipping and its divisor."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import datasets
import dp_accounting
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.per_example.batch import batch_size
from tests.training.workbench import (
    EXPECTED,
    MICRO,
    ROWS,
    STEPS,
    Trajectory,
    classifier,
    distance,
    draws,
    exact,
    flat,
    gradients_of,
    last_log,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import adapted, with_dropout

pytestmark = pytest.mark.usefixtures("checked_once")


def plain_trajectory(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[dict[str, Tensor]]:
    """Ordinary training on the same Poisson batches: the model's own loss, one example at a time."""
    data, points = rows(), [parameters(model)]
    for batch in draws(seed):
        optimizer.zero_grad(set_to_none=False)
        total = sum((model(**pad([data[i]])).loss for i in batch), start=torch.zeros((), dtype=torch.float64))
        (total / EXPECTED).backward()
        optimizer.step()
        points.append(parameters(model))
    return points


@pytest.mark.few(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_without_noise_and_clipping_it_is_an_ordinary_step(tmp_path: Path, optimizer: str) -> None:
    model, trajectory = classifier(torch.float64), Trajectory()
    plain = copy.deepcopy(model)
    lr = 0.1 if optimizer == "sgd" else 1e-2
    trainer = make(
        tmp_path, model, exact(), parts={"callbacks": [trajectory]}, optim=optimizer, learning_rate=lr, weight_decay=0.0
    )
    trainer.train()
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    options = {} if optimizer == "sgd" else {"weight_decay": 0.0}
    truth = plain_trajectory(plain, kind(plain.parameters(), lr=lr, **options), seed=7)
    assert len(trajectory.points) == len(truth) == STEPS + 1
    for found, expected in zip(trajectory.points, truth, strict=True):
        assert distance(found, expected) < 1e-6
    assert distance(truth[0], truth[-1]) > 1e-3


@pytest.mark.few(1)
@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_failure_13_the_micro_batch_size_changes_neither_the_step_nor_its_cost(tmp_path: Path, micro: int) -> None:
    results = []
    for size in (micro, MICRO):
        model = classifier(torch.float64)
        steps = EXPECTED // size
        trainer = make(tmp_path, model, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        trainer.train()
        results.append((parameters(model), trainer.privacy_report(), trainer.state.global_step))
    (one, report, steps), (two, other_report, other_steps) = results
    assert distance(one, two) < 1e-9
    assert report == other_report
    assert steps == other_steps == report.steps == STEPS


def test_failure_05_an_empty_batch_is_a_step_of_noise(tmp_path: Path) -> None:
    steps = 12
    batches = draws(7, steps, expected=1)
    empty = [i for i, batch in enumerate(batches) if not batch]
    assert 2 <= len(empty) < steps, "the seed should give some empty and some full batches"
    trainer = make(
        tmp_path, max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=1,
        include_num_input_tokens_seen="all", parts={"callbacks": [trajectory := Trajectory()]},
    )  # fmt: skip
    gradients = gradients_of(trainer)
    assert trainer.ledger.steps == trainer.state.global_step == len(gradients) == steps
    for i in empty:
        assert float(flat(gradients[i]).std()) == pytest.approx(1.0, rel=0.05), "noise multiplier 1, expected batch 1"
        assert not same(trajectory.points[i], trajectory.points[i + 1])


def test_failure_04_the_accounted_sampling_is_the_sampling_that_runs(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(DPTrainer):
        def training_step_sizes(self, inputs: dict[str, Any]) -> None:
            seen.append(sum(map(batch_size, inputs["micro_batches"])))

        def floating_point_ops(self, inputs: dict[str, Any]) -> int:
            self.training_step_sizes(inputs)
            return super().floating_point_ops(inputs)

    trainer = make(tmp_path, kind=Counting, max_steps=10)
    trainer.train()
    assert seen == [len(batch) for batch in draws(7, 10)]
    assert len(set(seen)) > 3, "fixed-size batches would not be Poisson"
    (event, count, _label), *others = trainer.ledger.entries
    assert not others
    assert count == 10
    assert event == dp_accounting.PoissonSampledDpEvent(EXPECTED / ROWS, dp_accounting.GaussianDpEvent(1.0))


def test_failure_08_an_example_enters_a_step_at_most_once(tmp_path: Path) -> None:
    """One draw per logical batch: with q = 1 every example comes exactly once, in however many micro-batches."""
    trainer = make(
        tmp_path, per_device_train_batch_size=5, gradient_accumulation_steps=2, max_steps=2, parts={
            "train_dataset": [{**row, "input_ids": [i + 3, *row["input_ids"][1:]]} for i, row in enumerate(rows(10))]
        },
    )  # fmt: skip
    seen: list[list[int]] = []
    original = trainer.compute_per_example_loss

    def spy(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if model.training and torch.is_grad_enabled() and seen_counts["on"]:
            seen.append(inputs["input_ids"][:, 0].tolist())
        return original(model, inputs)

    seen_counts = {"on": False}

    class On(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen_counts["on"] = True

    trainer.compute_per_example_loss = spy
    trainer.add_callback(On())
    trainer.train()
    assert [len(micro) for micro in seen] == [5, 5, 5, 5]
    for step in (seen[:2], seen[2:]):
        assert sorted(step[0] + step[1]) == list(range(3, 13))


def test_failure_10_noise_for_the_sum_and_the_expected_batch_size_below_it(tmp_path: Path) -> None:
    def run(**privacy: Any) -> list[Tensor]:
        return [flat(g).double() for g in gradients_of(make(tmp_path, privacy=private(**privacy), learning_rate=0.0))]

    with pytest.warns(UserWarning, match="not private"):
        silent = run(noise_multiplier=0, clipping_norm=0.1)
    noisy = run(noise_multiplier=3.0, clipping_norm=0.1)
    sizes = [len(batch) for batch in draws(7)]
    assert any(size != EXPECTED for size in sizes)
    for without, with_noise in zip(silent, noisy, strict=True):
        noise = with_noise - without
        assert float(noise.std()) == pytest.approx(3.0 * 0.1 / EXPECTED, rel=0.05)
    # All examples are clipped to 0.1; were the sum divided by the drawn size, its norm could not exceed 0.1.
    assert all(float(s.norm()) <= 0.1 * size / EXPECTED * (1 + 1e-6) for s, size in zip(silent, sizes, strict=True))


def test_failure_11_trainers_own_clipping_is_off(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=private(noise_multiplier=50.0), logging_steps=1)
    noisy = gradients_of(trainer)
    assert trainer.args.max_grad_norm == 0
    assert all(float(flat(g).norm()) > 100 for g in noisy)
    assert last_log(trainer, "grad_norm") == pytest.approx(float(flat(noisy[-1]).norm()), rel=1e-4)


@pytest.mark.slow
def test_failure_12_a_sigma_of_1000_wrecks_accuracy(tmp_path: Path) -> None:
    def accuracy(noise: float) -> float:
        trainer = make(
            tmp_path, privacy=private(noise_multiplier=noise), max_steps=40, optim="adamw_torch", learning_rate=1e-2,
            parts={
                "train_dataset": rows(200), "eval_dataset": rows(200),
                "compute_metrics": lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
            },
            per_device_train_batch_size=40, gradient_accumulation_steps=1,
        )  # fmt: skip
        trainer.train()
        return float(trainer.evaluate()["eval_accuracy"])

    assert accuracy(0.1) > 0.9
    assert accuracy(1000.0) < 0.6


def test_failure_15_bf16_parameters_get_float32_noise(tmp_path: Path) -> None:
    model = classifier(torch.bfloat16)
    (first, *_) = gradients_of(make(tmp_path, model, max_steps=1))
    wide = flat(first).float()
    # Noise drawn in bf16 has few distinct values and none is far out; rounding afterwards keeps the deviation.
    assert float(wide.std()) == pytest.approx(1 / EXPECTED, rel=0.03)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.slow  # tests/step/test_clipped_sum.py has it of the sum itself
def test_failure_15_small_contributions_are_not_swallowed(tmp_path: Path) -> None:
    """The sum over many examples is kept in float32 though the parameters are bf16."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        model = classifier(torch.bfloat16, n_layers=2).to(dtype)
        with pytest.warns(UserWarning, match="not private"):
            config = private(noise_multiplier=0, clipping_norm=1e-3)
        trainer = make(
            tmp_path, model, config, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS
        )
        results.append(flat(gradients_of(trainer)[0]).double())
    low, high = results
    assert float((low - high).norm()) < 0.05 * float(high.norm())


@pytest.mark.slow
def test_failure_23_bf16_autocast_skips_no_step(tmp_path: Path) -> None:
    model = classifier()
    trainer = make(tmp_path, model, bf16=True)
    gradients = gradients_of(trainer)
    assert trainer.ledger.steps == trainer.state.global_step == len(gradients) == STEPS
    assert all(float(flat(g).std()) == pytest.approx(1 / EXPECTED, rel=0.05) for g in gradients)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in model.parameters())


def test_failure_20_the_budget_is_met_and_not_exceeded(tmp_path: Path) -> None:
    for target in (0.5, 20.0):
        trainer = make(tmp_path, privacy=private(noise_multiplier=None, target_epsilon=target))
        trainer.train()
        assert 0.99 * target < trainer.privacy_report().epsilon <= target


def test_failure_21_the_ledger_is_as_long_as_the_training(tmp_path: Path) -> None:
    for changes in (
        {"max_steps": 5},
        {"max_steps": -1, "num_train_epochs": 2},
        {"max_steps": -1, "num_train_epochs": 0.5},
    ):
        trainer = make(tmp_path, **changes)
        out = trainer.train()
        per_epoch = math.ceil(ROWS / EXPECTED)
        expected = (
            changes["max_steps"] if changes["max_steps"] > 0 else math.ceil(changes["num_train_epochs"] * per_epoch)
        )
        assert trainer.ledger.steps == out.global_step == trainer.privacy_report().steps == expected


@pytest.mark.slow
def test_dropout_trains_and_its_masks_are_not_those_of_the_public_seed(tmp_path: Path) -> None:
    def run(seed: int | None) -> dict[str, Tensor]:
        with pytest.warns(UserWarning, match="not private"):
            config = private(noise_multiplier=0, seed=seed)
        model = classifier(dropout=0.3)
        # q = 1: without dropout nothing would be left to chance.
        make(
            tmp_path, model, config, max_steps=1, per_device_train_batch_size=ROWS, gradient_accumulation_steps=1
        ).train()
        return parameters(model)

    assert same(run(7), run(7))
    assert not same(run(None), run(None))


class Randomness(TrainerCallback):
    """Notes the global random states when training begins."""

    def __init__(self) -> None:
        self.state: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.state = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))


@pytest.mark.checked_anew
@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
@pytest.mark.slow
def test_the_checks_before_the_first_step_draw_nothing_from_the_seed(tmp_path: Path, kind: Any) -> None:
    def drawn(token: int) -> int:
        return int(token + torch.randint(2, ()) + random.randrange(2) + np.random.randint(2)) % 30

    def at_random(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad([{**e, "input_ids": [drawn(token) for token in e["input_ids"]]} for e in examples])

    before, after = Randomness(), Randomness()
    model = with_dropout(classifier())
    parts = {"callbacks": [before], "data_collator": at_random, "train_dataset": kind(rows(low=6, high=6))}
    trainer = make(tmp_path, model, parts=parts, max_steps=1)
    trainer.add_callback(after)
    trainer.train()
    assert before.state == after.state


@pytest.mark.slow
def test_frozen_modules_that_are_compiled_are_so_in_the_steps_alone(tmp_path: Path) -> None:
    """torch compiles few variants of a module: those that checks need are not among them."""
    torch.compiler.reset()
    model, began, ran = adapted("LoRA", torch.float32), list[bool](), list[bool]()

    def counted(graph: Any, given: Any) -> Any:
        return lambda *args: ran.append(bool(began)) or graph(*args)

    class Begins(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            began.append(True)

    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.compile(backend=counted)
    parts = {"data_collator": pad_for_language, "callbacks": [Begins()]}
    make(tmp_path, model, parts=parts, max_steps=1).train()
    assert ran
    assert all(ran)
