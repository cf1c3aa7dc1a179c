"""How a logical batch is cut: by rows, by tokens, so that a long row does not decide the memory of all, and by units.

Whatever the cut, the drawn examples are the same, and so is the sum of their clipped gradients, up to rounding: none of
them depends on which others share its micro-batch. So the cut is no part of the promise; but in 16 bits rounding is
much, and follows from how wide a micro-batch is (docs/proof.md), so that those of one width can be kept together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hf_dp.config.ranges import is_count, shown
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.batch import batch_size, take
from hf_dp.units.packing import Owners, Size, packed

Part = tuple[list[Any], Mapping[str, Any]]
Collate = Callable[[list[Any]], Mapping[str, Any]]


def by_rows(rows: list[Any], size: int, collate: Collate) -> Iterator[Part]:
    """At most `size` rows at a time, in order, and what the collator makes of them."""
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield part, collate(part)


def by_tokens(
    rows: list[Any], size: int, most: int, collate: Collate, alone: Callable[[Any], Mapping[str, Any]]
) -> Iterator[Part]:
    """At most `size` rows and `most` tokens, padding included, at a time; a row with more is by itself. Each with the
    rows that it was collated among.

    From the last row on, as many as fit if none is wider. Where one is, the batch is cut once more as it is: to collate
    its rows again would choose, by which rows are beside it, among the random choices that are made for an example.

    Args:
        rows: the widest last, as far as that is known.
        alone: what the collator makes of a copy of one row.
    """
    rest = list(rows)
    while rest:
        fitting = min(size, max(1, most // tokens_across(alone(rest[-1]))))
        few = rest[-fitting:]
        del rest[-fitting:]
        batch = collate(few)
        fitting = max(1, most // tokens_across(batch))
        if len(few) <= fitting:
            yield few, batch
            continue
        for start in range(0, len(few), fitting):
            places = range(start, min(start + fitting, len(few)))
            yield few, take(batch, places)  # as wide as all of these together


def by_units(
    units: list[list[Any]],
    size: int,
    most: int | None,
    collate: Collate,
    alone: Callable[[Any], Mapping[str, Any]],
    length: Callable[[Any], int],
) -> Iterator[tuple[Part, Owners]]:
    """Units whole in one micro-batch of at most so many rows and tokens; one that is larger, which depends on its own
    rows, in several of its own. Each with whose its rows are.

    Args:
        units: the rows of each, those with the most last.
        most: see `by_tokens`; None: any number.
        length: of a row, roughly.
    """

    def fits(found: Size) -> bool:
        return found.rows <= size and (most is None or found.rows == 1 or found.rows * found.width <= most)

    sizes = [Size(len(rows), 0 if most is None else tokens_across(alone(max(rows, key=length)))) for rows in units]
    for part in packed(sizes, fits):
        few = units[part.start : part.stop]
        if not fits(sizes[part.start]):
            rows = sorted(few[0], key=length)
            cut = by_rows(rows, size, collate) if most is None else by_tokens(rows, size, most, collate, alone)
            yield from _of_one(cut, len(rows))
            continue
        rows = [row for unit in few for row in unit]
        batch = collate(rows)
        width = 0 if most is None else tokens_across(batch)
        if fits(Size(len(rows), width)):
            yield (rows, batch), Owners([place for place, unit in enumerate(few) for _ in unit])
            continue
        # Wider than it seemed: cut as it is, each unit by itself. See `by_tokens`.
        start, fitting = 0, max(1, (most or 0) // width)
        for unit in few:
            places = range(start, start := start + len(unit))
            yield from _of_one(
                ((rows, take(batch, places[i : i + fitting])) for i in range(0, len(unit), fitting)), len(unit)
            )


def _of_one(parts: Iterable[Part], rows: int) -> Iterator[tuple[Part, Owners]]:
    """Parts of one unit with so many rows."""
    before = 0
    for few, batch in parts:
        count = batch_size(batch)
        yield (few, batch), Owners([0] * count, before, rows - before - count)
        before += count


def tokens_across(batch: Mapping[str, Any]) -> int:
    """How many tokens a row of a collated batch has, padding included: by the longest of its tensors (rows, tokens), or
    (rows, texts, tokens) where a row has several texts.

    Raises:
        ConfigurationError: it has no such tensor.
    """
    given = [value for value in batch.values() if isinstance(value, Tensor)]
    texts = [value for value in given if value.dim() == 3 and not value.is_floating_point()]
    found = [*(value.shape[1] for value in given if value.dim() == 2), *(v.shape[1] * v.shape[2] for v in texts)]
    if not found:
        raise ConfigurationError(
            "max_tokens_per_micro_batch, and a collator that returns no tensor of shape (examples, tokens).",
            why="there are no tokens to count, and nothing would keep the cap.",
            fix="leave it out: rows of one size are cut by the number of examples alone.",
        )
    return max(1, *found)


def check_max_tokens(value: object) -> None:
    """Refuses what is no number of tokens, nor None (`ConfigurationError`)."""
    if value is not None and not is_count(value, at_least=1):
        raise ConfigurationError(
            f"max_tokens_per_micro_batch={shown(value)}.",
            why="it is how many tokens, padding included, a micro-batch may have.",
            fix="give a whole number of at least 1, or leave it out to cut by the number of examples alone.",
        )
