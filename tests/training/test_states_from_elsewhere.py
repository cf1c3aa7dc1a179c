"""An optimizer begins a private training with nothing that it remembers of another."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp.errors import ConfigurationError
from tests.training.own_loops import a_run
from tests.training.workbench import classifier, make, pad, rows

pytestmark = pytest.mark.usefixtures("checked_once")


def remembered(optimizer: Any, model: Any) -> Any:
    """The state after a step on rows of a training without privacy, of a copy."""
    other = copy.deepcopy(model)
    again = type(optimizer)(
        other.parameters(), **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "momentum")}
    )
    other(**pad(rows(4))).loss.backward()
    again.step()
    return again.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)])
def test_failure_94_the_state_of_another_training_is_refused_before_the_first_step(tmp_path: Path, kind: Any) -> None:
    model = classifier()
    optimizer = kind(model.parameters(), lr=0.01)
    optimizer.load_state_dict(remembered(optimizer, model))
    trainer = make(tmp_path, model, parts={"optimizers": (optimizer, None)})
    with pytest.raises(ConfigurationError, match=r"(exp_avg|momentum_buffer)\) before the first step"):
        trainer.train()
    assert trainer.ledger.steps == 0
    run = a_run(model)
    with pytest.raises(ConfigurationError, match="before the first step"):
        run.begin(optimizer)


def test_what_private_steps_left_and_what_constructors_make_is_gone_on_with(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)
    make(tmp_path, model, parts={"optimizers": (optimizer, None)}).train()
    trainer = make(tmp_path / "again", model := classifier(), parts={"optimizers": (own := _slow(model), None)})
    trainer.train()
    assert own.state
    trainer.args.output_dir = str(tmp_path / "third")
    own.load_state_dict(remembered(own, model))
    with pytest.raises(ConfigurationError, match="before the first step"):
        trainer.train()


def _slow(model: Any) -> Any:
    """As Lookahead does, it keeps copies of the weights from the beginning on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for p in model.parameters():
        optimizer.state[p]["slow"] = p.detach().clone()
    return optimizer


def loaded(optimizer: Any, state: Any) -> None:
    optimizer.load_state_dict(state)


def put_in_place(optimizer: Any, state: Any) -> None:
    for number, p in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[p] = dict(state["state"][number]) if number in state["state"] else {}


def written_over(optimizer: Any, state: Any) -> None:
    for number, p in enumerate(optimizer.param_groups[0]["params"]):
        if number in state["state"] and optimizer.state[p]:
            optimizer.state[p]["exp_avg"].copy_(state["state"][number]["exp_avg"])


def then_stepped(way: Any, optimizer: Any, state: Any) -> None:
    way(optimizer, state)
    optimizer.step()


@pytest.mark.parametrize("way", [loaded, put_in_place, written_over])
@pytest.mark.parametrize("at", [0, 1])
def test_failure_142_a_state_that_comes_of_another_training_between_the_steps_is_refused(way: Any, at: int) -> None:
    """Where the optimizer has a state by then: before its first step there is nothing to write over."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run, state = a_run(model), remembered(optimizer, model)
    run.begin(optimizer)
    for number, batch in enumerate(run.batches()):
        run.step(batch)
        if (number, way) == (0, written_over) or number < at:
            optimizer.step()
            continue
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ConfigurationError, match="state of the optimizer"):
            then_stepped(way, optimizer, state)
        assert all(map(torch.equal, before, model.parameters()))
        break


@pytest.mark.parametrize("way", [put_in_place, written_over])
def test_a_step_that_the_optimizer_would_refuse_is_not_charged(way: Any) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run, state = a_run(model, steps=3), remembered(optimizer, model)
    run.begin(optimizer)
    batches = iter(run.batches())
    run.step(next(batches))
    optimizer.step()
    way(optimizer, state)
    with pytest.raises(ConfigurationError, match="state of the optimizer"):
        run.step(next(batches))
    assert run.ledger.steps == 1


def test_what_is_not_loaded_changes_nothing_and_the_run_goes_on() -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = a_run(model, steps=3)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        with pytest.raises(ConfigurationError, match="state of the optimizer"):
            optimizer.load_state_dict(remembered(optimizer, model))
        optimizer.step()
    assert run.global_step == 3
    optimizer.load_state_dict(remembered(optimizer, model))  # the run has ended


def test_a_loop_that_was_left_lets_go_of_its_optimizer_as_it_is_told() -> None:
    run = a_run(model := classifier(), steps=3)
    run.begin(optimizer := torch.optim.AdamW(model.parameters(), lr=0.01))
    run.step(next(iter(run.batches())))
    optimizer.step()
    with pytest.raises(ConfigurationError) as caught:
        optimizer.load_state_dict(remembered(optimizer, model))
    assert "end()" in caught.value.fix
    run.end()
    optimizer.load_state_dict(remembered(optimizer, model))
