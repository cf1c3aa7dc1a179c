"""Copies of parameters, one for each row: what makes them sees their number alone, and not which rows these are.

That is seen where they meet some; of picked rows there may be as many as examples, and not one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.rule import INFERRED, Use, refusal
from hf_dp.per_example.watched import tensors_in


class Copy(NamedTuple):
    """What was copied for how many rows, and by which operation."""

    operation: str
    parameters: list[str]
    rows: int


class RowCopies:
    """Follows copies until they meet data.

    Args:
        inferred: gets the uses that were found to be right beside picked rows, as they must be in each step.
    """

    def __init__(self, inferred: set[Use]) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        self._inferred = inferred

    def note(self, made: Tensor, copy: Copy) -> None:
        """Takes note of copies."""
        self._copies[made] = copy

    def meet(self, given: Iterable[Tensor], known: Sequence[bool], by: str | None = None) -> None:
        """Takes note of what an operation is given.

        Args:
            known: of those that follow from picked rows, as many as examples, whether they are one of each, in order.
            by: which operation picked others, maybe more of some examples than of others.

        Raises:
            UnsupportedModelError: they are not, and some of what is given are copies.
        """
        if not (known or by) or not len(self._copies):
            return
        for copy in (self._copies[one] for one in given if one in self._copies):
            if not all(known) or (by and not known):
                what = f"operation {copy.operation} to {copy.rows} rows"
                reason = "these go with rows that were picked, and are not one of each example, in order"
                if by and all(known):
                    reason = f"they may be packed: {by}() picked the rows beside them, maybe more of some examples"
                raise refusal(copy.parameters, what, reason)
            self._inferred.update(Use(copy.operation, name, INFERRED, 0) for name in copy.parameters)

    def follow(self, given: list[Tensor], output: Any, is_data: Callable[[Tensor], bool]) -> None:
        """Notes that what was made of copies, and of no data, are copies."""
        if not len(self._copies):
            return
        copy = next((self._copies[one] for one in given if one in self._copies), None)
        if copy is not None and all(one in self._copies or not is_data(one) for one in given):
            self._copies.update((one, copy) for one in tensors_in(output))
