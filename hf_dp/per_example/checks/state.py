"""What a forward pass leaves behind in a model: nothing that is saved, and no switch that stays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.per_example.checks.values import HOOKS_NOTED, NOTHING, equal
from hf_dp.per_example.modules import named_modules

Attributes = list[tuple[str, Any, dict[str, Any]]]
Buffers = dict[str, tuple[Tensor, Tensor] | None]
_PLAIN = (str, bool, int, float, type(None), tuple, Tensor)
# Of configurations these count as well: they are saved.
_SAVED = (list, dict, set)
_CONFIGURATIONS = ("config", "generation_config")
_NO_STATE = ("training", HOOKS_NOTED)


class Switch(NamedTuple):
    """An attribute that is yes or no, or a word, and was another."""

    path: str
    name: str
    was: Any
    now: Any
    is_saved: bool

    def __str__(self) -> str:
        was = "nothing" if self.was is NOTHING else repr(self.was)
        return f"{self.path}.{self.name}".lstrip(".") + f" from {was} to {self.now!r}"


Told = Callable[[Sequence[Switch]], bool]


@contextmanager
def unchanged_state(model: nn.Module, are_told: Told | None = None) -> Iterator[None]:
    """Refuses a model that remembers what passes through it: running averages, or a switch that stays where it is.

    Looked at are saved buffers, all that configurations hold, and attributes of modules that are words or yes and no.
    All of them are put back, as are buffers that are not saved and numbers, in which a cache may be kept: whether these
    matter is for `check_padding` and `Memory` to see. Parameters are for `unchanged_weights` to see.

    Args:
        are_told: whether no loss follows from what was switched in modules; None: from all of it some may.

    Raises:
        UnsupportedModelError: with the name of the buffer or the attribute.
    """
    buffers, attributes = _buffers(model), attributes_of(model)
    try:
        yield
    except PreflightError as error:
        # What stays in the model may be why.
        found = _left_behind(model, buffers, attributes, are_told)
        if found is not None:
            raise found from error
        raise
    except BaseException:
        # An accelerator that had an index out of range answers nothing any more, which must not hide the reason.
        with suppress(torch.AcceleratorError):
            _put_back(model, buffers, attributes)
        raise
    found = _left_behind(model, buffers, attributes, are_told)
    if found is not None:
        raise found


@contextmanager
def uncompiled() -> Iterator[None]:
    """Lets what is compiled (`torch.compile`) run as it is written, in checks.

    torch compiles few variants of a module, and no more of it, for good, where it met it under a mode that sees every
    operation: after the checks the steps would run uncompiled too.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_hooked(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses hooks on the gradients of parameters.

    Raises:
        UnsupportedModelError: with their names.
    """
    with torch._C.DisableTorchFunction():  # of a check's modes, each would be asked for each attribute
        hooked = sorted(n for n, p in parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks)
    if hooked:
        raise UnsupportedModelError(
            f"{', '.join(hooked)} has a hook on its gradient.",
            why="the hook would not see the gradient of each example, and what it changes would be left out.",
            fix="remove the hook (the handle's remove()), or change the loss instead.",
        )


def refuse_compiled(modules: Sequence[nn.Module]) -> None:
    """Refuses modules that are trained and compiled or, by `torch.jit`, traced or scripted.

    Args:
        modules: all of a model, which comes first.

    Raises:
        UnsupportedModelError: with the name of the module.
    """
    for module in modules:
        is_script = isinstance(module, torch.jit.ScriptModule)
        is_compiled = "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        if (is_script or is_compiled) and any(p.requires_grad for p in module.parameters()):
            name = next(name for name, other in modules[0].named_modules() if other is module)
            raise UnsupportedModelError(
                f"{name or 'the model'} is compiled (torch.{'jit' if is_script else 'compile'}) and has trainable "
                "parameters.",
                why="the uses of a parameter cannot be seen inside a compiled graph.",
                fix="train it uncompiled, or freeze its parameters: frozen modules may be compiled by themselves.",
            )


def refuse_unshaped(model: nn.Module) -> None:
    """Refuses parameters and buffers that get their shapes from the first batch (`nn.LazyLinear`).

    Raises:
        UnsupportedModelError: with the name of the first.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedModelError(
                f"{name} has no shape yet.",
                why="it gets one, and its first values, from the first batch; what is clipped and saved must be known "
                "before.",
                fix="let the model compute made-up inputs of the right shape once, before optimizer and trainer are "
                "made, or give its size (nn.Linear in place of nn.LazyLinear).",
            )


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Puts back what passes leave in a model (see `unchanged_state`), and which of its parameters are trained."""
    buffers, attributes = _buffers(model), attributes_of(model)
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    finally:
        _put_back(model, buffers, attributes)
        for p, is_trained in trained:
            p.requires_grad_(is_trained)


def _left_behind(
    model: nn.Module, buffers: Buffers, attributes: Attributes, are_told: Told | None
) -> UnsupportedModelError | None:
    changed, written, switched = _put_back(model, buffers, attributes)
    if changed:
        return buffer_refused(changed[0])
    if written:
        return UnsupportedModelError(
            f"examples that pass through the model change {written[0]}.",
            why="a configuration is saved with the model, and no noise is added to what it remembers of the data.",
            fix="keep what is computed from examples out of the configuration.",
        )
    saved = [switch for switch in switched if switch.is_saved]
    if saved or (switched and not (are_told and are_told(switched))):
        found = (saved or switched)[0]
        way = "in the model's configuration" if found.is_saved else "where the model is made (its configuration, say)"
        return UnsupportedModelError(
            f"examples that pass through the model change {found}, and it stays so.",
            why="what one example switched would change the gradients of all that come later.",
            fix=f"set it {way} to the value that it is changed to.",
        )
    return None


def buffer_refused(name: str) -> UnsupportedModelError:
    """The refusal of a saved buffer that remembers."""
    return UnsupportedModelError(
        f"the buffer {name!r} changes when examples pass through the model.",
        why="buffers are saved with the model, and no noise is added to what this one remembers of the data.",
        fix="switch it off (track_running_stats=False, say), or keep its module in eval mode by its train().",
    )


def kept_refused(place: tuple[str, Any]) -> UnsupportedModelError:
    """The refusal of what an attribute remembers."""
    return UnsupportedModelError(
        f"{named_place(place)} keeps something of the examples that pass through the model, and the losses of later "
        "ones follow from it.",
        why="one example could change the gradients of all that come after it, by any amount.",
        fix="switch it off in training, or reset it before each pass.",
    )


def named_place(place: tuple[str, Any]) -> str:
    return ".".join(filter(None, map(str, place)))


def _buffers(model: nn.Module) -> Buffers:
    """Each buffer by all of its names (one pass may give two names one tensor), and what it holds."""
    return {name: None if b is None else (b, b.detach().clone()) for name, b in _buffers_as_they_are(model).items()}


def _buffers_as_they_are(model: nn.Module) -> dict[str, Tensor | None]:
    """Also those that have no value yet: a model asks whether it is None."""
    modules = model.named_modules(remove_duplicate=False)
    return {f"{path}.{last}".lstrip("."): b for path, module in modules for last, b in module._buffers.items()}


def attributes_of(model: nn.Module) -> Attributes:
    """For each module, and each configuration that one holds, its name and its plain attributes."""
    modules = named_modules(model)
    return [(path, holder, values_of(holder)) for path, holder in [*modules, *_configurations(modules)]]


def configurations(modules: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, dict[str, Any]]]:
    """Of each configuration that one of the named modules holds, its name and what it holds."""
    return [(path, values_of(holder)) for path, holder in _configurations(modules) if not isinstance(holder, nn.Module)]


def _configurations(modules: Sequence[tuple[str, nn.Module]]) -> Iterable[tuple[str, Any]]:
    """What they hold as such, other than one of themselves."""
    own, found = {id(module) for _, module in modules}, dict[int, tuple[str, Any]]()
    # That a module lacks something torch takes long to say, and says thousands of times in each step.
    plain: dict[type, tuple[str, ...]] = {}
    for name, module in modules:
        kind = type(module)
        if kind not in plain:
            plain[kind] = tuple(n for n in _CONFIGURATIONS if _is_own(kind, n))
        for held in _CONFIGURATIONS:
            is_own = held in plain[kind] and held not in module._modules
            holder = module.__dict__.get(held) if is_own else getattr(module, held, None)
            if hasattr(holder, "__dict__") and id(holder) not in own:
                found.setdefault(id(holder), (f"{name}.{held}".lstrip("."), holder))
    return found.values()


def _is_own(kind: type, name: str) -> bool:
    """Whether modules of that class have an attribute only where it is set on one."""
    return kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, name)  # type: ignore[attr-defined]


def values_of(holder: Any) -> dict[str, Any]:
    """Its plain attributes; of a configuration lists and the like too, as they are now."""
    kinds = _PLAIN if isinstance(holder, nn.Module) else (*_PLAIN, *_SAVED)
    return {
        name: copy.deepcopy(value) if isinstance(value, _SAVED) else value
        for name, value in vars(holder).items()
        if isinstance(value, kinds) and name not in _NO_STATE
    }


def is_saved(owner: nn.Module, last: str) -> bool:
    """Whether the buffer of this name goes into the state dict."""
    return last not in owner._non_persistent_buffers_set


def _put_back(model: nn.Module, buffers: Buffers, attributes: Attributes) -> tuple[list[str], list[str], list[Switch]]:
    """Saved buffers that are other than before, what configurations hold that is, and switches; all are put back."""
    now, changed, written, switched = _buffers_as_they_are(model), list[str](), list[str](), list[Switch]()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in {**now, **buffers}:
        was, found, (path, _, last) = buffers.get(name), now.get(name), name.rpartition(".")
        is_gone = was is None and path not in modules  # with its module, and it held nothing
        if is_gone or ((name in now) is (name in buffers) and (found is None if was is None else equal(found, was[1]))):
            continue
        owner = model.get_submodule(path)
        changed += [name] if is_saved(owner, last) and not (was is None and found is None) else []
        # Whoever asks whether there is one, and of which value, gets the answer of before.
        owner._buffers[last] = None if was is None else was[0]
        if name not in buffers:
            del owner._buffers[last]
        if was is not None:
            was[0].detach().copy_(was[1])
    for path, holder, before in attributes:
        is_module = isinstance(holder, nn.Module)
        for name, value in before.items():
            found = vars(holder).get(name)
            if found is value or (not isinstance(value, Tensor) and type(found) is type(value) and found == value):
                continue
            # Of a module None is what is not there yet.
            is_switch = isinstance(value, (str, bool)) or (value is None and not is_module)
            if is_switch and isinstance(found, (str, bool)):
                switched.append(Switch(path, name, value, found, not is_module))
            elif not is_module:
                written.append(f"{path}.{name}")
            setattr(holder, name, value)
        for name, found in values_of(holder).items():
            if name not in before:
                if isinstance(found, (str, bool)):
                    switched.append(Switch(path, name, NOTHING, found, not is_module))
                elif not is_module:
                    written.append(f"{path}.{name}")
                delattr(holder, name)
    return changed, written, switched
