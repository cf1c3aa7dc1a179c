"""Whatever became of a folder with checkpoints: what is gone on from is counted by its ledger, or nothing is."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.strategies import cases, damages, unless_refused
from tests.training.own_loops import begun
from tests.training.test_any_rows import ROWS, Bag, loss
from tests.training.workbench import parameters, private, same

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS = 3


def run_of(model: nn.Module, path: Path, resume: Any = None, steps: int = STEPS) -> Any:
    """A run of the model, its optimizer and its scheduler."""
    return begun(model, private(seed=None), resume, dataset=ROWS, loss=loss, output_dir=path, steps=steps)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Bag()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: nn.Module) -> tuple[list[Path], list[list[Any]]]:
    """Two trainings, the second of more steps: their folders, and their weights after each step."""
    folders, found = [], []
    for steps in (STEPS, STEPS + 1):
        folders.append(tmp_path_factory.mktemp("trained") / "out")
        now = copy.deepcopy(model)
        run, optimizer, scheduler = run_of(now, folders[-1], steps=steps)
        found.append([parameters(now)])
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            scheduler.step()
            found[-1].append(parameters(now))
            run.save_checkpoint()
    return folders, found


@pytest.mark.fuzzed
@cases(15)
@given(st.data())
@pytest.mark.slow
def test_what_is_gone_on_from_is_counted(
    trained: tuple[list[Path], list[list[Any]]], model: nn.Module, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    (folder, others), weights = trained
    path = tmp_path_factory.mktemp("damaged") / "out"
    shutil.copytree(folder, path)
    for _ in range(data.draw(st.integers(1, 2))):
        data.draw(damages(folder, others))(path)
    again = copy.deepcopy(model)
    resume = data.draw(st.sampled_from([True, *sorted(p.name for p in path.glob("checkpoint-*"))]))
    resume = resume if resume is True else path / resume
    found = unless_refused(lambda: run_of(again, path, resume))
    if found is not None:
        run = found[0]
        run.end()
        taken = [steps for steps, one in enumerate(weights[0]) if same(one, parameters(again))]
        assert taken == [run.global_step] == [run.ledger.steps]
    shutil.rmtree(path.parent)
