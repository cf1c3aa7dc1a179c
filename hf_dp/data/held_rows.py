"""For the check before the first step: which rows are held against which, by their widths and by what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hf_dp.data.lengths import columns_of
from hf_dp.data.outlying_rows import outlying_rows
from hf_dp.data.widths import Measure, Widths, by_width, outermost

_IN_FOURS, _BETWEEN = 4, 2
_OF_EACH_COLUMN, _AT_MOST = 3, 8
# Rows may be long.
_AT_ONCE = 2


def rare_rows(dataset: Any) -> list[Any]:
    """Of a loader's dataset the rows with what stands out among broken numbers."""
    return [dataset[i] for i in outlying_rows(dataset.dataset)[:_AT_MOST]]


def hold(
    uneven: Sequence[Any],
    others: Sequence[Any],
    measure: Measure,
    compare: Callable[[list[Any], int], list[float]],
    rare: Sequence[Any] = (),
) -> list[Any]:
    """The narrowest and the widest rows are held against each other, those between against wider ones, one against rows
    with other labels, and each of `rare` against these.

    Args:
        uneven: rows that are known to be narrow or wide; all may be held against others, and these first.
        others: more rows.
        measure: see `by_width`.
        compare: holds the first so many of some rows against all of them, and says how long the gradients of these are.
        rare: rows of any widths.

    Returns:
        Of `uneven` the ends that add something; none where none does.
    """
    norms: dict[int, float] = {}

    def held(rows: list[Any]) -> None:
        norms.update(zip(map(id, rows), compare(rows, len(rows)), strict=True))

    def adds(row: Any) -> bool:
        if id(row) not in norms:
            held([row])
        return 0 < norms[id(row)] < float("inf")

    held(beside := outermost(uneven, measure))
    ends = _ends_that_add(uneven, measure, adds)
    compared = outermost(uneven, measure, ends)
    if {*map(id, compared)} != {*map(id, beside)}:
        held(compared)
    if between := _rows_between([*uneven, *others], measure, compared):
        # The last is beside the others, as wide as it is alone: what narrower rows do to a wide one is known.
        compare(between, len(between) - 1)
    labelled = _rows_with_other_numbers(ends[0], by_width([*uneven, *others], measure)[0]) if ends else []
    for start in range(0, len(labelled), _AT_ONCE):
        compare([ends[0], *labelled[start : start + _AT_ONCE]], 1)
    for row in rare:  # what it lacks may be taken from others
        compare([row, *beside, *others[:_AT_ONCE]], 1)
    return ends


def _ends_that_add(rows: Sequence[Any], measure: Measure, adds: Callable[[Any], bool]) -> list[Any]:
    """The narrowest and the widest of those rows that add something, in each axis; none where none does.

    Whether others move those that add nothing (no label) is not seen.

    Args:
        measure: see `by_width`.
        adds: whether a row has a gradient. It is asked of few: the ends, and what is next to those that have none.
    """
    left = list(rows)
    while left:
        ends = outermost(left, measure)
        silent = {id(row) for row in ends if not adds(row)}
        if not silent:
            return ends
        left = [row for row in left if id(row) not in silent]
    return []


def _rows_between(rows: Sequence[Any], measure: Measure, held: Sequence[Any]) -> list[Any]:
    """Of `rows` some with widths that leave another rest by four than those that were `held`, each beside a wider one.

    A model that takes positions in fours (CANINE) does with padding what lengths decide that `held` need not have.

    Args:
        measure: see `by_width`.
        held: of `rows`, the narrowest first, against one another.

    Returns:
        The narrowest first; none where there are no such rows.
    """
    in_order, _ = by_width(rows, measure)
    widths = [measure(row) for row in in_order]
    sizes = [sum(width.values()) for width in widths]

    def rest(width: Widths) -> frozenset[tuple[tuple[str, int], int]]:
        return frozenset((name, n % _IN_FOURS) for name, n in width.items())

    # Axis by axis: of inputs and labels together there are too many rests to try them all.
    known, found = set[tuple[tuple[str, int], int]]().union(*(rest(measure(row)) for row in held[:-1])), set[int]()
    narrower = [place for place, size in enumerate(sizes) if size < sizes[-1]]
    for _ in range(_BETWEEN if narrower else 0):
        if new := rest(widths[telling := max(narrower, key=lambda place: len(rest(widths[place]) - known))]) - known:
            found, known = found | {telling}, known | new
    if not found:
        return []
    # Beside it whatever is taken in fours is another.
    more = {name: n + _IN_FOURS for name, n in widths[max(found)].items()}
    wider = (place for place, width in enumerate(widths) if any(width.get(name, 0) >= n for name, n in more.items()))
    return [in_order[place] for place in (*sorted(found), next(wider, len(in_order) - 1))]


def _rows_with_other_numbers(row: Any, rows: Sequence[Any]) -> list[Any]:
    """Of `rows` some with other whole numbers than `row`, where a column has one in each (a label).

    Of each column those with the least and the greatest number, and the first with others.
    """
    told = [(_numbers(other), other) for other in rows]
    columns: list[dict[int, Any]] = []
    for name, own in _numbers(row).items():
        having: dict[int, Any] = {}
        for numbers, other in told:
            if (number := numbers.get(name, own)) != own:
                having.setdefault(number, other)
        columns.append(having)
    found: list[Any] = []
    for having in sorted(filter(None, columns), key=len):  # a label has fewer than a number of the row
        ends = [min(having), max(having)]
        for other in [having[number] for number in dict.fromkeys([*ends, *having])][:_OF_EACH_COLUMN]:
            found += [other] if all(other is not one for one in found) else []
    return found[:_AT_MOST]


def _numbers(row: Any) -> dict[Any, int]:
    return {name: int(value) for name, value in columns_of(row) or () if _is_whole_number(value)}


def _is_whole_number(value: Any) -> bool:
    """Whether it is one, of whatever library."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, (int, np.integer, np.bool_))
