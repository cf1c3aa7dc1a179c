"""How long a private step would take on a GPU beside an ordinary one, by arithmetic: products and bytes at known rates.

Counted are products with parameters, what is read and written for them, norms, sums, noise and AdamW. Attention,
activations and the loss, which both steps have, are left out, and nothing overlaps: so it is rather too large.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

from hf_dp.per_example.gram import SMALLEST_BLOCK, SMALLEST_ON_CORES
from hf_dp.per_example.products import BLOCK, CUT_BLOCK, SHORT_BLOCK, blocks_at_once, instantiated_from
from hf_dp.planning.sized import ModelSize, Parameter


@dataclass(frozen=True)
class Gpu:
    """What a GPU does in a second, in practice.

    Attributes:
        low: operations of products of 16-bit numbers.
        full: operations of products of float32 numbers, without TF32.
        bandwidth: bytes read or written.
    """

    low: float
    full: float
    bandwidth: float


# NVIDIA's data sheet of the H100 SXM: 989e12, 67e12 and 3.35e12. Large products and copies reach 60 to 90 % of these.
GPUS = MappingProxyType({"H100": Gpu(600e12, 50e12, 2.8e12)})
# Bytes for each trained number and step: AdamW reads and writes a weight and two moments, and reads a gradient; the
# private step besides fills its sum with zeros, adds noise that it makes and divides.
ADAM, _NOISE = 28, 28
# Bytes for each number and further block of a long sum.
_ADDED = 8
_FOR_EACH_ROW = 90
# Seconds that Python and torch take for each use of a trained parameter in a micro-batch, the model's own operations
# included: steps that waited for the host of an H200 took 0.7 (LoRA on each matrix) to 1.1 ms (docs/benchmarks_gpu.md).
# What the GPU computes is more than what is counted here, so it is the smaller.
_HOST = 0.7e-3
# More examples than are computed with at once.
_MOST = 1 << 12


@dataclass(frozen=True)
class Work:
    """Operations of products in the model's own dtype, and bytes moved."""

    operations: float = 0.0
    moved: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.moved + other.moved)

    def times(self, number: float) -> Work:
        return Work(number * self.operations, number * self.moved)

    def seconds(self, rate: float, bandwidth: float) -> float:
        """One after the other."""
        return self.operations / rate + self.moved / bandwidth


def predicted_ratio(
    model: ModelSize,
    gpu: Gpu,
    *,
    length: int,
    micro_batch: int,
    micro_batches: int = 1,
    bytes_computed: int = 2,
    checkpointing: bool = False,
) -> float:
    """A private step's time over an ordinary one's.

    Args:
        model: what is trained.
        gpu: where.
        length: T, positions of each example.
        micro_batch: B, examples at once.
        micro_batches: of one logical batch.
        bytes_computed: of each number that is computed with: 2 on tensor cores, 4 for float32.
        checkpointing: whether forward is computed twice.
    """
    b, t, c = micro_batch, length, bytes_computed
    by_autograd = _sum(_with_weight(p, b, t, c) + Work(0, 4 * p.numel) for p in model.parameters if p.trained)
    both = _forward(model, b, t, c, checkpointing)
    ordinary = (both + by_autograd).times(micro_batches) + Work(0, ADAM * model.trained)
    private = (both + _private(model, b, t, c)).times(micro_batches) + Work(0, (ADAM + _NOISE) * model.trained)
    rate = gpu.low if c == 2 else gpu.full
    return private.seconds(rate, gpu.bandwidth) / ordinary.seconds(rate, gpu.bandwidth)


def busy_from(model: ModelSize, gpu: Gpu, *, length: int, bytes_computed: int = 2) -> int:
    """From how many examples at once on a private step waits for the GPU, not for its host: in shorter micro-batches
    it takes longer than `predicted_ratio` says. Arguments as there."""
    t, c = length, bytes_computed
    host = _HOST * sum(p.uses for p in model.parameters if p.trained)
    rate = gpu.low if c == 2 else gpu.full

    def is_busy(b: int) -> bool:
        work = _forward(model, b, t, c, checkpointing=False) + _private(model, b, t, c)
        return work.seconds(rate, gpu.bandwidth) >= host

    return bisect.bisect_left(range(1, _MOST), True, key=is_busy) + 1


def _forward(model: ModelSize, b: int, t: int, c: int, checkpointing: bool) -> Work:
    """What both steps have: the products of the forward pass, and those with the weights of the backward pass."""
    return _sum(_with_weight(p, b, t, c).times(2 + checkpointing) for p in model.parameters)


def _private(model: ModelSize, b: int, t: int, c: int) -> Work:
    return _sum(_factors(p, b, t, c) for p in model.parameters if p.trained)


def _sum(works: Iterable[Work]) -> Work:
    return sum(works, start=Work())


def _sides(parameter: Parameter) -> tuple[int, int, int]:
    """p and d of a weight (p, d), and in how many products it is."""
    p = parameter.shape[0] if parameter.shape else 1
    return p, parameter.numel // max(1, p), parameter.uses - parameter.is_embedding if len(parameter.shape) > 1 else 0


def _with_weight(parameter: Parameter, b: int, t: int, c: int) -> Work:
    """One product of (B T, d) with (d, p), for each use; of experts, of the positions that each is given."""
    if parameter.routes:
        rows, (experts, p, d) = b * t * parameter.routes, parameter.shape
        return Work(2 * rows * p * d, c * (rows * (p + d) + experts * p * d))
    p, d, uses = _sides(parameter)
    return Work(2 * b * t * p * d, c * (b * t * (p + d) + p * d)).times(uses)


def _factors(parameter: Parameter, b: int, t: int, c: int) -> Work:
    """Norms and weighted sum."""
    if parameter.routes:
        # As of so many examples as there are pairs of one and an expert, each with its share of the positions.
        experts, *shape = parameter.shape
        one = replace(parameter, shape=tuple(shape), routes=0)
        return _factors(one, b * experts, max(1, t * parameter.routes // experts), c)
    p, d, uses = _sides(parameter)
    rows = b * t * (p + d)
    if len(parameter.shape) < 2:
        return Work()
    # Looked-up rows: the other side's Gram matrix, and an addition of rows in float32.
    lookup = (_gram(d, b, t, c) + Work(0, (c + 16) * b * t * d)).times(parameter.is_embedding)
    # For the bound on rounding the length of each row, of which a few numbers more are made.
    lengths = _FOR_EACH_ROW * b * t
    if t >= (fewest := instantiated_from(p * d, p + d, on_cores=c == 2)):
        # Rows are read once more; a Gram matrix has their squares on its diagonal.
        lengths = 0 if c == 2 and fewest == 0 else lengths + c * rows
        # Made, in blocks where sums are long, read for the norm and for the sum. That is made beside the sum of what is
        # left out, and added; a single one is copied or left out.
        each, once = 4 * 3 + _ADDED * (-(-t // BLOCK) - 1), 20 if b > 1 else 16
        return lookup + Work(2 * b * t * p * d, c * rows + lengths + (each * b + once) * p * d).times(uses)
    norm = _gram(p, b, t, c) + _gram(d, b, t, c)
    # Both sides are copied without what is left out; the smaller is weighted, and in 16 bits split into two, each of
    # which is added in blocks.
    parts, blocks = (2, -(-b * t // BLOCK)) if c == 2 else (1, 1)
    moved = 2 * c * rows + lengths + (28 if c == 2 else 8) * b * t * min(p, d)
    total = Work(parts * 2 * b * t * p * d, moved + parts * (c * rows + 8 * p * d * blocks))
    return lookup + (norm + total).times(uses)


def _gram(width: int, b: int, t: int, c: int) -> Work:
    """The Gram matrices of (B, T, width): made, added up in blocks where sums are long, and multiplied by others."""
    smallest = SMALLEST_ON_CORES if c == 2 else SMALLEST_BLOCK
    halvings = max(0, math.ceil(math.log2((t + 1) / (2 * smallest))))
    blocks = -(-width // (CUT_BLOCK if c == 2 else SHORT_BLOCK))
    total = Work()
    # Of what is symmetric one triangle of blocks, and those on the diagonal whole: for each halving, and at last.
    for halving in range(1, halvings + 2):
        numbers = b * t * t / 2 ** (halving + 1 if halving <= halvings else halvings)
        # Two halves, or both sides of the same rows.
        rows = c * b * t * width * (1 if halving <= halvings else 2)
        parts, side = 2 ** (halving - 1), t >> min(halving, halvings)
        together = blocks_at_once(b * parts, side, side, width // CUT_BLOCK) if c == 2 else 1
        if together > 1:
            # Copied, written block by block, and read again.
            rows, added = rows + 2 * c * b * t * width, 8 * blocks
        else:
            added = _ADDED * (blocks - 1)
        total += Work(2 * numbers * width, rows + numbers * (12 + added))
    return total
