"""Matrices of experts that are products of smaller ones, W + A B: their gradients, without those of W.

LoRA of experts computes each expert's matrix so. Its gradient, for each example, would be as large as all experts are;
those of A and B are sums over positions too, of rows that were multiplied with the other of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.per_example.gram import Dense, Side
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.routed import Routed
from hf_dp.per_example.watched import Source, WatchedParameter, plain


class Summand(NamedTuple):
    """What a matrix is computed from, and what its gradients (of a position each) become there."""

    source: Source
    passed: Callable[[Routed], Routed]


def summands_of(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Summand] | None:
    """Those of `torch.baddbmm(W, A, B, alpha=...)` with W (E, p, d), A (E, p, r) and B (E, r, d).

    Returns:
        None of any other function, and where W is one for all experts.
    """
    if function is not torch.baddbmm or len(args) != 3 or not kwargs.keys() <= {"alpha", "beta"}:
        return None
    whole, left, right = args
    if plain(whole).shape != (*plain(left).shape[:2], plain(right).shape[2]):
        return None
    alpha, beta = (float(plain(kwargs.get(name, 1))) for name in ("alpha", "beta"))
    passed = (
        (whole, lambda routed: routed.scaled(beta)),
        (left, lambda routed: replace(routed, right=_times(routed, routed.right, plain(right).mT)).scaled(alpha)),
        (right, lambda routed: replace(routed, left=_times(routed, routed.left, plain(left))).scaled(alpha)),
    )
    return [Summand(each.source, hand) for each, hand in passed if isinstance(each, WatchedParameter)]


def _times(routed: Routed, side: Side, matrices: Tensor) -> Dense:
    """The rows (B, T, n) of a side, each multiplied with its expert's of `matrices` (E, n, m)."""
    rows, matrices = accumulation(side.tensor.flatten(0, 1)), accumulation(matrices)
    found = rows.new_empty(len(rows), matrices.shape[2])
    for matrix, places in zip(matrices, routed.places(), strict=True):
        if len(places):
            found[places] = rows[places] @ matrix
    return Dense(found.view(*routed.ids.shape, -1))
