"""What a training says of itself, and how many passes its check takes."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tqdm.auto import tqdm
from transformers.integrations import integration_utils

import hf_dp.ranks as ranks
from hf_dp import PrivacyConfig
from hf_dp.demo.quiet import quiet
from hf_dp.training.progress import Clock, Seldom, in_words, opening, passes_shown, say
from tests.training.workbench import EXPECTED, make, pad_for_language, private, rows
from tests.zoo import tiny


def adapted() -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1), config)


@pytest.mark.slow
def test_the_check_of_a_model_without_random_numbers_takes_few_passes(tmp_path: Path) -> None:
    """Most of them of a few rows that are cut short, so that they take as long as few steps of ordinary batches."""
    data = rows(60, low=20, high=30)
    trainer = make(tmp_path, adapted(), parts={"train_dataset": data, "data_collator": pad_for_language})
    trainer.get_train_dataloader()
    passes: Counter[str] = Counter()

    def note(module: Any, args: Any, output: Any) -> None:
        tokens = output.logits.shape[:2].numel()
        passes.update(forward=1, tokens_forward=tokens)
        if output.logits.requires_grad:
            output.logits.register_hook(lambda _: passes.update(backward=1, tokens_backward=tokens))

    trainer.model.register_forward_hook(note)
    trainer._run.engine.check()
    assert passes["forward"] <= 38
    assert passes["backward"] <= 17
    assert passes["tokens_forward"] <= 2013
    assert passes["tokens_backward"] <= 907


@pytest.mark.parametrize(("is_terminal", "is_silent", "rank", "is_shown"), [
    (True, False, 0, True), (False, False, 0, False), (True, True, 0, False), (True, False, 1, False)
])  # fmt: skip
def test_passes_are_counted_on_a_terminal_by_the_first_rank(
    is_terminal: bool, is_silent: bool, rank: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    model = torch.nn.Linear(2, 2)
    with passes_shown(model, is_silent=is_silent):
        found = model(torch.ones(1, 2))
    assert ("Checking before the first step" in terminal.getvalue()) is is_shown
    assert torch.equal(found, model(torch.ones(1, 2)))
    assert not model._forward_pre_hooks


@pytest.mark.slow
def test_three_lines_say_what_begins_and_the_logs_how_long_noise_and_signal_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, privacy=PrivacyConfig(noise_multiplier=100), max_steps=2, logging_steps=1)
    trainer.train()
    out, told = capsys.readouterr()
    promised, drawn, ahead = [line for line in told.splitlines() if line.startswith(("Private", "Drawn", "Time"))]
    assert promised == opening(trainer._run.plan)[0]
    assert re.match(r"Drawn: .*, Poisson with sampling probability 0.1667, 2 steps of expected batch size 8\.", drawn)
    assert re.fullmatch(r"Time: the check before the first step took [\d.e-]+ (s|min)\.", ahead)
    assert "Private training" not in out + caplog.text
    for entry in (one for one in trainer.state.log_history if "loss" in one):
        assert entry["grad_norm"] == pytest.approx(entry["noise_norm"], rel=0.05)
        assert entry["signal_bound"] == 1.0


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (private(), "NOT PRIVATE (without noise, or with a seed that subtracts it)."),
        (
            PrivacyConfig(noise_multiplier=1.5),
            "the epsilon of noise multiplier 1.5, in the log and in privacy_report(),",
        ),
        (PrivacyConfig(target_epsilon=8.0), "Private training: epsilon 8 at delta 0.0142 for one training example."),
    ],
)
@pytest.mark.slow
def test_what_is_promised_is_said_as_it_was_given(privacy: PrivacyConfig, said: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=privacy)
    trainer.get_train_dataloader()
    assert said in opening(trainer._run.plan)[0]


def test_a_rate_of_adam_that_hardly_moves_anything_is_said(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=2)
    trainer.get_train_dataloader()
    plan, model = (
        trainer._run.plan,
        torch.nn.Sequential(torch.nn.Linear(40, 40).requires_grad_(False), torch.nn.Linear(2, 1)),
    )
    weights = list(model[1].parameters())
    line = opening(plan, model, torch.optim.AdamW(weights, lr=2e-5))[-1]
    assert line.startswith("Learning rate: 2e-05 moves each weight by some 3e-05 in all")
    assert "proposes 0.016 for adapters" in line
    warming = torch.optim.AdamW(weights, lr=2e-5)
    torch.optim.lr_scheduler.LambdaLR(warming, lambda step: 0.0)
    assert opening(plan, model, warming)[-1] == line
    for optimizer in (torch.optim.Adam(weights, lr=1e-3), torch.optim.SGD(weights, lr=1e-5), None):
        assert len(opening(plan, model, optimizer)) == 2
    (warm,) = opening(plan, model[1], warming)[2:]  # all of it is trained
    assert warm.startswith("Schedule: a rate of 0 in the step that comes first")


def test_a_rate_of_zero_is_said_whatever_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, max_steps=1, learning_rate=0.0, optim="sgd").train()
    assert "Learning rate: 0. Unless something raises it, no weight moves, and steps are paid for." in (
        capsys.readouterr().err
    )
    make(tmp_path / "warming", max_steps=2, warmup_steps=1, lr_scheduler_type="linear").train()
    said = capsys.readouterr().err
    assert "Learning rate" not in said
    assert "which is paid for and moves no weight, as where a warm-up begins" in said


@pytest.mark.parametrize("tell", [say, lambda message: ranks.warn(logging.getLogger("hf_dp.told"), message)])
def test_what_is_said_beside_a_bar_has_a_line_of_its_own(
    tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(logging.getLogger("hf_dp.told"), "handlers", [logging.StreamHandler(terminal)])
    with tqdm(total=9) as bar:
        bar.update()
        tell("Something.")
    assert "Something." in terminal.getvalue().splitlines()
    assert "1/9" in terminal.getvalue().split("Something.")[1]


@pytest.mark.parametrize("begins", [False, True])
def test_inside_of_something_else_it_is_said_where_it_is_a_part_of_that(
    begins: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with quiet(begins=begins):
        say("Inside.")
    say("After.")
    assert capsys.readouterr().err.splitlines() == ["Inside."] * begins + ["After."]


@pytest.mark.parametrize(("unit_sampling", "whose"), [
    ("units", "the mean gradient of the drawn examples with each value of 'user' is"),
    ("examples", "each example's gradient is"),
])  # fmt: skip
def test_the_opening_says_what_is_clipped(unit_sampling: Any, whose: str, tmp_path: Path) -> None:
    privacy = private(unit="user", max_examples_per_unit=3, unit_sampling=unit_sampling)
    owned = [{**row, "user": f"u{i // 2}"} for i, row in enumerate(rows())]
    trainer = make(tmp_path, privacy=privacy, parts={"train_dataset": owned}, max_steps=1)
    trainer.get_train_dataloader()
    drawn = opening(trainer._run.plan)[1]
    assert drawn.endswith(f"1 step of expected batch size {EXPECTED}. max_grad_norm is 0: {whose} clipped.")


@pytest.mark.slow
def test_no_time_of_private_rows_is_said_where_what_is_not_private_is_withheld(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, privacy=private(withhold_non_private_logs=True), max_steps=1).train()
    told = capsys.readouterr().err
    assert "Private training" in told
    assert "Time:" not in told


def test_how_long_it_takes_is_said_once_and_of_steps_that_were_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr("hf_dp.training.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("hf_dp.training.progress.say", said.append)
    trainer = make(tmp_path, max_steps=100)
    trainer.get_train_dataloader()
    clock = Clock(trainer._run.plan, done=10, charged=10)
    now[0] += 3
    clock.checked()
    for seconds in (30, *[0.5] * 89):
        now[0] += 60  # evaluation, a checkpoint
        clock.begins()
        now[0] += seconds
        clock.stepped()
    assert said == [
        "Time: the check before the first step took 3 s.",
        "Time: about 42 s for 85 steps ahead, as 4 steps took 2 s; what lies between steps is not counted.",
    ]


@pytest.mark.parametrize(
    ("privacy", "ahead"), [(PrivacyConfig(target_epsilon=8.0, accountant="rdp"), 70), (private(), 90)]
)
@pytest.mark.slow
def test_steps_that_a_budget_does_not_pay_for_again_are_not_ahead(
    privacy: PrivacyConfig, ahead: int, tmp_path: Path
) -> None:
    trainer = make(tmp_path, privacy=privacy, max_steps=100)
    trainer.get_train_dataloader()
    assert Clock(trainer._run.plan, done=10, charged=30)._ahead == ahead


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.04 s"), (119, "120 s"), (121, "2 min"), (7000, "120 min"), (86400, "24 h"), (2e5, "2.3 days")],
)
def test_durations_are_said_in_two_digits(seconds: float, said: str) -> None:
    assert in_words(seconds) == said


def test_what_takes_long_is_said_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr("hf_dp.training.progress.time.monotonic", lambda: now[0])

    def slow() -> None:
        calls.append(now[0])
        now[0] += 2

    seldom = Seldom()
    for _ in range(300):
        seldom(slow)
        now[0] += 1
    assert calls == [0, 102, 204]


@pytest.mark.slow
def test_tensorboard_gets_epsilon_as_any_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformers' own callback, also where TensorBoard itself is not installed."""
    written: dict[str, list[float]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.setdefault(name, []).append(value)

        def add_text(self, *_: Any) -> None: ...

        def flush(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    tracker = integration_utils.TensorBoardCallback(Writer())
    trainer = make(tmp_path, parts={"callbacks": [tracker]}, max_steps=2, logging_steps=1)
    trainer.train()
    logged = [entry["epsilon"] for entry in trainer.state.log_history]
    assert written["train/epsilon"] == logged
    assert len(written["train/signal_bound"]) == 2
