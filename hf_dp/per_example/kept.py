"""What stays in a model, and in what computes its losses, after a pass: nothing that later losses follow from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.sharding import is_sharded
from hf_dp.per_example.state import copied, is_saved, put_back, same
from hf_dp.randomness import unchanged_global_state

Losses = Callable[[Any], Tensor]
_Place = tuple[str, str]
_KEPT = (int, float, str, type(None), tuple, Tensor)
_NOTHING = object()
# Parameters beside a model that a refused step has written to, and torch's count of writes then.
_WRITTEN: Any = WeakTensorKeyDictionary()
# So many times what losses differ by themselves is no more than that.
_BY_ITSELF = 4.0
# Whatever comes of a value that a model did not write.
_FAILED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Memory:
    """What passes leave in plain attributes (numbers, words, tensors and tuples of these) and unsaved buffers.

    Args:
        model: in training mode.
        losses: of a batch.
        loss: what computes them. Looked at as well are the object that it is a method of, and modules that this one,
            its class or a closure holds: all of their buffers, and those of their parameters that passes write to.
    """

    def __init__(self, model: nn.Module, losses: Losses, loss: Any = None) -> None:
        self._model, self._losses = model, losses
        self._beside = dict(beside(model, loss))
        self._harmless: set[_Place] = set()
        # Parameters, of modules beside the model, that every pass may write to (a teacher that follows the weights).
        self._moving: dict[_Place, nn.Parameter] = {}
        self._probe: Any = None

    def refuse(self, one: Any, other: Any, probe: Any) -> None:
        """Refuses what depends on the content of a batch, and what losses follow from.

        Two batches of the same shapes pass through from one state. What they leave is a cache if it is the same; else
        it is changed by much, and the losses of a third batch must not be.

        Args:
            one, other: of the same shapes, with other content.
            probe: a batch.

        Raises:
            UnsupportedModelError: with the name of the attribute.
        """
        writes = self._writes()
        for place, p in self._parameters().items():
            if _WRITTEN.get(p) == p._version:
                raise _refused(place)
        left = self._left_by(one, other)
        if written := self._written_since(writes):
            self._moving = {place: self._parameters()[place] for place in written}
            left = self._left_by(one, other)
        moved = {place: p.detach() + 1 for place, p in self._moving.items()}
        for place in {**left[0], **left[1]}:
            first, second = (found.get(place, _NOTHING) for found in left)
            if same(first, second):
                if place in self._moving and not same(first, moved[place]):  # it follows the weights
                    self._harmless.add(place)
                continue
            value = second if first is _NOTHING else first
            if not self._is_alike(probe, {place: value}, {place: _far(value, second)}):
                raise _refused(place)
            self._harmless.add(place)

    def _left_by(self, *batches: Any) -> list[dict[_Place, Any]]:
        left = []
        for batch in batches:
            with self._put_back(), unchanged_global_state():
                for p in self._moving.values():
                    p.data.add_(1)  # a teacher that begins as its pupil would follow it unseen
                self._losses(batch)
                left.append(self._look())
        return left

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Refuses what changes inside where losses follow from it: one rare example alone may do it.

        What has changed is a cache if some rows that the model has seen have the same losses with it as without. Not
        under FSDP2, where all ranks would have to ask together.

        Raises:
            UnsupportedModelError: with the name of the attribute. It is put back, as it is where something else fails.
        """
        if self._probe is None or is_sharded(self._model):
            yield
            return
        before, writes = self._look(), self._writes()
        try:
            yield
            self._refuse_moved(before, writes)
        except BaseException:
            # The next step, or training, would begin with it.
            with suppress(RuntimeError):
                for place, value in self._look().items():
                    if not same(value, before.get(place, _NOTHING)):
                        self._put(place, before.get(place, _NOTHING))
                parameters = self._parameters()
                _WRITTEN.update((p, p._version) for p in map(parameters.__getitem__, self._written_since(writes)))
            raise

    def _refuse_moved(self, before: dict[_Place, Any], writes: dict[_Place, int]) -> None:
        after = self._look()
        for place in self._written_since(writes):
            if place not in self._moving:
                raise _refused(place)
        changed = [p for p in {**before, **after} if not same(before.get(p, _NOTHING), after.get(p, _NOTHING))]
        changed = [place for place in changed if place not in self._harmless]
        if not changed:
            return
        was, now = ({place: found.get(place, _NOTHING) for place in changed} for found in (before, after))
        if not self._is_alike(self._probe, now, was):
            alone = [p for p in changed if not self._is_alike(self._probe, {p: now[p]}, {p: was[p]})]
            raise _refused((alone or changed)[0])
        for place, value in now.items():
            # What is changed in each step need not be asked about each time.
            if value is not _NOTHING and self._is_alike(self._probe, {place: value}, {place: _far(value, was[place])}):
                self._harmless.add(place)

    def ask_of(self, probe: Any) -> None:
        """From now on `unmoved` asks for the losses of `probe`, a small batch."""
        self._probe = probe

    def _holders(self) -> Iterator[tuple[str, Any]]:
        yield from self._model.named_modules()
        yield from self._beside.items()

    def _parameters(self) -> dict[_Place, nn.Parameter]:
        """Of what is beside the model."""
        modules = [(path, holder) for path, holder in self._beside.items() if isinstance(holder, nn.Module)]
        return {(path, n): p for path, m in modules for n, p in m._parameters.items() if p is not None}

    def _writes(self) -> dict[_Place, int]:
        return {place: p._version for place, p in self._parameters().items() if not p.is_inference()}

    def _written_since(self, writes: dict[_Place, int]) -> list[_Place]:
        return [place for place, version in self._writes().items() if writes.get(place, version) != version]

    def _look(self) -> dict[_Place, Any]:
        found: dict[_Place, Any] = {place: copied(p.detach()) for place, p in self._moving.items()}
        for path, holder in self._holders():
            found |= {(path, n): copied(v) for n, v in vars(holder).items() if isinstance(v, _KEPT) and n != "training"}
            if isinstance(holder, nn.Module):
                is_own = path not in self._beside
                buffers = {n: b for n, b in holder._buffers.items() if not (is_own and is_saved(holder, n))}
                found |= {(path, name): copied(buffer) for name, buffer in buffers.items()}
        return found

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(put_back(self._model))
            for holder in self._beside.values():
                if isinstance(holder, nn.Module):
                    stack.enter_context(put_back(holder))
            plain = {path: holder for path, holder in self._beside.items() if not isinstance(holder, nn.Module)}
            before = {path: dict(vars(holder)) for path, holder in plain.items()}
            kept = [(p, p.detach().clone()) for p in self._moving.values()]
            try:
                yield
            finally:
                for p, value in kept:
                    p.data.copy_(value)
                for path, values in before.items():
                    vars(plain[path]).update(values)
                    for name in vars(plain[path]).keys() - values.keys():
                        delattr(plain[path], name)

    def _is_alike(self, probe: Any, one: dict[_Place, Any], other: dict[_Place, Any]) -> bool:
        """Whether the losses are the same with these values and with those."""
        found = []
        for wanted in (one, one, other):
            with self._put_back(), unchanged_global_state():
                try:
                    for place, value in wanted.items():
                        self._put(place, value)
                    found.append(self._losses(probe).detach())
                except _FAILED:
                    return False  # it is read
        if len({losses.shape for losses in found}) > 1:
            return False
        # Sums of one batch may differ by themselves, where a device adds up in any order.
        by_itself = (found[1] - found[0]).abs().max()
        return same(found[0], found[2]) or bool((found[2] - found[0]).abs().max() <= _BY_ITSELF * by_itself)

    def _put(self, place: _Place, value: Any) -> None:
        path, name = place
        owner: Any = self._beside[path] if path in self._beside else self._model.get_submodule(path)
        buffers = owner._buffers if isinstance(owner, nn.Module) else {}
        if (path, name) in self._moving:
            self._moving[path, name].data.copy_(value)
        elif value is _NOTHING:
            buffers.pop(name, None)
            vars(owner).pop(name, None)
        elif name in buffers or (isinstance(owner, nn.Module) and name in owner._non_persistent_buffers_set):
            owner._buffers[name] = copied(value)
        else:
            setattr(owner, name, copied(value))


def beside(model: nn.Module, loss: Any) -> Iterator[tuple[str, Any]]:
    """What holds something besides the model's own modules, by a name: what computes losses, and modules it holds."""
    own = {id(module) for module in model.modules()}
    for name, holder in _held(loss):
        if not isinstance(holder, nn.Module):
            yield name, holder
        elif not any(id(module) in own for module in holder.modules()):
            for path, module in holder.named_modules():
                yield ".".join(filter(None, (name, path))), module


def _held(loss: Any) -> Iterator[tuple[str, Any]]:
    """What computes losses, and modules that it, its class or its closure holds."""
    while isinstance(loss, functools.partial):
        yield from _modules({**dict(enumerate(loss.args)), **loss.keywords})
        loss = loss.func
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    if owner is None:
        yield from _closure(loss)
        owner = None if hasattr(loss, "__code__") else loss
    if not hasattr(owner, "__dict__"):
        return
    kind = type(owner)
    yield kind.__name__, owner
    if not isinstance(owner, nn.Module):
        for name, module in _modules({**vars(kind), **vars(owner)}):
            yield f"{kind.__name__}.{name}", module
        for method in vars(kind).values():
            yield from _closure(method)


def _modules(values: dict[Any, Any]) -> Iterator[tuple[str, nn.Module]]:
    return ((str(name), value) for name, value in values.items() if isinstance(value, nn.Module))


def _closure(function: Any) -> Iterator[tuple[str, nn.Module]]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    for name, cell in zip(code.co_freevars, cells, strict=True) if code and cells else ():
        with suppress(ValueError):  # it is empty
            yield from _modules({name: cell.cell_contents})


def _refused(place: _Place) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{'.'.join(filter(None, place))} keeps something of the examples that pass through the model, and the "
        "losses of later ones follow from it.",
        why="one example could change the gradients of all that come after it, by any amount.",
        fix="switch it off in training, or reset it before each pass.",
    )


def _far(value: Any, other: Any) -> Any:
    """Another value of this kind, far from it: no number is its own."""
    if isinstance(value, tuple):
        others = other if isinstance(other, tuple) and len(other) == len(value) else value
        return tuple(map(_far, value, others))
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return 2 * value.nan_to_num().abs() + 1
        if value.dtype == torch.bool:
            return ~value
        return other if isinstance(other, Tensor) and not same(value, other) else value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * abs(value) + 1 if math.isfinite(value) else 1.0
    return other if other is not _NOTHING else value
