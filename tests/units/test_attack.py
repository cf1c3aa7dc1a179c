"""Who was in? An attack on the released weights, user by user: what holds for examples does not hold for users."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivateRun

pytestmark = pytest.mark.usefixtures("checked_once")

USERS, ROWS, STEPS, SAMPLED, EPSILON, DELTA = 800, 8, 3, 0.2, 1.0, 1e-4
# Of users who were not there, the share that the attack takes for users who were. What is drawn at random here is not
# chosen by a seed: each bound is wrong in one of a million runs.
WRONGLY, SURE, TRAININGS = 0.1, 1 - 1e-6, 4


class Places(nn.Module):
    """One number for each user, whom only that user's rows move: games with one of them are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(USERS, 1, bias=False)
        nn.init.zeros_(self.place.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.place(x)[:, 0]


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    # Longer than the clipping norm.
    return -3.0 * model(batch["x"])


def stack(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the rows of users who are out are replaced by: nothing."""
    x = torch.zeros(len(rows), USERS)
    for i, row in enumerate(rows):
        x[i, row["place"]] = row["there"]
    return {"x": x}


def attacked(names: int, **promise: Any) -> tuple[Tensor, Tensor]:
    """Which users are in, by a coin each, and which an attack says are, who each go by so many names."""
    are_in = torch.rand(USERS) < 0.5
    are_in[[0, -1]] = True  # The check before the first step looks at their rows.
    rows = [(u, i) for u in range(USERS) for i in range(ROWS)]
    data = [{"place": u, "there": float(are_in[u]), "user": f"{u}, {i % names}"} for u, i in rows]
    if "unit" not in promise:
        data = [{name: value for name, value in row.items() if name != "user"} for row in data]
    drawn = USERS * names if promise.get("unit_sampling", "examples") == "units" else len(rows)
    model = Places()
    run = PrivateRun(
        model, data, PrivacyConfig(target_epsilon=EPSILON, target_delta=DELTA, **promise), stack,
        expected_batch_size=round(SAMPLED * drawn), micro_batch_size=2000, steps=STEPS, loss=loss,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.report().epsilon <= EPSILON
    plan = run._run.plan
    alone = plan.noise_standard_deviation * math.sqrt(STEPS) / plan.sampler.expected_batch_size
    return are_in, model.place.weight[0].detach() > stats.norm.isf(WRONGLY) * alone


def lower_bound(names: int = 1, **promise: Any) -> float:
    """On epsilon, with confidence `SURE` (Clopper and Pearson 1934)."""
    are_in, said_in = map(torch.cat, zip(*(attacked(names, **promise) for _ in range(TRAININGS)), strict=True))
    (found, members), (wrong, others) = ((int(said_in[who].sum()), int(who.sum())) for who in (are_in, ~are_in))
    least = stats.beta.ppf((1 - SURE) / 2, found, members - found + 1)
    most = stats.beta.ppf((1 + SURE) / 2, wrong + 1, others - wrong)
    return math.log(max(least - DELTA, 1e-9) / most)


@pytest.mark.slow
def test_noise_for_examples_does_not_hide_a_user() -> None:
    assert lower_bound() > EPSILON


@pytest.mark.parametrize("way", ["units", "examples"])
@pytest.mark.slow
def test_both_ways_for_users_do_unless_one_goes_by_several_names(way: str) -> None:
    promise = {"unit": "user", "unit_sampling": way}
    assert lower_bound(**promise, max_examples_per_unit=ROWS) < EPSILON
    assert lower_bound(ROWS, **promise, max_examples_per_unit=1) > EPSILON
