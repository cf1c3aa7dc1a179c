"""How wide a collator makes rows: what may change the gradients of others, whatever the rows were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Of each axis after the first of each tensor, under the tensor's name and the number of the axis; under `_TOLD` how
# much a mask shows of a row, or how far positions go: where all rows are of one width, models can still read it there;
# under `_LEAST` how much of the row of which it shows the least,
# under `_BEGINS` whether it hides a beginning, and under `_HOLES` how much at once of what lies between others.
Widths = dict[tuple[str, int], int]
Measure = Callable[[Any], Widths]
_TOLD, _BEGINS, _HOLES, _LEAST = -1, -2, -3, -4


def widths_of(batch: Mapping[str, Any]) -> Widths:
    """Of what a collator made of one row or several."""
    found: Widths = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            found.update({(name, axis): n for axis, n in enumerate(value.shape[1:])})
            if value.dim() in (2, 3) and value.numel() and name.endswith("mask"):
                shown = value.ne(0)
                # Of most rows by themselves a mask shows all, which is found out sooner.
                told = (value.shape[-1], value.shape[-1], 0, 0) if bool(shown.all()) else _told(shown)
                keys = (_TOLD, _LEAST, _BEGINS, _HOLES) if value.dim() == 2 else (_TOLD, _LEAST)
                found.update({(name, key): n for key, n in zip(keys, told, strict=False)})
            elif value.dim() == 2 and value.numel() and name.endswith("position_ids"):
                found[name, _TOLD] = int(value.max())
    return found


def _told(shown: Tensor) -> tuple[int, int, int, int]:
    """Of a mask ([B,] R, T): how much it shows of a row at most, and at least; of one (B, T), whether it hides a
    beginning, and how much at once of what lies between."""
    numbers = shown.sum(-1)
    most, least = int(numbers.max()), int(numbers.min())
    if shown.dim() > 2:
        return most, least, 0, 0
    return most, least, int((shown.any(1) & ~shown[:, 0]).any()), _longest_hole(shown)


def _longest_hole(shown: Tensor) -> int:
    """How many positions in a row (B, T) are hidden between two that are shown, at most."""
    places = torch.arange(shown.shape[1], device=shown.device).expand(shown.shape)
    # Of each position the last before it that is shown, or itself.
    last = places.where(shown, -1).cummax(1).values[:, :-1]
    gaps = (places[:, 1:] - last - 1).where(shown[:, 1:] & last.ge(0), 0)
    return int(gaps.max()) if gaps.numel() else 0


def by_width(rows: Sequence[Any], measure: Measure) -> tuple[list[Any], list[int]]:
    """Rows, the narrowest first, and the places of the first, the last, and the least and the greatest of each axis.

    Args:
        measure: the widths of a row that is collated by itself.
    """
    measured = sorted(((row, measure(row)) for row in rows), key=lambda pair: sum(pair[1].values()))
    places = range(len(measured))
    ends = {*places[:1], *places[-1:]}
    for name in {name for _, widths in measured for name in widths}:
        sizes = [widths.get(name, 0) for _, widths in measured]
        # The first of the least and the last of the greatest: where all axes grow together, these are two rows.
        ends |= {min(places, key=sizes.__getitem__), max(reversed(places), key=sizes.__getitem__)}
    return [row for row, _ in measured], sorted(ends)


def outermost(rows: Sequence[Any], measure: Measure, always: Sequence[Any] = ()) -> list[Any]:
    """The narrowest and the widest of `rows`, in each axis, the narrowest first; two of them where all are alike.

    Args:
        always: of `rows`, which are among them in any case.
    """
    in_order, ends = by_width(rows, measure)
    kept = set(map(id, always))
    return [row for i, row in enumerate(in_order) if i in ends or id(row) in kept]


class Between:
    """The least and the most of each of some widths."""

    def __init__(self, seen: Iterable[Widths] = ()) -> None:
        self._least: Widths = {}
        self._most: Widths = {}
        for widths in seen:
            self.note(widths)

    def note(self, widths: Widths) -> None:
        for name, n in widths.items():
            self._least[name] = min(n, self._least.get(name, n))
            self._most[name] = max(n, self._most.get(name, n))

    def holds(self, widths: Widths) -> bool:
        return all(self._least.get(name, n + 1) <= n <= self._most[name] for name, n in widths.items())


class Checked:
    """The widths between which rows were held against one another (see `check_padding`).

    Args:
        rows: at least one, which were.
        measure: see `by_width`.
        always: of `rows`, which all others are held against: they add something, which later rows may not.
    """

    def __init__(self, rows: Sequence[Any], measure: Measure, always: Sequence[Any] = ()) -> None:
        self._between = Between()
        self._always = always
        self._rows = self._widened(rows, measure)

    def beyond(self, rows: Sequence[Any], batch: Mapping[str, Any], measure: Measure) -> list[Any]:
        """Rows to hold against one another now, the narrowest first; none where `batch` is as wide as others were.

        Args:
            rows: of one micro-batch.
            batch: what the collator made of them.
        """
        found = widths_of(batch)
        if self._between.holds(found):
            return []
        others = (
            row for row in (*self._rows, *outermost(rows, measure)) if all(row is not one for one in self._always)
        )
        compared = outermost([*self._always, *others], measure, self._always)
        self._between.note(found)
        self._rows = self._widened(compared, measure)
        return compared

    def _widened(self, rows: Sequence[Any], measure: Measure) -> list[Any]:
        """Notes the widths of `rows`; the narrowest and the widest, which later ones are held against."""
        for row in rows:
            self._between.note(measure(row))
        in_order, _ = by_width(rows, measure)
        return [in_order[0], in_order[-1]]
