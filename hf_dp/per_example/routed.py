"""Per-example gradients of the matrices of experts, each of which was given some of an example's positions.

Expert e's part of example i's gradient is the sum of outer products over the positions of i that e was given. Parts of
different experts lie in different places, so a squared norm is the sum of theirs: each is one of an `Outer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.products import add_weighted_


class Parts(NamedTuple):
    """Some parts of gradients, of n pairs of an example and an expert with about as many positions, at most m.

    Attributes:
        examples: (n,) whose they are.
        experts: (n,) beside them.
        at: (n, m) their positions among those of all examples, the last one of some again and again.
        used: (n, m) those that are none again.
    """

    examples: Tensor
    experts: Tensor
    at: Tensor
    used: Tensor

    def rows(self, values: Tensor) -> Tensor:
        """(n, m, ...) of (B, T, ...)."""
        return values.flatten(0, 1)[self.at]

    def filled(self, values: Tensor) -> Tensor:
        """The same with zeros where a position comes again."""
        return self.rows(values).masked_fill_(~self.used.view(*self.used.shape, *[1] * (values.dim() - 2)), 0)


@dataclass(frozen=True)
class Routed(Outer):
    """Example i's gradient (experts, left.size, right.size): that of expert e is the sum over the t with ids_i[t] = e.

    Attributes:
        ids: (B, T) which expert was given each position.
        experts: how many there are.
    """

    ids: Tensor = field(kw_only=True)
    experts: int = field(kw_only=True)

    @staticmethod
    def joined(uses: Sequence[Factors]) -> Routed | None:
        """Several uses as one of more positions, if all are alike."""
        routed = [use for use in uses if isinstance(use, Routed)]
        kinds = {(use.scale, use.experts, use.left.tensor.dtype, use.right.tensor.dtype, use.given) for use in routed}
        if len(routed) < len(uses) or len(kinds) > 1:
            return None
        left, right = (
            Dense(torch.cat([side.tensor for side in sides], 1))
            for sides in ([use.left for use in routed], [use.right for use in routed])
        )
        return replace(routed[0], left=left, right=right, ids=torch.cat([use.ids for use in routed], 1))

    def parts(self) -> Iterator[Parts]:
        """All that have a position. Those with up to half as many again go together."""
        batch, positions = self.ids.shape
        owners = torch.arange(batch, device=self.device).repeat_interleave(positions)
        keys, order = (owners * self.experts + self.ids.flatten()).sort(stable=True)
        found, counts = keys.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        steps = torch.ceil(2 * counts.double().log2()).long()
        for step in steps.unique().tolist():
            chosen = (steps == step).nonzero().squeeze(1)
            places, own = torch.arange(math.floor(2 ** (step / 2)), device=self.device), counts[chosen, None]
            index = order[starts[chosen, None] + places.minimum(own - 1)]
            yield Parts(found[chosen] // self.experts, found[chosen] % self.experts, index, places < own)

    def places(self) -> Sequence[Tensor]:
        """Of each expert, where its positions are among those of all examples."""
        ids = self.ids.flatten()
        places: Sequence[Tensor] = ids.argsort(stable=True).split(ids.bincount(minlength=self.experts).tolist())
        return places

    def outer(self, parts: Parts) -> Outer:
        """Those of n "examples"."""
        # Beside zeros on one side it makes no difference what is on the other.
        return Outer(Dense(parts.filled(self.left.tensor)), Dense(parts.rows(self.right.tensor)), self.scale)

    def lengths(self, left: Tensor | None = None, right: Tensor | None = None, is_kept: bool = False) -> Lengths:
        """One for each example, of its parts together."""
        if self.given is not None:
            return self.given
        whole, found = super().lengths(left, right, is_kept), list[tuple[Tensor, Tensor]]()
        assert whole.right is not None
        for parts in self.parts():
            own = replace(whole, left=parts.filled(whole.left), right=parts.filled(whole.right))
            found.append((parts.examples, own.magnitude().square()))
        return Lengths(self.added(found).sqrt()[:, None])

    def added(self, found: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(B,) the sums of numbers (n,) of parts whose examples (n,) stand beside them."""
        examples, numbers = (torch.cat(several) for several in zip(*found, strict=True))
        return numbers.new_zeros(len(self.ids)).index_add_(0, examples, numbers)

    @property
    def likeness(self) -> tuple[object, ...]:
        """As of others of its kind."""
        return type(self), self.experts, super().likeness

    def instantiated(self, block: int | None = None) -> PerExample:
        """The gradients (B, experts, left.size, right.size)."""
        dtype = accumulation(self.left.tensor[:0]).dtype
        shape = len(self.ids), self.experts, self.left.size, self.right.size
        values = torch.zeros(shape, dtype=dtype, device=self.device)
        for parts in self.parts():
            values[parts.examples, parts.experts] = self.outer(parts).instantiated().values.to(dtype)
        return PerExample(values)

    def settled(self) -> Outer:
        """Itself: of all experts together the gradients are large, and most are zero."""
        return self

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        """As of `Outer`, to `out` (experts, left.size, right.size)."""
        matrices = out.view(self.experts, self.left.size, self.right.size)
        for matrix, rows in zip(matrices, self.places(), strict=True):
            if len(rows):
                left, right = (side.tensor.flatten(0, 1)[rows, None] for side in (self.left, self.right))
                add_weighted_(matrix, left, right, coefficients[rows // self.ids.shape[1]], self.scale)

    def selected(self, index: Tensor) -> Outer:
        """The examples in `index` alone."""
        return replace(super().selected(index), ids=self.ids[index])  # type: ignore[call-arg]
