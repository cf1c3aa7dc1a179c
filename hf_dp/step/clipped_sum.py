"""The clipped sum of one logical batch over its micro-batches, and over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.clipping.rule import ClippingRule
from hf_dp.errors import HfDpError
from hf_dp.noise.source import NoiseSource
from hf_dp.per_example import RowSum, sparse_gradient
from hf_dp.per_example.long_sums import LongSums
from hf_dp.per_example.modules import named_modules, names_in, parameters_of, trained_in
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rule import refuse_differing
from hf_dp.per_example.sharding import as_sums, like, local, reshard

# Numbers between the beginnings of two gradients in one buffer: 128 bytes of float32; and of one buffer, if it has
# several gradients: of weights in 16 bits each goes as soon as their gradients were made of it.
_ALIGNMENT, _LARGEST = 32, 1 << 24


class SummedByRows(Protocol):
    """Parameters whose gradients are summed by their rows, of which some are chosen when all examples are in.

    All other rows are zero and get no noise. What the choice is made by is summed beside the gradients.
    """

    @property
    def names(self) -> Collection[str]: ...

    def begin(self) -> None:
        """A new logical batch."""

    def add(self, gradients: PerExampleGradients, used: Tensor) -> None:
        """The examples of one micro-batch, of which those that are not `used` (B,) add no gradient."""

    def choose(self, step: int) -> Mapping[str, Tensor]:
        """For each parameter the rows (k,), ascending; the same on all ranks. The caller has charged the step."""
        ...


class ClippedSum:
    """A sum over examples of clipped gradients, and the sensitivity that it is known to have.

    On several ranks each adds its own examples; `meet` and `release` make it the sum over all.

    Attributes:
        gradients: the sum for each trainable parameter but those by rows, float32 (float64 for float64 parameters); of
            a parameter that FSDP2 shards, this rank's part.
        rows: the sum for each parameter that is summed by rows, over this rank's examples.
        examples: how many examples were added.
    """

    def __init__(self, model: nn.Module, clipping: ClippingRule, by_rows: SummedByRows | None = None) -> None:
        self._clipping, self._by_rows = clipping, by_rows
        # A forward pass without a backward pass leaves the root's parameters whole.
        reshard(model)
        modules = named_modules(model, by_each_name=True)
        self._parameters = trained_in(modules)
        self._groups = clipping.groups(names_in(modules))
        names = () if by_rows is None else by_rows.names
        dense = {name: p for name, p in self._parameters.items() if name not in names}
        plain = {name: p for name, p in dense.items() if not isinstance(p, DTensor)}
        sharded = {name: p for name, p in dense.items() if isinstance(p, DTensor)}
        replicated, self._buffers = _in_buffers(plain)
        shards, self._own = _in_buffers({name: local(p) for name, p in sharded.items()})
        held = {**replicated, **shards}
        self._gradients = {name: held[name] for name in dense}
        self._sums = as_sums(self._gradients, self._parameters)
        # Shards are summed over the ranks once, if until then all whole gradients are no larger than one parameter.
        largest = max(p.numel() for p in parameters_of(model)) if sharded else 0
        is_little = sum(p.numel() for p in sharded.values()) <= largest
        self._whole = {name: _whole_zeros(p) for name, p in sharded.items()} if is_little else {}
        # Into a shard come examples of all ranks, unless they are summed whole first.
        together = ranks.world_size() if self._own and not self._whole else 1
        self._long = LongSums([*self._buffers, *self._own, *self._whole.values()], together)
        self.rows = {name: RowSum(name, self._parameters[name]) for name in names}
        self._chosen: Mapping[str, Tensor] = {}
        self.examples = 0
        # Clipped, not finite, loss, others when computed again: on the device, and asked of it once.
        self._counted: Tensor | None = None
        if by_rows is not None:
            by_rows.begin()

    @property
    def gradients(self) -> dict[str, Tensor]:
        """As above."""
        self._long.settle()
        return self._gradients

    @property
    def clipped(self) -> int:
        """How many examples were scaled down, in any group of parameters; a rule may scale others up."""
        return int(self._read()[0])

    @property
    def non_finite(self) -> int:
        """How many had a gradient that is not finite in some group of parameters, and contributed nothing there."""
        return int(self._read()[1])

    @property
    def loss(self) -> float:
        """The sum of the finite examples' losses."""
        return float(self._read()[2])

    def _read(self) -> Tensor:
        self._counted = torch.zeros(4, dtype=torch.float64) if self._counted is None else self._counted.cpu()
        return self._counted

    @property
    def mean_loss(self) -> float:
        """Of the examples that contributed in all groups; 0 if there were none."""
        finite = self.examples - self.non_finite
        return self.loss / finite if finite else 0.0

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves the gradients in l2 norm, over all parameters together."""
        return self._clipping.sensitivity

    def add(self, gradients: PerExampleGradients) -> None:
        """Clips and adds the examples of one micro-batch, possibly none.

        Raises:
            HfDpError: rows of an example that has more elsewhere.
        """
        if any(gradients.elsewhere):
            raise HfDpError(
                f"{gradients.batch_size} rows of an example that has more in other micro-batches.",
                why="row by row it would be clipped several times, and add more than the bound.",
                fix="let `Pieces` join them.",
            )
        if not gradients.batch_size:
            return self.add_nothing(gradients)
        each: list[Tensor] = []

        def add_clipped(number: int, group: PerExampleGradients) -> None:
            share = self._groups[number].share
            coefficients = self._clipping.coefficients(group.squared_norms(), group.rounding(), share)
            # A finite gradient of an infinite loss is no gradient of anything.
            coefficients = coefficients.masked_fill(~group.losses.isfinite(), 0.0)
            group.add_weighted_sum_({**self._sums, **self._whole}, coefficients, self.rows)
            each.append(coefficients)

        gradients.by_groups([group.names for group in self._groups], add_clipped)
        # Of each example the group that it has least of.
        coefficients = each[0] if len(each) == 1 else torch.stack([one.double() for one in each]).amin(0)
        used = coefficients.ne(0)
        if self._by_rows is not None:
            self._by_rows.add(gradients, used)
        self.examples += gradients.batch_size
        self._long.added(gradients.batch_size)
        loss = gradients.losses.double().masked_fill(~used, 0.0).sum()
        differing = loss.new_zeros(()) if gradients.differing is None else gradients.differing.to(loss)
        counted = torch.stack([(used & coefficients.lt(1)).sum().double(), (~used).sum().double(), loss, differing])
        self._counted = counted if self._counted is None else self._counted + counted

    def add_nothing(self, gradients: PerExampleGradients) -> None:
        """Takes part in a micro-batch of the other ranks; none of its examples counts."""

        def add_zeros(number: int, group: PerExampleGradients) -> None:
            group.add_weighted_sum_({**self._sums, **self._whole}, torch.zeros_like(group.losses), self.rows)

        gradients.by_groups([group.names for group in self._groups], add_zeros)
        self._long.added(gradients.batch_size)

    def meet(self, step: int) -> None:
        """Waits for the other ranks, and makes the counts and the loss those of all. One small all-gather.

        Args:
            step: which logical batch this is, for this rank.

        Raises:
            HfDpError: another rank is at another step.
            UnsupportedModelError: examples came out otherwise when they were computed again.
        """
        table = ranks.gathered([step, self.examples, *self._read().tolist()])
        steps = [int(value) for value in table[:, 0]]
        if len(set(steps)) > 1:
            raise HfDpError(
                f"the ranks are at different steps: {steps}.",
                why="they would add up different logical batches, and no ledger would count the right releases.",
                fix="let every rank take the same callbacks and stopping decisions; resume from the last checkpoint.",
            )
        total = table[:, 1:].sum(0)
        self.examples, self._counted = int(total[0]), total[1:]
        refuse_differing(total[4])

    def choose_rows(self, step: int) -> None:
        """Moves this rank's sums of the rows that are chosen for this step to `gradients`."""
        if self._by_rows is None:
            return
        chosen = self._by_rows.choose(step)
        self._chosen = {name: rows.to(self.rows[name].device) for name, rows in chosen.items()}
        # The first k rows have the shape and dtype of any k.
        alike = {name: self._parameters[name].detach()[: len(rows)] for name, rows in chosen.items()}
        sums, buffers = _in_buffers(alike)
        for name, rows in self._chosen.items():
            sums[name].copy_(self.rows[name].of(rows))
        self._gradients.update(sums)
        self._buffers += buffers

    def release(self, noise: NoiseSource, standard_deviation: float, step: int) -> None:
        """Makes `gradients` the sum over all ranks with noise, added to each element by one rank only.

        A shard gets it from the rank that holds it, which first has the sum of it. What every rank holds whole gets it
        from rank 0, before the all-reduce that gives every rank the same bits: one for each buffer, and one more for
        the chosen rows. Noise that nothing may be added to comes between two, the second from rank 0.

        Args:
            noise: of this rank; what it gives the next rank is independent of it.
            standard_deviation: of the noise on each element.
            step: which logical batch this is.
        """
        self._long.settle()
        for name, whole in self._whole.items():
            self._sums[name].add_(whole)
        rank = ranks.rank()
        if noise.comes_last:
            for buffer in self._buffers:
                ranks.sum_(buffer)
        # Not parameter by parameter, for which a GPU would be asked hundreds of times.
        own = [*self._own, *(self._buffers if rank == 0 else [])]
        noise.add_(own, standard_deviation, step, stream=f"noise of rank {rank}" if rank else "noise")
        for buffer in self._buffers:
            (ranks.from_first_ if noise.comes_last else ranks.sum_)(buffer)

    def set_gradients(self, divisor: float) -> None:
        """Divides the sum in place, and makes it `.grad` of the parameters; of those by rows it is sparse.

        Of parameters in 16 bits the sum itself is gone then.

        Args:
            divisor: the expected number of examples.
        """
        self._long.settle()
        # Not parameter by parameter; and in place: a second copy of all gradients would be the peak of memory.
        if self._buffers or self._own:
            torch._foreach_div_([*self._buffers, *self._own], divisor)
        self._buffers, self._own, self._sums, self._whole, self._long = [], [], {}, {}, LongSums([])
        with torch.no_grad():
            for name, p in self._parameters.items():
                mean = self._gradients[name]
                if mean.dtype != p.dtype:
                    mean = self._gradients.pop(name).to(p.dtype)
                p.grad = sparse_gradient(self._chosen[name], mean, p) if name in self._chosen else like(mean, p)


def _in_buffers(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A zero gradient for each parameter, laid out as it is; and the few buffers that they are views of."""
    sizes: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, p in parameters.items():
        size, alike = -(-p.numel() // _ALIGNMENT) * _ALIGNMENT, sizes.setdefault((sum_dtype(p.dtype), p.device), [0])
        if alike[-1] and alike[-1] + size > _LARGEST:
            alike.append(0)
        places[name] = len(alike) - 1, alike[-1]
        alike[-1] += size
    buffers = {key: [torch.zeros(n, dtype=key[0], device=key[1]) for n in alike] for key, alike in sizes.items()}
    gradients: dict[str, Tensor] = {}
    for name, p in parameters.items():
        number, begin = places[name]
        strides = p.stride() if p.is_contiguous() else torch.empty_like(p, device="meta").stride()
        gradients[name] = buffers[sum_dtype(p.dtype), p.device][number].as_strided(p.shape, strides, begin)
    return gradients, list(itertools.chain.from_iterable(buffers.values()))


def _whole_zeros(parameter: DTensor) -> Tensor:
    # Not where the shard lies, which may be offloaded.
    return torch.zeros(
        parameter.shape, dtype=sum_dtype(parameter.dtype), device=torch.device(parameter.device_mesh.device_type)
    )
