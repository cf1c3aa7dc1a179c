"""For the check before the first step: rows that show what rows can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.data.extremes import Extremes
from hf_dp.data.lengths import length, length_of
from hf_dp.data.widths import Between, Measure, Widths, by_width
from hf_dp.per_example.batch import Batch, take
from hf_dp.per_example.checks.independence import different_pair

_ROWS, _KEPT, _FEW_TOKENS = 32, 5, 12


def telling_rows(dataset: Any, measure: Measure) -> tuple[list[Any], list[Any]]:
    """About five rows from all over `dataset`, the narrowest first; data that is sorted begins with many alike.

    Args:
        measure: see `by_width`. Rows that it fails on come first; what they do is for others to say.

    Returns:
        These rows, and all that they were chosen from.
    """

    def tried(row: Any) -> Widths:
        try:
            return measure(row)
        except Exception:  # noqa: BLE001
            return {}

    rows, ends = by_width([dataset[i] for i in _spread(len(dataset), _ROWS)], tried)
    return [rows[i] for i in sorted({*ends, *range(0, len(rows), max(1, len(rows) // _KEPT))})], rows


def _spread(n: int, count: int) -> list[int]:
    return list(range(n)) if n <= count else [i * (n - 1) // (count - 1) for i in range(count)]


def uneven_rows(dataset: Any, extremes: Extremes, few: Sequence[Any]) -> list[Any]:
    """Rows that are known to be narrow or wide, which show whether padding leaks from one into another.

    Args:
        few: see `telling_rows`.
    """
    return [*few, *(dataset[i] for i in sorted({*extremes.rows, *extremes.uneven}))]


def rows_beyond(few: Sequence[Any], known: Sequence[Any], measure: Measure) -> list[Any]:
    """The first and the last of `few` where they are narrower or wider than all that is `known`, or the collator fails
    on them; all of `few` where nothing is known.

    Args:
        few: see `telling_rows`.
        known: rows that columns tell of.
        measure: see `by_width`.
    """

    def is_within(row: Any) -> bool:
        try:
            return Between(map(measure, known)).holds(measure(row))
        except Exception:  # noqa: BLE001 - it is tried, and then its error is told
            return False

    return [row for row in (few[0], few[-1]) if not is_within(row)] if known else list(few)


def alike_batches(few: Sequence[Any], batch: Callable[[list[Any]], Batch]) -> tuple[Batch, Batch, Batch]:
    """Two rows in batches of one shape with other content, if there are such, and all of `few` together.

    They are the first, and the narrowest that differs from it in as many columns as any does.

    Args:
        batch: list of rows -> batch.
    """
    together = batch(list(few))
    columns = [value for value in together.values() if isinstance(value, Tensor)]
    differing = [sum(not torch.equal(column[0], column[i]) for column in columns) for i in range(len(few))]
    pair = batch([few[0], few[differing.index(max(differing))]])
    return take(pair, [0]), take(pair, [1]), together


def short_rows(few: Sequence[Any], batch: Callable[[list[Any]], Batch], loss: Callable[[Batch], Tensor]) -> list[Any]:
    """`few`, cut short, on which the engine is compared with the oracle in a fraction of the time.

    All of their lists are cut, or else the longest alone; none where what is left does not go through, or shows less:
    no loss, or no two rows that differ.

    Args:
        batch: list of rows -> batch.
        loss: (B,) of a batch.
    """
    tried: list[Any] = []
    for longest_alone in (False, True):
        cut = [_cut(row, _FEW_TOKENS, longest_alone=longest_alone) for row in few]
        if all(map(is_same, cut, tried or few)):
            continue
        try:
            together = batch(tried := cut)
            losses = loss(together).detach()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001
            continue
        if bool((losses.isfinite() & losses.ne(0)).all()) and different_pair(together) is not None:
            return cut
    return list(few)


def _cut(row: Any, kept: int, *, longest_alone: bool) -> Any:
    """`row` with `kept` elements, from both ends, of each list that has more, or of the longest of them alone."""
    longest = length(row)
    if longest <= kept:
        return row

    def ends(value: Any) -> Any:
        whole = length_of(value)
        is_kept = whole <= kept or (longest_alone and whole != longest)
        if is_kept or getattr(value, "ndim", 1) > 1:
            return value
        first, last = value[: kept - kept // 2], value[whole - kept // 2 :]
        if isinstance(value, Tensor):
            return torch.cat([first, last])
        return np.concatenate([first, last]) if isinstance(value, np.ndarray) else first + last

    return {name: ends(value) for name, value in row.items()}


def is_same(row: Any, other: Any) -> bool:
    """Whether two rows are known to hold the same."""
    if row is other:
        return True
    try:
        return bool(row == other) and repr(row) == repr(other)  # 1 is True otherwise
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays
        return False
