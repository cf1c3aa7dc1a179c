"""What is known of the rows of one micro-batch: whether they were picked, whose they are, and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.followed.axes import is_plainly_folded
from hf_dp.per_example.followed.counts import Counts
from hf_dp.per_example.followed.following import Following, in_experts, is_of_torch, may_route, wrapped
from hf_dp.per_example.followed.picked import Picked
from hf_dp.per_example.followed.routes import Routes
from hf_dp.per_example.rule import ALONE, INFERRED, INFERS, ROUTED, Readings, Use
from hf_dp.per_example.watched import WatchedParameter

# Beside which certificates note that rows are picked somewhere, and whose they are is to be followed.
_ROWS = ("rows", "", 0)
# The same of losses of a loop over examples, which came out in their order.
_LOSSES = ("losses", "", 0)


@dataclass(eq=False)
class FollowedRows:
    """Follows the rows of one micro-batch through its passes, as far as what was certified needs it.

    Attributes:
        batch_size: B.
        ambiguous_sizes: sizes that other axes have too, or None where readings are certified.
        readings: what is known of them.
        counts: what numbers of rows tell of this micro-batch.
        inferred: what was read as folded, and is no plain view; see `Picked`.
        routes: whose the rows are that were picked or sorted.
        infers: whether each operation is followed, which takes time, and from which nothing may follow.
    """

    batch_size: int
    ambiguous_sizes: frozenset[int] | None = None
    readings: Readings = field(default_factory=dict)
    inferred: set[Use] = field(default_factory=set)
    counts: Counts = field(init=False)
    routes: Routes = field(init=False)
    infers: bool = field(init=False)
    _storages: set[int] = field(default_factory=set)
    _picked: Picked | None = None
    _has_looked: bool = False
    _is_followed: bool = False
    _is_following: bool = False
    _others: list[nn.Module] = field(default_factory=list)
    # For which example alone copies of parameters are made.
    _copying: int | None = None
    _were_alone: bool = False

    def __post_init__(self) -> None:
        self.counts, self.routes = Counts(self.batch_size), Routes(self.batch_size)
        self.infers = bool(self.readings.get(INFERS, True))

    @contextmanager
    def followed(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Inside, rows are followed through those `modules` that may sort them by something else than examples."""
        is_first = self.ambiguous_sizes is not None or not self.readings
        self._is_followed = is_first or self.readings.get(_ROWS) is not None
        may_sort = list(modules) if is_first or any(v.startswith(ROUTED) for v in self.readings.values()) else []

        self._others = [one for one in may_sort if self._is_followed and not may_route(one) and not is_of_torch(one)]
        try:
            with in_experts(may_sort, self.routes, self._in_order, self._restored, self.follow, self._is_data):
                yield
        finally:
            self._others = []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside is the backward pass: what a checkpoint computes again is followed too, at whichever module it
        begins."""

        def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_following:
                return forward(*args, **kwargs)
            with self._following():
                return forward(*args, **kwargs)

        try:
            with wrapped(self._others, run):
                yield
        except CheckpointError as error:
            # Of a function, and no module, nobody knows again whose rows are: they are cut in another way.
            if not any(use.operation == _ROWS[0] for use in self.inferred):
                raise
            raise UnsupportedModelError(
                "a checkpoint that computes rows again in another way than before, some of which were picked.",
                why="it is a function's, and rows are followed in modules alone when they are computed again, so it is "
                "not known whose they are.",
                fix="let the checkpoint run a module (checkpoint(self.block, x)) that picks its rows itself, or none.",
            ) from error

    @contextmanager
    def _following(self) -> Iterator[None]:
        self._is_following = True
        try:
            hooks = self._entered, self._back_in_order, self._takes_each, self._is_data, self._unknown, self._is_across
            with Following(self.routes, *hooks):
                yield
        finally:
            self._is_following = False

    def _entered(self, source: Tensor) -> Tensor | None:
        """Whose the rows are that are picked of `source`, if they lie in order."""
        if isinstance(source, (nn.Parameter, WatchedParameter)) or not source.dim():
            return None
        if not source.requires_grad and (self._picked is None or not self._picked.is_data(source)):
            return None
        if self._picked is not None and (self._picked.axes.of(source) or self._picked.are_images(source)):
            return None
        if self._picked is not None and (example := self._picked.alone.of(source)) is not None:
            return torch.tensor(example, device=source.device)
        if (number := _number_of(source, self.batch_size)) is not None:
            assert source._base is not None
            # Of as many positions as examples it might be one of these.
            if len(source) == self.batch_size:
                return None
            if (owners := self.routes.of(source._base)) is not None:
                return owners[number]
            return None if self._was_picked(source._base) else torch.tensor(number, device=source.device)
        is_plain = len(source) == self.batch_size or is_plainly_folded(source, self.batch_size)
        if self._was_picked(source) or not (is_plain or self._is_even(source)):
            return None
        return self.routes.in_order(len(source), source.device)

    def _takes_each(self, made: Tensor) -> bool:
        return self._picked is not None and self._picked.takes_each(made)

    def _is_data(self, tensor: Tensor) -> bool:
        return tensor.requires_grad if self._picked is None else self._picked.is_data(tensor)

    def _is_across(self, source: Tensor) -> bool:
        """Whether its second axis is known to be that of the examples: time first."""
        if self._picked is None or not self._picked.axes.is_across(source) or not self._picked.is_data(source):
            return False
        return self._picked.has_one_of_each(source) is not False

    def _back_in_order(self, given: Tensor, parts: list[Tensor]) -> bool:
        """Takes note that rows which were picked are in order again, as they must be in each step; not of those of
        which only what nobody picked says so.

        Args:
            given: the rows.
            parts: what they were computed from, of what it is known whose it is.
        """
        if self._picked is None or not self._picked.follows_index(given):
            return True
        if not any(map(self._picked.follows_index, parts)):
            return False
        self._picked.forget(given)
        self.follow()
        return True

    def _unknown(self, given: Tensor, parts: list[Tensor]) -> None:
        """Takes note that as many rows as examples need not be one of each."""
        if self._picked is None or given.shape[:1] != (self.batch_size,):
            return
        if self._picked.axes.is_across(given):  # of which these are points in time
            return
        if self._picked.alone.is_in_order(given) or not any(map(self._picked.follows_index, parts)):
            return
        # Of rows that are known to be others' it is no matter how they looked before.
        if self._picked.has_one_of_each(given) is None or any(self.routes.known(one) is not None for one in parts):
            self._picked.doubt(given)

    def follow(self) -> None:
        """Takes note that rows are to be followed through all modules, in each step, and looked at as in the check."""
        self.inferred.update(Use(*_ROWS[:2], reading, 0) for reading in (ROUTED, INFERRED))

    def one_of(self, parameters: list[str], data: list[Tensor]) -> int | None:
        """The one example that several operands of an operation beside these parameters are of, if that is known."""
        if self.batch_size == 1:
            return 0 if self.readings.get(("expand", parameters[0], 0), "").startswith(ALONE) and data else None
        if self._picked is None:
            return None
        found = {self._picked.example_of(one) for one in filter(self._picked.is_data, data)}
        return found.pop() if len(found) == 1 else None

    @contextmanager
    def copying_for(self, example: int) -> Iterator[None]:
        """Inside, copies of parameters are made for one example alone."""
        self._copying = example
        try:
            yield
        finally:
            self._copying = None

    def _is_whole(self, given: Tensor) -> bool:
        """Whether it is known, whatever sizes there are, to have a row for each example; or to be of none."""
        if self._picked is None:
            return False
        if not self._picked.is_data(given):
            return True
        axes = self._picked.axes
        return axes.is_sure(given) and not axes.of(given) and len(given) == self.batch_size

    def check_order(self, losses: Tensor) -> None:
        """Refuses losses of a loop that are not known to be the examples', in order, where they were in the check."""
        if not self._were_alone or self._picked is None or self.batch_size == 1:
            return
        is_known = self._picked.has_one_of_each(losses) is not False
        self.inferred.add(Use(*_LOSSES[:2], ALONE if is_known else "constant", 0))
        if not is_known and self.readings.get(_LOSSES) == ALONE:
            raise UnsupportedModelError(
                f"a loop over examples, of whose {self.batch_size} losses it is not known that each is one example's.",
                why="in the check before the first step it was, and what follows from others breaks the bound.",
                fix="let each turn of the loop see one example, hand nothing on to the next, and put what it makes in "
                "that example's place.",
            )

    def is_of_batch(self, tensor: Tensor) -> bool:
        """Whether it is a view of what the batch holds."""
        return _storage(tensor) in self._storages

    @contextmanager
    def reading(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside is the forward pass of a micro-batch of these `tensors`."""
        given = list(tensors)
        self._storages = {_storage(v) for v in given}
        self.counts = Counts.of(given, self.batch_size)
        self._picked = Picked(given, self.batch_size, self.counts.room, self.inferred) if self.infers else None
        try:
            with self._picked or nullcontext(), self._following() if self._is_followed else nullcontext():
                yield
        finally:
            self._has_looked |= self._picked is not None
            self._picked = None

    def _in_order(self, several: Sequence[Tensor]) -> list[Tensor]:
        """Those of `several` that have as many rows of each example, one example after another.

        Beside one of which that is known, others with as many rows are taken for such too, unless they were picked.
        """
        rows = [one for one in several if one.is_floating_point() and one.dim() > 1]
        plain = {len(one) for one in rows if is_plainly_folded(one, self.batch_size)}
        plain |= {len(one) for one in rows} & {self.batch_size}
        sizes = plain or {len(one) for one in rows if self._is_in_order(one)}
        found = [one for one in several if len(one) in sizes and not self._was_picked(one)]
        if self._picked is not None and any(map(self._picked.follows_index, found)):
            self.inferred.add(Use("experts", "", INFERRED, 0))
        return found

    def _is_in_order(self, given: Tensor) -> bool:
        """Whether its rows are, as `check_folded` has it."""
        if self._was_picked(given) or not self._is_even(given):
            return False
        if self._picked is not None:
            self.inferred.add(Use("experts", "", INFERRED, given.dim()))
        return True

    def _is_even(self, given: Tensor) -> bool:
        if len(given) % self.batch_size or (self._picked is None and not self._has_looked):
            return False
        return self.counts.is_even(len(given) // self.batch_size, given.shape[1:])

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


def _number_of(source: Tensor, batch_size: int) -> int | None:
    """Of which example `source` is all there is, if it is a view of one of (B, ...)."""
    base = source._base
    if base is None or base.shape[:1] != (batch_size,) or base.stride()[1:] != source.stride():
        return None
    number, rest = divmod(int(source.storage_offset() - base.storage_offset()), max(base.stride(0), 1))
    return number if base.shape[1:] == source.shape and not rest and batch_size > 1 else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
