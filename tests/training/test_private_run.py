"""PrivateRun: a loop of one's own gives DPTrainer's weights, bit for bit, and resumes; wrong loops are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_dp import DPTrainer, PrivacyConfig, PrivateRun, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.training.own_checkpoints import found_checkpoint, step_of
from hf_dp.training.resume import SavedRun
from tests.crashes import killed, killed_everywhere
from tests.training.workbench import (
    EXPECTED,
    MICRO,
    Recommender,
    classifier,
    clicks,
    make,
    pad,
    parameters,
    private,
    rows,
    same,
    stack,
)

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS = 7  # of which 6 are an epoch
PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "Re-Attention": {"re_attention": ReAttentionConfig(token_frequencies="uniform")},
    "sparse embeddings": {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)},
}


def a_run(model: nn.Module, privacy: PrivacyConfig | None = None, **changes: Any) -> PrivateRun:
    values = {"expected_batch_size": EXPECTED, "micro_batch_size": MICRO, "steps": STEPS, **changes}
    data, collate = values.pop("dataset", rows()), values.pop("collate", pad)
    return PrivateRun(model, data, privacy or private(), collate, **values)


def begun(model: nn.Module, privacy: PrivacyConfig | None = None, resume: Any = None, **changes: Any) -> Any:
    """A run, its optimizer (with a state) and its scheduler."""
    run = a_run(model, privacy, **changes)
    optimizer = run.make_optimizer(lambda trained: torch.optim.Adam(trained, lr=0.01))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run.begin(optimizer, scheduler, resume_from_checkpoint=resume)
    return run, optimizer, scheduler


def loop(run: PrivateRun, optimizer: Any, scheduler: Any, save_at: int = 0, until: int = 0) -> None:
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        scheduler.step()
        if run.global_step == save_at:
            run.save_checkpoint()
        if run.global_step == until:
            break


@pytest.mark.parametrize("part", PARTS)
def test_a_loop_of_ones_own_trains_as_trainer_does(tmp_path: Path, part: str) -> None:
    privacy, found, ledgers = private(**PARTS[part]), [], []
    torch.manual_seed(0)
    first = classifier(dropout=0.1)
    for own in (True, False):
        model = copy.deepcopy(first)
        torch.manual_seed(42)
        if own:
            run = a_run(model, privacy)
            optimizer = run.make_optimizer(lambda trained: torch.optim.SGD(trained, lr=0.1))
            run.begin(optimizer)
            for batch in run.batches():
                model.eval()
                run.step(batch)
                optimizer.step()
            ledgers.append(run.ledger)
        else:
            trainer: DPTrainer = make(tmp_path, model, privacy, max_steps=STEPS)
            torch.manual_seed(42)
            trainer.train()
            ledgers.append(trainer.ledger)
        found.append(parameters(model))
    assert same(*found)
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].steps == STEPS


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("at", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_resumed_it_goes_on_as_if_there_had_been_no_break(tmp_path: Path, part: str, at: int) -> None:
    privacy = private(**PARTS[part])
    model = classifier(dropout=0.1)
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    run, optimizer, scheduler = begun(model, privacy, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=at)
    torch.manual_seed(2)
    resumed, optimizer, scheduler = begun(again, privacy, output_dir=tmp_path, resume=True)
    assert resumed.global_step == resumed.ledger.steps == at
    loop(resumed, optimizer, scheduler)
    assert same(parameters(model), parameters(again))
    assert run.ledger == resumed.ledger
    assert run.report() == resumed.report()


def test_a_saved_model_is_verified_and_lies_beside_its_record(tmp_path: Path) -> None:
    run, optimizer, scheduler = begun(classifier(), PrivacyConfig(target_epsilon=8.0), steps=2, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1)
    run.save(tmp_path / "final")
    for folder, steps in (("final", 2), ("checkpoint-1", 1)):
        assert verify(tmp_path / folder).consistent
        assert verify(tmp_path / folder).report.steps == steps
    assert run.report().epsilon <= 8.0
    assert run.logs().keys() >= {"epsilon", "noise_multiplier", "clipped_fraction"}


def test_a_plain_module_with_a_loss_of_its_own(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")

    models = [Recommender(), Recommender()]
    for model, resume in zip(models, (None, tmp_path / "checkpoint-3"), strict=True):
        run, optimizer, scheduler = begun(
            model, loss=loss, dataset=clicks(), collate=stack, output_dir=tmp_path, resume=resume
        )
        loop(run, optimizer, scheduler, save_at=3)
    assert same(*map(parameters, models))
    run.save(tmp_path / "final")
    assert verify(tmp_path / "final").consistent


def test_a_run_ends_with_its_budget_and_a_checkpoint_counts_what_was_spent(tmp_path: Path) -> None:
    privacy = PrivacyConfig(target_epsilon=8.0, seed=3)
    run, optimizer, scheduler = begun(classifier(), privacy, steps=2, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1)
    assert list(run.batches()) == []
    assert not run.budget_is_left
    spent, optimizer, scheduler = begun(classifier(), privacy, steps=2, output_dir=tmp_path, resume=True)
    # As after a break in the middle of a step: the ledger has it, the weights have not.
    spent.ledger.charge(spent._run.plan.event)
    loop(spent, optimizer, scheduler)
    assert spent.global_step == 1
    with pytest.raises(BudgetExceededError):
        spent._run.step({"micro_batches": []})


def after_one_step() -> Any:
    """A run after its first step, and what is in hand then."""
    model = classifier(n_layers=1)
    run = a_run(model, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    batches = run.batches()
    batch = next(batches)
    run.step(batch)
    return model, run, optimizer, batches, batch


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
        ({"micro_batch_size": 2.5}, "micro_batch_size=2.5"),
        ({"steps": True}, "steps=True"),
        ({"dataset": {"train": rows()}}, "with the keys train"),
        ({"dataset": iter(rows())}, "can only be iterated"),
        ({"expected_batch_size": 64}, "an expected batch of 64 from"),
        ({"privacy": 8.0}, "privacy=8.0"),
    ],
)
def test_settings_are_refused_as_those_of_a_trainer(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        a_run(classifier(), **change)


def test_models_processes_and_optimizers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    for wrapped, words in (
        (nn.DataParallel(model), "DataParallel"),
        (torch.compile(model), "OptimizedModule"),
        ("gpt2", "str for a model"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            a_run(wrapped)
    run = a_run(model)
    schedule_free = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule_free.param_groups[0]["train_mode"] = True
    scaled: Any = type("Wrapped", (), {"optimizer": torch.optim.SGD(model.parameters()), "scaler": object()})()
    for optimizer, words in (
        (torch.optim.SGD, "type for an optimizer"),
        (schedule_free, "exchanges weights between training and evaluation"),
        (scaled, "fp16"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS evaluates the gradient several times"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(2))]), "none of the model's trainable"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            run.begin(optimizer)
    for too_early in (run.batches, lambda: run.step(None), lambda: run.save("nowhere")):
        with pytest.raises(ConfigurationError, match="has not begun"):
            too_early()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="no process group"):
        a_run(model)


def test_a_beginning_that_was_refused_can_be_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigurationError("padding", why="a test", fix="none")

    model = classifier()
    run = a_run(model, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("hf_dp.training.engine.check_padding", refuse)
        with pytest.raises(ConfigurationError, match="padding"):
            run.begin(optimizer)
    assert not run.ledger.entries
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.ledger.steps == run.global_step == 1


@pytest.mark.parametrize("first", ["Trainer", "own"])
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
def test_a_checkpoint_of_another_training_is_refused(
    tmp_path: Path, resume: Callable[[Path], None], words: str
) -> None:
    run, optimizer, scheduler = begun(classifier(), output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1, until=1)
    run.end()
    with pytest.raises((LedgerError, ConfigurationError), match=words):
        resume(tmp_path)


@pytest.mark.parametrize("all_moments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_in_a_save_there_is_a_whole_checkpoint_with_its_ledger(tmp_path: Path, all_moments: bool) -> None:
    out = tmp_path / "out"
    run, optimizer, scheduler = begun(classifier(n_layers=1), output_dir=out)
    loop(run, optimizer, scheduler, save_at=1, until=2)
    found, one = [], (killed(out, run.save_checkpoint, number) for number in (4,))
    for _ in killed_everywhere(out, run.save_checkpoint) if all_moments else one:
        checkpoint = found_checkpoint(True, out)
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


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dp.training.output_lock._PATIENCE", 0.01)
    run, optimizer, scheduler = begun(classifier(), steps=1, output_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="another training writes into"):
        begun(classifier(), steps=1, output_dir=tmp_path)
    loop(run, optimizer, scheduler, until=2)
    run.save_checkpoint()
    begun(classifier(), steps=1, output_dir=tmp_path)
