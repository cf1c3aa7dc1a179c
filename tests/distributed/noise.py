"""Noise on the gradient of several processes: drawn many times, right or wrong in known ways."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import hf_dp.ranks as ranks
import hf_dp.step.clipped_sum
from hf_dp.accounting import Ledger
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.distributed.tasks import device, promise

SIGMA, CLIPPING, REPEATS = 1.5, 0.5, 400
# How often an honest noise may be found wrong. The mistakes below are off by ten standard deviations and more.
LEVEL = 1e-7


def drawn(kind: str, wrong: str | None = None, repeats: int = REPEATS, noise: str = "gaussian") -> dict[str, Tensor]:
    """The noise on each parameter (repeats, ...) of a model with rows that do not divide evenly, and rank 0's scalar.

    Args:
        kind: "ddp", "fsdp", or "mixed", where FSDP2 is told to leave a parameter alone.
        wrong: which mistake to make.
        noise: its source.
        repeats: fewer are enough for a mistake that they show.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1), nn.Linear(1, 3)).to(device())
    if kind != "ddp":
        ignored = {model[0].weight} if kind == "mixed" else set()
        mesh = init_device_mesh(device().type, (ranks.world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        fully_shard(model, mesh=mesh, ignored_params=ignored)
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    with mistake(wrong):
        for repeat in range(repeats):
            seed = repeat if wrong == "the same noise on two shards" else None
            sampler = PoissonBatchSampler.of(100, 10, Entropy(0))
            config = promise(noise_multiplier=SIGMA, clipping_norm=CLIPPING, seed=seed, noise=noise)
            plan = Plan.make(config, sampler, 1, Entropy(seed))
            private_gradient(model, None, [], plan, Ledger())  # type: ignore[arg-type]
            for name, p in model.named_parameters():
                held = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                rows[name].append(held.clone() * sampler.expected_batch_size)
    return {name: _whole(torch.stack(rows[name]), p).cpu() for name, p in model.named_parameters()}


def _whole(samples: Tensor, p: nn.Parameter) -> Tensor:
    """Samples (repeats, ...) of what this rank holds of `p`, with those of the other shards."""
    if not isinstance(p, DTensor):
        return samples
    like = samples.new_empty(len(samples), *p.shape)
    layout = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(samples, p.device_mesh, [Shard(1)], run_check=False, **layout).full_tensor()


def mistake(wrong: str | None) -> Any:
    """A context in which it is made."""
    honest = GaussianNoise.add_

    def add(self: GaussianNoise, tensors: Any, deviation: float, step: int, stream: str = "noise") -> None:
        if wrong == "noise missing on one rank" and ranks.rank() == ranks.world_size() - 1:
            return
        if wrong == "noise missing on the first rank" and ranks.rank() == 0:
            return
        scale = 2 / 3 if wrong == "two thirds of the noise" else 1.0
        name = "noise" if wrong == "the same noise on two shards" else stream
        honest(self, tensors, deviation * scale, step, name)

    if wrong == "noise on every rank":
        return mock.patch.object(hf_dp.step.clipped_sum.ranks, "rank", return_value=0)
    return mock.patch.object(GaussianNoise, "add_", add)


def complaints(noise: dict[str, Tensor]) -> list[str]:
    """What is wrong with samples (REPEATS, elements) of what should be independent N(0, (sigma C)^2)."""
    samples = torch.cat([values.flatten(1) for values in noise.values()], dim=1).double() / (SIGMA * CLIPPING)
    repeats, elements = samples.shape
    found = []
    squares = samples.square().sum(0)
    if not _plausible(float(squares.sum()), repeats * elements, LEVEL):
        found.append(f"total variance {float(squares.mean() / repeats):.3f}")
    odd = [i for i in range(elements) if not _plausible(float(squares[i]), repeats, LEVEL / elements)]
    if odd:
        found.append(f"variance of elements {odd}")
    normal = samples / samples.norm(dim=0).clamp_min(1e-12)
    correlation = (normal.T @ normal).abs().fill_diagonal_(0).max()
    limit = stats.norm.isf(LEVEL / elements**2) / repeats**0.5
    if correlation > limit:
        found.append(f"correlation {float(correlation):.3f}")
    return found


def _plausible(chi_squared: float, freedom: int, level: float) -> bool:
    return bool(stats.chi2.ppf(level / 2, freedom) < chi_squared < stats.chi2.isf(level / 2, freedom))
