"""Which axis of an operation's input leads through the examples.

Of a shape alone it cannot be known: as many positions as examples look like examples, and packed rows like whole ones.
What preflight certified decides, where there is a certificate; what is left in doubt is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from hf_dp.per_example.picked import Picked
from hf_dp.per_example.pictures import not_blank
from hf_dp.per_example.rule import (
    BY_GRADIENT,
    INFERRED,
    INFERS,
    MIXED,
    SECOND,
    Axis,
    Bound,
    Readings,
    Rule,
    Use,
    refusal,
)

_PACKED = "it may be packed, with other numbers of rows for each of"
_SECOND = "neither its first axis nor its second can be read as"
_WHOLE = (
    "let each example keep all of its rows (zeros in place of those that are left out), or make their numbers even and "
    "give them as (B, rows, ...)"
)


@dataclass(eq=False)
class Reader:
    """Reads the axes of the inputs of one recording of one micro-batch.

    Attributes:
        batch_size: B.
        ambiguous_sizes: sizes that other axes have too, or None where readings are certified.
        readings: what is known of them.
        length: positions of each row in the ids of the batch, or in its series.
        rows: how many rows of ids each example has: two of a pair of texts.
        folded_lengths: rows of each example in plain views.
        images: how many each example has, where it may have several.
        inferred: what was read as folded, and is no plain view; see `Picked`.
    """

    batch_size: int
    ambiguous_sizes: frozenset[int] | None = None
    readings: Readings = field(default_factory=dict)
    length: int = 0
    rows: int = 1
    folded_lengths: set[int] = field(default_factory=set)
    images: list[int] = field(default_factory=list)
    inferred: set[Use] = field(default_factory=set)
    _storages: set[int] = field(default_factory=set)
    _has_positions: bool = True
    _has_pictures: bool = False
    _windows: set[tuple[int, int]] = field(default_factory=set)
    _picked: Picked | None = None
    _has_looked: bool = False

    @contextmanager
    def reading(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside is the forward pass of a micro-batch of these `tensors`."""
        given = list(tensors)
        self._storages = {_storage(v) for v in given}
        ids = [v for v in given if v.dim() == 2 and not v.is_floating_point()]
        others = [v for v in given if v.dim() > 2]
        if not ids and all(v.dim() == 3 and not v.is_floating_point() for v in others):
            ids, self.rows = others, max((v.shape[1] for v in others), default=1)
        self._has_positions = bool(ids)
        self._has_pictures = any(v.dim() == 4 and v.is_floating_point() for v in given)
        # The second axis of a picture is its colours.
        series = [v.shape[1] for v in others if v.dim() != 4 and v.is_floating_point()]
        self.length = max([*(v.shape[-1] for v in ids), *series], default=0)
        # (B, N, C, H, W): models drop the images that are all zero, which fill up an example with fewer than others.
        several = [v for v in given if v.dim() == 5]
        self.images = not_blank(several[0]).tolist() if several else []
        # To follow each operation takes time, and nothing may follow from it.
        if not self.readings.get(INFERS, True):
            yield
            return
        self._picked = Picked(given, self.batch_size, several[0].shape[:2].numel() if several else 0)
        try:
            with self._picked:
                yield
        finally:
            self._picked, self._has_looked = None, True

    @property
    def has_uneven_images(self) -> bool:
        """Whether some examples have more images than others."""
        return len(set(self.images)) > 1

    def known(self, operation: str, parameters: list[str], given: Tensor | None) -> str | None:
        """How preflight saw such a use read, if it did."""
        found = self.readings.get((operation, parameters[0], 0 if given is None else given.dim()))
        if found == BY_GRADIENT:
            return "data" if given is not None and given.requires_grad else "constant"
        return found

    def example_axis(self, rows: int) -> str | None:
        """As what so many rows can be read."""
        if rows == self.batch_size:
            return "batch"
        return "folded" if rows % self.batch_size == 0 else None

    def read(self, rule: Rule, bound: Bound, parameters: list[str]) -> str:
        """The reading of a use: "batch", "folded", SECOND or "constant".

        Raises:
            UnsupportedModelError: the shape has no reading, or may have another.
        """
        given = bound.input
        known = self.known(rule.name, parameters, given)
        if given is None:
            rows = bound.options["rows"]
            found = self.example_axis(rows) if known != "constant" else None
            if "folded" in (found, found and known) and self.batch_size > 1:
                what = f"operation {rule.name} to {rows} rows"
                # Of a number nobody knows what it follows from.
                if not self._is_even(rows // self.batch_size):
                    raise refusal(parameters, what, f"{_PACKED} {self.batch_size} examples", _WHOLE)
                self.inferred.update(Use(rule.name, name, INFERRED, 0) for name in parameters)
            return found or "constant"
        found = self.example_axis(given.shape[0]) if given.dim() > rule.features else None
        may_be_second = self._may_be_second(rule, bound, given)
        if known == MIXED or (known == SECOND and not may_be_second):
            self._unreadable(rule.name, given, parameters, _SECOND)
        if known == SECOND or (known is None and not found and may_be_second):
            return SECOND
        if known != "constant" and (found == "folded" or (found == "batch" and known == "folded")):
            self.check_folded(rule.name, given, parameters)
        elif known != "constant" and found == "batch":
            self._check_picked(rule.name, given, parameters)
        if given.requires_grad or known in ("batch", "folded", "data"):
            return found or self._unreadable(rule.name, given, parameters, "its first axis cannot be read as")
        if not found and self.has_uneven_images and given.shape[0] == sum(self.images):
            self._unreadable(rule.name, given, parameters, "its first axis cannot be read as")
        if found and known == "either" and self.batch_size > 1 and _storage(given) not in self._storages:
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
            or self.batch_size in self.ambiguous_sizes
            or self.batch_size in given.shape[1:]
        ):
            return True
        if axis.reading == "constant":
            are_position_ids = given.dim() == 2 and len(given) == 1 and not given.is_floating_point()
            return not are_position_ids
        if axis.reading == "folded":
            return not _is_plainly_folded(given, self.batch_size)
        is_single_position = given.shape[1 : given.dim() - rule.features].numel() == 1
        return is_single_position and not given.requires_grad

    def may_be_data(self, operation: str, parameters: list[str], given: Tensor) -> bool:
        """Whether an operand may have a row for each example."""
        known = self.known(operation, parameters, given)
        is_clear = known not in ("constant", "either") or _storage(given) in self._storages
        return given.requires_grad or (is_clear and self.example_axis(len(given)) is not None)

    def is_constant(self, operation: str, parameters: list[str], other: Tensor) -> bool:
        """Whether no example is in an operand of an operation without a rule."""
        # Of a single example's data as of a constant, the gradient is exact.
        may_be_data = other.dim() > 0 and (other.shape[0] == 1 or self.batch_size > 1)
        known = self.known(operation, parameters, other)
        reading = known or (self.example_axis(other.shape[0]) if may_be_data else None)
        return not other.requires_grad and reading in ("constant", None)

    def check_folded(self, operation: str, given: Tensor, parameters: list[str]) -> None:
        """Refuses rows that may be packed: so many in all, but not the same number of each example."""
        each = given.shape[0] // self.batch_size
        if _is_plainly_folded(given, self.batch_size):
            self.folded_lengths.add(each)
            self._windows.update((each, size) for size in given.shape[1:-1])
        elif given.numel() and self.batch_size > 1:
            what = f"operation {operation} on an input of shape {tuple(given.shape)}"
            by = None if self._picked is None else self._picked.picked_by(given)
            # As many images of each may be more of each than in the check, which had one.
            if by is not None or self.images != [each] * self.batch_size:
                self._refuse_picked(what, parameters, by)
            if not self._is_even(each, given.shape[1:]):
                self._unreadable(operation, given, parameters, _PACKED)
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)

    def _is_even(self, each: int, sizes: Sequence[int] = ()) -> bool:
        """Whether so many rows on average can only be the same number of each example, as far as numbers tell.

        Args:
            sizes: of the other axes. Beside a text a picture has windows where a plain view had as many, as large.
        """
        # All rows, or windows of an image, where there is no mask by which some could have been chosen.
        is_window = self._has_pictures and any((each, size) in self._windows for size in sizes)
        if each == self.rows > 1 or (each in self.folded_lengths and (is_window or not self._has_positions)):
            return True
        # A choice among n positions of each example gives n for each only where it takes them all.
        whole = [n for n in (self.length, max(self.folded_lengths, default=0)) if n and n >= self.length]
        # Or the images of each example, none of them dropped. By one position all numbers are divided.
        if self.batch_size == 1 or self.images == [each] * self.batch_size:
            return True
        return any(each % n == 0 for n in whole if n > 1 or each == 1)

    def _check_picked(self, operation: str, given: Tensor, parameters: list[str]) -> None:
        """Refuses as many rows as examples that were picked, and are not one of each in order."""
        found = None if self._picked is None or self.batch_size == 1 else self._picked.has_one_of_each(given)
        if found is False:
            self._unreadable(
                operation, given, parameters, "its rows were picked, and are not one of each, in order, of"
            )
        if found:
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)

    def _refuse_picked(self, what: str, parameters: list[str], by: str | None) -> None:
        """Refuses rows that follow from those that an operation, `by`, picked.

        What a checkpoint computes again was looked at in its forward pass.
        """
        if self._picked is None and self._has_looked:
            return
        if self._picked is None:
            reason = "no such rows, which are no plain view, were there when it was checked, of"
        elif by is not None:
            reason = f"{by}() picked rows before, maybe more of some than of others of"
        else:
            return
        raise refusal(parameters, what, f"it may be packed: {reason} {self.batch_size} examples", _WHOLE)

    def _unreadable(self, operation: str, given: Tensor, parameters: list[str], reason: str) -> NoReturn:
        if self.has_uneven_images:
            reason = "it may hold other numbers of images of each of"
        raise refusal(
            parameters,
            f"operation {operation} on an input of shape {tuple(given.shape)}",
            f"{reason} {self.batch_size} examples",
        )


def _is_plainly_folded(given: Tensor, batch_size: int) -> bool:
    """Whether `given` is a plain view of a tensor (B, ...) whose examples lie one after another in memory."""
    base = given._base
    return (
        base is not None
        and base.shape[:1] == (batch_size,)
        and base.stride(0) * batch_size == base.numel() == given.numel()
        and base.storage_offset() == given.storage_offset()
        and given.is_contiguous()
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
