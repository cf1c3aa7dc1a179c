"""Gradients of the engine, compared with those of the oracle: norms, and sums parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.errors import PreflightError
from hf_dp.per_example.oracle import Truth
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rows import RowSum
from hf_dp.per_example.sharding import as_sums

_EXACTNESS_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2
# Of a square, relative to all squares.
_ROUNDING = 1e-12
_CHUNK = 1 << 20


def compare(
    engine: PerExampleGradients,
    oracle: Truth,
    weights: Tensor,
    scales: Tensor,
    dtypes: Set[torch.dtype],
    parameters: Mapping[str, Tensor],
) -> None:
    """Refuses what is off by more than rounding in the coarsest of `dtypes`.

    Args:
        weights: (B,), of the sums.
        scales: (B,), by which the losses of the engine were multiplied.

    Raises:
        PreflightError: with the parameter.
    """
    tolerance = max(_EXACTNESS_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) for dtype in dtypes)
    # An example whose own gradient is not finite contributes nothing; it must be the same ones for both.
    finite = oracle.norms.isfinite()
    if not bool((finite & oracle.norms.ne(0)).any()):
        found = " and ".join(sorted({str(norm) for norm in oracle.norms.tolist()}))
        raise PreflightError(
            f"the gradients of {len(finite)} examples have no norm but {found}.",
            why="there is nothing to compare, and where no example has a gradient, budget is spent on noise alone.",
            fix="look at the losses of single examples: are there labels (not all -100), is everything finite?",
        )
    scales = scales.to(weights)
    unscaled = engine.squared_norms().double() / scales.square()
    squares, true_norms = (n.where(finite, 0) for n in (unscaled, oracle.norms))
    # Of a gradient that is nothing, the terms of the square cancel but for rounding, of which the root is no rounding.
    is_same = (squares - true_norms.square()).abs() <= _ROUNDING * true_norms.square().sum()
    found_norms = true_norms.where(is_same, squares.sqrt())
    ours, rows = engine.zeros(besides=oracle.rows), {name: RowSum(name, parameters[name]) for name in oracle.rows}
    engine.add_weighted_sum_(as_sums(ours, parameters), (weights / scales).where(finite, 0), rows)
    truth = {**oracle.sums, **{name: sums.coalesced()[1] for name, sums in oracle.rows.items()}}
    sizes = {name: _norm(expected, parameters[name]) for name, expected in truth.items()}
    whole = math.hypot(*sizes.values())
    checks = [("the norms", _norm(found_norms - true_norms), _norm(true_norms))]
    for name, expected in truth.items():
        if name in rows:
            rows[name].sub_(oracle.rows[name])
            difference = rows[name].coalesced()[1]
        else:
            # All ranks gave the same examples.
            ours[name] /= ranks.world_size() if isinstance(parameters[name], DTensor) else 1
            difference = ours[name].sub_(expected)
        checks.append((name, _norm(difference, parameters[name]), max(sizes[name], 0.1 * whole)))
    for name, error, scale in checks:
        if not error <= tolerance * scale + 1e-12:
            raise PreflightError(
                f"per-example gradients of {name} are off by {error:.2g} where the oracle's have norm {scale:.2g}.",
                why="clipping would act on wrong norms, so the noise would not cover an example's influence.",
                fix="freeze this parameter, and please report the model: a rule is wrong, or its own rounding is that "
                "coarse.",
            )


def _norm(values: Tensor, parameter: Tensor | None = None) -> float:
    """In float64, without a copy of all values; over all shards, if the parameter has shards."""
    square = sum(float(part.double().square().sum()) for part in values.reshape(-1).split(_CHUNK))
    return math.sqrt(float(ranks.gathered([square]).sum()) if isinstance(parameter, DTensor) else square)
