"""What stays in a model, and in what computes its losses, after a pass: nothing that later losses follow from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.per_example.checks.alike import Alike
from hf_dp.per_example.checks.counts import Others, many, refuse_counts
from hf_dp.per_example.checks.held import Held, Place
from hf_dp.per_example.checks.moved import still
from hf_dp.per_example.checks.reads import Reads, reads_of
from hf_dp.per_example.checks.state import Switch, kept_refused, named_place, unchanged_state, uncompiled
from hf_dp.per_example.checks.values import FAILED, NOTHING, OF_MODULES, Which, emptied, far, here, same
from hf_dp.per_example.modules import named_modules
from hf_dp.per_example.sharding import is_sharded
from hf_dp.randomness import unchanged_global_state

# Parameters beside a model that a refused step has written to, and torch's count of writes then.
_WRITTEN: Any = WeakTensorKeyDictionary()


class Memory(Alike):
    """Refuses what passes leave in attributes and unsaved buffers, and later losses follow from.

    Attributes:
        rows: gives batches of one row each, of which it is asked whether a switch is read.
    """

    rows: Callable[[], Iterable[Any]] = tuple

    def refuse(self, one: Any, other: Any, probe: Any) -> set[str]:
        """Refuses what depends on the content of a batch, and what losses follow from.

        Two batches of the same shapes pass through from one state. What they leave is a cache if it is the same; else
        it is changed by much, and the losses of a third batch must not be. Nor may a batch that passes once more read
        what it has left itself, by words of its own say.

        Args:
            one, other: of the same shapes, with other content.
            probe: a batch.

        Returns:
            The names of what passes change, and no loss follows from.

        Raises:
            UnsupportedModelError: with the name of the attribute.
        """
        before, writes = self._look(), self._writes()
        for place, p in self._parameters().items():
            if _WRITTEN.get(p) == p._version:
                raise kept_refused(place)
        left = self._left_by(one, other)
        if written := self._written_since(writes):
            self._moving = {place: self._parameters()[place] for place in written}
            left = self._left_by(one, other)
        # What follows the weights is not as it would be, see `_left_by`.
        for batch, after in () if self._moving else zip((one, other), left, strict=True):
            self._refuse_read(batch, before, after)
        moved = {place: p.detach() + 1 for place, p in self._moving.items()}
        owners, alike = Held(self._holders()).owners, list[Place]()
        for place in {**left[0], **left[1]}:
            first, second = (found.get(place, NOTHING) for found in left)
            if same(first, second):
                if place in self._moving and not same(first, moved[place]):  # it follows the weights
                    self._harmless.add(place)
                is_kept = place in self._moving or isinstance(first, Which) or same(first, before.get(place, NOTHING))
                alike += [] if is_kept else [place]
                continue
            value = second if first is NOTHING else first
            kinds = type(first), type(second)
            if (is_one := Which in kinds) and kinds[0] is not kinds[1]:  # what it holds is asked about by itself
                continue
            with self._put_back(), unchanged_global_state():
                if is_new := place[0] not in owners:  # an object that the pass has made
                    self._losses(other if first is NOTHING else one)
                changed = Others([second if is_one else far(value, second)])
                if not self._are_alike(probe, place, value, [changed, *many(before.get(place, NOTHING), value)]):
                    raise kept_refused(place)
            if not is_new and not is_one:
                self._note_unread(probe, place, before.get(place, NOTHING), value)
        if alike:
            with self._put_back(), unchanged_global_state():
                self._losses(one)
                self._losses(one)
                again = self._look()
            refuse_counts({at: (left[0][at], again.get(at)) for at in alike}, partial(self._are_alike, probe))
            self._harmless.update(place for place in alike if not same(again.get(place, NOTHING), left[0][place]))
        return {named_place(place) for place in self._harmless}

    def settle(self, rows: Iterable[Any]) -> None:
        """Turns on for good what each row turns on by itself, a note that something was warned of, say.

        That is what a first pass would do, whoever is in the data. Only where losses and gradients of each row are the
        same with it on and off from the beginning: else what the first pass does besides would be left out. What fails
        is for others to say.

        Args:
            rows: batches of one row each.
        """
        try:
            several = [] if is_sharded(self._model) else list(rows)
            turned = [self._turned_on(row) for row in several[:1]]
            if len(several) < 2 or not turned[0]:
                return
            turned += [self._turned_on(row) for row in several[1:]]
            places = [place for place in turned[0] if all(place in found for found in turned)]
            on, off = (dict.fromkeys(places, value) for value in (True, False))
            if places and all(self._is_alike(row, off, on) for row in several):
                modules = dict(named_modules(self._model))
                for path, name in places:
                    self._switches.settle(modules[path], name)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - of a model, a loss or a collator
            return

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """As `unchanged_state`, but for switches of modules, where no loss or gradient of `rows` follows from them."""
        with unchanged_state(self._model, self._are_told):
            yield

    def _are_told(self, switched: Sequence[Switch]) -> bool:
        was = {(one.path, one.name): one.was for one in switched}
        now = {(one.path, one.name): one.now for one in switched}
        rows = [] if is_sharded(self._model) else list(self.rows())
        return bool(rows) and all(self._is_alike(row, now, was) for row in rows)

    def _turned_on(self, row: Any) -> list[Place]:
        """Which attributes of modules are False before a row passes, and True after it."""
        held = [(path, vars(module)) for path, module in named_modules(self._model)]
        off = [(path, own, name) for path, own in held for name, is_on in own.items() if is_on is False]
        with self._put_back(), unchanged_global_state():
            self._losses(row)
            return [(path, name) for path, own, name in off if own.get(name) is True and name not in OF_MODULES]

    def _left_by(self, *batches: Any) -> list[dict[Place, Any]]:
        left = []
        for batch in batches:
            with self._put_back(), unchanged_global_state():
                for p in self._moving.values():
                    p.data.add_(1)  # a teacher that begins as its pupil would follow it unseen
                self._losses(batch)
                left.append(self._look())
        return left

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches of a step. Refuses, as `unmoved`, also what one leaves for the next alone: of what is on an
        accelerator, which would have to be waited for, that is not seen."""
        with self.unmoved() as latest:
            for batch in batches:
                yield batch
                if before := latest:
                    self._refuse_read(self._probe, *here(before, latest := self._look_again(), self._harmless))

    @contextmanager
    def unmoved(self) -> Iterator[dict[Place, Any]]:
        """Refuses what changes inside where losses follow from it: one rare example alone may do it.

        What has changed is a cache if some rows that the model has seen have the same losses with it as without. Not
        under FSDP2, where all ranks would have to ask together.

        Raises:
            UnsupportedModelError: with the name of the attribute. It is put back, as it is where something else fails.
        """
        if self._probe is None or is_sharded(self._model):
            yield {}
            return
        before, writes = self._look(), self._writes()
        try:
            yield before
            self._refuse_moved(before, writes)
        except BaseException:
            # The next step, or training, would begin with it.
            with suppress(RuntimeError):
                owners, after = Held(self._holders()).owners, self._look()
                for place in {**before, **after}:
                    if not same(after.get(place, NOTHING), before.get(place, NOTHING)):
                        with suppress(*FAILED):  # it is gone
                            self._put(owners, place, before.get(place, NOTHING))
                parameters = self._parameters()
                _WRITTEN.update((p, p._version) for p in map(parameters.__getitem__, self._written_since(writes)))
            raise

    def _refuse_moved(self, before: dict[Place, Any], writes: dict[Place, int]) -> None:
        after = self._look_again()
        for place in self._written_since(writes):
            if place not in self._moving:
                raise kept_refused(place)
        changed = self._refuse_read(self._probe, before, after)
        for place, (was, now) in changed.items():
            # What is changed in each step need not be asked about each time.
            is_value = now is not NOTHING and not isinstance(now, Which)
            if is_value and self._is_alike(self._probe, {place: now}, {place: far(now, was)}):
                self._note_unread(self._probe, place, was, now)

    def _refuse_read(
        self, probe: Any, before: dict[Place, Any], after: dict[Place, Any]
    ) -> dict[Place, tuple[Any, Any]]:
        """What has changed, from what to what, once the losses of `probe` are known not to follow from it."""
        # Nearly all are the very same, and told apart the fastest by that.
        others = [place for place, value in after.items() if before.get(place, NOTHING) is not value]
        others += [place for place in before if place not in after]
        found = {place: (before.get(place, NOTHING), after.get(place, NOTHING)) for place in others}
        changed = {p: two for p, two in found.items() if not same(*two) and p not in self._harmless}
        was, now = ({place: two[i] for place, two in changed.items()} for i in range(2))
        if changed and not self._is_alike(probe, now, was):
            alone = [p for p in changed if not self._is_alike(probe, {p: now[p]}, {p: was[p]})]
            raise kept_refused((alone or [*changed])[0])
        return changed

    def _note_unread(self, probe: Any, place: Place, was: Any, value: Any) -> None:
        """Of what is not read, but for how many items it has, or how far it has counted."""
        empty = [] if (one := emptied(value)) is NOTHING else [Others([one])]
        if self._are_alike(probe, place, value, [*many(was, value), *empty]):
            self._harmless.add(place)
            self._latest = None  # which looked into it

    def ask_of(self, probe: Any) -> None:
        """From now on `unmoved` asks for the losses of `probe`, a small batch."""
        self._probe = probe

    def read_by(self, probe: Any) -> Reads:
        """What the losses of a batch and their gradients read, and where; nothing is left of the pass."""
        owners = Held(self._holders()).owners
        frozen = still(self._model, self._tables)
        with uncompiled(), self._put_back(), unchanged_global_state(), frozen, reads_of(owners) as found:
            self._gradients(self._losses(probe))
        return found

    def _writes(self) -> dict[Place, int]:
        return {place: p._version for place, p in self._parameters().items() if not p.is_inference()}

    def _written_since(self, writes: dict[Place, int]) -> list[Place]:
        return [place for place, version in self._writes().items() if writes.get(place, version) != version]
