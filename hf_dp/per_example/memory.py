"""What a model keeps of examples that pass through it: nothing that is saved, or that later losses follow from."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.sharding import reshard
from hf_dp.per_example.state import attributes_of, buffer_refused, configurations, equal, is_saved, put_back
from hf_dp.per_example.taken import bits_of
from hf_dp.randomness import unchanged_global_state

Losses = Callable[[Any], Tensor]
_Place = tuple[str, str]
_KEPT = (int, float, tuple, Tensor)
# So many times what losses differ by themselves is no more than that.
_BY_ITSELF = 4.0


@contextmanager
def unchanged_weights(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose passes write into what is saved with it: parameters, frozen or trained, and what modules
    add to a state dict (extra state, hooks). Buffers are for `unchanged_state` to see.

    Compared are checksums, whatever way it was written in.

    Raises:
        UnsupportedModelError: with the name in the state dict.
    """
    before = _checksums(model)
    yield
    now = _checksums(model)
    found = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if found:
        raise UnsupportedModelError(
            f"{found[0]!r} changes when examples pass through the model, or comes with the first of them.",
            why="it is saved with the model, and no noise is added to what was computed of the data.",
            fix="load the model again, and switch off what writes into it; what starts from data is to start from "
            "public rows, before training.",
        )


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses what changes inside of what is saved with a model and not trained: one example alone may do it.

    Looked at are saved buffers, which are put back, configurations and extra state. Frozen parameters are compared by
    the counts that torch keeps of writes, which those through `.data` pass by.

    Raises:
        UnsupportedModelError: with the name.
    """
    before, others, writes = _saved_buffers(model), _others(model), _writes(model)
    yield
    now = _saved_buffers(model, copied=False)
    changed = [place for place in {**before, **now} if not _same(before.get(place), now.get(place))]
    for path, last in changed:
        owner = model.get_submodule(path)
        value, found = before.get((path, last)), owner._buffers.pop(last, None)
        if (path, last) in before:
            is_there = value is not None and found is not None and found.shape == value.shape
            owner._buffers[last] = found.detach().copy_(value) if is_there else value  # type: ignore[union-attr,arg-type]
    if changed:
        raise buffer_refused(".".join(filter(None, changed[0])))
    written = _differing(others, _others(model)) + _differing(writes, _writes(model))
    if written:
        raise UnsupportedModelError(
            f"{written[0]} was written to while a private step was computed.",
            why="it is saved with the model, and no noise is added to what was computed of the data.",
            fix="begin again from the last checkpoint, without what writes into it.",
        )


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _saved_buffers(model: nn.Module, *, copied: bool = True) -> dict[_Place, Tensor | None]:
    return {
        (path, last): _copy(buffer) if copied else buffer
        for path, owner in model.named_modules()
        for last, buffer in owner._buffers.items()
        if is_saved(owner, last)
    }


def _others(model: nn.Module) -> dict[str, Any]:
    """What configurations hold, and extra state."""
    found = {path: _told(values) for path, values in configurations(model)}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[f"the extra state of {path or 'the model'}"] = _told(module.get_extra_state())
    return found


def _writes(model: nn.Module) -> dict[str, int]:
    return {
        f"the frozen parameter {name!r}": p._version
        for name, p in model.named_parameters()
        if not (p.requires_grad or isinstance(p, DTensor) or p.is_inference())
    }


def refuse_memory(model: nn.Module, losses: Losses, one: Any, other: Any, probe: Any) -> None:
    """Refuses a model in which something stays that depends on the content of a batch, and that losses follow from.

    Two batches of the same shapes pass through it from one state. What they leave in attributes, or in buffers that are
    not saved, is a cache if it is the same; else it is changed by much, and the losses of a third batch must not be.

    Args:
        model: in training mode.
        losses: of a batch.
        one, other: of the same shapes, with other content.
        probe: a batch.

    Raises:
        UnsupportedModelError: with the name of the attribute.
    """
    left = []
    for batch in (one, other):
        with put_back(model), unchanged_global_state():
            losses(batch)
            left.append(_left(model))
    for place in {**left[0], **left[1]}:
        if not _same(left[0].get(place), left[1].get(place)) and not _is_harmless(model, losses, place, left, probe):
            raise UnsupportedModelError(
                f"{'.'.join(filter(None, place))} keeps something of the examples that pass through the model, and the "
                "losses of later ones follow from it.",
                why="one example could change the gradients of all that come after it, by any amount.",
                fix="switch it off in training, or reset it before each pass.",
            )


def _is_harmless(model: nn.Module, losses: Losses, place: _Place, left: list[dict[_Place, Any]], probe: Any) -> bool:
    value = left[0].get(place, left[1].get(place))
    found = []
    for wanted in (value, value, _far(value, left[1].get(place))):
        with put_back(model), unchanged_global_state():
            _put(model, place, wanted)
            try:
                found.append(losses(probe).detach())
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                return False  # it is read
    # Sums of one batch may differ by themselves, where a device adds up in any order.
    by_itself = (found[1] - found[0]).abs().max()
    return equal(found[0], found[2]) or bool((found[2] - found[0]).abs().max() <= _BY_ITSELF * by_itself)


def _left(model: nn.Module) -> dict[_Place, Any]:
    """Numbers, tensors and tuples in attributes of modules, and buffers that are not saved."""
    found: dict[_Place, Any] = {}
    for path, holder, values in attributes_of(model):
        if isinstance(holder, nn.Module):
            found |= {(path, name): _copy(v) for name, v in values.items() if isinstance(v, _KEPT)}
            unsaved = {n: b for n, b in holder._buffers.items() if b is not None and not is_saved(holder, n)}
            found |= {(path, name): _copy(buffer) for name, buffer in unsaved.items()}
    return found


def _put(model: nn.Module, place: _Place, value: Any) -> None:
    path, name = place
    owner = model.get_submodule(path)
    if isinstance(value, Tensor) and not is_saved(owner, name):
        owner._buffers[name] = _copy(value)
    else:
        setattr(owner, name, value)


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
        return other if isinstance(other, Tensor) and not _same(value, other) else value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 2 * abs(value) + 1 if math.isfinite(value) else 1.0
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and equal(other, one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_copy, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def _checksums(model: nn.Module) -> dict[str, Any]:
    reshard(model)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    parameters = model.named_parameters(remove_duplicate=False)
    kept = itertools.chain(parameters, model.state_dict(keep_vars=True).items())
    return {name: _told(value) for name, value in kept if name not in buffers}


def _told(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _told_of_others(value)
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "__tensor_flatten__"):
        return [_told(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    value = torch.view_as_real(value) if value.is_complex() else value
    return None if value.is_meta else int(bits_of(value.reshape(1, -1)))


def _told_of_others(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return repr(value)
