"""What a forward pass leaves behind in a model: nothing that is saved, and no switch that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError, UnsupportedModelError

_Attributes = list[tuple[str, Any, dict[str, Any]]]
_PLAIN = (str, bool, int, float, type(None), tuple, Tensor)


@contextmanager
def unchanged_state(model: nn.Module) -> Iterator[None]:
    """Refuses a model that remembers what passes through it: running averages, or a switch that stays where it is.

    Looked at are saved buffers, and attributes of modules and configurations that are words or yes and no. All of them
    are put back, as are buffers that are not saved and numbers, in which a cache may be kept: whether these matter is
    for `check_padding` to see.

    Raises:
        UnsupportedModelError: with the name of the buffer or the attribute.
    """
    buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    attributes = _attributes(model)
    try:
        yield
    except PreflightError as error:
        # What stays in the model may be why.
        found = _left_behind(model, buffers, attributes)
        if found is not None:
            raise found from error
        raise
    except BaseException:
        # An accelerator that had an index out of range answers nothing any more, which must not hide the reason.
        with suppress(torch.AcceleratorError):
            _put_back(model, buffers, attributes)
        raise
    found = _left_behind(model, buffers, attributes)
    if found is not None:
        raise found


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Puts back what passes leave in a model (see `unchanged_state`), and which of its parameters are trained."""
    buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    attributes, trained = _attributes(model), [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        _put_back(model, buffers, attributes)
        for p, is_trained in trained:
            p.requires_grad_(is_trained)


def _left_behind(
    model: nn.Module, buffers: dict[str, tuple[Tensor, Tensor]], attributes: _Attributes
) -> UnsupportedModelError | None:
    changed, switched = _put_back(model, buffers, attributes)
    if changed:
        return UnsupportedModelError(
            f"the buffer {changed[0]!r} changes when examples pass through the model.",
            why="buffers are saved with the model, and no noise is added to what this one remembers of the data.",
            fix="switch it off (track_running_stats=False, say), or keep its module in eval mode by its train().",
        )
    if switched:
        return UnsupportedModelError(
            f"examples that pass through the model change {switched[0]}, and it stays so.",
            why="what one example switched would change the gradients of all that come later.",
            fix="set it in the model's configuration to the value that it is changed to.",
        )
    return None


def _attributes(model: nn.Module) -> _Attributes:
    """For each module, and each configuration that one holds, its name and its plain attributes."""
    holders: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        for path, holder in ((name, module), (f"{name}.config".lstrip("."), getattr(module, "config", None))):
            if hasattr(holder, "__dict__"):
                holders.setdefault(id(holder), (path, holder))
    return [
        (path, holder, {k: v for k, v in vars(holder).items() if isinstance(v, _PLAIN) and k != "training"})
        for path, holder in holders.values()
    ]


def _put_back(
    model: nn.Module, buffers: dict[str, tuple[Tensor, Tensor]], attributes: _Attributes
) -> tuple[list[str], list[str]]:
    """Saved buffers that are not what they were before, and switches, from what to what; now all are as before."""
    now, changed, switched = dict(model.named_buffers()), [], []
    for name, (buffer, value) in buffers.items():
        if not _equal(now.get(name), value):
            path, _, last = name.rpartition(".")
            owner = model.get_submodule(path)
            buffer.detach().copy_(value)
            owner._buffers[last] = buffer
            changed += [] if last in owner._non_persistent_buffers_set else [name]
    for path, holder, before in attributes:
        for name, value in before.items():
            found = vars(holder).get(name)
            if found is value or (not isinstance(value, Tensor) and type(found) is type(value) and found == value):
                continue
            if isinstance(value, (str, bool)) and isinstance(found, (str, bool)):
                switched.append(f"{path}.{name}".lstrip(".") + f" from {value!r} to {found!r}")
            setattr(holder, name, value)
        for name, found in list(vars(holder).items()):
            if name not in before and isinstance(found, _PLAIN) and name != "training":
                if isinstance(found, (str, bool)):
                    switched.append(f"{path}.{name}".lstrip(".") + f" from nothing to {found!r}")
                delattr(holder, name)
    return changed, switched


def _equal(now: Any, before: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and now.shape == before.shape
        and bool((now.eq(before) | (now.ne(now) & before.ne(before))).all())
    )
