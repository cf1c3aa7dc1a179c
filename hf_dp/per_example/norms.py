"""Norms of per-example gradients that are held as factors, and bounds on what rounding did to them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_dp.per_example.chosen import SMALL, SUMMED_AT_ONCE
from hf_dp.per_example.factors import DistinctRows, Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense, OneHot, SelfGrams, gram, smallest_block
from hf_dp.per_example.lengths import Lengths, joined, magnitudes, more_times, most_times, of_all, rounding
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.routed import Routed
from hf_dp.per_example.waiting import answers_at_once

# A squared norm that rounding may have moved by this part of itself is taken in float64, sums of products apart.
_DOUBTFUL = 2.0**-10
# The longest sums that are left to one reduction: rounding grows with their length.
_NORM_BLOCK = 512


def all_squared_norms(factors: Iterable[list[Factors]]) -> list[tuple[Tensor, Tensor]]:
    """As of `squared_norms`, of the uses of each parameter; parameters that are used once go together."""
    grams, pairs = SelfGrams(), list[tuple[Tensor, Tensor]]()
    kept: dict[Hashable, list[tuple[Tensor, Lengths | None]]] = {}
    outers: dict[Hashable, list[Outer]] = {}
    for uses in factors:
        match uses:
            case [PerExample(values) as use]:
                rows = accumulation(values).reshape(len(values), -1)
                kept.setdefault((rows.dtype, rows.device, use.lengths is None), []).append((rows, use.lengths))
            case [Outer() as outer] if not isinstance(outer, DistinctRows):
                outers.setdefault(outer.likeness, []).append(outer)
            case [_, *_]:
                pairs.append(squared_norms(uses, grams))
    for together in kept.values():
        norms = _norms_together([rows for rows, _ in together])
        apart = magnitudes([lengths for _, lengths in together if lengths is not None]) or [norms[None]]
        pairs.append((norms.square(), torch.cat([rounding(one).to(norms) for one in apart]).sum(0)))
    for alike in outers.values():
        total, magnitude = _own_terms(alike, grams)
        bounds = rounding(magnitude)
        found = [_refined([use], *known) for use, *known in zip(alike, total.clamp_min(0), bounds, strict=True)]
        pairs.append((torch.stack(found).sum(0), bounds.sum(0)))
    return pairs


class NormsOfDropped:
    """Squared norms of the uses of one parameter after another, whose factors need not be kept.

    A GPU takes long to start on the bound of each by itself: what bounds follow from is kept, two numbers for each
    position, and those that are alike go together.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._unbound: dict[Hashable, list[tuple[Tensor, Lengths]]] = {}

    def add(self, uses: list[Factors]) -> None:
        """All of one parameter."""
        match uses:
            case [Outer() as outer] if not (isinstance(outer, DistinctRows) or answers_at_once(outer.device)):
                squares, lengths = _own_norms(outer, SelfGrams())
            case [PerExample(values, lengths=Lengths() as lengths)] if not answers_at_once(values.device):
                squares = _norms(accumulation(values).reshape(len(values), -1)).square()
            case _:
                self._pairs.append(squared_norms(uses))
                return
        self._unbound.setdefault((squares.dtype, lengths.likeness), []).append((squares, lengths))

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """As of `all_squared_norms`."""
        found = list(self._pairs)
        for alike in self._unbound.values():
            squares, lengths = zip(*alike, strict=True)
            bounds = rounding(joined(lengths).magnitude())
            found.append((torch.stack(squares).clamp_min(0).sum(0), bounds.sum(0)))
        return found


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
        case [DistinctRows(OneHot(), Dense(values), scale) as rows]:
            norms = abs(scale) * _norms(accumulation(values).flatten(1))
            return norms.square(), rounding(norms if rows.given is None else rows.given.magnitude())
    if len(uses) > 1 and (joined_uses := Routed.joined(uses)) is not None:
        uses = [joined_uses]
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses) and (len(uses) == 1 or not any(isinstance(use, Routed) for use in uses)):
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
    total, bound = (torch.stack([pair[i].to(losses.device, dtype) for pair in pairs]).sum(0) for i in (0, 1))
    return total, bound


def _gram_norms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    total, apart = _terms(outers, grams)
    bound = rounding(*apart)
    return _refined(outers, total.clamp_min(0), bound), bound


def _refined(uses: Sequence[Factors], norms: Tensor, bound: Tensor) -> Tensor:
    """Squared `norms` (B,), in float64 of examples whose gradient nearly cancels.

    Of these the norm would be little else than rounding, which follows from what is computed beside them.
    """
    if norms.dtype == torch.float64 or not answers_at_once(norms.device):
        return norms
    # As of an example that is as long as the micro-batch: which are taken again is no part of the promise.
    times = more_times(len(uses) - 1) * max(most_times(*use.doubt) for use in uses)
    doubtful = bound.isfinite() & (bound > _DOUBTFUL * times * norms)
    if not bool(doubtful.any()):
        return norms
    index = doubtful.nonzero().squeeze(1)
    found, _ = squared_norms([use.selected(index).in_float64() for use in uses])
    return norms.index_copy(0, index, found.to(norms.dtype))


def _terms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, list[Tensor]]:
    """Of one parameter, (B,) each: the squared norm, and the magnitude of each use."""
    terms = [_own_terms([outer], grams) for outer in outers]
    # Of k uses there are k^2 terms, each of which would round the sum of all before it.
    total = sum((own[0].double() for own, _ in terms[1:]), start=terms[0][0][0].double())
    for position, first in enumerate(outers):
        for second in outers[position + 1 :]:
            crossed = gram(first.left, second.left) * gram(first.right, second.right)
            total += 2 * first.scale * second.scale * crossed.sum((1, 2)).double()
    return total.to(terms[0][0].dtype), [magnitude[0] for _, magnitude in terms]


def _own_terms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    """Of k outer products that are alike, (k, B) each: their squared norms, and what these would be the squares of if
    nothing cancelled."""
    squares, lengths = zip(*(_own_norms(outer, grams) for outer in outers), strict=True)
    return torch.stack(squares), joined(lengths).magnitude()


def _own_norms(outer: Outer, grams: SelfGrams) -> tuple[Tensor, Lengths]:
    """The squared norms (B,) of an outer product, and the lengths of its rows."""
    if isinstance(outer, Routed):
        found = [(parts.examples, squared_norms([outer.outer(parts).settled()])[0]) for parts in outer.parts()]
        return outer.added(found), outer.lengths()
    smallest = smallest_block(outer.left, outer.right)
    left, right = (grams.of(side, smallest) for side in (outer.left, outer.right))
    squares = left.inner(right)
    lengths = outer.lengths(left.row_norms, right.row_norms)
    return squares if abs(outer.scale) == 1.0 else outer.scale**2 * squares, lengths


def _norms_of_sum(uses: list[Factors], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    """As of `squared_norms`, where a gradient is instantiated; looked-up rows, which are few of them, are not."""
    looked_up = [use for use in uses if isinstance(use, Outer) and _is_lookup(use)]
    others = [use for use in uses if not (isinstance(use, Outer) and _is_lookup(use))]
    values = [accumulation(use.instantiated().values if isinstance(use, Outer) else use.values) for use in others]
    # A convolution's factors are those of a matrix, and instantiated gradients of the parameter's own shape.
    values = [rows.reshape(len(rows), -1) for rows in values]
    whole = sum(values[1:], start=values[0])
    for use in looked_up:
        # The bound on rounding is that of the larger type.
        whole = whole.to(torch.promote_types(whole.dtype, use.right.tensor.dtype))
    norms = _norms(whole)
    # The weighted sum adds the uses one by one: what cancels between them there leaves its rounding behind.
    apart = [norms if len(others) == 1 and _is_norm(use) else magnitude_of(use) for use in others]
    # What is kept instantiated has the norm of the very numbers that are summed: none is in doubt but for the others.
    sizes = [norms] if len(others) == 1 else [magnitude_of(_by_itself(use)) for use in others]
    total = norms.square()
    if looked_up:
        squares, magnitudes_of_rows = _terms(looked_up, grams)
        total, apart, sizes = total + squares.clamp_min(0), [*apart, *magnitudes_of_rows], [*sizes, *magnitudes_of_rows]
    for use in looked_up:
        rows = whole.view(len(whole), use.left.size, -1)
        met = rows[torch.arange(len(whole), device=whole.device)[:, None], use.left.tensor]
        total = total + 2 * use.scale * met.mul_(use.right.tensor).sum((1, 2))
    total = total.clamp_min(0)
    return total if len(uses) == 1 else _refined(uses, total, rounding(*sizes)), rounding(*apart)


def _is_lookup(use: Outer) -> bool:
    return isinstance(use.left, OneHot) and isinstance(use.right, Dense)


def _by_itself(use: Factors) -> Factors:
    """With its norm for its magnitude, where it is kept instantiated."""
    return replace(use, lengths=None) if isinstance(use, PerExample) else use


def _is_norm(use: Factors) -> bool:
    """Whether its magnitude is its norm."""
    return isinstance(use, PerExample) and use.lengths is None


def magnitude_of(use: Factors) -> Tensor:
    """(B,): what the norm could be if nothing cancelled between positions."""
    lengths = use.lengths() if isinstance(use, Outer) else use.lengths
    if lengths is not None:
        return lengths.magnitude()
    assert isinstance(use, PerExample)
    values = torch.view_as_real(use.values.resolve_conj()) if use.values.is_complex() else use.values
    return _norms(accumulation(values).reshape(len(values), -1))


def magnitude_of_all(uses: Sequence[Factors]) -> Tensor:
    """The same of all uses of one parameter."""
    return of_all(*map(magnitude_of, uses))


def _norms_together(several: Sequence[Tensor]) -> Tensor:
    """(B,) l2 norms of `several` (B, n), one after another."""
    short, waiting, held = list[Tensor](), list[Tensor](), 0
    for rows in several:
        size = rows.shape[1]
        # Not copied whole: that would be as many numbers again. But where each by itself would take longer to start on
        # than to make, a few MiB are.
        is_copied = size <= _NORM_BLOCK or (size <= SMALL and not answers_at_once(rows.device))
        waiting.append(rows if is_copied else _shortened(rows))
        held += waiting[-1].numel()
        if held > SUMMED_AT_ONCE:
            short.append(_shortened(torch.cat(waiting, dim=1)))
            waiting, held = [], 0
    return _norms(torch.cat([*short, *waiting], dim=1))


def _norms(rows: Tensor) -> Tensor:
    """(B,) l2 norms of rows (B, n), in blocks: one long float32 sum of squares falls short by 0.02 % at n = 10^7."""
    while rows.shape[1] > _NORM_BLOCK:
        rows = _shortened(rows)
    norms: Tensor = torch.linalg.vector_norm(rows.contiguous(), dim=1)
    return norms


def _shortened(rows: Tensor) -> Tensor:
    """Rows of the same norms as `rows` (B, n), with one number for each whole block of theirs."""
    whole = rows.shape[1] // _NORM_BLOCK * _NORM_BLOCK
    # Where numbers lie apart in memory, a CPU adds them up one by one instead of a few beside one another.
    several = rows[:, :whole].unflatten(1, (-1, _NORM_BLOCK))
    several = several if several.stride(2) == 1 else several.contiguous()
    blocks: Tensor = torch.linalg.vector_norm(several, dim=2)
    return torch.cat([blocks, rows[:, whole:]], dim=1) if whole < rows.shape[1] else blocks
