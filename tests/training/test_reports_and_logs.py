"""What a training tells: its report, epsilon and noise in logs and progress bar, and nothing where that is withheld."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import pld
from transformers import TrainerCallback

from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.figures import upper
from tests.training.workbench import EXPECTED, ROWS, STEPS, exact, last_log, make, private, trained

pytestmark = pytest.mark.usefixtures("checked_once")


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    config = private(target_delta=1e-3, clipping_norm=0.5, accountant="rdp", seed=None)
    trainer = make(tmp_path, privacy=config)
    with pytest.raises(ConfigurationError, match="train"):
        trainer.privacy_report()
    trainer.train()
    report = trainer.privacy_report()
    by_hand = {
        "delta": 1e-3, "noise_multiplier": 1.0, "clipping_norm": 0.5, "sampling_probability": EXPECTED / ROWS,
        "steps": STEPS, "accountant": "rdp", "dataset_size": ROWS, "expected_batch_size": EXPECTED,
        "target_epsilon": None, "reproducible": False, "unit": "one training example",
        "adjacency": "replace one by nothing (zero-out), n public", "sampling": "Poisson",
    }  # fmt: skip
    assert {name: getattr(report, name) for name in by_hand} == by_hand
    assert report.epsilon == report.epsilon_rdp
    assert report.private
    assert report.caveats


@pytest.mark.slow
def test_epsilon_is_that_of_the_event_one_would_compose_by_hand(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=private(target_delta=1e-3))
    trainer.train()
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(EXPECTED / ROWS, gaussian), STEPS)
    fine = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-3)
    assert trainer.privacy_report().epsilon == pytest.approx(fine, rel=2e-3)
    assert last_log(trainer, "epsilon") == float(upper(trainer.privacy_report().epsilon, 4))


def test_without_noise_epsilon_is_infinite_and_a_seed_is_not_private(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=exact())
    trainer.train()
    report = trainer.privacy_report()
    assert report.epsilon == math.inf
    assert not report.private
    assert "NOT PRIVATE" in str(report)


NOT_PRIVATE = {"loss", "train_loss", "clipped_fraction", "non_finite_examples", "num_input_tokens_seen", "total_flos"}


class WithBar(TrainerCallback):
    """In place of Trainer's; interrupts before the step of that number."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.training_bar, self.shown, self.interrupted_at = self, list[str](), interrupted_at

    def set_postfix(self, epsilon: str) -> None:
        self.shown.append(epsilon)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.interrupted_at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted_at", [None, 3])
@pytest.mark.slow
def test_the_bar_names_the_step_of_its_epsilon_and_ends_with_all_that_was_spent(
    interrupted_at: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom it was refreshed."""
    monkeypatch.setattr("hf_dp.training.callbacks.Seldom.__call__", lambda self, compute: None)
    bar = WithBar(interrupted_at)
    trainer = make(tmp_path, parts={"callbacks": [bar]}, logging_steps=1000)
    with pytest.raises(KeyboardInterrupt) if interrupted_at else nullcontext():
        trainer.train()
    spent = upper(trainer.privacy_report().epsilon, 4)
    assert bar.shown[-1] == f"{spent} after step {interrupted_at or STEPS}"


@pytest.mark.slow
def test_the_bar_says_nothing_of_epsilon_where_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """It said 0, after the checkpoint's step."""
    trained(tmp_path, save_strategy="steps", save_steps=STEPS)
    bar = WithBar()
    trainer = make(tmp_path, parts={"callbacks": [bar]}, max_steps=STEPS + 1)
    with pytest.raises(LedgerError, match="the ledger belongs to another run"):
        trainer.train(resume_from_checkpoint=True)
    assert bar.shown == []


@pytest.mark.slow
def test_epsilon_and_noise_are_logged_and_shown_in_the_progress_bar(tmp_path: Path) -> None:
    bar = WithBar()
    trainer = trained(tmp_path, parts={"callbacks": [bar]}, logging_steps=1)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["epsilon"] for entry in entries] == sorted({entry["epsilon"] for entry in entries})
    assert len(entries) == STEPS
    assert all(entry["noise_multiplier"] == 1.0 and 0 <= entry["clipped_fraction"] <= 1 for entry in entries)
    assert {f"{entry['epsilon']:g} after step {entry['step']}" for entry in entries} <= set(bar.shown)
    assert {entry["signal_bound"] for entry in entries} == {1.0}
    assert "clipped_fraction" not in trainer.state.log_history[-1], "the last window has no examples left to count"


@pytest.mark.slow
def test_withheld_logs_leave_no_function_of_the_data_behind(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.append(dict(logs))

    trainer = make(
        tmp_path, privacy=private(withhold_non_private_logs=True), parts={"callbacks": [Listener()]},
        save_strategy="steps", save_steps=2, include_num_input_tokens_seen="all", logging_steps=1,
    )  # fmt: skip
    out = trainer.train()
    trainer.save_state()
    states = [json.loads(p.read_text()) for p in tmp_path.rglob("trainer_state.json")]
    assert len(states) == 3
    for entry in [*heard, *trainer.state.log_history, out.metrics, *(e for s in states for e in s["log_history"])]:
        assert not {k for k in entry if k in NOT_PRIVATE and entry[k]}, entry
        assert not entry.get("train_tokens_per_second")
    for state in states:
        assert not state["total_flos"]
        assert not state["num_input_tokens_seen"]
    assert (out.training_loss, trainer.state.total_flos, trainer.state.num_input_tokens_seen) == (0, 0, 0)
    assert all("epsilon" in entry for entry in heard if "learning_rate" in entry)
    assert not any("withhold" in caveat for caveat in trainer.privacy_report().caveats)


@pytest.mark.parametrize("withheld", [False, True])
def test_time_and_memory_are_withheld_with_what_else_follows_from_rows(tmp_path: Path, withheld: bool) -> None:
    privacy = private(withhold_non_private_logs=withheld)
    trainer = make(
        tmp_path, privacy=privacy, max_steps=1, skip_memory_metrics=False, logging_steps=1,
        include_num_input_tokens_seen="all",
    )  # fmt: skip
    metrics = trainer.train().metrics
    of_steps = {
        name for entry in trainer.state.log_history if "loss" in entry or "grad_norm" in entry for name in entry
    }
    trainer.log({"eval_runtime": 1.0})  # of other rows, of which nothing is promised
    told = {name for entry in (metrics, *trainer.state.log_history) for name in entry}
    measured = {"train_runtime", "train_samples_per_second", "train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"}
    measured |= {"init_mem_cpu_alloc_delta", "before_init_mem_cpu"}
    assert of_steps & {"train_runtime"} == (set() if withheld else {"train_runtime"})
    assert (told & measured == set()) if withheld else (told >= measured)
    assert {"eval_runtime", "epsilon"} <= told
