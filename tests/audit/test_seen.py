"""What steps are seen to do: honest ones are taken for honest, and what is done otherwise than charged is odd.

Among the sabotages here are those that attacks on weights do not show (docs/audit.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hf_dp.data.collate as collate
from hf_dp.accounting import Ledger
from hf_dp.audit.seen import (
    Seen,
    _of_squares,
    _within_steps,
    charged,
    contributions,
    in_common,
    noise,
    odd,
    standard_draws,
)
from hf_dp.clipping.flat import Flat
from hf_dp.clipping.rule import ClippingRule, Group
from hf_dp.demo.quiet import quiet
from hf_dp.demo.seen import seen_here
from hf_dp.errors import HfDpError, LedgerError, PreflightError
from hf_dp.noise.source import NoiseSource
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from tests.audit.sabotage import noise_again_after_resuming

Patch = pytest.MonkeyPatch
RNG = np.random.default_rng()


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time(monkeypatch: Patch) -> None:
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(7))


# --- of numbers -------------------------------------------------------------------------------------------------------


def added(drawn: Any) -> list[Seen]:
    return contributions(drawn + RNG.normal(0, 1e-4, drawn.shape), np.ones(drawn.shape[1]), 0.25)


def honest_noise(steps: int = 4) -> dict[str, Any]:
    return {"weight": RNG.normal(size=(steps, 3000)), "bias": RNG.normal(size=(steps, 50))}


def what(seen: list[Seen]) -> set[str]:
    return {one.what for one in odd(seen)}


def test_honest_numbers_are_not_odd() -> None:
    for _ in range(20):
        drawn, others = (RNG.random((8, 400)) < 0.25 for _ in range(2))
        both = [standard_draws(1.0 * one, np.ones(400), 0.25) for one in (drawn, others)]
        seen = [*added(1.0 * drawn), in_common("draws", *both), *noise(honest_noise()), *charged(8, 8, 1.0, 1.0)]
        assert not odd(seen)
        assert min(one.p for one in seen) > 1e-5


@pytest.mark.slow
def test_p_values_of_honest_numbers_are_as_rare_as_they_say() -> None:
    """Of those whose law is normal, or nearly."""
    found = [[one.p for one in added(1.0 * (RNG.random((8, 400)) < 0.25))] for _ in range(200)]
    rare = (np.array(found)[:, 1:] < 0.05).mean(0)
    assert (rare < 0.1).all()
    assert (rare > 0.005).all()


@pytest.mark.slow
def test_every_distance_has_the_same_law() -> None:
    """Half of the way round each pair is there twice."""
    for n in (60, 61):
        found = []
        for _ in range(200):
            (one,) = _within_steps(RNG.normal(size=(60, n)))
            found.append(one.found.endswith(f" {n // 2} numbers"))
        assert sum(found) < 200 * 2 / (n // 2)


def test_few_steps_and_numbers_have_a_verdict() -> None:
    half = 1.0 * (RNG.random((1, 400)) < 0.5)
    assert not odd(contributions(half, np.ones(400), 0.5))
    assert not odd(noise({"bias": RNG.normal(size=(1, 1))}))
    assert "noise on bias" in what(noise({"bias": np.zeros((3, 50))}))
    assert "noise on bias" in what(noise({"bias": np.full((3, 50), np.nan)}))


def test_how_much_examples_differ_is_no_more_often_odd_than_it_says() -> None:
    """Far out, where squares are more frequent on one side than a normal law has them."""
    times = np.arange(13)
    of_one = [math.comb(12, k) * 0.3**k * 0.7 ** (12 - k) for k in times]
    squares = np.sort(RNG.multinomial(1500, of_one, size=200_000) @ (np.square(times - 3.6) / (12 * 0.21)))
    for rare in (squares[20], squares[-20]):  # 1e-4 on either side
        assert 1.3e-4 < _of_squares(float(rare), 1500, 2 + (1 / 0.21 - 6) / 12) < 3e-4


def test_draws_that_are_not_what_is_charged_are_odd() -> None:
    steps, m = 8, 400
    more = RNG.random((steps, m)) < 0.5
    fixed = np.stack([RNG.permutation(m) < m // 4 for _ in range(steps)])
    once = np.concatenate([np.argsort(np.argsort(RNG.random(m))) // (m // 4) == np.arange(4)[:, None]] * 2)
    same = np.repeat(RNG.random((1, m)) < 0.25, steps, axis=0)
    pairs = np.repeat(RNG.random((steps, m // 2)) < 0.25, 2, axis=1)
    assert "how often examples are drawn" in what(added(1.0 * more))
    assert "how much batches differ in size" in what(added(1.0 * fixed))
    assert "how much examples differ in how often they are drawn" in what(added(1.0 * once))
    assert "draws of an example in one step and the next" in what(added(1.0 * same))
    assert "draws of neighbouring examples" in what(added(1.0 * pairs))


@pytest.mark.parametrize("times", [2.0, 0.7, -1.0])
def test_what_is_added_otherwise_than_alone_is_odd(times: float) -> None:
    drawn = 1.0 * (RNG.random((8, 400)) < 0.25)
    drawn[3, 5] = times
    assert what(added(drawn)) == {"what an example adds to a sum"}


def test_noise_that_is_not_what_is_charged_is_odd() -> None:
    silent, tiled, again, alike, flat, cut = (honest_noise() for _ in range(6))
    silent["bias"][2] *= 0.1
    tiled["weight"] = np.tile(tiled["weight"][:, :30], 100)
    again["weight"][3] = -again["weight"][1]
    alike["bias"] = alike["weight"][:, :50]
    flat["weight"] = RNG.uniform(-(3**0.5), 3**0.5, (4, 3000))
    cut["weight"] = cut["weight"].clip(-2, 2)
    assert what(noise(silent)) == {"noise on bias"}
    assert "noise of one number beside that of others in a step" in what(noise(tiled))
    assert "noise of one step beside that of another" in what(noise(again))
    assert "noise of one parameter beside that of another" in what(noise(alike))
    assert "the distribution of the noise" in what(noise(flat))
    assert "the largest noise" in what(noise(cut))
    one = honest_noise()["weight"]
    assert what([in_common("noise", one, one)]) == {"noise of one training beside those of another"}


def test_a_report_of_fewer_steps_or_less_epsilon_is_odd() -> None:
    assert what(charged(8, 7, 1.0, 1.0)) == {"steps that are charged"}
    assert what(charged(8, 8, 1.0, 1.01)) == {"epsilon of the report"}


# --- of this library --------------------------------------------------------------------------------------------------


def of_library(folder: Path, **promise: Any) -> list[Seen]:
    folder.mkdir(exist_ok=True)
    with quiet():
        return seen_here(folder, **promise)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["gaussian", "chacha20", "grid"])
def test_this_library_does_what_it_charges(tmp_path: Path, source: str) -> None:
    if source != "gaussian":
        pytest.importorskip("randomgen")
    assert not odd(of_library(tmp_path, noise=source))


def noises(change: Callable[[list[Tensor], int], list[Tensor]]) -> Callable[[Patch], None]:
    """Noise drawn on zeros, and what `change` makes of it added."""

    def on(patch: Patch) -> None:
        add = NoiseSource.add_

        def changed(self: Any, tensors: Any, deviation: float, step: int, stream: str = "noise") -> None:
            targets = list(tensors)
            made = [torch.zeros_like(tensor) for tensor in targets]
            add(self, made, deviation, step, stream)
            for target, one in zip(targets, change(made, step), strict=True):
                target.add_(one)

        patch.setattr(NoiseSource, "add_", changed)

    return on


def draws(draw: Callable[[PoissonBatchSampler, int], list[int]]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(PoissonBatchSampler, "draw", draw)


_draw, _coefficients, _release = PoissonBatchSampler.draw, ClippingRule.coefficients, ClippedSum.release


def of_permutations(sampler: PoissonBatchSampler, step: int) -> list[int]:
    expected = round(sampler.expected_batch_size)
    epoch, place = divmod(step, max(1, sampler.dataset_size // expected))
    order = sampler._entropy.generator("shuffle", epoch).permutation(sampler.dataset_size)
    return sorted(order[place * expected :][:expected].tolist())


def of_one_size(sampler: PoissonBatchSampler, step: int, again: bool = False) -> list[int]:
    generator, size = sampler._entropy.generator("choice", step), round(sampler.expected_batch_size)
    return sorted(generator.choice(sampler.dataset_size, size, replace=again).tolist())


def in_pairs(self: ClippingRule, squared: Tensor, rounding: Tensor, share: float = 1.0) -> Tensor:
    sums, even = squared.clone(), len(squared) // 2 * 2
    sums[:even] = squared[:even].view(-1, 2).sum(1).repeat_interleave(2)
    return _coefficients(self, sums, rounding, share)


def by_examples(self: ClippedSum, source: NoiseSource, deviation: float, step: int) -> None:
    _release(self, source, deviation * self.examples / 30, step)


def filled_up(patch: Patch) -> None:
    cut = collate.by_rows

    def filled(rows: list[Any], size: int, collated: Any) -> Iterator[Any]:
        for part, _ in cut(rows, size, collated):
            whole = [*part, *[part[-1]] * (size - len(part))]
            yield whole, collated(whole)

    patch.setattr(collate, "by_rows", filled)


def a_seed_for_noise(patch: Patch) -> None:
    """Of a generator that is not the library's."""
    generators: dict[int, np.random.Generator] = {}

    def add(self: Any, tensors: Any, deviation: float, step: int, stream: str = "noise") -> None:
        generator = generators.setdefault(id(self), np.random.default_rng(3))
        for tensor in tensors:
            tensor.add_(torch.from_numpy(generator.normal(0, deviation, tensor.shape)).float())

    patch.setattr(NoiseSource, "add_", add)


def a_seed_for_draws(patch: Patch) -> None:
    generator = Entropy.generator
    patch.setattr(Entropy, "generator", lambda self, purpose, step: generator(Entropy(42), purpose, step))


def telescoping() -> Callable[[Patch], None]:
    last: dict[torch.Size, Tensor] = {}

    def less(made: list[Tensor], step: int) -> list[Tensor]:
        before = [last.get(one.shape) if step else None for one in made]
        last.update({one.shape: one for one in made})
        return [one if other is None else one - other for one, other in zip(made, before, strict=True)]

    return noises(less)


def mirrored(made: list[Tensor], step: int) -> list[Tensor]:
    flat = [one.flatten() for one in made]
    halves = [(one[: len(one) // 2], one[len(one) // 2 * 2 :]) for one in flat]
    whole = [torch.cat([half, -half, rest]) for half, rest in halves]
    return [one.view(other.shape) for one, other in zip(whole, made, strict=True)]


def tiled(made: list[Tensor], step: int) -> list[Tensor]:
    return [one.flatten()[:64].repeat(math.ceil(one.numel() / 64))[: one.numel()].view(one.shape) for one in made]


# With what is odd of each.
EXPOSED: dict[str, tuple[Callable[[Patch], None], str]] = {
    "noise left out for vectors": (
        noises(lambda made, step: [one * (one.dim() > 1) for one in made]), "noise on norm.weight",
    ),
    "noise left out for the first parameter": (
        noises(lambda made, step: [one * (place > 0) for place, one in enumerate(made)]), "noise on table.weight",
    ),
    "0.95 of the noise": (noises(lambda made, step: [0.95 * one for one in made]), "noise on table.weight"),
    "noise of a third in every fifth step": (
        noises(lambda made, step: [one / (1 if step % 5 else 3) for one in made]), "noise on table.weight",
    ),
    "noise by how many were drawn": (
        lambda patch: patch.setattr(ClippedSum, "release", by_examples), "noise on table.weight",
    ),
    "64 numbers of noise again and again": (noises(tiled), "noise of one number beside that of others in a step"),
    "half of the noise is minus the other": (noises(mirrored), "noise of one number beside that of others in a step"),
    "noise taken off in the next step": (telescoping(), "noise of one step beside that of another"),
    "noise again after resuming": (noise_again_after_resuming, "noise of one step beside that of another"),
    "noise cut at three deviations": (
        noises(lambda made, step: [one.clamp(-3000, 3000) for one in made]), "the largest noise",
    ),
    "noise of a seed": (a_seed_for_noise, "numbers of the noise of one training beside those of another"),
    "draws of a seed": (a_seed_for_draws, "draws of one training beside those of another"),
    "twice the probability": (
        draws(lambda self, step: sorted({*_draw(self, 2 * step), *_draw(self, 2 * step + 1)})),
        "how often examples are drawn",
    ),
    "shuffled batches": (draws(of_permutations), "how much examples differ in how often they are drawn"),
    "batches of one size": (draws(of_one_size), "how much batches differ in size"),
    "drawn with replacement": (
        draws(lambda self, step: of_one_size(self, step, again=True)), "what an example adds to a sum",
    ),
    "the same batch in every step": (
        draws(lambda self, step: _draw(self, 0)), "draws of an example in one step and the next",
    ),
    "clipped in pairs": (
        lambda patch: patch.setattr(ClippingRule, "coefficients", in_pairs), "what an example adds to a sum",
    ),
    "clipped to the mean norm": (
        lambda patch: patch.setattr(Flat, "scales", lambda self, norms, bound: (bound / norms.mean()).expand_as(norms)),
        "what an example adds to a sum",
    ),
    "each parameter clipped to C": (
        lambda patch: patch.setattr(
            ClippingRule, "groups", lambda self, names: tuple(Group(frozenset([name]), 1.0) for name in names)
        ),
        "what an example adds to a sum",
    ),
    "the last micro-batch filled up with a row": (filled_up, "what an example adds to a sum"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize("name", EXPOSED)
def test_what_is_done_otherwise_is_seen(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    switch, expected = EXPOSED[name]
    switch(monkeypatch)
    assert expected in what(of_library(tmp_path))


def skipped(patch: Patch) -> None:
    charge, calls = Ledger.charge, [0]

    def every_second(self: Ledger, *args: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] % 2:
            charge(self, *args, **options)

    patch.setattr(Ledger, "charge", every_second)


def once_for_ties(patch: Patch) -> None:
    norms = PerExampleGradients.squared_norms
    patch.setattr(
        PerExampleGradients,
        "squared_norms",
        lambda self: norms(self) / (4 if any(len(uses) > 1 for uses in self.factors.values()) else 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "kind", "said"),
    [(skipped, LedgerError, "private steps"), (once_for_ties, PreflightError, "norms are off")],
)
def test_what_is_refused_by_name(
    switch: Callable[[Patch], None], kind: type[HfDpError], said: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    switch(monkeypatch)
    with pytest.raises(kind, match=said):
        of_library(tmp_path)
