"""Norms of per-example gradients that are held as factors, and bounds on what rounding did to them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from hf_dp.per_example.factors import DistinctRows, Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense, OneHot, SelfGrams, gram, smallest_block
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.products import BLOCK, unsure

# Rounding of a squared norm, in units of machine epsilon x (sum over positions of |left| |right|)^2.
_ROUNDING = 8.0
# The longest sums that are left to one reduction: rounding grows with their length.
_NORM_BLOCK = 512


def all_squared_norms(factors: Iterable[list[Factors]]) -> list[tuple[Tensor, Tensor]]:
    """As of `squared_norms`, of the uses of each parameter; parameters that are used once go together."""
    grams, pairs = SelfGrams(), list[tuple[Tensor, Tensor]]()
    kept: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    outers: dict[Hashable, list[Outer]] = {}
    for uses in factors:
        match uses:
            case [PerExample(values)]:
                rows = accumulation(values).reshape(len(values), -1)
                # Not copied whole: that would be as many numbers again.
                rows = _shortened(rows) if rows.shape[1] > _NORM_BLOCK else rows
                kept.setdefault((rows.dtype, rows.device), []).append(rows)
            case [Outer() as outer] if not isinstance(outer, DistinctRows):
                outers.setdefault(outer.likeness, []).append(outer)
            case [_, *_]:
                pairs.append(squared_norms(uses, grams))
    pairs += [squared_norms([PerExample(torch.cat(together, dim=1))]) for together in kept.values()]
    for alike in outers.values():
        total, rounding = _clamped(*_own_terms(alike, grams))
        pairs.append((total.sum(0), rounding.sum(0)))
    return pairs


def squared_norms(uses: list[Factors], grams: SelfGrams | None = None) -> tuple[Tensor, Tensor]:
    """Squared l2 norms of the per-example gradients of one parameter used `len(uses)` times.

    Args:
        uses: the factors of its uses.
        grams: what is known from other parameters of the same recording.

    Returns:
        The squared norms (B,): inner products over all ordered pairs of uses; and a bound (B,) on their rounding
        error, which matters where large terms cancel.
    """
    match uses:
        case [DistinctRows(OneHot(), Dense(values), scale)]:
            norms = abs(scale) * _norms(accumulation(values).flatten(1))
            return norms.square(), _rounding(norms)
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses):
        return _gram_norms(outers, grams or SelfGrams())
    return _norms_of_sum(uses, grams or SelfGrams())


def stacked(pairs: list[tuple[Tensor, Tensor]], losses: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of squared norms and of bounds on their rounding, (B,) each, over all parameters; zero of none.

    Args:
        pairs: of each parameter.
        losses: (B,), beside which the sums are to lie.
    """
    pairs = pairs or [(torch.zeros_like(losses), torch.zeros_like(losses))]
    dtype = torch.promote_types(torch.float32, max((p[0].dtype for p in pairs), key=lambda d: d.itemsize))
    total, rounding = (torch.stack([pair[i].to(losses.device, dtype) for pair in pairs]).sum(0) for i in (0, 1))
    return total, rounding


def _gram_norms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    terms = zip(*(_own_terms([outer], grams) for outer in outers), strict=True)
    total, magnitude, underflow = (sum(several[1:], start=several[0]) for several in terms)
    for position, first in enumerate(outers):
        for second in outers[position + 1 :]:
            crossed = gram(first.left, second.left) * gram(first.right, second.right)
            total = total + 2 * first.scale * second.scale * crossed.sum((1, 2))
    norms, rounding = _clamped(total, magnitude, underflow)
    return norms[0], rounding[0]


def _own_terms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, Tensor, Tensor]:
    """Of k outer products that are alike, (k, B) each: their squared norms, what these would be the squares of if
    nothing cancelled, and what the square of which was lost below the smallest normal number."""
    first = outers[0]
    smallest, scale = smallest_block(first.left, first.right), abs(first.scale)
    pairs = [(grams.of(outer.left, smallest), grams.of(outer.right, smallest)) for outer in outers]
    total = torch.stack([left.inner(right) for left, right in pairs])
    left, right = (torch.stack([pair[i].row_norms for pair in pairs]) for i in (0, 1))
    length = max(first.left.width, first.right.width) / BLOCK
    times = 1 + length + unsure(first.left.tensor, first.right.tensor) / _ROUNDING
    magnitude = times**0.5 * scale * (left * right).sum(2)
    # Each entry of a Gram matrix may have lost as much as the smallest normal number in each of its products.
    lost = first.left.width * right.sum(2).square() + first.right.width * left.sum(2).square()
    underflow = scale * torch.finfo(lost.dtype).tiny ** 0.5 * lost.sqrt()
    return scale**2 * total, magnitude, underflow


def _clamped(total: Tensor, magnitude: Tensor, underflow: Tensor) -> tuple[Tensor, Tensor]:
    return total.clamp_min(0), _rounding(magnitude) + underflow.square()


def _norms_of_sum(uses: list[Factors], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    """As of `squared_norms`, where a gradient is instantiated; looked-up rows, which are few of them, are not."""
    looked_up = [use for use in uses if isinstance(use, Outer) and _is_lookup(use)]
    others = [use for use in uses if not (isinstance(use, Outer) and _is_lookup(use))]
    values = [accumulation(use.instantiated().values if isinstance(use, Outer) else use.values) for use in others]
    whole = sum(values[1:], start=values[0])
    for use in looked_up:
        # The bound on rounding is that of the larger type.
        whole = whole.to(torch.promote_types(whole.dtype, use.right.tensor.dtype))
    norms = _norms(whole.reshape(len(whole), -1))
    if len(uses) == 1:
        return norms.square(), _rounding(norms)
    # The weighted sum adds the uses one by one: what cancels between them there leaves its rounding behind.
    apart = [norms] if len(others) == 1 and not isinstance(others[0], Outer) else [_magnitude(use) for use in others]
    rounding = _rounding(torch.stack([*apart, *(_magnitude(use) for use in looked_up)]).sum(0))
    total = norms.square()
    if looked_up:
        squares, bound = _gram_norms(looked_up, grams)
        total, rounding = total + squares, rounding + bound
    for use in looked_up:
        met = whole[torch.arange(len(whole), device=whole.device)[:, None], use.left.tensor]
        total = total + 2 * use.scale * met.mul_(use.right.tensor).sum((1, 2))
    return total.clamp_min(0), rounding


def _is_lookup(use: Outer) -> bool:
    return isinstance(use.left, OneHot) and isinstance(use.right, Dense)


def _magnitude(use: Factors) -> Tensor:
    """(B,): what the norm could be if nothing cancelled between positions."""
    if isinstance(use, PerExample):
        return _norms(accumulation(use.values).reshape(use.values.shape[0], -1))
    times = 1 + unsure(use.left.tensor, use.right.tensor) / _ROUNDING
    return (use.left.row_norms() * use.right.row_norms()).sum(1) * (abs(use.scale) * math.sqrt(times))


def _norms(rows: Tensor) -> Tensor:
    """(B,) l2 norms of rows (B, n), in blocks: one long float32 sum of squares falls short by 0.02 % at n = 10^7."""
    while rows.shape[1] > _NORM_BLOCK:
        rows = _shortened(rows)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def _shortened(rows: Tensor) -> Tensor:
    """Rows of the same norms as `rows` (B, n), with one number for each whole block of theirs."""
    whole = rows.shape[1] // _NORM_BLOCK * _NORM_BLOCK
    blocks: Tensor = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _NORM_BLOCK)), dim=2)
    return torch.cat([blocks, rows[:, whole:]], dim=1) if whole < rows.shape[1] else blocks


def _rounding(magnitude: Tensor) -> Tensor:
    return _ROUNDING * torch.finfo(magnitude.dtype).eps * magnitude.square()
