"""Checkpoints of a loop of one's own: Trainer goes on from them, and one that is killed leaves a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.training.resuming.own_checkpoints import found_checkpoint, step_of
from hf_dp.training.resuming.resume import SavedRun
from tests.crashes import killed, killed_everywhere
from tests.training.own_loops import a_run, begun, loop
from tests.training.workbench import classifier, make, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize("first", ["Trainer", "own"])
@pytest.mark.slow
def test_a_checkpoint_goes_on_in_the_other_loop(tmp_path: Path, first: str) -> None:
    def trained(loop: str, resume: bool) -> dict[str, torch.Tensor]:
        model = classifier(dropout=0.1)
        trainer: DPTrainer = make(tmp_path, model, max_steps=4, save_strategy="steps", save_steps=2)
        if loop == "Trainer":
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
            return parameters(model)
        optimizer = trainer.create_optimizer()
        scheduler = LambdaLR(optimizer, lambda step: 1.0)
        run = a_run(model, steps=4, output_dir=tmp_path)
        run.begin(optimizer, scheduler, resume_from_checkpoint=tmp_path / "checkpoint-2" if resume else None)
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            scheduler.step()
            if run.global_step == 2:
                run.save_checkpoint()
        return parameters(model)

    second = "own" if first == "Trainer" else "Trainer"
    assert same(trained(first, resume=False), trained(second, resume=True))


def resumed_with(**changes: Any) -> Callable[[Path], None]:
    def resume(path: Path) -> None:
        begun(classifier(), output_dir=path, resume=True, **changes)

    return resume


def with_another_optimizer(path: Path) -> None:
    model = classifier()
    a_run(model, output_dir=path).begin(torch.optim.SGD(model.parameters(), lr=0.1), resume_from_checkpoint=True)


def with_another_kind_of_optimizer(path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    a_run(model, output_dir=path).begin(optimizer, scheduler, resume_from_checkpoint=True)


def with_changed_weights(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = path / "checkpoint-1" / "model.safetensors"
    save_file({name: values + 1 for name, values in load_file(weights).items()}, weights, {"format": "pt"})
    resumed_with()(path)


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("loop_of", ["Trainer", "own"])
def test_other_parameters_frozen_than_before_are_refused(tmp_path: Path, loop_of: str, more: bool) -> None:
    def train(freeze: bool, resume: bool) -> None:
        model = classifier()
        model.get_input_embeddings().requires_grad_(not freeze)
        if loop_of == "Trainer":
            only = {"save_only_model": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
            make(tmp_path, model, **only).train(
                resume_from_checkpoint=str(tmp_path / "checkpoint-1") if resume else None
            )
            return
        run = a_run(model, steps=2, output_dir=tmp_path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.begin(optimizer, LambdaLR(optimizer, lambda step: 1.0), resume_from_checkpoint=resume)
        loop(run, optimizer, run._scheduler, save_at=1, until=1)
        run.end()

    train(freeze=not more, resume=False)
    with pytest.raises(LedgerError, match="word_embeddings.weight is (frozen|trained) now"):
        train(freeze=more, resume=True)
    train(freeze=not more, resume=True)


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        (resumed_with(dataset=rows(seed=1)), "is not the data that the checkpoint was trained on"),
        (resumed_with(privacy=private(clipping_norm=2.0)), "clipping_norm"),
        (resumed_with(expected_batch_size=4), "expected_batch_size"),
        (with_another_optimizer, "with another scheduler than this run has"),
        (with_another_kind_of_optimizer, "the checkpoint's optimizer has no dampening"),
        (with_changed_weights, "contradicts itself|is not what was saved there"),
    ],
)
@pytest.mark.slow
def test_a_checkpoint_of_another_training_is_refused(
    tmp_path: Path, resume: Callable[[Path], None], words: str
) -> None:
    run, optimizer, scheduler = begun(classifier(), output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1, until=1)
    run.end()
    with pytest.raises((LedgerError, ConfigurationError), match=words):
        resume(tmp_path)


@pytest.mark.parametrize("all_moments", [False, True])
@pytest.mark.slow
def test_killed_in_a_save_there_is_a_whole_checkpoint_with_its_ledger(tmp_path: Path, all_moments: bool) -> None:
    out = tmp_path / "out"
    run, optimizer, scheduler = begun(classifier(n_layers=1), output_dir=out)
    loop(run, optimizer, scheduler, save_at=1, until=2)
    found, one = [], (killed(out, run.save_checkpoint, number) for number in (4,))
    for _ in killed_everywhere(out, run.save_checkpoint) if all_moments else one:
        checkpoint = found_checkpoint(True, out, private())
        assert checkpoint is not None
        assert SavedRun.read(checkpoint).ledger.steps == step_of(checkpoint)
        found.append(step_of(checkpoint))
    assert found == (sorted(found) if all_moments else [1])
    assert set(found) == ({1, 2} if all_moments else {1})


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("a test")

    run, optimizer, _ = begun(classifier(n_layers=1), steps=2, output_dir=tmp_path)
    batches = run.batches()
    run.step(next(batches))
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(LambdaLR, "state_dict", fail)
        with pytest.raises(OSError, match="a test"):
            run.save_checkpoint()
    assert not list(tmp_path.glob("*saving*")) + list(tmp_path.glob("checkpoint-*"))
    run.save_checkpoint()
    run.step(next(batches))
    optimizer.step()
    assert list(batches) == []
    assert (tmp_path / "checkpoint-1").is_dir()


@pytest.mark.slow
def test_two_runs_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dp.training.resuming.output_lock._PATIENCE", 0.01)
    run, optimizer, scheduler = begun(classifier(), steps=1, output_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="another training writes into"):
        begun(classifier(), steps=1, output_dir=tmp_path)
    loop(run, optimizer, scheduler, until=2)
    run.save_checkpoint()
    begun(classifier(), steps=1, output_dir=tmp_path)
