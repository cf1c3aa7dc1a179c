"""What an editor is told: the arguments of the trainer behind, in their order, and the promise."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import hf_dp
from hf_dp import DPTrainer, DPTrainerMixin
from hf_dp.per_example import preflight, record
from hf_dp.training.signature import OURS

ROOT = Path(__file__).resolve().parents[2]


def told(of: Any) -> list[tuple[str, Any, Any]]:
    """Names, defaults and kinds, without `self`."""
    found = inspect.signature(of).parameters.values()
    return [(one.name, one.default, one.kind) for one in found if one.name != "self"]


def test_dp_trainer_shows_trainers_arguments_and_its_own() -> None:
    assert [one for one in told(DPTrainer) if one[0] not in OURS] == told(Trainer)
    assert tuple(name for name, _, _ in told(DPTrainer)[-2:]) == OURS
    assert DPTrainer.__init__ is DPTrainerMixin.__init__, "nothing runs in its place"


def test_help_shows_what_a_person_can_read() -> None:
    for of in (DPTrainer, hf_dp.PrivateRun, record, preflight):
        assert all(len(repr(default)) < 80 for _, default, _ in told(of)), of


def test_what_a_type_checker_reads_is_what_the_installed_version_takes() -> None:
    tree = ast.parse(Path(inspect.getfile(DPTrainer)).read_text(encoding="utf-8"))
    kind = next(one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "DPTrainer")
    read = next(one for one in ast.walk(kind) if isinstance(one, ast.FunctionDef)).args
    wanted = inspect.signature(DPTrainer).parameters
    assert [one.arg for one in [*read.args[1:], *read.kwonlyargs]] == list(wanted)
    defaults = [*read.defaults, *(one for one in read.kw_defaults if one is not None)]
    given = [one.default for one in wanted.values() if one.default is not one.empty]
    assert [ast.literal_eval(one) for one in defaults] == given
    assert [one.arg for one in read.kwonlyargs] == list(OURS)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("DPTrainer", "PrivacyConfig")))
        for name in hf_dp.__all__
        if callable(getattr(hf_dp, name))
    ],
)
def test_an_editor_that_reads_the_source_shows_what_there_is(name: str) -> None:
    jedi = pytest.importorskip("jedi")
    script = jedi.Script(
        f"from hf_dp import {name}\n{name}(",
        project=jedi.Project(ROOT, smart_sys_path=False, sys_path=[str(ROOT), *sys.path]),
        environment=jedi.InterpreterEnvironment(),
    )
    (shown,) = script.get_signatures()
    wanted = inspect.signature(getattr(hf_dp, name)).parameters.values()
    named = [one.name for one in wanted if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    assert [one.name for one in shown.params if one.name in named] == named != []


def test_so_does_a_class_of_ones_own_and_one_that_takes_more() -> None:
    class Subclass(DPTrainer):
        pass

    class Own(DPTrainer):
        def __init__(self, ours: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    assert told(Subclass) == told(DPTrainer)
    assert [name for name, _, _ in told(Own)] == ["ours", "kwargs"]


def test_trainers_of_trl_show_theirs() -> None:
    trl = pytest.importorskip("trl")
    for behind in (trl.SFTTrainer, trl.DPOTrainer):
        kind = type("DP", (DPTrainerMixin, behind), {})
        assert [one for one in told(kind) if one[0] not in OURS] == told(behind)
        assert {name for name, _, _ in told(kind)} > set(OURS)
