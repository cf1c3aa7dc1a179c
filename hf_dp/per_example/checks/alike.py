"""Losses and their gradients, with one value or another in the places of what passes leave: are they the same?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from hf_dp.per_example.batch import batch_size, take
from hf_dp.per_example.checks.again import Again, looked_at
from hf_dp.per_example.checks.beside import beside
from hf_dp.per_example.checks.built import as_built, parametrised, put_in
from hf_dp.per_example.checks.counts import Others, all_alike
from hf_dp.per_example.checks.held import Held, Place
from hf_dp.per_example.checks.moved import are_same, still, told_of_gradients
from hf_dp.per_example.checks.state import is_saved, put_back
from hf_dp.per_example.checks.switches import Switches
from hf_dp.per_example.checks.values import FAILED, NOTHING, Which, copied, is_away, same
from hf_dp.per_example.modules import named_modules
from hf_dp.per_example.sharding import is_sharded
from hf_dp.randomness import unchanged_global_state

Losses = Callable[[Any], Tensor]
# Of gradients what nobody adds up in one order anywhere.
_ROUNDING = 1e-6


class Alike:
    """What passes leave in attributes (see `Held`) and unsaved buffers, and whether losses are the same without.

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

    def apart(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same, in shards as if it had not run: what begins with the first row there no step is watched for."""
        return self.restored()(run) if is_sharded(self._model) else run

    def _are_alike(self, probe: Any, place: Place, value: Any, others: list[Others]) -> bool:
        return all_alike(others, lambda one: self._is_alike(probe, {place: value}, {place: one}))

    def _is_alike(self, probe: Any, one: dict[Place, Any], other: dict[Place, Any]) -> bool | None:
        """Whether losses and gradients are the same with these values and with those; None where those do not do.

        Of what a pass has written itself nobody knows whether it was read before: there each row is asked for alone.
        """
        found, gradients, left = list[Tensor](), list[Tensor](), list[dict[Place, Any]]()
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
                    now = self._look()
                    left.append({place: now.get(place, NOTHING) for place in wanted})
                except FAILED:
                    return None if wanted is other else False  # it is read
        if any(each.shape != several[0].shape for several in (found, gradients) for each in several):
            return False
        rounding = _ROUNDING * float(gradients[0].abs().max())
        if not are_same(found) or not are_same(gradients, rounding):
            return False
        is_hidden = any(same(left[0][place], left[2][place]) for place in one if not same(one[place], other[place]))
        return not is_hidden or all(self._is_alike(row, one, other) for row in _rows(probe))

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

    def _holders(self) -> list[tuple[str, Any]]:
        return [*named_modules(self._model), *self._beside.items()]

    def _parameters(self) -> dict[Place, nn.Parameter]:
        """Of what is beside the model."""
        modules = [(path, holder) for path, holder in self._beside.items() if isinstance(holder, nn.Module)]
        return {(path, n): p for path, m in modules for n, p in m._parameters.items() if p is not None}


def _rows(batch: Any) -> Iterator[Any]:
    """Each row of a batch alone, where there are several."""
    size = batch_size(given := batch if isinstance(batch, Mapping) else {"": batch})
    rows = (take(given, [i]) for i in range(size if size > 1 else 0))
    return rows if given is batch else (row[""] for row in rows)
