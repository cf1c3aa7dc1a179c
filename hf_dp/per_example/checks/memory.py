"""What a model writes of examples that pass through it: nothing into what is saved with it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.bits import bits_in_place, bits_of
from hf_dp.per_example.checks.saved_buffers import Place, put_back_saved, saved_buffers, saved_put_back
from hf_dp.per_example.checks.state import buffer_refused, configurations
from hf_dp.per_example.checks.values import parts
from hf_dp.per_example.modules import named_modules
from hf_dp.per_example.sharding import reshard
from hf_dp.per_example.watched import flatten

_Told = tuple[Tensor | None, int | None, Any]
_Modules = Sequence[tuple[str, nn.Module]]
# In modules of models that were refused, so that copies have it too: what had been written, by the last of its name,
# and its checksum.
_WRITTEN = "_hf_dp_written"
# Parameters that passes write to and leave as they are (PEFT takes those of `target_parameters` out and puts them back
# in each), by the latest of torch's counts: their checksum.
_AS_THEY_WERE: Any = WeakTensorKeyDictionary()


@contextmanager
def unchanged_weights(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose passes write into what is saved with it: parameters, frozen or trained, and what modules
    add to a state dict (extra state, hooks). Buffers and configurations are for `unchanged_state` to see; here
    they are put back, also what passes in evaluation mode have written.

    Compared are checksums, whatever way it was written in: of what was written to and is as it was they are from now
    on. What was written stays there, and as long as it does the model is refused. So are those that let a parameter be
    trained, or no more, which is put back.

    Raises:
        UnsupportedModelError: with the name in the state dict.
    """
    before, switched = _checksums(model), list[str]()
    _refuse_written(model, {**before, **_others(named_modules(model))})
    try:
        with writes_noted(model), _trained_as_before(model, switched), saved_put_back(model):
            yield
    except BaseException:
        # An accelerator that is full, or had an index out of range, answers nothing, which must not hide the reason.
        with suppress(RuntimeError):
            _note_written(model, _differing(before, now := _checksums(model)), now)
        raise
    now = _checksums(model)
    if found := sorted(_differing(before, now)):
        _note_written(model, found, now)
        raise UnsupportedModelError(
            f"{found[0]!r} changes when examples pass through the model, or comes with the first of them.",
            why="it is saved with the model, and no noise is added to what was computed of the data.",
            fix="load the model again, and switch off what writes into it; what starts from data is to start from "
            "public rows, before training.",
        )
    if switched:
        raise UnsupportedModelError(
            f"examples that pass through the model change whether {switched[0]!r} is trained.",
            why="one example more or less could decide what is trained, and no noise is added to that.",
            fix="freeze it before training, or not at all (requires_grad_).",
        )


@contextmanager
def _trained_as_before(model: nn.Module, switched: list[str]) -> Iterator[None]:
    """The same parameters are trained at the end; `switched` has the names of others."""
    before = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    try:
        yield
    finally:
        for name, p, is_trained in before:
            if p.requires_grad is not is_trained:
                switched.append(name)
                p.requires_grad_(is_trained)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses what changes inside of what is saved with a model: one example alone may do it.

    Looked at are saved buffers, which are put back, configurations and extra state. Parameters, trained or not, are
    compared by the counts that torch keeps of writes, which those through `.data` pass by.

    Raises:
        UnsupportedModelError: with the name.
    """
    # Of thousands of modules, which take long to walk through.
    modules = named_modules(model)
    before, others, writes = saved_buffers(modules), _others(modules), _writes(modules)

    def undone() -> tuple[list[Place], list[str]]:
        changed, modules = put_back_saved(model, before), named_modules(model)
        if written := _differing(others, left := _others(modules)) + _differing(writes, _writes(modules)):
            _note_written(model, written, {**_checksums(model), **left})
        return changed, written

    try:
        yield
    except BaseException:
        # The step may be taken again, and would begin with it.
        with suppress(RuntimeError):
            undone()
        raise
    changed, written = undone()
    if changed:
        raise buffer_refused(".".join(filter(None, changed[0])))
    if written:
        raise UnsupportedModelError(
            f"{written[0]!r} was written to while a private step was computed.",
            why="it is saved with the model, and no noise is added to what was computed of the data.",
            fix="begin again from the last checkpoint, in a model that is loaded anew, without what writes into it.",
        )


@contextmanager
def writes_noted(model: nn.Module) -> Iterator[None]:
    """From now on, what is written to inside is compared by checksums (see `write_of`), in all models that share it."""
    before = _parameters(named_modules(model))
    counts = {name: p._version for name, p in before.items()}
    try:
        yield
    finally:
        for name, p in before.items():
            if p._version != counts[name]:
                _AS_THEY_WERE[p] = None, None


def write_of(p: Tensor) -> Any:
    """What changes where a parameter is written to: torch's count, or, of one that passes write to, a checksum."""
    if not _AS_THEY_WERE or (known := _AS_THEY_WERE.get(p)) is None:
        return p._version
    if known[0] != p._version:
        known = _AS_THEY_WERE[p] = p._version, told_of(p)
    return known[1]


def buffers_told(model: nn.Module, known: Mapping[str, _Told]) -> dict[str, _Told]:
    """Of each saved buffer the tensor, torch's count of writes, and a checksum: that of `known` where it is as it was.
    A write that changes nothing, such as DDP's, leaves the checksum as it is."""
    found: dict[str, _Told] = {}
    for (path, last), buffer in saved_buffers(named_modules(model), as_is=True).items():
        name = f"{path}.{last}".lstrip(".")
        count = None if buffer is None or buffer.is_inference() else buffer._version
        mark = known.get(name)
        is_as_it_was = mark is not None and count is not None and mark[0] is buffer and mark[1] == count
        found[name] = mark if is_as_it_was else (buffer, count, told_of(buffer))  # type: ignore[assignment]
    return found


def _note_written(model: nn.Module, names: Iterable[str], now: Mapping[str, Any]) -> None:
    told = {_known(name, now[name]) for name in names if name in now}
    for module in model.modules() if told else ():
        setattr(module, _WRITTEN, vars(module).get(_WRITTEN, frozenset()) | told)


def _refuse_written(model: nn.Module, now: Mapping[str, Any]) -> None:
    written = set[tuple[str, str]]().union(*(vars(module).get(_WRITTEN, ()) for module in model.modules()))
    if found := sorted(name for name, told in now.items() if written and _known(name, told) in written):
        raise UnsupportedModelError(
            f"{found[0]!r} was written when examples passed through this model before, in a training that was refused.",
            why="it is saved with the model, and no noise is added to what was computed of the data.",
            fix="load the model again, into a new object, without what writes into it.",
        )


def _known(name: str, told: Any) -> tuple[str, str]:
    # What comes before it changes where the model is put into another one, an adapter's say.
    return name.rpartition(".")[2], repr(told)


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _others(modules: _Modules) -> dict[str, Any]:
    """What configurations hold, and extra state."""
    found = {
        f"{path}.{name}": told_of(value) for path, values in configurations(modules) for name, value in values.items()
    }
    for path, module in modules:
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[f"{path}._extra_state".lstrip(".")] = told_of(module.get_extra_state())
    return found


def _writes(modules: _Modules) -> dict[str, Any]:
    return {name: write_of(p) for name, p in _parameters(modules).items()}


def _parameters(modules: _Modules) -> dict[str, nn.Parameter]:
    """Of which torch counts writes."""
    return {
        f"{path}.{last}".lstrip("."): p
        for path, owner in modules
        for last, p in owner._parameters.items()
        if not (p is None or isinstance(p, DTensor) or p.is_inference())
    }


def _checksums(model: nn.Module) -> dict[str, Any]:
    reshard(model)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    kept = dict(model.named_parameters(remove_duplicate=False)) | model.state_dict(keep_vars=True)
    kept = {name: value for name, value in kept.items() if name not in buffers}
    # A parameter is most often in both, and a tied one has several names.
    told = {id(value): told_of(value) for value in {id(value): value for value in kept.values()}.values()}
    return {name: told[id(value)] for name, value in kept.items()}


def told_of(value: Any) -> Any:
    """A checksum of tensors, and of what holds some; of anything else what it is."""
    if not isinstance(value, Tensor):
        return _told_of_others(value)
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.to_local()
    if hasattr(value, "__tensor_flatten__"):
        return [told_of(getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    if value.layout is not torch.strided:
        return [told_of(part) for part in parts(value)]
    value = torch.view_as_real(value) if value.is_complex() else value
    return None if value.is_meta else int(bits_of(value.reshape(1, -1)))


def told_in_place(value: Tensor) -> Tensor:
    """(n,) int64: the same of a tensor, and where its numbers are, if it is an ordinary one."""
    is_ordinary = type(value.data) is Tensor and value.layout is torch.strided and value.numel() > 0
    if is_ordinary and not (value.is_meta or value.is_complex()):
        return bits_in_place(value)
    return torch.tensor([bits or 0 for bits in flatten(told_of(value))], dtype=torch.int64)


def _told_of_others(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: told_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [told_of(item) for item in value]
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return repr(value)
