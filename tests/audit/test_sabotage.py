"""Something wrong in the training, switched on here alone: attacks expose it, or a check names it before it begins.

Which of the library's own tests and checks see the same: docs/audit.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.audit import epsilon_of_mu, two_worlds
from hf_dp.audit.dirac import PLACE, THERE, WithDirac, placed
from hf_dp.audit.public import public_seeds, without_known_noise
from hf_dp.errors import ConfigurationError, HfDpError, PreflightError
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.noise.source import NoiseSource
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from tests.audit.sabotage import DELTA, loss, noise_again_after_resuming, trained

Patch = pytest.MonkeyPatch
AUDITS = 50


def with_noise(patch: Patch, change: Callable[[list[Tensor], float], tuple[list[Tensor], float]]) -> None:
    """`NoiseSource.add_` of what `change` makes of its tensors and its standard deviation."""
    add = NoiseSource.add_

    def changed(self: Any, tensors: Any, deviation: float, step: int, stream: str = "noise") -> None:
        targets, size = change(list(tensors), deviation)
        add(self, targets, size, step, stream)

    patch.setattr(NoiseSource, "add_", changed)


# --- honest -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("checked_once")
def test_a_training_with_a_third_of_the_noise_is_exposed_and_an_honest_one_is_not(monkeypatch: Patch) -> None:
    assert trained(2000).shown(confidence=1 - 1e-6).epsilon < 1
    with_noise(monkeypatch, lambda tensors, deviation: (tensors, deviation / 3))
    assert trained(2000).shown().epsilon > 1


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_honest_trainings_pass(share: float) -> None:
    above = sum(trained(1000, share=share).shown().epsilon > 1 for _ in range(AUDITS))
    assert above <= stats.binom.isf(1e-4, AUDITS, 0.05)


# --- exposed by an attack ---------------------------------------------------------------------------------------------


class Two(WithDirac):
    """Canaries in two parameters."""

    def __init__(self, number: int) -> None:
        super().__init__(nn.Identity(), number)
        self.more = nn.Embedding(number, 1)
        nn.init.zeros_(self.more.weight)

    def forward(self, place: Tensor, there: Tensor) -> Tensor:
        return super().forward(place, there) + self.more(place)[:, 0] * there


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_noise_omitted_for_one_parameter(monkeypatch: Patch) -> None:
    honest = trained(2000, model=Two(2001))
    assert max(honest.shown(-honest.sums.sum(0)[i], confidence=0.999).epsilon for i in (0, 1)) < 1
    with_noise(monkeypatch, lambda tensors, deviation: (tensors[:-1], deviation))
    found = trained(2000, model=Two(2001))
    assert max(found.shown(-found.sums.sum(0)[i], confidence=0.975).epsilon for i in (0, 1)) > 5


class Tied(WithDirac):
    """Each canary's parameter is used twice."""

    def forward(self, place: Tensor, there: Tensor) -> Tensor:
        return super().forward(place, there) + self.places(place)[:, 0] * there


def loosen(patch: Patch) -> None:
    """Norms of tied parameters are taken for a tenth of what they are: clipped at 10 C."""
    norms = PerExampleGradients.squared_norms

    def smaller(self: PerExampleGradients) -> Tensor:
        tied = any(len(uses) > 1 for uses in self.factors.values())
        return norms(self) / (100 if tied else 1)

    patch.setattr(PerExampleGradients, "squared_norms", smaller)


@pytest.mark.slow
def test_clipping_at_10_c_for_tied_weights(monkeypatch: Patch) -> None:
    tied = Tied(nn.Identity(), 2001)
    assert trained(2000, model=tied).shown(confidence=0.999).epsilon < 1
    tied = Tied(nn.Identity(), 2001)
    assert trained(2000, model=tied, begun=lambda: loosen(monkeypatch)).shown().epsilon > 5
    monkeypatch.undo()
    loosen(monkeypatch)
    with pytest.raises(PreflightError, match="norm"):
        trained(20, model=Tied(nn.Identity(), 21))


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_the_same_batch_in_every_step(monkeypatch: Patch) -> None:
    plan: dict[str, Any] = {"share": 0.07, "steps": 100}
    assert trained(3000, **plan).shown(confidence=0.999).epsilon < 1
    draw = PoissonBatchSampler.draw
    monkeypatch.setattr(PoissonBatchSampler, "draw", lambda self, step: draw(self, 0))
    # One training in five shows 0.9 alone; an honest one shows none of it.
    assert any(trained(3000, **plan).shown().epsilon > 1 for _ in range(6))


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_noise_that_comes_again_after_resuming(monkeypatch: Patch, tmp_path: Path) -> None:
    """What differs between two steps with the same noise is who was drawn."""
    plan: dict[str, Any] = {"share": 0.5, "steps": 4}

    def apart(path: Path) -> float:
        found = trained(2000, folder=path, **plan)
        assert len(found.sums) == 4
        return found.shown((found.sums[0] - found.sums[2]).abs()[0], confidence=0.99).epsilon

    assert apart(tmp_path / "honest") < 1
    noise_again_after_resuming(monkeypatch)
    assert apart(tmp_path / "again") > 1


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize("is_public", [False, True])
def test_noise_from_a_published_seed(monkeypatch: Patch, tmp_path: Path, is_public: bool) -> None:
    (tmp_path / "README.md").write_text("- learning_rate: 0.1\n- seed: 271828\n")
    if is_public:
        monkeypatch.setattr(Entropy, "fresh", lambda self, purpose, step: Entropy(271828)._keyed(purpose, step))
    m, steps = 2000, 2
    found = trained(m, steps=steps)
    monkeypatch.undo()
    assert found.report.private  # as it says itself

    def noise(seed: int) -> dict[str, Tensor]:
        source, made = GaussianNoise(Entropy(seed)), torch.zeros(m + 1, 1)
        for step in range(steps):
            source.add_([made], found.report.noise_multiplier * found.report.clipping_norm, step)
        return {"places": made[:m, 0]}

    rest, seed = without_known_noise({"places": found.sums.sum((0, 1))}, public_seeds(tmp_path), [noise])
    assert seed == (271828 if is_public else None)
    assert (found.shown(-rest["places"], confidence=0.999).epsilon > 4) == is_public
    # By the weights alone it looks as honest as any: the audits of others would pass it.
    assert found.shown(confidence=0.999).epsilon < 1


def steps_of(rows: list[dict[str, Any]], steps: int, promise: PrivacyConfig, expected: int) -> tuple[Any, float]:
    """The noisy sum at the first place in each of many steps, each a training of its own; and sigma."""
    model = WithDirac(nn.Identity(), 2)
    run = PrivateRun(
        model, rows, promise, placed, expected_batch_size=expected, micro_batch_size=1000, steps=steps, loss=loss
    )
    optimizer, sums = torch.optim.SGD(model.parameters(), lr=0.0), []
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        assert model.places.weight.grad is not None
        sums.append(-expected * float(model.places.weight.grad[0, 0]))
        optimizer.step()
    return np.array(sums), run.report().noise_multiplier


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_empty_batches_skipped(monkeypatch: Patch) -> None:
    """Where n is secret: of three examples one more step of four is empty than of two."""
    q, sigma = 0.5, 100.0
    rows = [{PLACE: i % 2, THERE: 1.0} for i in range(3)]
    promise = PrivacyConfig(noise_multiplier=sigma, sampling_probability=q, target_delta=DELTA)
    claimed = epsilon_of_mu(1 / sigma, DELTA)  # of one step, without what sampling gains

    def shown(steps: int) -> float:
        (more, _), (fewer, _) = (steps_of(rows[:n], steps, promise, 1) for n in (3, 2))
        return two_worlds(more != 0, fewer != 0, delta=DELTA).epsilon

    assert shown(400) <= claimed
    release = ClippedSum.release

    def skipping(self: ClippedSum, *args: Any) -> None:
        if self.examples:
            release(self, *args)

    monkeypatch.setattr(ClippedSum, "release", skipping)
    assert shown(1600) > claimed


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_a_sum_in_bfloat16_before_the_noise(monkeypatch: Patch) -> None:
    """Among 1,029 examples that are alike one moves the rounded sum by 8 C; there is one more that is not."""
    sigma, steps, n = 3.73, 600, 1030
    promise = PrivacyConfig(noise_multiplier=sigma, target_delta=DELTA)
    claimed = epsilon_of_mu(1 / sigma, DELTA)

    def shown() -> float:
        rows = [{PLACE: 1, THERE: 1.0}, *[{PLACE: 0, THERE: 1.0}] * (n - 2)]
        worlds = (steps_of([*rows, {PLACE: 0, THERE: there}], steps, promise, n)[0] for there in (1.0, 0.0))
        return two_worlds(*worlds, delta=DELTA, confidence=0.99).epsilon

    assert shown() <= claimed
    release = ClippedSum.release

    def rounding(self: ClippedSum, *args: Any) -> None:
        for gradient in self.gradients.values():
            gradient.copy_(gradient.bfloat16())
        release(self, *args)

    monkeypatch.setattr(ClippedSum, "release", rounding)
    assert shown() > claimed


# --- named before the first step --------------------------------------------------------------------------------------


def shared(model: Any, batch: Any) -> Tensor:
    return loss(model, batch) / batch[THERE].sum().clamp_min(1)


class OneCoin(WithDirac):
    def forward(self, place: Tensor, there: Tensor) -> Tensor:
        return super().forward(place, there) * (torch.rand(()) < 0.5)


def mixing(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Each row has the place of another."""
    batch = placed(rows)
    return {**batch, PLACE: batch[PLACE][torch.randperm(len(rows))]}


# Which of two checks says it depends on where coins fall.
OFF = "gradients of the norms are off"
NAMED: dict[str, tuple[dict[str, Any], type[HfDpError], str]] = {
    "a loss over the batch": ({"loss": shared}, PreflightError, f"depends on its neighbours|{OFF}"),
    "one coin for a micro-batch": (
        {"model": OneCoin(nn.Identity(), 41)},
        PreflightError,
        "one random number moves several",
    ),
    "a collator that mixes rows": ({"collate": mixing}, ConfigurationError, "another row when other examples"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_a_check_names(name: str) -> None:
    wrong, kind, said = NAMED[name]
    with pytest.raises(kind, match=said):
        trained(40, **wrong)
