"""One row for each pair: two answers to one prompt are one example, and are clipped as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_TWO = 2


@dataclass(frozen=True)
class PairCollator:
    """Gives tensors (B, 2, ...), of a collator that puts the first answers of B pairs before the second: (2 B, ...).

    Tensors (B, ...) stay as they are.
    """

    data_collator: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, examples: list[Any]) -> Any:
        """One batch; what is no mapping is for others to refuse."""
        batch = self.data_collator(examples)
        if not isinstance(batch, Mapping):
            return batch
        rows = _TWO * len(examples)

        def paired(value: Any) -> Any:
            if not (isinstance(value, Tensor) and value.shape[:1] == (rows,)):
                return value
            return value.unflatten(0, (_TWO, len(examples))).transpose(0, 1).contiguous()

        return {name: paired(value) for name, value in batch.items()}


def rows_of_pairs(batch: Mapping[str, Any], *, firsts_first: bool = False) -> dict[str, Any]:
    """Tensors (2 B, ...) of those (B, 2, ...): the two rows of a pair one after another, as the engine reads them.

    Args:
        firsts_first: the first rows of all pairs before the second ones, as the collator had put them.
    """

    def rows(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == _TWO):
            return value
        return (value.transpose(0, 1) if firsts_first else value).flatten(0, 1)

    return {name: rows(value) for name, value in batch.items()}


def both(values: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) of the first and of the second rows, of (2 B,) in the order of the engine."""
    first, second = values.unflatten(0, (-1, _TWO)).unbind(1)
    return first, second
