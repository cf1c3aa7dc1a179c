"""For the check before the first step: rows that show what rows can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.extremes import Extremes
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.independence import different_pair
from hf_dp.sampling import length, length_of

_ROWS = 32
_KEPT = 5
# As short as a row is made: what has a threshold in the length (block-sparse attention, say) is below it then.
_SHORT = 4
_FEW_TOKENS = 16


def telling_rows(dataset: Any) -> list[Any]:
    """About five rows from all over `dataset`, the shortest first; data that is sorted begins with many alike."""
    rows = sorted((dataset[i] for i in _spread(len(dataset), _ROWS)), key=length)
    middle = rows[:: max(1, len(rows) // _KEPT)]
    return middle if length(middle[-1]) == length(rows[-1]) else [*middle, rows[-1]]


def _spread(n: int, count: int) -> list[int]:
    return list(range(n)) if n <= count else [i * (n - 1) // (count - 1) for i in range(count)]


def uneven_rows(dataset: Any, extremes: Extremes, few: Sequence[Any], run: Callable[[list[Any]], object]) -> list[Any]:
    """Rows of different lengths, the shortest first, which show whether padding leaks from one into another.

    Where all lengths are known, the shortest and the longest of `dataset`. Where they are not, two of `few`, and what
    is left of one when a piece is cut out of its middle: even if rows that were looked at are all of one length, others
    need not be. Nothing is cut out of rows that were padded to one length before, as their masks show.

    Args:
        few: see `telling_rows`.
        run: takes several rows through the collator and the model. What was cut and cannot go through is left out.
    """
    if extremes.is_complete:
        return [dataset[i] for i in extremes.uneven] or list(few[:2])
    rows = [few[0], few[-1]] if len(few) > 1 else list(few)
    if length(rows[0]) == length(rows[-1]) and any(_is_padded(row) for row in few):
        return rows
    made = []
    for kept in (_SHORT, length(rows[-1]) // 2):
        row = _cut(rows[-1], kept)
        try:
            assert row is not None
            run([row])
            run([row, rows[-1]])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001
            continue
        made.append(row)
    return sorted([*made, *rows], key=length)


def short_rows(few: Sequence[Any], batch: Callable[[list[Any]], Batch], loss: Callable[[Batch], Tensor]) -> list[Any]:
    """`few`, cut short, on which the engine is compared with the oracle in a fraction of the time.

    As they are where what is left does not go through, or shows less: no loss, or no two rows that differ.

    Args:
        batch: list of rows -> batch.
        loss: (B,) of a batch.
    """
    cut = [_cut(row, _FEW_TOKENS) or row for row in few]
    try:
        together = batch(cut)
        losses = loss(together).detach()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001
        return list(few)
    is_telling = bool((losses.isfinite() & losses.ne(0)).all()) and different_pair(together) is not None
    return cut if is_telling else list(few)


def _is_padded(row: Any) -> bool:
    mask = row.get("attention_mask") if isinstance(row, Mapping) else None
    return mask is not None and not np.asarray(mask).all()


def _cut(row: Any, kept: int) -> Any:
    """`row` with `kept` elements, from both ends, of each of its longest lists; None if there are not more."""
    whole = length(row)
    if kept < 2 or whole <= kept:
        return None

    def ends(value: Any) -> Any:
        if length_of(value) != whole or getattr(value, "ndim", 1) > 1:
            return value
        first, last = value[: kept - kept // 2], value[whole - kept // 2 :]
        if isinstance(value, Tensor):
            return torch.cat([first, last])
        return np.concatenate([first, last]) if isinstance(value, np.ndarray) else first + last

    return {name: ends(value) for name, value in row.items()}


def refuse_rows_that_fail(dataset: Any, extremes: list[int], few: list[Any], run: Callable[[Any], object]) -> None:
    """Refuses training data of which some row would stop the training, after it has spent budget.

    Args:
        dataset: of which the `extremes` are tried.
        extremes: see `hf_dp.extremes`.
        few: rows that are tried as well; see `telling_rows`.
        run: takes one row through the collator and the model, to its loss.

    Raises:
        ConfigurationError: with the error that the row made.
    """
    tried = [(f"row {i} of the training data", dataset[i]) for i in extremes]
    for name, row in [*tried, *(("a row of the training data", row) for row in few)]:
        try:
            loss = run(row)
            if isinstance(loss, Tensor):
                # An accelerator tells of an index out of range only when it is asked for a number.
                loss.sum().item()
        except (HfDpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{name} does not go through the collator and the model ({type(error).__name__}: {error}).",
                why="the training would stop where it is drawn, and what was spent until then would be lost.",
                fix="correct the row or leave it out: token ids are below the size of the vocabulary, labels are below "
                "num_labels, and texts have no more tokens than the model has positions (truncation=True). If any row "
                "fails, the collator, model or adapter does not take one by itself; micro-batches of one occur.",
            ) from error
