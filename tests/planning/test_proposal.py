"""A batch is proposed by what a search finds that calibrates the noise of each batch it looks at."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hf_dp.planning import proposal
from hf_dp.planning.proposal import Candidate, candidate, propose


def by_calibrating_each(min_steps: int, **given: Any) -> Candidate:
    best = candidate(min(given["dataset_size"], int(given["examples"] / min_steps)), **given)
    most, low, high = 1.1 * best.noise_of_the_run(), max(1, best.batch_size // 1000), best.batch_size
    while high > max(low + 1, 1.05 * low):
        middle = candidate(round(math.sqrt(low * high)), **given)
        if middle.noise_of_the_run() <= most:
            best, high = middle, middle.batch_size
        else:
            low = middle.batch_size
    return best


@pytest.mark.parametrize(
    ("n", "epochs", "epsilon", "min_steps"),
    [
        (10003, 6, 8.0, 14),
        (200, 1, 0.3, 5),
        (50_000, 30, 80.0, 14),
        (40, 2, 1.0, 1),
    ],
)
@pytest.mark.slow
def test_the_proposal_is_that_of_calibrating_each(
    n: int, epochs: float, epsilon: float, min_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"dataset_size": n, "examples": n * epochs, "target_epsilon": epsilon, "target_delta": n**-1.1}
    wanted, calibrated = by_calibrating_each(min_steps, **given), []

    def counted(batch: int, **values: Any) -> Candidate:
        calibrated.append(batch)
        return candidate(batch, **values)

    monkeypatch.setattr(proposal, "candidate", counted)
    assert propose(min_steps=min_steps, **given) == wanted
    assert len(calibrated) <= 4, "of nearly all batches it is plain on which side they are"
