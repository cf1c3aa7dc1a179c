"""Several processes under DDP train the sparse embeddings that one process trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.gang import Gang
from tests.distributed.sparse import (
    CHOSEN,
    METHODS,
    refused_rows,
    sent_in_each_step,
    trained,
    trained_from_other_tables,
    whole_tables_made,
)
from tests.distributed.tasks import farthest

pytestmark = pytest.mark.usefixtures("checked_once")

TOLERANCE = 1e-6
BUDGET = {"noise_multiplier": None, "target_epsilon": 8.0}


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Parameters, optimizer and rows of two processes."""
    pairs = [(value, second["parameters"][name]) for name, value in first["parameters"].items()]
    pairs += [*zip(first["optimizer"], second["optimizer"], strict=True), (first["last"], second["last"])]
    return all(torch.equal(one, two) for one, two in pairs)


def each_once(*values: Sequence[Any]) -> list[Any]:
    """Each value beside the one that follows in the other list; all other pairs are slow."""
    first, second = values
    usual = [(i, i % len(second)) for i in range(max(len(first), len(second)))]
    return [
        pytest.param(one, two, marks=[] if (i, j) in usual else [pytest.mark.slow])
        for i, one in enumerate(first)
        for j, two in enumerate(second)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(("method", "optimizer"), each_once([*METHODS], ["sgd", "row_wise_adam"]))
@pytest.mark.parametrize("name", [pytest.param("one table", marks=pytest.mark.slow), "several tables"])
def test_without_noise_two_processes_agree_with_one(
    tmp_path: Path, pair: Gang, name: str, method: str, optimizer: str
) -> None:
    settings = {**METHODS[method], "optimizer": optimizer}
    alone = trained(str(tmp_path / "one"), name, 1, settings)
    first, second = pair.run(trained, str(tmp_path / "two"), name, 2, settings)
    assert first["wrapped"] == "DistributedDataParallel"
    # Uneven shares of the batches, and rows of every table that moved.
    assert first["sizes"] != second["sizes"]
    assert all(alone["moved"].values())
    assert same_bits(first, second)
    assert farthest(first["parameters"], alone["parameters"]) < TOLERANCE
    for found in (first, second):
        assert found["logs"] == alone["logs"]
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert (found["ledger"], found["report"]) == (alone["ledger"], alone["report"])


@pytest.mark.parametrize("name", ["one table", "several tables"])
@pytest.mark.slow
def test_batches_that_are_empty_on_some_ranks_or_all(tmp_path: Path, pair: Gang, name: str) -> None:
    settings, many = {"threshold": 0.4}, {"max_steps": 12}
    alone = trained(str(tmp_path / "one"), name, 1, settings, None, 2, **many)
    first, second = pair.run(lasting, str(tmp_path / "two"), name, settings, None, 2, 12)
    shares = list(zip(first["sizes"], second["sizes"], strict=True))
    assert (0, 0) in shares
    assert any(0 in share and sum(share) for share in shares)
    assert same_bits(first, second)
    assert farthest(first["parameters"], alone["parameters"]) < TOLERANCE
    assert first["logs"] == second["logs"] == alone["logs"]


def lasting(
    path: str, name: str, settings: dict[str, Any], privacy: dict[str, Any] | None, expected: int, steps: int
) -> dict[str, Any]:
    """`trained` by two processes, for so many steps."""
    return trained(path, name, 2, settings, privacy, expected, max_steps=steps)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("one table", {"threshold": 2.0}),
        ("one table", {**CHOSEN, "renew_every": 2, "method": "adafest+"}),
        ("several tables", CHOSEN),
        ("several tables", {**CHOSEN, "renew_every": 2, "method": "adafest+"}),
        ("one table", CHOSEN),
        ("several tables", {"threshold": 2.0}),
    ],
)
@pytest.mark.slow
def test_the_seeded_draws_are_those_of_one_process(
    tmp_path: Path, pair: Gang, name: str, settings: dict[str, Any]
) -> None:
    """Rows that many examples touch, rows that survive by chance, the top-k and all noise."""
    alone = trained(str(tmp_path / "one"), name, 1, settings, BUDGET)
    first, second = pair.run(trained, str(tmp_path / "two"), name, 2, settings, BUDGET)
    assert same_bits(first, second)
    assert torch.equal(first["last"], alone["last"])
    assert alone["kept"] is None or torch.equal(first["kept"], alone["kept"])
    assert farthest(first["parameters"], alone["parameters"]) < 1e-5
    assert first["logs"] == second["logs"] == alone["logs"]
    assert (first["ledger"], first["report"]) == (alone["ledger"], alone["report"])


@pytest.mark.parametrize("settings", [{"threshold": 2.0}, {**CHOSEN, "renew_every": 2}])
@pytest.mark.slow
def test_with_secret_draws_all_processes_have_the_same_bits(
    tmp_path: Path, pair: Gang, settings: dict[str, Any]
) -> None:
    secret = {**BUDGET, "seed": None}
    first, second = pair.run(trained, str(tmp_path), "several tables", 2, settings, secret)
    assert same_bits(first, second)
    assert first["ledger"] == second["ledger"]
    assert first["logs"] == second["logs"]
    again = pair.run(trained, str(tmp_path), "several tables", 2, settings, secret)[0]
    assert not same_bits(first, again)


SAVED = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "lr_scheduler_type": "linear"}


def saved(path: str, world: int, settings: dict[str, Any], resume: bool) -> dict[str, Any]:
    """A seeded run that leaves a checkpoint after two steps, or goes on from it."""
    checkpoint = "checkpoint-2" if resume else None
    return trained(path, "several tables", world, settings, BUDGET, resume=checkpoint, **SAVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "optimizer"),
    each_once([{"threshold": 2.0}, {**CHOSEN, "renew_every": 4}], ["row_wise_adam", "sparse_adam"]),
)
def test_saved_by_some_and_resumed_by_others(
    tmp_path: Path, pair: Gang, settings: dict[str, Any], optimizer: str
) -> None:
    settings = {**settings, "optimizer": optimizer}
    whole = pair.run(saved, str(tmp_path), 2, settings, False)[0]
    again = pair.run(saved, str(tmp_path), 2, settings, True)
    assert same_bits(whole, again[0])
    assert same_bits(whole, again[1])
    alone = saved(str(tmp_path), 1, settings, True)
    assert farthest(alone["parameters"], whole["parameters"]) < 1e-5
    assert alone["ledger"] == again[0]["ledger"] == whole["ledger"]
    saved(str(tmp_path / "one"), 1, settings, False)
    first, second = pair.run(saved, str(tmp_path / "one"), 2, settings, True)
    assert same_bits(first, second)
    assert farthest(first["parameters"], alone["parameters"]) < 1e-5
    assert first["ledger"] == alone["ledger"]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("method", ["adafest", "fest"])
@pytest.mark.slow
def test_what_a_step_sends(tmp_path: Path, pair: Gang, method: str, accumulation: int) -> None:
    """One number for each row once, the rows that survived, the dense parameters, and two counts: however many
    micro-batches."""
    first, second = pair.run(sent_in_each_step, str(tmp_path / "run"), METHODS[method], accumulation)
    assert first == second
    for sent in first:
        items, users = sent["released"]
        counts = [3000 + 1200] if method == "adafest" else []
        *sums, dense, rows = sent["allreduce"]
        assert sums == counts
        assert 0 <= dense - (7 * 2 + 9 * 2 + 2) < 3 * 32
        assert 0 <= rows - (4 * items + 3 * users) < 2 * 32
        assert sent.get("broadcast", []) == ([1, items + users] if method == "adafest" else [])
        assert len(sent["allgather"]) == 2  # how many micro-batches there are, and how many rows
        assert set(sent) <= {"allreduce", "allgather", "broadcast", "released"}


@pytest.mark.parametrize("method", ["adafest", "fest"])
@pytest.mark.slow
def test_nothing_as_large_as_a_table_is_made(tmp_path: Path, pair: Gang, method: str) -> None:
    """Neither by the wrapper, nor in the comparison of the ranks, nor in a step."""
    assert pair.run(whole_tables_made, str(tmp_path / "run"), METHODS[method]) == [set(), set()]
    # Negative control: the wrapper that is told nothing makes one.
    assert all(pair.run(whole_tables_made, str(tmp_path / "run"), METHODS[method], False))


@pytest.mark.slow
def test_a_table_that_differs_is_replaced_by_that_of_the_first_rank(tmp_path: Path, pair: Gang) -> None:
    alone = trained(str(tmp_path / "one"), "several tables", 1, METHODS["adafest"])
    for found in pair.run(trained_from_other_tables, str(tmp_path / "two")):
        assert farthest(found, alone["parameters"]) < TOLERANCE


@pytest.mark.slow
def test_ranks_with_other_public_rows(tmp_path: Path, pair: Gang) -> None:
    for found in pair.run(refused_rows, str(tmp_path / "other"), True):
        assert "rank 1 has not the same as rank 0: the embedding rows that are trained" in found
    assert pair.run(refused_rows, str(tmp_path / "same"), False) == ["no error"] * 2
