"""What a loop of one's own may do to weights, gradients and draws behind the run's back: refused, or harmless."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import hf_dp.ranks as ranks
from hf_dp import PrivateRun
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.written import WrittenGradients
from tests.training.own_loops import a_run, after_one_step, begun, loop
from tests.training.workbench import classifier, make, pad, parameters, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


def interrupt(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def moved_before_the_optimizer(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1)
    optimizer.step()


def loaded_before_the_optimizer(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()})
    optimizer.step()


def another_optimizer_before(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    torch.optim.SGD(model.classifier.parameters(), lr=0.1).step()
    optimizer.step()


def zeroed_gradients(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def with_a_closure(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step(lambda: 1.0)


def other_precision(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step()
    model.to(torch.bfloat16)
    run.step(next(batches))


def autocast_later(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.step(next(batches))


def without_gradients(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step()
    with torch.no_grad():
        run.step(next(batches))


def in_inference_mode(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step()
    with torch.inference_mode():
        run.step(next(batches))


def a_step_counted_by_hand(model: Any, run: Any, optimizer: Any, batches: Any) -> None:
    optimizer.step()
    run.global_step = 0


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (moved_before_the_optimizer, "something else than the run's optimizer has changed"),
        (loaded_before_the_optimizer, "something else than the run's optimizer has changed"),
        (another_optimizer_before, "something else than the run's optimizer has changed"),
        (zeroed_gradients, "gradients that are not those of the private step"),
        (with_a_closure, "gradients that are not those of the private step"),
        (other_precision, "something else than the run's optimizer has changed"),
        (autocast_later, "torch.autocast"),
        (without_gradients, r"torch\.no_grad\(\)"),
        (in_inference_mode, r"torch\.inference_mode\(\)"),
        (a_step_counted_by_hand, "global_step"),
    ],
)
def test_it_is_refused_before_it_costs_anything(misuse: Callable[..., None], words: str) -> None:
    model, run, optimizer, batches, _ = after_one_step()
    with pytest.raises((ConfigurationError, AttributeError), match=words):
        misuse(model, run, optimizer, batches)
    assert run.ledger.steps == 1


def test_a_gradient_that_was_there_before_moves_nothing() -> None:
    model = classifier()
    model(**pad(rows(4))).loss.backward()  # of private examples, without noise
    frozen = next(model.parameters()).requires_grad_(False)
    was = frozen.detach().clone()
    assert frozen.grad is not None
    run, optimizer = a_run(model, steps=1), torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert torch.equal(frozen, was)
    assert frozen.grad is None


@pytest.mark.parametrize("at", [(ClippedSum, "release"), (WrittenGradients, "note")])
def test_a_step_that_was_paid_for_and_failed_is_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: tuple[type, str]
) -> None:
    run, optimizer, scheduler = begun(classifier(), steps=3, output_dir=tmp_path)
    loop(run, optimizer, scheduler, until=1)
    batch = next(batches := run.batches())
    with monkeypatch.context() as patch:
        patch.setattr(*at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step(batch)
    assert run.ledger.steps == 2
    for again in (lambda: run.step(batch), lambda: next(batches), lambda: run.step(next(run.batches()))):
        with pytest.raises(ConfigurationError, match="after a step that was paid for"):
            again()
    run.save_checkpoint()
    run.end()
    resumed, optimizer, scheduler = begun(classifier(), steps=3, output_dir=tmp_path, resume=True)
    loop(resumed, optimizer, scheduler)
    assert (resumed.global_step, resumed.ledger.steps) == (3, 4)


def test_a_step_that_failed_before_it_was_paid_for_can_be_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run, optimizer, batches, _ = after_one_step()
    optimizer.step()
    batch = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(ClippedSum, "meet", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.step(batch)
    with pytest.raises(ConfigurationError, match=r"without its step\(\)"):
        next(batches)
    run.step(batch)
    optimizer.step()
    assert run.global_step == run.ledger.steps == 2


def test_a_step_that_failed_on_one_of_several_ranks_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank waits in the middle of it, and would take what comes first for what it waits for."""
    _, run, optimizer, batches, _ = after_one_step()
    optimizer.step()
    batch = next(batches)

    def failing(*args: Any) -> None:
        monkeypatch.setattr(ranks, "world_size", lambda: 2)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ClippedSum, "add", failing)
        with pytest.raises(torch.OutOfMemoryError):
            run.step(batch)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match="or that several processes took together"):
        run.step(batch)
    assert run.ledger.steps == 1


@pytest.mark.slow
def test_failure_51_a_step_that_is_taken_again_does_not_begin_with_what_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, run, optimizer, batches, _ = after_one_step()
    optimizer.step()
    embeddings, batch = model.get_input_embeddings(), next(batches)
    embed, embeddings.times = embeddings.forward, 1.0

    def remembering(ids: Tensor) -> Tensor:
        embeddings.times = 0.5
        shown: Tensor = embed(ids) * embeddings.times
        return shown

    with monkeypatch.context() as patch:
        patch.setattr(embeddings, "forward", remembering)
        patch.setattr(ClippedSum, "add", interrupt)
        try:
            run.step(batch)
        except KeyboardInterrupt:
            assert embeddings.times == 1
    run.step(batch)


def test_rows_of_new_widths_beside_weights_of_zero_are_no_write_by_something_else() -> None:
    model = classifier()
    with torch.no_grad():
        model.classifier.weight.zero_()  # as a fresh adapter's
    run = a_run(model, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    batch = next(run.batches())
    batch._item["unlike"] = [rows()[:2]]
    run.step(batch)
    optimizer.step()


def test_threads_do_not_use_one_draw_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    _, run, optimizer, batches, _ = after_one_step()
    optimizer.step()
    batch, refused, meet = next(batches), list[str](), ClippedSum.meet

    def meanwhile(self: Any, step: int) -> None:
        def second() -> None:
            with pytest.raises(ConfigurationError) as error:
                run.step(batch)
            refused.append(str(error.value))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        meet(self, step)

    monkeypatch.setattr(ClippedSum, "meet", meanwhile)
    run.step(batch)
    assert len(refused) == 1
    assert run.ledger.steps == 2


@pytest.mark.parametrize("second", ["Trainer", "own"])
def test_weights_of_a_checkpoint_that_was_refused_are_not_trained_as_if_they_were_new(
    tmp_path: Path, second: str
) -> None:
    first = classifier()
    make(tmp_path, first, save_strategy="steps", save_steps=4).train()
    model, checkpoint = classifier(), tmp_path / "checkpoint-4"
    trainer = make(tmp_path, model, parts={"train_dataset": rows(seed=5)})
    if second == "Trainer":
        with pytest.raises(LedgerError, match="is not the data"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        again: Any = trainer.train
    else:
        (checkpoint / "rng_state.pth").write_bytes((checkpoint / "scheduler.pt").read_bytes()[:-9] + b"\0" * 9)
        run = a_run(model, steps=4, output_dir=tmp_path)
        with pytest.raises(LedgerError):
            run.begin(torch.optim.SGD(model.parameters()), resume_from_checkpoint=checkpoint)

        def again() -> None:
            a_run(model, steps=4).begin(torch.optim.SGD(model.parameters()))

    if second == "Trainer":
        assert same(parameters(first), parameters(model))
    with pytest.raises(LedgerError, match="4 private steps"):
        again()


@pytest.mark.parametrize("trained", [True, False])
def test_failure_50_weights_of_a_checkpoint_that_was_refused_are_not_saved(tmp_path: Path, trained: bool) -> None:
    run, optimizer, scheduler = begun(classifier(), output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=2, until=2)
    run.end()
    model, checkpoint = classifier(), tmp_path / "checkpoint-2"
    first, optimizer, scheduler = begun(model)
    loop(first, optimizer, scheduler, until=1)
    first.end()
    second = a_run(model, output_dir=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(LedgerError, match="optimizer has no dampening"):
        second.begin(optimizer, LambdaLR(optimizer, lambda step: 1.0), resume_from_checkpoint=checkpoint)
    assert same(parameters(run.model), parameters(model)), "the weights were read by then"
    saves: list[Callable[[], object]] = [lambda: second.save(tmp_path / "saved"), second.save_checkpoint]
    for save in [lambda: first.save(tmp_path / "saved")] if trained else saves:
        with pytest.raises((ConfigurationError, LedgerError)):
            save()
    assert not (tmp_path / "saved").exists()
    assert not (tmp_path / "checkpoint-0").exists()


def test_resuming_without_an_output_directory_is_refused() -> None:
    model = classifier()
    with pytest.raises(ConfigurationError, match="without output_dir"):
        a_run(model).begin(torch.optim.SGD(model.parameters()), resume_from_checkpoint=True)


@pytest.mark.parametrize("option", ["in_order", "shuffle", "batch_size", "collate_fn", "generator"])
def test_options_that_change_the_draws_are_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        a_run(classifier(), **{option: None})


def test_a_kind_of_wrapper_is_refused_too() -> None:
    with pytest.raises(ConfigurationError, match="Mine"):
        a_run(type("Mine", (nn.DataParallel,), {})(classifier()))


@pytest.mark.parametrize("output_dir", [3, "", b"out"])
def test_what_is_no_folder_is_refused(output_dir: Any) -> None:
    with pytest.raises(ConfigurationError, match="output_dir="):
        a_run(classifier(), output_dir=output_dir)


def test_a_loop_as_it_is_written_without_privacy_is_told_how_it_is_written_here() -> None:
    _, run, _, _, _ = after_one_step()
    with pytest.raises(ConfigurationError, match=r"for batch in run.batches\(\)"):
        iter(run)
    model = classifier(n_layers=1)
    run = a_run(model, steps=3)
    run.begin(torch.optim.SGD(model.parameters(), lr=0.1))
    mean = run.step(next(run.batches()))
    assert isinstance(mean, float)
    with pytest.raises(ConfigurationError, match=r"backward\(\) of what step\(\) returned."):
        mean.backward()  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"backward\(\) of what step\(\) returned."):
        Accelerator(cpu=True).backward(mean)


def test_a_run_that_lacks_something_is_told_what() -> None:
    needed = "privacy, collate, expected_batch_size, micro_batch_size, steps"
    with pytest.raises(ConfigurationError, match=f"PrivateRun without {needed}.") as told:
        PrivateRun(classifier(), rows())  # type: ignore[call-arg]
    assert "privacy=PrivacyConfig(target_epsilon=8.0), collate=" in str(told.value)
    with pytest.raises(ConfigurationError, match="loss=None."):
        a_run(classifier(), loss=None)
    with pytest.raises(ConfigurationError, match=r"\(of a PrivateRun expected_batch_size\) to at most"):
        a_run(classifier(), expected_batch_size=10_000)
    with pytest.raises(TypeError, match="positional"):
        PrivateRun(*range(9))  # type: ignore[arg-type, misc]


def test_failure_140_a_run_that_was_made_before_its_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    run = a_run(model)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match="made as one of 1 process.* now rank 0 of 2"):
        run._run.begin(torch.optim.SGD(model.parameters(), lr=0.1), None, 0, run)
    with pytest.raises(ConfigurationError, match="made as one of 1 process"):
        run._loader.dummies({"micro_batches": []})  # of each step
