"""For the check before the first step: rows that show what rows can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.data.extremes import Extremes, empty_rows
from hf_dp.data.lengths import length, length_of
from hf_dp.data.widths import Measure, Widths, by_width, outermost
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.figures import row_in_words
from hf_dp.launched import of_the_backend
from hf_dp.per_example.batch import Batch, take
from hf_dp.per_example.independence import different_pair

_ROWS, _KEPT, _FEW_TOKENS = 32, 5, 12
_IN_FOURS, _BETWEEN = 4, 2
_TOO_LITTLE = (
    "The check before the first step takes a few rows, the longest among them, at once and in float32; no budget was "
    "spent. Cut rows shorter (max_length), train fewer parameters (LoRA), or take an accelerator with more memory."
)


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
            sizes = [measure(one) for one in known]
            return all(
                min(size.get(name, n + 1) for size in sizes) <= n <= max(size.get(name, 0) for size in sizes)
                for name, n in measure(row).items()
            )
        except Exception:  # noqa: BLE001 - it is tried, and then its error is told
            return False

    return [row for row in (few[0], few[-1]) if not is_within(row)] if known else list(few)


def ends_that_add(rows: Sequence[Any], measure: Measure, adds: Callable[[Any], bool]) -> list[Any]:
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


def rows_between(rows: Sequence[Any], measure: Measure, held: Sequence[Any]) -> list[Any]:
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
        if all(map(_is_same, cut, tried or few)):
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


def _is_same(row: Any, other: Any) -> bool:
    """Whether two rows are known to hold the same."""
    if row is other:
        return True
    try:
        return bool(row == other) and repr(row) == repr(other)  # 1 is True otherwise
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays
        return False


def refuse_rows_that_fail(dataset: Any, extremes: list[int], few: list[Any], run: Callable[[Any], object]) -> None:
    """Refuses training data of which some row would stop the training, after it has spent budget.

    Args:
        dataset: of which the `extremes` are tried.
        extremes: see `hf_dp.data.extremes`.
        few: rows that are tried as well; see `telling_rows`.
        run: takes one row through the collator and the model, to its loss.

    Raises:
        ConfigurationError: with the error that the row made.
    """
    tried = [(f"{row_in_words(i)} of the training data", dataset[i]) for i in extremes]
    gone: list[Any] = []
    for name, row in [*tried, *(("a row of the training data", row) for row in few)]:
        if any(_is_same(row, one) for one in gone):
            continue
        gone.append(row)
        try:
            loss = run(row)
            if isinstance(loss, Tensor):
                # An accelerator tells of an index out of range only when it is asked for a number.
                loss.sum().item()
        except (HfDpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = f"does not go through the collator and the model ({type(error).__name__}: {error})"
            why = "the training would stop where it is drawn, and what was spent until then would be lost."
            if (found := _nothing_in(row, dataset)) is not None:
                column, number = found
                more = "" if number is None else f" ({number} such row{'s' * (number != 1)})"
                raise ConfigurationError(
                    f"{name} has nothing in its column {column!r}{more}, and {failed}.",
                    why=why,
                    fix="leave out the rows that are empty, before or after they are tokenized, for example "
                    f"dataset.filter(lambda row: len(row[{column!r}]) > 0); or give each a token, such as the end of a "
                    "text.",
                ) from error
            if isinstance(error, KeyError):
                raise ConfigurationError(
                    f"{name} {failed}.",
                    why=why,
                    fix="give the dataset that column; if it has it, TrainingArguments(remove_unused_columns=False): "
                    "Trainer drops what the model's forward does not name, and a collator or loss of your own may "
                    "need it.",
                ) from error
            raise ConfigurationError(
                f"{name} {failed}.",
                why=why,
                fix="correct the row or leave it out: token ids are below the size of the vocabulary, labels of "
                "classes whole numbers below num_labels (True and 1.0 are none), and texts have no more tokens than "
                "the model has positions (truncation=True). If any row fails, the collator, model or adapter does not "
                "take one by itself; micro-batches of one occur.",
            ) from error


@contextmanager
def failures_refused() -> Iterator[None]:
    """What fails inside with an error of the model's, the loss's or the collator's own is refused.

    Raises:
        ConfigurationError: with that error, unless it is of memory, or of another rank.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(_TOO_LITTLE)
        raise
    except (HfDpError, MemoryError):
        raise
    except Exception as error:
        if of_the_backend(error):
            raise
        raise ConfigurationError(
            f"the check before the first step failed in the model, its loss or the collator ({type(error).__name__}: "
            f"{error}).",
            why="it takes rows of all kinds through them, by themselves and together, as training does, which would "
            "stop at such a batch and lose what was spent until then.",
            fix="if some rows have what others lack, such as a picture, give it to all, or train on rows of one kind; "
            "of a model in few bits quantise weights alone, not activations. Else the traceback says where.",
        ) from error


def _nothing_in(row: Any, dataset: Any) -> tuple[str, int | None] | None:
    """A column in which a row has nothing, and others have something; and how many rows have nothing there."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        # A number in a tensor or an array has no length either.
        if isinstance(value, Sized) and getattr(value, "shape", None) != () and not length_of(value):
            number = empty_rows(getattr(dataset, "dataset", dataset), str(name))
            if number != len(dataset):
                return str(name), number
    return None
