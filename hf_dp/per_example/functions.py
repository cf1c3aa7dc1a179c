"""Autograd Functions, which do not show what they are given to whoever watches operations.

One that computes from parameters, and from what all examples share, is an operation on constants (LoHa's products). One
that is given data beside them is run again for each example in the backward pass (C3A's convolutions). What is given
more than one tensor of data, or objects that may hold some, is left as it is: the gradient that reaches a parameter
through it is seen, and refused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, refusal
from hf_dp.per_example.sharding import passes_on
from hf_dp.per_example.waiting import answers_at_once
from hf_dp.per_example.watched import WatchedParameter, flatten, mapped, names_of, plain, watched_in

# Relative to what an example has: products of one row may be rounded otherwise than those of many.
_TOLERANCE, _LOW_PRECISION_TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-2}, 5e-2
# Whether C makes of a Function what is called, as from torch 2.14 on: a model that has taken it from its class before
# calls C, where nobody sees it.
IS_OF_C = not inspect.ismethod(torch.autograd.Function.apply)
# What holds no tensors.
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Applied:
    """What a Function computes, as an operation with its name.

    Args:
        kind: the class of the Function.
        apply: of it, as torch has it.
    """

    def __init__(self, kind: Any, apply: Callable[..., Any]) -> None:
        self._kind, self._apply = kind, apply
        self.__module__, self.__qualname__ = kind.__module__, kind.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply(self._kind, *args, **kwargs)


@contextmanager
def functions_seen() -> Iterator[None]:
    """Inside, a Function that is given parameters is called as an operation that its rule is asked for."""
    # Below the class that models know, since they may have taken the method from it before (`f = MyFunction.apply`).
    base: Any = torch.autograd.Function if IS_OF_C else torch.autograd.function._SingleLevelFunction
    kept = base.__dict__.get("apply")

    def unseen(cls: Any, *args: Any, **kwargs: Any) -> Any:
        output = (super(base, cls).apply if kept is None else kept.__get__(None, cls))(*args, **kwargs)
        if returned := watched_in(output):
            raise returned_by(f"{cls.__module__}.{cls.__qualname__}", returned)
        return output

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        watched = watched_in(args, kwargs)
        # Reentrant checkpoints are given code, and whatever it uses.
        if not watched or any(map(callable, flatten((args, kwargs)))):
            return unseen(cls, *args, **kwargs)
        if passes_on(cls):  # no gradient comes to constants in the backward pass
            passed = iter(unseen(cls, *(a for a in args if not isinstance(a, WatchedParameter)), **kwargs))
            return tuple(a if isinstance(a, WatchedParameter) else next(passed) for a in args[1:])
        return watched[0].source.watch.call(Applied(cls, unseen), args, kwargs, watched)

    sparse = torch.sparse_coo_tensor

    @functools.wraps(sparse)
    def made_sparse(*args: Any, **kwargs: Any) -> Any:
        watched = watched_in(args, kwargs)
        return watched[0].source.watch.call(sparse, args, kwargs, watched) if watched else sparse(*args, **kwargs)

    base.apply = classmethod(apply)
    torch.sparse_coo_tensor = made_sparse
    try:
        yield
    finally:
        if kept is None:
            del base.apply
        else:
            base.apply = kept
        torch.sparse_coo_tensor = sparse


def returned_by(name: str, several: Sequence[WatchedParameter]) -> UnsupportedModelError:
    """The refusal of what a Function of this name returns, and what it was derived by would hand gradients on."""
    reason = (
        "it returns what its forward pass computes from parameters alone, and its own backward is not seen "
        "(of a checkpoint, with use_reentrant=False it is; of f = MyFunction.apply, where it is called as "
        "MyFunction.apply(...))"
    )
    return refusal(names_of(w.source for w in several), f"operation {name}", reason)


def refuse_returned(several: Sequence[WatchedParameter]) -> None:
    """Refuses what was returned by a Function whose method a model had taken from it before, where nobody sees it run.

    Raises:
        UnsupportedModelError: with its name.
    """
    if not IS_OF_C:
        return
    with torch._C.DisableTorchFunctionSubclass():
        made = {type(w.grad_fn).__name__.removesuffix("Backward") for w in several if w.grad_fn is not None}
    if made:
        raise returned_by(min(made), several)


def by_rows(
    function: Applied, args: Any, kwargs: Any, data: list[Tensor], differ: Callable[[Tensor], None]
) -> tuple[Rule, Bound] | None:
    """A rule for a Function of parameters and of `data`, if that is one tensor, and its arguments.

    Args:
        function: rows of what it gives depend on the same rows of the data alone, and on no random numbers.
        args: its arguments.
        kwargs: by name.
        data: those of `args` that are not the same for all examples.
        differ: is told which examples (B,) come out otherwise when it is run again, where the answer has to be waited
            for; elsewhere the backward pass refuses them.
    """
    given = flatten((args, kwargs))
    watched = {id(a): f"parameter {i}" for i, a in enumerate(given) if isinstance(a, WatchedParameter)}
    # Of what is empty nothing is computed: checkpoints of some versions of torch keep their arguments so.
    if len(data) > 1 or not data[0].numel() or not all(isinstance(a, (Tensor, *_PLAIN)) for a in given):
        return None

    # The backward pass is outside of the model's own.
    kind = data[0].device.type
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )

    def run(rows: Tensor, parameters: Mapping[str, Tensor | None]) -> Tensor:
        def put(value: Any) -> Any:
            return rows if value is data[0] else parameters.get(watched.get(id(value), ""), value)

        with autocast:
            output: Tensor = function(*mapped(put, args), **mapped(put, kwargs))
        if not isinstance(output, Tensor) or output.shape[:1] != rows.shape[:1]:
            raise TypeError("it gives something else than a row for each row")
        return output

    def forward(rows: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
        tensors = [value for a in given if isinstance(value := plain(a), Tensor) and not value.is_inference()]
        versions, states = [t._version for t in tensors], _random_states(rows.device)
        output = run(rows, operands.parameters)
        is_random = not all(map(torch.equal, states, _random_states(rows.device)))
        if is_random or [t._version for t in tensors] != versions:
            raise RuntimeError("it changes what it is given, or is random")
        return output, (rows, _print(output))

    def backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
        roles = sorted(operands.watched)
        inputs, known, gradients = (t if axis.reading == "constant" else axis.rows(t) for t in (*saved, gradient))
        found, prints = list[tuple[Tensor, ...]](), list[Tensor]()
        with torch.enable_grad():
            leaves = {
                role: value.detach().requires_grad_()
                for role in roles
                if (value := operands.parameters[role]) is not None
            }
            for one, own in zip(inputs, gradients, strict=True):
                one = one.detach().requires_grad_(needs_input)
                output = run(one, {**operands.parameters, **leaves})
                prints.append(_print(output))
                wanted = [*leaves.values(), *([one] if needs_input else [])]
                # Copied, since some write into what they are given.
                own = own.to(output.dtype, copy=True)
                found.append(torch.autograd.grad(output, wanted, own, materialize_grads=True))
        differing = _differing(torch.stack(prints), known, gradient.dtype)
        if not answers_at_once(differing.device):
            differ(differing)
        elif bool(differing.any()):
            reason = "run for one example it gives something else than for all: it mixes them, or changes each time"
            raise refusal(names, f"operation {name}", reason)
        columns = [torch.stack(column).to_dense() for column in zip(*found, strict=True)]
        factors: dict[str, Factors | None] = {r: PerExample(g) for r, g in zip(leaves, columns, strict=False)}
        return columns[-1].reshape(saved[0].shape) if needs_input else None, factors

    names = names_of(a.source for a in given if isinstance(a, WatchedParameter))
    name = f"{function.__module__}.{function.__qualname__}"
    roles = {role: next(a for a in given if id(a) == key) for key, role in watched.items()}
    return Rule(name, Bound, forward, backward), Bound(data[0], roles, {})


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _print(output: Tensor) -> Tensor:
    """What tells a row from another (rows, 2): the row itself may be changed in place later, and is large."""
    rows = torch.view_as_real(output.detach().resolve_conj()) if output.is_complex() else output.detach()
    rows = accumulation(rows.reshape(len(rows), math.prod(rows.shape[1:])))
    weights = torch.arange(rows.shape[1], device=rows.device).cos().to(rows.dtype)
    return torch.stack([rows @ weights, torch.linalg.vector_norm(rows, dim=1)], dim=1)


def _differing(found: Tensor, known: Tensor, dtype: torch.dtype) -> Tensor:
    """(B,): whether prints (B, rows, 2) are others, by more than rounding, where they are finite."""
    sizes = torch.linalg.vector_norm(known[..., 1].nan_to_num(0, 0, 0), dim=1)
    limits = _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) * (sizes + 1e-3 * sizes.max())
    is_off = torch.linalg.vector_norm(found - known, dim=(1, 2)) > limits
    is_finite, was_finite = (prints.isfinite().flatten(1).all(1) for prints in (found, known))
    return torch.logical_or(is_off, is_finite != was_finite)
