"""How a use of a parameter is seen and recorded.

For the duration of one forward and backward pass every trainable parameter is replaced by a `WatchedParameter`, a
tensor whose `__torch_function__` looks the operation up in the rules. Uses are thus keyed on (operation, parameter),
not on module class: tied weights, GPT-2's Conv1D, every RMSNorm and LoRA need no code of their own. An operation
without a rule is refused where it happens. Each use runs as an autograd Function on the plain weight, so autograd never
forms weight gradients; what backward needs goes through `save_for_backward`, so checkpointing works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.factors import Factors, Outer, sum_dtype


class Bound(NamedTuple):
    """The arguments of one call, sorted: the example-led input, the parameters by role, everything else."""

    input: Tensor | None
    parameters: dict[str, Tensor | None]
    options: dict[str, Any]


class Operands(NamedTuple):
    """What a rule computes with: plain tensors by role, and which roles are watched."""

    parameters: dict[str, Tensor | None]
    watched: frozenset[str]
    options: dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """How the example axis of an input is read: "batch" (B, ...), "folded" (B*k, ...) or "broadcast" (1, ...)."""

    batch_size: int
    reading: str

    def positions(self, tensor: Tensor) -> Tensor:
        """(B, T, n) from a tensor laid out like the input, features last."""
        return tensor.reshape(self.batch_size, -1, tensor.shape[-1])

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, k, ...) from a tensor laid out like the input."""
        return tensor.reshape(self.batch_size, -1, *tensor.shape[1:])


@dataclass(frozen=True)
class Rule:
    """How one torch function uses its parameters.

    Attributes:
        name: the operation's name in messages and certificates.
        bind: takes the function's own arguments and sorts them into a `Bound`.
        forward: `(input, operands) -> (output, tensors to save)`.
        backward: `(saved, operands, grad_output, axis, needs_input_gradient) -> (input gradient or None,
            {role: Factors})`. Example i's factor must depend on row i of the saved tensors and of `grad_output` alone.
        features: number of trailing axes of the input that are not example or position axes.
    """

    name: str
    bind: Callable[..., Bound]
    forward: Callable[[Any, Operands], tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[
        [tuple[Tensor, ...], Operands, Tensor, Axis, bool], tuple[Tensor | None, dict[str, Factors | None]]
    ]
    features: int = 1


class Use(NamedTuple):
    """The signature of a use, which preflight certifies: the same for every batch size and length."""

    operation: str
    parameter: str
    reading: str
    dimensions: int


@dataclass(eq=False)
class Watch:
    """What one recording of one micro-batch shares between its uses."""

    batch_size: int
    rules: Mapping[Any, Rule]
    ambiguous_sizes: frozenset[int] = frozenset()
    observe: Callable[[Use, Tensor, Axis], None] | None = None
    factors: dict[str, list[Factors]] = field(default_factory=dict)
    sum_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    uses: set[Use] = field(default_factory=set)
    doubts: set[Use] = field(default_factory=set)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Replaces every trainable parameter of `model`, wherever it is tied, and puts them back at the end.

        Raises:
            UnsupportedModelError: a gradient reached a parameter behind the watch's back.
        """
        originals = {name: p for name, p in model.named_parameters() if p.requires_grad}
        watched = {id(p): WatchedParameter.of(Source(name, self, p.detach())) for name, p in originals.items()}
        kept_gradients = {name: p.grad for name, p in originals.items()}
        places = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in watched
        ]
        self.factors = {name: [] for name in originals}
        self.sum_dtypes = {name: sum_dtype(p.dtype) for name, p in originals.items()}
        try:
            for holder, key, p in places:
                holder[key] = watched[id(p)]  # type: ignore[assignment]
            for p in originals.values():
                p.grad = None
            yield
            leaked = [name for name, p in originals.items() if p.grad is not None]
            leaked += [w.source.parameter for w in watched.values() if w.grad is not None]
            if leaked:
                raise UnsupportedModelError(
                    f"gradient reached {', '.join(sorted(set(leaked)))} by a use that no rule saw.",
                    why="a use that is not seen is missing from the norm, so the clipping bound would not hold.",
                    fix="freeze these parameters (requires_grad_(False)) or train with LoRA instead.",
                )
        finally:
            for holder, key, p in places:
                holder[key] = p
            for name, p in originals.items():
                p.grad = kept_gradients[name]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Runs one operation that involves a watched parameter by its rule."""
        rule = self.rules.get(function)
        names = sorted({a.source.parameter for a in _flatten((args, kwargs)) if isinstance(a, WatchedParameter)})
        if rule is None:
            raise _refusal(names, f"operation {_name(function)}", "it has no rule for exact per-example gradients")
        bound = rule.bind(*args, **kwargs)
        watched = {r: p for r, p in bound.parameters.items() if isinstance(p, WatchedParameter)}
        strays = [a for a in _flatten((bound.input, bound.options)) if isinstance(a, WatchedParameter)]
        if strays or len({id(p) for p in watched.values()}) != len(watched):
            raise _refusal(names, f"operation {rule.name}", "parameters are combined with one another there")
        plain = {r: p.source.plain if isinstance(p, WatchedParameter) else p for r, p in bound.parameters.items()}
        operands = Operands(plain, frozenset(watched), bound.options)
        given = bound.input
        if given is not None and given.dim() >= 1 and given.shape[0] == 1 and self.batch_size > 1:
            axis = Axis(self.batch_size, "broadcast")
            given = given.expand(self.batch_size, *given.shape[1:])
        else:
            axis = self._read(rule, given, names)
        for parameter in watched.values():
            use = Use(rule.name, parameter.source.parameter, axis.reading, 0 if given is None else given.dim())
            self._note(use, bound.input, axis)
            if self.observe is not None and given is not None:
                self.observe(use, given, axis)
        anchor = torch.zeros((), requires_grad=True)
        output: Tensor = _RecordedUse.apply(anchor, given, _Call(self, rule, operands, watched, axis))  # type: ignore[no-untyped-call]
        if given is None and output.shape[0] != self.batch_size:
            raise _refusal(
                names, f"operation {rule.name} to shape {tuple(output.shape)}", "its rows are not the examples"
            )
        return output

    def add(self, parameter: WatchedParameter, factors: Factors) -> None:
        """Records one use's factors, pulled back from the derived weight to the parameter itself."""
        source = parameter.source
        factors = factors.scaled(source.scale)
        factors = factors.transposed if source.is_transposed else factors
        factors = factors.settled() if isinstance(factors, Outer) else factors
        # A float64 parameter may be used through a float32 derivative (Gemma's norms); its sums stay float64.
        self.factors[source.parameter].append(factors.accumulated_in(self.sum_dtypes[source.parameter]))

    def _read(self, rule: Rule, given: Tensor | None, names: list[str]) -> Axis:
        if given is None or (given.dim() > rule.features and given.shape[0] == self.batch_size):
            return Axis(self.batch_size, "batch")
        if rule.features and given.dim() > rule.features and given.shape[0] % self.batch_size == 0:
            return Axis(self.batch_size, "folded")
        raise _refusal(
            names,
            f"operation {rule.name} on an input of shape {tuple(given.shape)}",
            f"no axis of that shape can be read as {self.batch_size} examples",
        )

    def _note(self, use: Use, given: Tensor | None, axis: Axis) -> None:
        self.uses.add(use)
        if self.batch_size == 1:
            return
        folded_from = getattr(given, "_base", None) if axis.reading == "folded" else None
        plainly_folded = (
            folded_from is not None
            and given is not None
            and folded_from.shape[:1] == (self.batch_size,)
            and folded_from.is_contiguous()
            and folded_from.numel() == given.numel()
        )
        if self.batch_size in self.ambiguous_sizes or (axis.reading == "folded" and not plainly_folded):
            self.doubts.add(use)


class Source(NamedTuple):
    """What a watched tensor is: `scale` x parameter + constant, cast and transposed, with its plain value."""

    parameter: str
    watch: Watch
    plain: Tensor
    scale: float = 1.0
    is_transposed: bool = False

    def derived(self, plain: Tensor, scale: float = 1.0, transpose: bool = False) -> WatchedParameter:
        """The weight `plain`, computed from this one."""
        return WatchedParameter.of(
            self._replace(plain=plain.detach(), scale=self.scale * scale, is_transposed=self.is_transposed ^ transpose)
        )


class WatchedParameter(torch.Tensor):
    """Stands for a trainable parameter, or a weight derived from one, during a recording."""

    source: Source

    @staticmethod
    def of(source: Source) -> WatchedParameter:
        """A leaf that requires grad: should a use slip past the rules, its gradient lands here and is seen."""
        made: WatchedParameter = torch.Tensor._make_subclass(WatchedParameter, source.plain, True)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _DETACHING:
            return args[0].source.plain
        derivation = _derive(func, args, kwargs)
        if derivation is not None:
            return derivation
        watch = next(a.source.watch for a in _flatten((args, kwargs)) if isinstance(a, WatchedParameter))
        return watch.call(func, args, kwargs)


class _Call(NamedTuple):
    watch: Watch
    rule: Rule
    operands: Operands
    watched: dict[str, WatchedParameter]
    axis: Axis


class _RecordedUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor | None, call: _Call) -> Tensor:
        output, saved = call.rule.forward(given, call.operands)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.input_dtype = None if given is None else given.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        call: _Call = ctx.call
        needs_input = bool(ctx.needs_input_grad[1])
        input_gradient, factors = call.rule.backward(
            ctx.saved_tensors, call.operands, gradients[0], call.axis, needs_input
        )
        for role, parameter in call.watched.items():
            found = factors[role]
            if found is not None:
                call.watch.add(parameter, found)
        if not needs_input or input_gradient is None:
            return None, None, None
        return None, input_gradient.to(ctx.input_dtype), None


def _refusal(names: list[str], what: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"parameter {', '.join(names)} is used by {what}.",
        why=f"{reason}, and a gradient that is not known to be exact would break the clipping bound.",
        fix="freeze this parameter (requires_grad_(False)), train with LoRA, or pass a rule for the operation.",
    )


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_METADATA = {
    *(_getter(n) for n in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad")),
    *(
        _getter(n)
        for n in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "itemsize")
    ),
    *(_getter(n) for n in ("nbytes", "grad_fn", "is_nested", "is_mkldnn", "_version")),
    *(getattr(torch.Tensor, n) for n in ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "get_device")),
    *(getattr(torch.Tensor, n) for n in ("is_floating_point", "is_complex", "element_size", "data_ptr", "__len__")),
    *(getattr(torch.Tensor, n) for n in ("ndimension", "storage_offset", "__hash__", "__repr__", "untyped_storage")),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_DETACHING = {_getter("data"), torch.Tensor.detach, torch.detach}
_CASTS = {
    getattr(torch.Tensor, n) for n in ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous")
}
_TRANSPOSES = {_getter("T"), _getter("mT"), torch.Tensor.t, torch.t, torch.Tensor.transpose, torch.transpose}
_SCALES = {
    **dict.fromkeys((torch.Tensor.add, torch.add, torch.Tensor.__add__, torch.Tensor.__radd__), "add"),
    **dict.fromkeys((torch.Tensor.sub, torch.sub, torch.Tensor.__sub__), "sub"),
    **dict.fromkeys((torch.Tensor.__rsub__, torch.rsub), "rsub"),
    **dict.fromkeys((torch.Tensor.mul, torch.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.Tensor.div, torch.div, torch.Tensor.__truediv__), "div"),
    **dict.fromkeys((torch.Tensor.neg, torch.neg, torch.Tensor.__neg__), "neg"),
}


def _derive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A weight derived from one watched parameter alone, if `func` is a cast, a transposition or scalar-affine."""
    watched = [a for a in _flatten((args, kwargs)) if isinstance(a, WatchedParameter)]
    parameter = watched[0]
    if func in _CASTS and parameter is args[0]:
        target = [a.source.plain if isinstance(a, WatchedParameter) else a for a in args[1:]]
        return parameter.source.derived(func(parameter.source.plain, *target, **kwargs))
    if func in _TRANSPOSES and parameter.source.plain.dim() == 2:
        return parameter.source.derived(
            func(parameter.source.plain, *args[1:], **kwargs), transpose=_swaps(args[1:], kwargs)
        )
    kind = _SCALES.get(func)
    if kind is None or kwargs or len(watched) != 1:
        return None
    others = [a for a in args if a is not parameter]
    if not all(
        isinstance(a, (int, float)) or (isinstance(a, Tensor) and a.dim() == 0 and not a.requires_grad) for a in others
    ):
        return None
    plain = func(*(a.source.plain if isinstance(a, WatchedParameter) else a for a in args))
    constant = float(others[0]) if others else 1.0
    is_first = args[0] is parameter
    if kind == "div" and not is_first:
        return None
    scales = {"add": 1.0, "sub": 1.0 if is_first else -1.0, "rsub": -1.0 if is_first else 1.0, "neg": -1.0}
    scale = constant if kind == "mul" else 1.0 / constant if kind == "div" else scales[kind]
    return parameter.source.derived(plain, scale)


def _swaps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    axes = [*args, *kwargs.values()]
    return not axes or axes[0] % 2 != axes[1] % 2


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(tuple(value.values()))
    else:
        yield value


def _name(function: Any) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', None) or getattr(function, '__name__', function)}".lstrip(".")
