"""What a model keeps of examples that pass through it: nothing that is saved, or that later losses follow from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.sharding import reshard
from hf_dp.per_example.state import attributes_of, buffer_refused, equal, is_saved, put_back
from hf_dp.per_example.taken import bits_of
from hf_dp.randomness import unchanged_global_state

Losses = Callable[[Any], Tensor]
_Place = tuple[str, str]


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

    Buffers are put back.

    Frozen parameters are compared by the counts that torch keeps of writes, which those through `.data` pass by.

    Raises:
        UnsupportedModelError: with the name.
    """
    owned = [
        (f"{prefix}.{last}".lstrip("."), owner, last, buffer, buffer.detach().clone())
        for prefix, owner in model.named_modules()
        for last, buffer in owner._buffers.items()
        if buffer is not None and is_saved(owner, last)
    ]
    frozen = [(name, p, p._version) for name, p in model.named_parameters() if _is_counted(p)]
    yield
    changed = []
    for name, owner, last, buffer, value in owned:
        if not equal(owner._buffers.get(last), value):
            buffer.detach().copy_(value)
            owner._buffers[last] = buffer
            changed.append(name)
    if changed:
        raise buffer_refused(changed[0])
    for name, p, version in frozen:
        if p._version != version:
            raise UnsupportedModelError(
                f"the frozen parameter {name!r} was written to while a private step was computed.",
                why="it is saved with the model, and no noise is added to what was computed of the data.",
                fix="begin again from the last checkpoint, without what writes into it.",
            )


def _is_counted(p: nn.Parameter) -> bool:
    return not (p.requires_grad or isinstance(p, DTensor) or p.is_inference())


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
    for place, value in left[0].items():
        if not _same(value, left[1].get(place)) and not _is_harmless(model, losses, place, value, left[1], probe):
            raise UnsupportedModelError(
                f"{'.'.join(filter(None, place))} keeps something of the examples that pass through the model, and the "
                "losses of later ones follow from it.",
                why="one example could change the gradients of all that come after it, by any amount.",
                fix="switch it off in training, or reset it before each pass.",
            )


def _is_harmless(
    model: nn.Module, losses: Losses, place: _Place, value: Any, others: dict[_Place, Any], probe: Any
) -> bool:
    found = []
    for wanted in (value, value, _far(value, others.get(place))):
        with put_back(model), unchanged_global_state():
            _put(model, place, wanted)
            try:
                found.append(losses(probe).detach())
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                return False  # it is read
    # Where sums of one batch differ by themselves, nothing can be told.
    return not equal(found[0], found[1]) or equal(found[0], found[2])


def _left(model: nn.Module) -> dict[_Place, Any]:
    """Numbers and tensors in attributes of modules, and buffers that are not saved."""
    found: dict[_Place, Any] = {}
    for path, holder, values in attributes_of(model):
        if isinstance(holder, nn.Module):
            found |= {(path, name): _copy(v) for name, v in values.items() if isinstance(v, (int, float, Tensor))}
            unsaved = {n: b for n, b in holder._buffers.items() if b is not None and not is_saved(holder, n)}
            found |= {(path, name): _copy(buffer) for name, buffer in unsaved.items()}
    return found


def _put(model: nn.Module, place: _Place, value: Any) -> None:
    path, name = place
    owner = model.get_submodule(path)
    if isinstance(owner._buffers.get(name), Tensor) and isinstance(value, Tensor):
        owner._buffers[name].copy_(value)  # type: ignore[union-attr]
    else:
        setattr(owner, name, value)


def _far(value: Any, other: Any) -> Any:
    """Another value of this kind, far from it."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return ~value if isinstance(value, Tensor) else not value
    if isinstance(value, Tensor) and not value.is_floating_point():
        return other if isinstance(other, Tensor) else value + 1
    return 2 * value + 1


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return equal(other, one)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _copy(value: Any) -> Any:
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
    return None if value.is_meta else int(bits_of(value.reshape(1, -1)))


def _told_of_others(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    return repr(value)
