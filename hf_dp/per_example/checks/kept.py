"""What stays in a model, and in what computes its losses, after a pass: nothing that later losses follow from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.per_example.checks.again import Again, looked_at
from hf_dp.per_example.checks.beside import beside
from hf_dp.per_example.checks.built import as_built, parametrised, put_in
from hf_dp.per_example.checks.counts import many, refuse_counts
from hf_dp.per_example.checks.held import Held, Place
from hf_dp.per_example.checks.moved import are_same, still, told_of_gradients
from hf_dp.per_example.checks.reads import Reads, reads_of
from hf_dp.per_example.checks.state import is_saved, kept_refused, put_back, uncompiled
from hf_dp.per_example.checks.switches import Switches
from hf_dp.per_example.checks.values import FAILED, NOTHING, Which, copied, emptied, far, here, is_away, same
from hf_dp.per_example.modules import named_modules
from hf_dp.per_example.sharding import is_sharded
from hf_dp.randomness import unchanged_global_state

Losses = Callable[[Any], Tensor]
# Parameters beside a model that a refused step has written to, and torch's count of writes then.
_WRITTEN: Any = WeakTensorKeyDictionary()
# Of gradients what nobody adds up in one order anywhere.
_ROUNDING = 1e-6


class Memory:
    """What passes leave in attributes (see `Held`) and unsaved buffers.

    Args:
        model: in training mode.
        losses: of a batch.
        loss: what computes them. Looked at as well are the object that it is a method of, what it names in its closure
            and its file, and modules that these, or a module of the model, hold unregistered: all of their buffers, and
            those of their parameters that passes write to.
        switches: what is switched off in the model, and stays so whatever is put back.
        tables: parameters whose gradients are nowhere made as a whole.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, loss: Any = None, switches: Switches | None = None,
        tables: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._model, self._losses, self._switches, self._tables = model, losses, switches or Switches(), tables
        self._beside = dict(beside(model, loss))
        self._harmless: set[Place] = set()
        # Parameters, of modules beside the model, that every pass may write to (a teacher that follows the weights).
        self._moving: dict[Place, nn.Parameter] = {}
        self._probe: Any = None
        # Not kept where each pass holds other things: those of a pass, and its graph, would be kept with it.
        self._latest: Again | None = None
        self._is_kept, self._copies = True, dict[Place, Any]()

    def refuse(self, one: Any, other: Any, probe: Any) -> None:
        """Refuses what depends on the content of a batch, and what losses follow from.

        Two batches of the same shapes pass through from one state. What they leave is a cache if it is the same; else
        it is changed by much, and the losses of a third batch must not be. Nor may a batch that passes once more read
        what it has left itself, by words of its own say.

        Args:
            one, other: of the same shapes, with other content.
            probe: a batch.

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
                others = [second] if is_one else [far(value, second), *many(before.get(place, NOTHING), value)]
                if not all(self._is_alike(probe, {place: value}, {place: one}) for one in others):
                    raise kept_refused(place)
            if not is_new and not is_one:
                self._note_unread(probe, place, before.get(place, NOTHING), value)
        if alike:
            with self._put_back(), unchanged_global_state():
                self._losses(one)
                self._losses(one)
                again = self._look()
            refuse_counts(
                {place: (left[0][place], again.get(place)) for place in alike}, partial(self._is_alike, probe)
            )

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
        others = [one for one in (emptied(value), *many(was, value)) if one is not NOTHING]
        if all(self._is_alike(probe, {place: value}, {place: one}) for one in others):
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

    def _holders(self) -> list[tuple[str, Any]]:
        return [*named_modules(self._model), *self._beside.items()]

    def _parameters(self) -> dict[Place, nn.Parameter]:
        """Of what is beside the model."""
        modules = [(path, holder) for path, holder in self._beside.items() if isinstance(holder, nn.Module)]
        return {(path, n): p for path, m in modules for n, p in m._parameters.items() if p is not None}

    def _writes(self) -> dict[Place, int]:
        return {place: p._version for place, p in self._parameters().items() if not p.is_inference()}

    def _written_since(self, writes: dict[Place, int]) -> list[Place]:
        return [place for place, version in self._writes().items() if writes.get(place, version) != version]

    def _look_again(self) -> dict[Place, Any]:
        latest, found = self._latest, self._look()
        self._is_kept &= self._latest is latest
        return found

    def _look(self) -> dict[Place, Any]:
        moving = {place: copied(p.detach()) for place, p in self._moving.items()}
        latest = looked_at(self._holders, self._harmless, self._latest)
        self._latest = latest if self._is_kept else None
        known, self._copies = self._copies, {}
        for place, module in latest.buffers:
            buffer, known_one = module._buffers[place[1]], known.get(place, NOTHING)
            is_late = self._probe is not None and not is_away(buffer)  # other saved ones are for others to see
            if is_late or place[0] in self._beside or not is_saved(module, place[1]):
                is_known = not is_away(buffer) and same(buffer, known_one)
                self._copies[place] = known_one if is_known else copied(buffer)
        return latest.joined(moving, self._copies)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(put_back(self._model))
            stack.enter_context(self.restored())
            stack.enter_context(parametrised(self._holders()))
            kept = [(p, p.detach().clone()) for p in self._moving.values()]
            try:
                yield
            finally:
                for p, value in kept:
                    p.data.copy_(value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts back what is held in attributes, and what is held in that, and buffers of modules beside the model: what
        the first rows leave there would otherwise be there before all steps, and no step would change it."""
        with ExitStack() as stack:
            for holder in self._beside.values():
                if isinstance(holder, nn.Module):
                    stack.enter_context(put_back(holder))
            stack.callback(self._switches.put_off_again)
            stack.enter_context(as_built(self._holders()))
            stack.enter_context(Held(self._holders()).put_back())
            yield

    def _is_alike(self, probe: Any, one: dict[Place, Any], other: dict[Place, Any]) -> bool:
        """Whether the losses, and their gradients, are the same with these values and with those."""
        found, gradients = list[Tensor](), list[Tensor]()
        for wanted in (one, one, other):
            with self._put_back(), unchanged_global_state(), still(self._model, self._tables):
                try:
                    # First what holds others.
                    for is_one in (True, False):
                        these = {place: value for place, value in wanted.items() if isinstance(value, Which) is is_one}
                        owners = Held(self._holders()).owners if these else {}
                        for place, value in these.items():
                            self._put(owners, place, value)
                    found.append((losses := self._losses(probe)).detach())
                    gradients.append(self._gradients(losses))
                except FAILED:
                    return False  # it is read
        if any(each.shape != several[0].shape for several in (found, gradients) for each in several):
            return False
        rounding = _ROUNDING * float(gradients[0].abs().max())
        return are_same(found) and are_same(gradients, rounding)

    def _gradients(self, losses: Tensor) -> Tensor:
        """What tells them from others; nothing of shards."""
        if is_sharded(self._model):
            return losses.new_zeros(())
        return told_of_gradients(losses, self._model.parameters(), self._parameters().values())

    def _put(self, owners: dict[str, Any], place: Place, value: Any) -> None:
        if place in self._moving:
            self._moving[place].data.copy_(value)
        else:
            put_in(owners.get(place[0]), place[1], value)
