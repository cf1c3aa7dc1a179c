"""On several processes rows are chosen with one noise, and get one noise; DP-FEST's rows are drawn once."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.gang import Gang
from tests.distributed.noise import LEVEL
from tests.distributed.sparse_noise import REPEATS, choice_p, chosen, complaints, drawn, rows_without_a_meeting


@pytest.mark.slow
def test_rows_survive_by_one_noise_and_get_one_noise(pair: Gang) -> None:
    first, second = pair.run(drawn)
    assert complaints(first) == []
    # Every process has the same bits.
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_one_process_passes_the_same_check() -> None:
    assert complaints(drawn()) == []


# With half the repeats a mistake is seen that is far larger than what they show.
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param("noise of every rank on the gradient", "on the rows", marks=pytest.mark.slow),
        pytest.param("no noise on the gradient", "variance 0.000 on the rows", marks=pytest.mark.slow),
        pytest.param("two thirds of the noise on the gradient", "variance 0.4", marks=pytest.mark.slow),
        pytest.param("noise of every rank on the counts", "survive", marks=pytest.mark.slow),
        pytest.param("no noise on the counts", "rows touched by 1 survive 0.000", marks=pytest.mark.slow),
        pytest.param("two thirds of the noise on the counts", "survive", marks=pytest.mark.slow),
        pytest.param("counts of the first rank alone", "rows touched by 4 survive", marks=pytest.mark.slow),
        pytest.param("rows that any rank draws", "rows touched by 0 survive", marks=pytest.mark.slow),
        pytest.param("one stream for both releases", "in a step", marks=pytest.mark.slow),
    ],
)
def test_the_check_can_fail(pair: Gang, wrong: str, words: str) -> None:
    repeats = REPEATS if wrong == "noise of every rank on the counts" else REPEATS // 2
    found = complaints(pair.run(drawn, wrong, repeats)[0])
    assert any(words in complaint for complaint in found), found


def test_one_process_draws_the_rows(pair: Gang) -> None:
    first, second = pair.run(rows_without_a_meeting, False)
    assert first == second
    assert len({tuple(rows) for rows in first}) > 1
    first, second = pair.run(rows_without_a_meeting, True)
    assert first != second


@pytest.mark.slow
def test_one_top_k_of_what_all_processes_count(pair: Gang) -> None:
    first, second = pair.run(chosen)
    assert first == second
    assert choice_p(first) > LEVEL


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("every rank counts all", marks=pytest.mark.slow),
        pytest.param("two thirds of the noise", marks=pytest.mark.slow),
        pytest.param("counts of the first rank alone", marks=pytest.mark.slow),
        pytest.param("no noise", marks=pytest.mark.slow),
    ],
)
def test_the_check_of_the_top_k_can_fail(pair: Gang, wrong: str) -> None:
    assert choice_p(pair.run(chosen, wrong)[0]) < LEVEL
