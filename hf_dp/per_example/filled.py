"""Tensors that parameters are written into (`weight = torch.zeros(n, m); weight[index] = w`), and are constants since;
and constants that are changed in place (`nn.ReLU(inplace=True)` after a layer that no example goes into).

The operation is one on a copy, which gives a constant, and the tensor then stands for it. Others that share its memory
would have to change with it: where there are any, it is refused.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.watched import Source, WatchedParameter, plain

_WRITING = re.compile(r"([^_]_|__setitem__|__i(add|sub|mul|matmul|(true|floor)div|mod|pow|and|or|xor|[lr]shift)__)$")
# Whose last argument says whether they write.
_ACTIVATIONS = (".celu", ".elu", ".hardtanh", ".leaky_relu", ".relu", ".relu6", ".selu", ".threshold")


def is_writing(name: str) -> bool:
    """Whether an operation of this name changes its first argument."""
    return _WRITING.search(name) is not None


def is_asked_to_write(name: str, args: Any, kwargs: Any) -> bool:
    """Whether it is called with `inplace=True`, the last argument of activations."""
    is_last = name.endswith(_ACTIVATIONS) and len(args) > 0 and args[-1] is True
    return is_last or kwargs.get("inplace") is True


class Filled:
    """The tensors that were written to in one recording."""

    def __init__(self) -> None:
        # By id; and how many tensors share the memory of the constant that each stands for.
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._computed: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def computed(self, constant: WatchedParameter, is_apart: bool) -> WatchedParameter:
        """Takes note of a constant, which may be changed in place where it has memory of its own; and returns it."""
        if is_apart:
            self._computed[id(constant)] = weakref.ref(constant), _sharing(constant.source.plain)
        return constant

    def write(self, function: Any, args: Any, on_constants: Callable[[Any, Any], Any]) -> Any:
        """Runs an operation on constants that changes its first argument.

        Args:
            args: its first argument is a tensor in which no example is, or a constant.
            on_constants: runs a function of the arguments that it is given beside it, as on constants.

        Returns:
            What the operation does: the tensor that was written to, or nothing.

        Raises:
            RuntimeError: it cannot be told what else changes with it.
        """
        target = args[0] if args else None
        if not isinstance(target, Tensor):
            raise RuntimeError("nothing that it could be written to")
        is_constant = isinstance(target, WatchedParameter)
        if not torch.is_grad_enabled() and not is_constant:
            return on_constants(function, args)
        self._check_alone(target)
        returned: list[bool] = []

        def on_copy(*others: Any, **options: Any) -> Tensor:
            # What is no constant is changed below, and must not be known to what is kept.
            first, others = (others[0], others[1:]) if is_constant else (target, others)
            copy: Tensor = first.clone()
            version, shape = copy._version, copy.shape
            output = function(copy, *others, **options)
            if copy._version == version or copy.shape != shape or not (output is None or output is copy):
                raise RuntimeError("not a change of the first argument's values")
            returned.append(output is not None)
            return copy

        value = on_constants(on_copy, args if is_constant else args[1:])
        source = value.source if isinstance(value, WatchedParameter) else None
        if source is None and is_constant:
            raise RuntimeError("what it gave has no gradient any longer")
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if self._of(target) is self._computed:
                target.data = plain(value)  # What it was is kept for the backward pass of the operation that gave it.
            else:
                target.copy_(plain(value))
        del value  # which shares the memory that `_stand_for` looks at
        if source is not None:
            self._stand_for(target, source)
        return target if returned[0] else None

    def end(self) -> None:
        """All are plain tensors again."""
        for reference, _ in self._known.values():
            target = reference()
            if target is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    target.requires_grad_(False)
                    target._backward_hooks = None
                del target.source  # type: ignore[attr-defined]
                target.__class__ = Tensor
        self._known.clear()

    def _of(self, target: Tensor) -> dict[int, tuple[weakref.ref[Tensor], int]]:
        reference, _ = self._computed.get(id(target), (None, 0))
        return self._known if reference is None or reference() is not target else self._computed

    def _check_alone(self, target: Tensor) -> None:
        if isinstance(target, WatchedParameter):
            reference, alone = self._of(target).get(id(target), (None, 0))
            if reference is None or reference() is not target:
                raise RuntimeError("what is written to is a parameter, or computed from one")
            if _sharing(target.source.plain) > alone:
                raise RuntimeError("other tensors share the memory that is written to")
        elif type(target) is not Tensor or not _is_usual(target):
            raise RuntimeError("what is written to is no ordinary tensor")
        elif _sharing(target) > _sharing(torch.empty(1)):
            raise RuntimeError("other tensors share the memory that is written to")

    def _stand_for(self, target: Tensor, source: Source) -> None:
        known = self._of(target)
        if isinstance(target, WatchedParameter):
            target.source = source
        else:
            target.__class__ = WatchedParameter
            with torch._C.DisableTorchFunctionSubclass():
                target.requires_grad_()
            WatchedParameter.becoming(target, source)  # type: ignore[arg-type]
        known[id(target)] = weakref.ref(target), _sharing(source.plain)


def _is_usual(target: Tensor) -> bool:
    if target.layout is not torch.strided or target.requires_grad or target.is_inference():
        return False
    return target.untyped_storage().resizable()  # as the memory of arrays and files is not


def _sharing(tensor: Tensor) -> int:
    """How many hold the memory of `tensor`, and it itself: more than once, and the same number of times for all."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
