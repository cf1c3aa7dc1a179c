"""Which axis of an operation's input leads through the examples.

Of a shape alone it cannot be known: as many positions as examples look like examples, and packed rows like whole ones.
What preflight certified decides, where there is a certificate; what is left in doubt is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.followed.axes import is_plainly_folded
from hf_dp.per_example.followed.copies import Copy
from hf_dp.per_example.followed.rows import FollowedRows
from hf_dp.per_example.order import Order
from hf_dp.per_example.rule import (
    ALONE,
    AND_ALONE,
    AND_ROUTED,
    BY_GRADIENT,
    INFERRED,
    MIXED,
    ROUTED,
    SECOND,
    Axis,
    Bound,
    Rule,
    Use,
    refusal,
)

_PACKED = "it may be packed, with other numbers of rows for each of"
_SORTED = "call model.set_experts_implementation('grouped_mm'), with which it is known whose each row is"
_BATCHED = "call model.set_experts_implementation('batched_mm'), with which Transformers' experts keep them in order"
_NOT_IN_ORDER = "its rows were picked, and are not one of each, in order, of"
_AGAIN = "a checkpoint computes it again without what picked its rows, which may be more of some than of others of"
_NOT_ALONE = "other rows there are of one example each, which it is not known of these to be, among"
_SECOND = "neither its first axis nor its second can be read as"
_WHOLE = (
    "pick them by a mask or by numbers, h[mask], and let what follows work on each row by itself; let each example "
    "keep all of its rows (zeros in place of those that are left out); or make their numbers even and give them as "
    "(B, rows, ...)"
)


@dataclass(eq=False)
class Reader(FollowedRows):
    """Reads the axes of the inputs of one recording of one micro-batch."""

    def known(self, operation: str, parameters: list[str], given: Tensor | None) -> str | None:
        """How preflight saw such a use read, if it did."""
        found = self._seen(operation, parameters, given)
        found = found if found is None else found.removeprefix(AND_ALONE).removeprefix(AND_ROUTED)
        if found == BY_GRADIENT:
            return "data" if given is not None and given.requires_grad else "constant"
        return found

    def _seen(self, operation: str, parameters: list[str], given: Tensor | None) -> str | None:
        return self.readings.get((operation, parameters[0], 0 if given is None else given.dim()))

    def example_axis(self, rows: int) -> str | None:
        """As what so many rows can be read."""
        if rows == self.batch_size:
            return "batch"
        return "folded" if rows % self.batch_size == 0 else None

    def axis(self, rule: Rule, bound: Bound, parameters: list[str]) -> Axis:
        """How the input of a use is read: as "batch", "folded", SECOND, ROUTED, ALONE or "constant".

        Raises:
            UnsupportedModelError: the shape has no reading, or may have another.
        """
        if self.infers and (alone := self._alone(rule, bound, parameters)) is not None:
            return alone
        order, known = None, self._seen(rule.name, parameters, bound.input)
        known = known if known is None else known.removeprefix(AND_ALONE)
        is_routed = known is not None and known.startswith(ROUTED)
        if bound.input is not None and bound.input.dim() and known != "constant":
            order = self.routes.order(bound.input, rule.is_sorted or is_routed)
        if order is None:
            if is_routed and self.batch_size > 1 and self._picked is None and self._has_looked:
                assert bound.input is not None
                self._unreadable(rule.name, bound.input, parameters, _AGAIN)
            return Axis(self.batch_size, self._read(rule, bound, parameters))
        if known is not None and not is_routed and not rule.is_sorted:
            assert bound.input is not None
            self._unreadable(rule.name, bound.input, parameters, _NOT_IN_ORDER)
        if not self.routes.are_in_experts:
            self.follow()
        return Axis(self.batch_size, ROUTED, order)

    def _alone(self, rule: Rule, bound: Bound, parameters: list[str]) -> Axis | None:
        """How what is known to be of one example is read."""
        given = bound.input
        if given is None and self._copying is not None:
            return self._of_one(self._copying)
        if given is None or rule.is_sorted or given.dim() < rule.features:
            return None
        is_row = given.dim() == rule.features
        known = self.readings.get((rule.name, parameters[0], given.dim() + is_row), "")
        may_be = known.startswith(ALONE)
        example = 0 if may_be else None
        if self.batch_size > 1:
            example = None if self._picked is None else self._picked.example_of(given)
        owners = None if is_row else self.routes.known(given)
        # Of pieces of a batch one may hold one example alone, and another several.
        if example is not None and (owners is None or not owners.dim()):
            is_empty = not is_row and not len(given)
            order = Order.of(torch.zeros(0, dtype=torch.long, device=given.device), 1) if is_empty else None
            return self._of_one(example, order, is_row)
        if self.batch_size == 1:
            return None
        # What a loop took out in another step is not read by its shape here.
        if may_be and owners is None and (known == ALONE or is_row or not self._is_whole(given)):
            self._unreadable(rule.name, given, parameters, _NOT_ALONE)
        return None

    def _of_one(self, example: int, order: Order | None = None, is_row: bool = False) -> Axis:
        self._were_alone = True
        return Axis(1, ALONE, order, (example, self.batch_size), is_row)

    def _read(self, rule: Rule, bound: Bound, parameters: list[str]) -> str:
        given = bound.input
        if rule.is_sorted:
            reason = "it mixes the tokens of all examples, and it is not known that each has as many, and which"
            raise refusal(parameters, f"operation {rule.name}", reason, _BATCHED)
        known = self.known(rule.name, parameters, given)
        if given is None:
            rows = bound.options["rows"]
            found = self.example_axis(rows) if known != "constant" else None
            if "folded" in (found, found and known) and self.batch_size > 1:
                what = f"operation {rule.name} to {rows} rows"
                # Of a number nobody knows what it follows from.
                if not self.counts.is_even(rows // self.batch_size):
                    raise refusal(parameters, what, f"{_PACKED} {self.batch_size} examples", _WHOLE)
                self.inferred.update(Use(rule.name, name, INFERRED, 0) for name in parameters)
            return found or "constant"
        found = self.example_axis(given.shape[0]) if given.dim() > rule.features else None
        may_be_second = self._may_be_second(rule, bound, given)
        if known == MIXED or (known == SECOND and not may_be_second):
            self._unreadable(rule.name, given, parameters, _SECOND)
        if known == SECOND or (known is None and not found and may_be_second):
            self._check_picked(rule.name, given, parameters, axis=1)
            return SECOND
        if known != "constant" and (found == "folded" or (found == "batch" and known == "folded")):
            self.check_folded(rule.name, given, parameters)
        elif known != "constant" and found == "batch":
            self._check_picked(rule.name, given, parameters)
        if given.requires_grad or known in ("batch", "folded", "data"):
            return found or self._unreadable(rule.name, given, parameters, "its first axis cannot be read as")
        if not found and self.counts.are_uneven_images and given.shape[0] == sum(self.counts.images):
            self._unreadable(rule.name, given, parameters, "its first axis cannot be read as")
        if found and known == "either" and self.batch_size > 1 and not self.is_of_batch(given):
            self._unreadable(rule.name, given, parameters, "it may be what all examples share, or rows of")
        return found if found and known != "constant" else "constant"

    def _may_be_second(self, rule: Rule, bound: Bound, given: Tensor) -> bool:
        is_orderless = rule.is_orderless and bound.options.get("is_orderless", True)
        return is_orderless and given.dim() - rule.features > 1 and given.shape[1] == self.batch_size

    def is_doubtful(self, rule: Rule, given: Tensor | None, axis: Axis, is_known: bool = True) -> bool:
        """Whether the shape of an input could be read in another way, or might not be led by examples at all; or what
        the operation does is not known."""
        if self.ambiguous_sizes is None or self.batch_size == 1:
            return False
        if (
            not is_known
            or given is None
            or axis.reading == ALONE  # of which its losses may be others' all the same
            or self.batch_size in self.ambiguous_sizes
            or self.batch_size in given.shape[1:]
        ):
            return True
        if axis.reading == ROUTED:
            return False
        if axis.reading == "constant":
            are_position_ids = given.dim() == 2 and len(given) == 1 and not given.is_floating_point()
            return not are_position_ids
        if axis.reading == "folded":
            return not is_plainly_folded(given, self.batch_size)
        is_single_position = given.shape[1 : given.dim() - rule.features].numel() == 1
        return is_single_position and not given.requires_grad

    def may_be_data(self, operation: str, parameters: list[str], given: Tensor) -> bool:
        """Whether an operand may have a row for each example."""
        known = self.known(operation, parameters, given)
        is_clear = known not in ("constant", "either") or self.is_of_batch(given)
        return given.requires_grad or (is_clear and self.example_axis(len(given)) is not None)

    def is_constant(self, operation: str, parameters: list[str], other: Tensor) -> bool:
        """Whether no example is in an operand of an operation without a rule."""
        # Of a single example's data as of a constant, the gradient is exact.
        may_be_data = other.dim() > 0 and (other.shape[0] == 1 or self.batch_size > 1)
        known = self.known(operation, parameters, other)
        reading = known or (self.example_axis(other.shape[0]) if may_be_data else None)
        return not other.requires_grad and reading in ("constant", None)

    def check_rows(self, operation: str, given: Tensor, parameters: list[str]) -> None:
        """Refuses rows beside copies for each example that are not as many of each, in order."""
        if self.example_axis(len(given)) == "folded":
            self.check_folded(operation, given, parameters)
        else:
            self._check_picked(operation, given, parameters)

    def check_folded(self, operation: str, given: Tensor, parameters: list[str]) -> None:
        """Refuses rows that may be packed: so many in all, but not the same number of each example."""
        each = given.shape[0] // self.batch_size
        self._check_picked(operation, given, parameters)
        by = None if self._picked is None else self._picked.through.of(given)
        if by:
            self._unreadable(operation, given, parameters, _NOT_IN_ORDER)
        if by is not None:
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)
        if is_plainly_folded(given, self.batch_size):
            self.counts.add_plain(each, given.shape[1:-1])
        elif self._picked is not None and self._picked.reshaped.has(given):
            self.counts.add_plain(each, given.shape[1:-1])
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)
        elif given.numel() and self.batch_size > 1:
            try:
                self._check_number(operation, given, parameters, each)
            except UnsupportedModelError:
                if not self.routes.is_restored(given):
                    raise
                self.follow()  # only here: it takes time, and waits for a device

    def _check_number(self, operation: str, given: Tensor, parameters: list[str], each: int) -> None:
        """Refuses rows of which `each` on average need not be as many of each example."""
        what = f"operation {operation} on an input of shape {tuple(given.shape)}"
        by = None if self._picked is None else self._picked.picked_by(given)
        # As many images of each may be more of each than in the check, which had one.
        if by is not None or self.counts.images != [each] * self.batch_size:
            self._refuse_picked(what, parameters, by)
        if not self.counts.is_even(each, given.shape[1:]):
            self._unreadable(operation, given, parameters, _PACKED)
        self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)

    def note_copies(self, operation: str, parameters: list[str], made: Tensor, rows: int) -> None:
        """Takes note of copies of parameters for so many rows; which rows these are is seen where they come to some."""
        if self._picked is not None and self.batch_size > 1:
            self._picked.copies.note(made, Copy(operation, parameters, rows))

    def _check_picked(self, operation: str, given: Tensor, parameters: list[str], axis: int = 0) -> None:
        """Refuses as many rows as examples that were picked, and are not one of each in order."""
        found = None if self._picked is None or self.batch_size == 1 else self._picked.has_one_of_each(given, axis)
        if found is False:
            self._unreadable(operation, given, parameters, _NOT_IN_ORDER)
        if found:
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)

    def _refuse_picked(self, what: str, parameters: list[str], by: str | None) -> None:
        """Refuses rows that follow from those that an operation, `by`, picked.

        What a checkpoint computes again was looked at in its forward pass.
        """
        if (self._picked is None and self._has_looked) or (self._picked is not None and by is None):
            return
        reason = "no such rows, which are no plain view, were there when it was checked, of"
        if by is not None:
            reason = f"{by}() picked rows before, maybe more of some than of others of"
        raise refusal(parameters, what, f"it may be packed: {reason} {self.batch_size} examples", self._way or _WHOLE)

    def _unreadable(self, operation: str, given: Tensor, parameters: list[str], reason: str) -> NoReturn:
        if self.counts.are_uneven_images:
            reason = "it may hold other numbers of images of each of"
        raise refusal(
            parameters,
            f"operation {operation} on an input of shape {tuple(given.shape)}",
            f"{reason} {self.batch_size} examples",
            self._way,
        )

    @property
    def _way(self) -> str:
        """Out of rows that follow from those which a module of experts picked."""
        return _SORTED if self.routes.were_in_experts else ""
