"""What can go wrong in a loop of one's own is refused before it costs anything, or does no harm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from hf_dp.errors import ConfigurationError, LedgerError
from tests.training.own_loops import a_run, after_one_step, begun
from tests.training.workbench import classifier, pad, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


def misuse_second_step(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.step(batch)


def misuse_no_optimizer(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    next(batches)


def misuse_another_optimizer(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    torch.optim.Adam(model.parameters()).step()
    next(batches)


def misuse_untaken_checkpoint(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    run.save("nowhere")


def misuse_backward(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    model(**pad(rows(4))).loss.backward()
    optimizer.step()


def misuse_clipping(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def misuse_own_step(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    model(**pad(rows(4))).loss.backward()
    optimizer.step()


def misuse_other_training_between(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    model(**pad(rows(4))).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    run.step(next(batches))


def misuse_other_fused_training_between(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    model(**pad(rows(4))).loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    run.step(next(batches))


def misuse_other_training_before_saving(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.end()
    optimizer.zero_grad()
    model(**pad(rows(4))).loss.backward()
    optimizer.step()
    run.save("nowhere")


def misuse_skipped_batch(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    next(batches)
    next(batches)


def misuse_two_loops(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.step(next(run.batches()))
    optimizer.step()
    next(batches)


def misuse_own_batch(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.step(pad(rows(4)))


def misuse_after_the_end(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    late = next(batches)
    run.end()
    run.step(late)


def misuse_second_beginning(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    run.begin(optimizer)


def misuse_second_run(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.end()
    a_run(model).begin(torch.optim.SGD(model.parameters(), lr=0.1))


def misuse_no_output_dir(model: Any, run: Any, optimizer: Any, batches: Any, batch: Any) -> None:
    optimizer.step()
    run.save_checkpoint()


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (misuse_second_step, "or was used before"),
        (misuse_no_optimizer, "the next batch before the run's optimizer has taken"),
        (misuse_another_optimizer, "the next batch before the run's optimizer has taken"),
        (misuse_untaken_checkpoint, r"save\(\) before the run's optimizer has taken"),
        (misuse_backward, "gradients that are not those of the private step"),
        (misuse_clipping, "gradients that are not those of the private step"),
        (misuse_own_step, "gradients that are not those of the private step"),
        (misuse_other_training_between, r"step\(\), after something else than the run's optimizer has changed"),
        (misuse_other_fused_training_between, r"step\(\), after something else than the run's optimizer has changed"),
        (misuse_other_training_before_saving, r"save\(\), after something else than the run's optimizer has changed"),
        (misuse_skipped_batch, r"a batch of batches\(\) without its step\(\)\."),
        (misuse_two_loops, "since another loop has begun"),
        (misuse_own_batch, "what is not the latest batch"),
        (misuse_after_the_end, "what is not the latest batch"),
        (misuse_second_beginning, "has begun"),
        (misuse_second_run, "has trained this model before: 1 private steps"),
        (misuse_no_output_dir, "without output_dir"),
    ],
)
def test_what_can_go_wrong_in_a_loop_is_refused(misuse: Callable[..., None], words: str) -> None:
    in_hand = after_one_step()
    steps = in_hand[1].ledger.steps
    with pytest.raises((ConfigurationError, LedgerError), match=words):
        misuse(*in_hand)
    assert in_hand[1].ledger.steps <= steps + 1
    assert not Path("nowhere").exists()


def test_two_runs_on_one_model_are_refused_at_the_first_step_of_the_second() -> None:
    model = classifier()
    runs = [a_run(model), a_run(model)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in runs]
    for run, optimizer in zip(runs, optimizers, strict=True):
        run.begin(optimizer)
    runs[0].step(next(runs[0].batches()))
    optimizers[0].step()
    with pytest.raises(ConfigurationError, match="something else than the run's optimizer"):
        runs[1].step(next(runs[1].batches()))
    assert runs[1].ledger.steps == 0


def test_what_does_no_harm_changes_nothing() -> None:
    found, first = [], classifier()
    for careless in (False, True):
        model = copy.deepcopy(first)
        run, optimizer, scheduler = begun(model, steps=3)
        while run.global_step < 3:
            for batch in run.batches():
                run.step(batch)
                optimizer.step()
                scheduler.step()
                if careless:  # breaks, evaluates, averages in a copy, and leaves the gradients
                    torch.optim.swa_utils.AveragedModel(model)
                    model.eval()
                    model(**pad(rows(4)))
                    break
                optimizer.zero_grad()
        found.append(parameters(model))
        assert run.ledger.steps == 3
        run.end()
        optimizer.step()  # nobody listens any more
    assert same(*found)


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [1e-3, float("inf")])
def test_after_gradients_that_were_clipped_once_more_the_loop_goes_on_without_them(
    tmp_path: Path, limit: float
) -> None:
    model = classifier()
    run, optimizer, _ = begun(model)
    batches = run.batches()
    run.step(next(batches))
    before = parameters(model)
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    with pytest.raises(ConfigurationError, match="gradients that are not those of the private step"):
        optimizer.step()
    optimizer.step()  # of nothing
    assert same(parameters(model), before)
    run.save(tmp_path / "unmoved")
    run.step(next(batches))
    optimizer.step()
    assert not same(parameters(model), before)
    assert run.ledger.steps == 2
    run.save(tmp_path / "saved")


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["between", "saving", "new"])
def test_failure_76_statistics_that_a_loop_writes_into_saved_buffers(what: str, tmp_path: Path) -> None:
    model = classifier()
    model.register_buffer("centre", torch.zeros(3))
    run, optimizer, _ = begun(model)
    batches = run.batches()
    run.step(next(batches))
    optimizer.step()
    model.centre.copy_(model.centre.clone())  # as DDP writes buffers anew, as they were
    batch = next(batches)
    if what == "new":
        model.register_buffer("mean", torch.ones(3))
    else:
        model.centre += 1
    with pytest.raises(ConfigurationError, match="something else than the run's optimizer has changed (centre|mean)"):
        run.save(tmp_path / "saved") if what == "saving" else run.step(batch)
    assert run.ledger.steps == 1
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("way", ["a list", "chained"])
def test_what_is_no_scheduler_or_hides_one_by_metrics_is_refused(way: str) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer)
    scheduler: Any = [linear]
    if way == "chained":
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([linear], optimizer)
        scheduler._schedulers = [linear, plateau]
    words = "list" if way == "a list" else "ReduceLROnPlateau"
    with pytest.raises(ConfigurationError, match=rf"begin\(\) with {words} for a scheduler"):
        a_run(model).begin(optimizer, scheduler)


def test_a_scheduler_that_the_loop_does_not_step_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = a_run(model, steps=4)
    run.begin(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4))
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        assert ("learning rate is 0 in a second step" in caplog.text) == (run.global_step > 1)
    assert caplog.text.count("learning rate is 0") == 1


@pytest.mark.parametrize("withheld", [False, True])
def test_failure_77_rates_that_follow_from_the_losses_of_steps(withheld: bool) -> None:
    model = classifier()
    run = a_run(model, private(withhold_non_private_logs=withheld), steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    if not withheld:
        with pytest.raises(ConfigurationError, match=r"begin\(\) with ReduceLROnPlateau for a scheduler"):
            run.begin(optimizer, scheduler)
        return
    run.begin(optimizer, scheduler)
    for batch in run.batches():
        assert run.step(batch) == 0
        optimizer.step()
        scheduler.step(1.0)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, batch: model(**batch),
        lambda model, batch: batch["labels"],
        lambda model, batch: batch.to("cpu"),
        lambda model, batch: {name: value.to("cpu") for name, value in batch.items()},
    ],
    ids=["a model", "a name", "to a device", "one by one"],
)
def test_a_batch_is_no_input_of_a_model(use: Any) -> None:
    model = classifier()
    run, *_ = begun(model)
    with pytest.raises(ConfigurationError, match=r"^a batch of batches\(\) is no input of a model") as caught:
        use(model, next(run.batches()))
    assert "run.step(batch)" in caught.value.fix
    assert run.ledger.steps == 0


def test_within_accelerates_accumulate_a_step_is_refused_before_it_is_paid_for() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = classifier()
    run, optimizer = a_run(model), torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(accelerator.prepare(optimizer))
    batch = next(run.batches())
    words = r"^step\(\) within accumulate\(\) of accelerate"
    with pytest.raises(ConfigurationError, match=words), accelerator.accumulate(model):
        run.step(batch)
    assert run.ledger.steps == 0
    accelerator.gradient_state._set_sync_gradients(True)
    run.step(batch)
    assert run.ledger.steps == 1
