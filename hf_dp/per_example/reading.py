"""Which axis of an operation's input leads through the examples.

Of a shape alone it cannot be known: as many positions as examples look like examples, and packed rows like whole ones.
What preflight certified decides, where there is a certificate; what is left in doubt is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, nn

from hf_dp.per_example.counts import Counts
from hf_dp.per_example.following import Following, in_experts, is_of_torch, may_route, wrapped
from hf_dp.per_example.picked import Picked
from hf_dp.per_example.routes import Routes
from hf_dp.per_example.rule import (
    BY_GRADIENT,
    INFERRED,
    INFERS,
    MIXED,
    ROUTED,
    SECOND,
    Axis,
    Bound,
    Readings,
    Rule,
    Use,
    refusal,
)
from hf_dp.per_example.watched import WatchedParameter

_PACKED = "it may be packed, with other numbers of rows for each of"
_SORTED = "call model.set_experts_implementation('grouped_mm'), with which it is known whose each row is"
_BATCHED = "call model.set_experts_implementation('batched_mm'), with which Transformers' experts keep them in order"
_NOT_IN_ORDER = "its rows were picked, and are not one of each, in order, of"
_SECOND = "neither its first axis nor its second can be read as"
_WHOLE = (
    "let each example keep all of its rows (zeros in place of those that are left out), or make their numbers even and "
    "give them as (B, rows, ...)"
)


# Beside which certificates note that rows are picked somewhere, and whose they are is to be followed.
_ROWS = ("rows", "", 0)
_INFERRED = Use("rows", "", INFERRED, 0)


@dataclass(eq=False)
class Reader:
    """Reads the axes of the inputs of one recording of one micro-batch.

    Attributes:
        batch_size: B.
        ambiguous_sizes: sizes that other axes have too, or None where readings are certified.
        readings: what is known of them.
        counts: what numbers of rows tell of this micro-batch.
        inferred: what was read as folded, and is no plain view; see `Picked`.
        routes: whose the rows are that modules of experts sorted.
    """

    batch_size: int
    ambiguous_sizes: frozenset[int] | None = None
    readings: Readings = field(default_factory=dict)
    inferred: set[Use] = field(default_factory=set)
    counts: Counts = field(init=False)
    routes: Routes = field(init=False)
    _storages: set[int] = field(default_factory=set)
    _picked: Picked | None = None
    _has_looked: bool = False
    _is_followed: bool = False
    _is_following: bool = False

    def __post_init__(self) -> None:
        self.counts, self.routes = Counts(self.batch_size), Routes(self.batch_size)

    @contextmanager
    def followed(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, rows are followed through those `modules` that may sort them by something else than examples.

        Where rows are picked elsewhere, through all: what a checkpoint computes again begins at any of them.
        """
        is_first = self.ambiguous_sizes is not None or not self.readings
        self._is_followed = is_first or self.readings.get(_ROWS) is not None
        may_sort = list(modules) if is_first or ROUTED in self.readings.values() else []

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_following:
                return forward(*args, **kwargs)
            with self._following():
                return forward(*args, **kwargs)

        others = [one for one in may_sort if self._is_followed and not may_route(one) and not is_of_torch(one)]
        hooks = self._in_order, self._restored, self._follow
        with in_experts(may_sort, self.routes, *hooks), wrapped(others, run):
            yield

    @contextmanager
    def _following(self) -> Iterator[None]:
        self._is_following = True
        try:
            with Following(self.routes, self._entered, self._back_in_order):
                yield
        finally:
            self._is_following = False

    def _entered(self, source: Tensor) -> Tensor | None:
        """Whose the rows are that are picked of `source`, if they lie in order."""
        if isinstance(source, (nn.Parameter, WatchedParameter)) or not source.dim():
            return None
        if not source.requires_grad:
            if self._picked is None or not self._picked.is_data(source):
                return None
            self.inferred.add(_INFERRED)  # in each step too
        is_plain = len(source) == self.batch_size or _is_plainly_folded(source, self.batch_size)
        if not (is_plain and not self._was_picked(source)) and not self._in_order([source]):
            return None
        return self.routes.in_order(len(source), source.device)

    def _back_in_order(self, given: Tensor) -> None:
        """Takes note that rows which were picked are in order again, as they must be in each step."""
        if self._picked is not None and self._picked.follows_index(given):
            self._picked.forget(given)
            self._follow()
            self.inferred.add(_INFERRED)

    def _follow(self) -> None:
        """Takes note that rows are to be followed through all modules, in each step."""
        self.inferred.add(Use(*_ROWS[:2], ROUTED, 0))

    @contextmanager
    def reading(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside is the forward pass of a micro-batch of these `tensors`."""
        given = list(tensors)
        self._storages = {_storage(v) for v in given}
        self.counts = Counts.of(given, self.batch_size)
        # To follow each operation takes time, and nothing may follow from it.
        if not self.readings.get(INFERS, True):
            yield
            return
        self._picked = Picked(given, self.batch_size, self.counts.room)
        try:
            with self._picked, self._following() if self._is_followed else nullcontext():
                yield
        finally:
            self._picked, self._has_looked = None, True

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

    def axis(self, rule: Rule, bound: Bound, parameters: list[str]) -> Axis:
        """How the input of a use is read: as "batch", "folded", SECOND, ROUTED or "constant".

        Raises:
            UnsupportedModelError: the shape has no reading, or may have another.
        """
        order, known = None, self.known(rule.name, parameters, bound.input)
        if bound.input is not None and bound.input.dim() and known != "constant":
            order = self.routes.order(bound.input, rule.is_sorted or known == ROUTED)
        if order is None:
            return Axis(self.batch_size, self._read(rule, bound, parameters))
        if known not in (None, ROUTED) and not rule.is_sorted:
            assert bound.input is not None
            self._unreadable(rule.name, bound.input, parameters, _NOT_IN_ORDER)
        if not self.routes.are_in_experts:
            self._follow()
        return Axis(self.batch_size, ROUTED, order)

    def _in_order(self, several: Sequence[Tensor]) -> list[Tensor]:
        """Those of `several` that have as many rows of each example, one example after another.

        Beside one of which that is known, others with as many rows are taken for such too, unless they were picked.
        """
        rows = [one for one in several if one.is_floating_point() and one.dim() > 1]
        plain = {len(one) for one in rows if _is_plainly_folded(one, self.batch_size)}
        plain |= {len(one) for one in rows} & {self.batch_size}
        sizes = plain or {len(one) for one in rows if self._is_in_order(one)}
        found = [one for one in several if len(one) in sizes and not self._was_picked(one)]
        if self._picked is not None and any(map(self._picked.follows_index, found)):
            self.inferred.add(Use("experts", "", INFERRED, 0))
        return found

    def _is_in_order(self, given: Tensor) -> bool:
        """Whether its rows are, as `check_folded` has it."""
        if len(given) % self.batch_size or (self._picked is None and not self._has_looked) or self._was_picked(given):
            return False
        is_even = self.counts.is_even(len(given) // self.batch_size, given.shape[1:])
        if is_even and self._picked is not None:
            self.inferred.add(Use("experts", "", INFERRED, given.dim()))
        return is_even

    def _was_picked(self, given: Tensor) -> bool:
        if self._picked is None:
            return False
        has_one = self._picked.has_one_of_each(given)
        if has_one is None and len(given) != self.batch_size:
            return self._picked.picked_by(given) is not None
        return has_one is False

    def _restored(self, given: Tensor) -> None:
        """Takes note that rows which a module picked are in order again."""
        if self._picked is not None and self._picked.follows_index(given):
            self._picked.forget(given)
            self.inferred.add(Use("experts", "", ROUTED, given.dim()))

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
        if axis.reading == ROUTED:
            return False
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
        self._check_picked(operation, given, parameters)
        if _is_plainly_folded(given, self.batch_size):
            self.counts.add_plain(each, given.shape[1:-1])
        elif given.numel() and self.batch_size > 1:
            what = f"operation {operation} on an input of shape {tuple(given.shape)}"
            by = None if self._picked is None else self._picked.picked_by(given)
            # As many images of each may be more of each than in the check, which had one.
            if by is not None or self.counts.images != [each] * self.batch_size:
                self._refuse_picked(what, parameters, by)
            if not self.counts.is_even(each, given.shape[1:]):
                self._unreadable(operation, given, parameters, _PACKED)
            self.inferred.update(Use(operation, name, INFERRED, given.dim()) for name in parameters)

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
        return _SORTED if self.routes.were_followed else ""


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
