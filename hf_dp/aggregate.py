"""The clipped sum of one logical batch over its micro-batches, and over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.clipping import Clipping
from hf_dp.errors import HfDpError
from hf_dp.noise import GaussianNoise
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.sharding import as_sums, like, local, trainable

# Numbers between the beginnings of two gradients in one buffer: 128 bytes of float32.
_ALIGNMENT = 32


class ClippedSum:
    """A sum over examples of clipped gradients, and the sensitivity that it is known to have.

    On several ranks each adds its own examples; `meet` and `release` make it the sum over all.

    Attributes:
        gradients: the sum for each trainable parameter, float32 (float64 for float64 parameters); of a parameter that
            FSDP2 shards, this rank's part.
        examples: how many examples were added.
        clipped: how many of them were scaled down.
        non_finite: how many had a gradient that is not finite, and so contributed nothing.
        loss: the sum of the finite examples' losses.
    """

    def __init__(self, model: nn.Module, clipping: Clipping) -> None:
        self._clipping = clipping
        self._parameters = trainable(model)
        plain = {name: p for name, p in self._parameters.items() if not isinstance(p, DTensor)}
        sharded = {name: p for name, p in self._parameters.items() if isinstance(p, DTensor)}
        replicated, self._buffers = _in_buffers(plain)
        shards = {name: torch.zeros_like(local(p), dtype=sum_dtype(p.dtype)) for name, p in sharded.items()}
        self.gradients = {name: {**replicated, **shards}[name] for name in self._parameters}
        self._sums = as_sums(self.gradients, self._parameters)
        # Shards are summed over the ranks once, if until then all whole gradients are no larger than one parameter.
        is_little = sum(p.numel() for p in sharded.values()) <= max(p.numel() for p in model.parameters())
        self._whole = {name: _whole_zeros(p) for name, p in sharded.items()} if is_little else {}
        self.examples = self.clipped = self.non_finite = 0
        self.loss = 0.0

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves `gradients` in l2 norm, over all parameters together."""
        return self._clipping.sensitivity

    def add(self, gradients: PerExampleGradients) -> None:
        """Clips and adds the examples of one micro-batch."""
        coefficients = self._clipping.coefficients(gradients.squared_norms(), gradients.rounding())
        # A finite gradient of an infinite loss is no gradient of anything.
        coefficients = coefficients.where(gradients.losses.isfinite(), 0.0)
        gradients.add_weighted_sum_({**self._sums, **self._whole}, coefficients)
        used = coefficients.ne(0)
        self.examples += gradients.batch_size
        self.non_finite += int((~used).sum())
        self.clipped += int((used & coefficients.lt(1)).sum())
        self.loss += float(gradients.losses.double().where(used, 0.0).sum())

    def add_nothing(self, gradients: PerExampleGradients) -> None:
        """Takes part in a micro-batch of the other ranks; none of its examples counts."""
        gradients.add_weighted_sum_({**self._sums, **self._whole}, torch.zeros_like(gradients.losses))

    def meet(self, step: int) -> None:
        """Waits for the other ranks, and makes the counts and the loss those of all. One small all-gather.

        Args:
            step: which logical batch this is, for this rank.

        Raises:
            HfDpError: another rank is at another step.
        """
        table = ranks.gathered([step, self.examples, self.clipped, self.non_finite, self.loss])
        steps = [int(value) for value in table[:, 0]]
        if len(set(steps)) > 1:
            raise HfDpError(
                f"the ranks are at different steps: {steps}.",
                why="they would add up different logical batches, and no ledger would count the right releases.",
                fix="let every rank take the same callbacks and stopping decisions; resume from the last checkpoint.",
            )
        self.examples, self.clipped, self.non_finite = (int(value) for value in table.sum(0)[1:4])
        self.loss = float(table[:, 4].sum())

    def release(self, noise: GaussianNoise, standard_deviation: float, step: int) -> None:
        """Makes `gradients` the sum over all ranks with noise, added to each element by one rank only.

        A shard gets it from the rank that holds it, which first has the sum of it. What every rank holds whole gets it
        from rank 0, before the all-reduce that gives every rank the same bits: one for each dtype, so mostly one.

        Args:
            noise: of this rank; what it gives the next rank is independent of it.
            standard_deviation: of the noise on each element.
            step: which logical batch this is.
        """
        for name, whole in self._whole.items():
            self._sums[name].add_(whole)
        rank = ranks.rank()
        own = [g for name, g in self.gradients.items() if rank == 0 or isinstance(self._parameters[name], DTensor)]
        noise.add_(own, standard_deviation, step, stream=f"noise of rank {rank}" if rank else "noise")
        for buffer in self._buffers:
            ranks.sum_(buffer)

    def set_gradients(self, divisor: float) -> None:
        """Divides the sum in place, and makes it `.grad` of the parameters."""
        with torch.no_grad():
            for name, p in self._parameters.items():
                # In place: a second copy of all gradients would be the peak of memory.
                p.grad = like(self.gradients[name].div_(divisor).to(p.dtype), p)


def _in_buffers(parameters: dict[str, nn.Parameter]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A zero gradient for each parameter, laid out as it is; and the few buffers that they are views of."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    places: dict[str, int] = {}
    for name, p in parameters.items():
        key = sum_dtype(p.dtype), p.device
        places[name] = sizes.get(key, 0)
        sizes[key] = places[name] + -(-p.numel() // _ALIGNMENT) * _ALIGNMENT
    buffers = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    gradients: dict[str, Tensor] = {}
    for name, p in parameters.items():
        strides = torch.empty_like(p, device="meta").stride()
        gradients[name] = buffers[sum_dtype(p.dtype), p.device].as_strided(p.shape, strides, places[name])
    return gradients, list(buffers.values())


def _whole_zeros(parameter: DTensor) -> Tensor:
    # Not where the shard lies, which may be offloaded.
    return torch.zeros(
        parameter.shape, dtype=sum_dtype(parameter.dtype), device=torch.device(parameter.device_mesh.device_type)
    )
