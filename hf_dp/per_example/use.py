"""One use of watched parameters, run by its rule as an autograd Function that hands on per-example factors."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.apart import of_example
from hf_dp.per_example.filled import is_asked_to_write, is_writing
from hf_dp.per_example.functions import Applied
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import PLAIN, SECOND, Axis, Bound, Operands, Rule, Use, refusal
from hf_dp.per_example.watched import Recording, Source, WatchedParameter, flatten, mapped, names_of, plain, tensors_in

# Why there is no rule, and the way out, by a part of the operation's name.
_REASONS = {
    "requires_grad": (
        "the model freezes or unfreezes it as it runs",
        "do so before the training: call requires_grad_() yourself, or the model once, under torch.no_grad()",
    ),
    "autograd.backward": (
        "a reentrant checkpoint returns what is computed from parameters alone",
        "take gradient_checkpointing_kwargs={'use_reentrant': False}, with which this is exact",
    ),
}
_IN_PLACE = (
    "it changes in place what is computed from parameters alone, and may lie in memory that others share",
    "give it inplace=False, with which it is exact",
)

_KEPT = (
    "it works on a value that was computed from the parameter in an earlier pass and kept",
    "compute it anew in each pass; or, where it is kept for evaluation, let go of it in the module's own train(mode)",
)

# Methods that change what becomes of a tensor.
CHANGING = re.compile(r"hook$|backward$|__set__$")
_ITSELF = (
    "it changes the parameter itself in the middle of a pass",
    "do so before the training (of RWKV, which divides weights whenever it is evaluated, set "
    "model.config.rescale_every = 0, with which it is exact)",
)

_ELEMENTWISE = (
    *("addcdiv", "addcmul", "atan2", "clamp", "clamp_max", "clamp_min", "clip", "div", "fmax", "fmin", "hypot", "lerp"),
    *("logaddexp", "logaddexp2", "masked_fill", "max", "maximum", "min", "minimum", "pow", "sub", "true_divide"),
    *("where", "xlogy"),
)
# What gives example i the same, whether an operand has one row for all examples or a copy for each.
_BROADCASTING = {
    *(getattr(torch.Tensor, name) for name in ("__iadd__", "add_", "__isub__", "sub_", "__imul__", "mul_")),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("sub", "rsub", "truediv", "rtruediv", "pow", "rpow")),
    *(getattr(module, name) for name in _ELEMENTWISE for module in (torch, torch.Tensor)),
}
# What gives no tensor.
_NUMBERS = {getattr(torch.Tensor, n) for n in ("item", "tolist", "__float__", "__int__", "__bool__", "__format__")}
# What has a rule for parameters that broadcast against a first axis.
_SUMS = {
    *(torch.add, torch.mul, torch.Tensor.add, torch.Tensor.mul),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("add", "radd", "mul", "rmul")),
}
# The same, for operands with two axes or more, of which other axes than those of the output are added up.
_PRODUCTS = {
    *(torch.matmul, torch.nn.functional.scaled_dot_product_attention),
    *(getattr(torch.Tensor, name) for name in ("matmul", "__matmul__", "__rmatmul__")),
}


class Call(NamedTuple):
    """One use, as its backward pass needs to know it."""

    watch: Recording
    rule: Rule
    operands: Operands
    watched: dict[str, Source]
    axis: Axis


def recorded(given: Tensor | None, call: Call) -> Tensor:
    """What the operation gives; its parameters' factors go where theirs go, once the backward pass comes here."""
    output: Tensor = _RecordedUse.apply(call.watch.anchor, given, call)
    return output


class _RecordedUse(torch.autograd.Function):
    # As torch has it below all: what a use is given need not be looked through once more (`functions_seen`).
    apply = torch._C._FunctionBase.__dict__["apply"]

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor | None, call: Call) -> Tensor:
        if given is None or not call.rule.is_product:
            output, saved = call.rule.forward(given, call.operands)
        else:
            cast, is_new = call.watch.casts.of(given)
            # What the model computes follows from no cast of before, whatever has happened to its input since.
            output, saved = call.rule.forward(cast if is_new else given, call.operands)
            saved = tuple(cast if tensor is given else tensor for tensor in saved)
        if output._is_view():
            # Autograd would let nobody change it in place.
            output = torch.ops.aten._unsafe_view(output, output.shape)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.input_dtype = None if given is None else given.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        call: Call = ctx.call
        if not call.watch.is_final:
            raise refusal(
                names_of(call.watched.values()),
                f"operation {call.rule.name}",
                "the loss function differentiates it by itself, as gradient penalties do",
                "compute what is differentiated there with constants in place of parameters, such as p.detach()",
            )
        needs_input = bool(ctx.needs_input_grad[1])
        # Detached: factors that held on to the graph would be held by it in turn, and never be freed.
        saved = tuple([tensor.detach() for tensor in ctx.saved_tensors])
        try:
            input_gradient, factors = call.rule.backward(saved, call.operands, gradients[0], call.axis, needs_input)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            names = names_of(call.watched.values())
            raise refusal(names, f"operation {call.rule.name}", f"its rule cannot read it ({error})") from error
        with of_example(call.axis.example):
            for role, source in call.watched.items():
                found = factors[role]
                if found is not None:
                    source.pull(found)
        if not needs_input or input_gradient is None:
            return None, None, None
        return None, input_gradient.to(ctx.input_dtype), None


def sorted_operands(
    rule: Rule | None, name: str, parameters: list[str], args: Any, kwargs: Any
) -> Bound | UnsupportedModelError:
    """The operands of a use, sorted, or why they cannot be."""
    if rule is None:
        reasons = [reason for part, reason in _REASONS.items() if part in name]
        reasons += [_IN_PLACE] if is_asked_to_write(name, args, kwargs) else []
        reasons += [_ITSELF] if is_writing(name) and not torch.is_grad_enabled() else []
        reasons += [("it has no rule for exact per-example gradients", "")]
        return refusal(parameters, f"operation {name}", *reasons[0])
    try:
        bound = rule.bind(*args, **kwargs)
    except TypeError as error:
        return refusal(parameters, f"operation {name}", f"its arguments are not known ({error})")
    except UnsupportedModelError as error:
        # Made anew, with the names: its frames would keep the memory of the whole pass.
        found = error.found.replace("a trainable parameter", f"parameter {', '.join(parameters)}")
        return UnsupportedModelError(found, why=error.why, fix=error.fix)
    reason = _entangled(bound)
    return bound if reason is None else refusal(parameters, f"operation {name}", reason)


def _entangled(bound: Bound) -> str | None:
    """Why the operands of a use are no input and parameters, if they are not."""
    values, options = bound.parameters.values(), flatten(bound.options) if bound.options else []
    watched = [p for p in values if isinstance(p, WatchedParameter)]
    strays = [a for a in (bound.input, *options) if isinstance(a, WatchedParameter)]
    if strays or (len(watched) > 1 and len(set(map(id, watched))) != len(watched)):
        return "parameters are combined with one another there"
    # A rule of a user's own may have put several into one role.
    others = [p for p in values if p is not None and not isinstance(p, WatchedParameter)]
    tensors = tensors_in(others, options) if others or options else []
    computed = [*[p.source.plain for p in watched], *tensors, *([] if bound.input is None else [bound.input])]
    if any(map(torch.is_complex, computed)):
        return "no rule is known to conjugate complex numbers as they need it"
    if any(a.requires_grad for a in tensors):
        return "another of its operands needs a gradient too"
    return None


class Copies(NamedTuple):
    """The operands of an operation, with as many rows of each parameter as the data has; and how they are read."""

    args: Any
    kwargs: Any
    read: set[Use]


def copied(reader: Reader, function: Any, name: str, parameters: list[str], args: Any, kwargs: Any) -> Copies | None:
    """The operands of an operation with copies of parameters for the examples, if it gives the same then."""
    tensors, given = tensors_in(args, kwargs), (parameters, args, kwargs)
    if reader.infers and (alone := _for_one(reader, function, name, tensors, *given)) is not None:
        return alone
    is_whole, found = function in _BROADCASTING, None
    is_product = function in _PRODUCTS and all(t.dim() > 1 for t in tensors if isinstance(t, WatchedParameter))
    if is_whole or is_product or function in _SUMS:
        found = _along_second(reader, name, tensors, *given, own=2 if is_product else 0)
    if found is None and (is_whole or is_product):
        found = _along_first(reader, name, tensors, *given, is_whole=is_whole)
    return found


def _for_one(
    reader: Reader, function: Any, name: str, tensors: list[Tensor], parameters: list[str], args: Any, kwargs: Any
) -> Copies | None:
    """Where all data is of one example, of which autograd then finds the gradients, whatever the operation does."""
    data = [t for t in tensors if not isinstance(t, WatchedParameter)]
    is_written = (is_writing(name) and isinstance(next(iter(args), None), WatchedParameter)) or "out" in kwargs
    is_plain = not (isinstance(function, Applied) or is_written or is_asked_to_write(name, args, kwargs))
    if not is_plain or not torch.is_grad_enabled() or CHANGING.search(name) or "autograd" in name:
        return None
    example = reader.one_of(parameters, data)
    if example is None:
        return None

    def copy(value: Any) -> Any:
        if not isinstance(value, WatchedParameter):
            return value
        with reader.copying_for(example):
            return value.expand(1, *value.shape)[0]

    return Copies(mapped(copy, args), mapped(copy, kwargs), set())


def _along_first(
    reader: Reader, name: str, tensors: list[Tensor], parameters: list[str], args: Any, kwargs: Any, *, is_whole: bool
) -> Copies | None:
    """The operands of an operation with a row for each row of the data, where parameters have one; or as large as the
    output, so that it is not autograd that adds up their gradients over positions."""
    dimensions = max(t.dim() for t in tensors)
    if not is_whole and dimensions < 3:  # of a product of matrices the first axis is none of several
        return None
    data = [t for t in tensors if t.dim() == dimensions and not isinstance(t, WatchedParameter)]
    led = [t for t in data if reader.may_be_data(name, parameters, t)]
    rows = {len(t) for t in led} - {1}
    watched = [t for t in tensors if isinstance(t, WatchedParameter)]
    if len(rows) > 1 or not data or any(t.dim() == dimensions and len(t) > 1 for t in watched):
        return None
    for tensor in led:
        reader.check_rows(name, tensor, parameters)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if is_whole else (-1,) * dimensions
    readings = ["batch"] if all(t.requires_grad for t in data) else ["batch", PLAIN]

    def copy(value: Any) -> Any:
        if not isinstance(value, WatchedParameter):
            return value
        one: Any = value.reshape(*[1] * (dimensions - value.dim()), *value.shape)
        return one.expand(next(iter(rows), 1), *shape[1:])

    if not rows and (reader.batch_size > 1 or all(reader.known(name, parameters, t) == "constant" for t in data)):
        return None
    read = {Use(name, parameter, reading, dimensions) for parameter in parameters for reading in readings if rows}
    return Copies(mapped(copy, args), mapped(copy, kwargs), read)


def _along_second(
    reader: Reader, name: str, tensors: list[Tensor], parameters: list[str], args: Any, kwargs: Any, *, own: int
) -> Copies | None:
    """Where the examples are second, and each parameter has a row, or a matrix, for each position: (T, 1, ...); the
    last axes, so many, are each operand's `own`."""
    watched = [t for t in tensors if isinstance(t, WatchedParameter)]
    sizes = {t.shape[1] for t in tensors if t.dim() > 2 and not isinstance(t, WatchedParameter)}
    is_known = len({t.dim() for t in tensors}) == 1 and sizes == {reader.batch_size}
    if not is_known or any(t.shape[1] != 1 or t.dim() < 2 + own for t in watched):
        return None
    shape = torch.broadcast_shapes(*(t.shape[: t.dim() - own] for t in tensors))
    if any(len(t) != shape[0] for t in watched):
        return None

    def copy(value: Any) -> Any:
        return value.expand(*shape, *[-1] * own) if isinstance(value, WatchedParameter) else value

    read = {Use(name, parameter, SECOND, len(shape) + own) for parameter in parameters}
    return Copies(mapped(copy, args), mapped(copy, kwargs), read)


def of_earlier_pass(function: Any, name: str, parameters: list[str], args: Any, kwargs: Any, *, is_over: bool) -> Any:
    """What an operation gives of values that a pass which `is_over` has left, where no gradient is asked for: of a
    penalty that is logged, say.

    Raises:
        UnsupportedModelError: of any other operation.
    """
    is_writing_one = is_writing(name) or is_asked_to_write(name, args, kwargs) or CHANGING.search(name)
    if is_over and not is_writing_one and (function in _NUMBERS or not torch.is_grad_enabled()):
        return function(*mapped(plain, args), **mapped(plain, kwargs))
    raise refusal(parameters, f"operation {name}", *_KEPT)


def name_of(function: Any) -> str:
    """As it is called in messages and certificates."""
    if getattr(function, "__name__", "") == "__set__":  # an attribute
        return f"Tensor.{function.__self__.__name__}.__set__"
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', None) or getattr(function, '__name__', function)}".lstrip(".")
