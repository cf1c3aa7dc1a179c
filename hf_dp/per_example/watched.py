"""The tensor that stands for a trainable parameter during a recording, and weights derived from one.

A weight that is a cast, a transposition, a scalar-affine image (Gemma's `1 + w.float()`) of one parameter, or a frozen
matrix with some of its rows replaced, is watched in its place, and its factors are pulled back as they are. Whatever
else is computed from parameters is a constant (`constants.py`) or a use, which needs a rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_dp.per_example.casts import Casts
from hf_dp.per_example.factors import Factors, Outer
from hf_dp.per_example.routed import Routed


class Recording(Protocol):
    """What a watched tensor, and a use of one, know of the recording that they belong to.

    Attributes:
        anchor: a leaf that all uses hang on, for autograd to come to them.
        is_final: the backward pass is that of the losses.
        leaked: parameters that a gradient reached by a use that no rule saw.
        casts: what autocast makes of the inputs of products.
    """

    anchor: Tensor
    is_final: bool
    leaked: set[str]
    casts: Casts

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Sequence[WatchedParameter]
    ) -> Any:
        """Runs an operation on arguments of which some, all of these, are `watched`."""
        ...


class Source(NamedTuple):
    """What a watched tensor is: its plain value, the parameters behind it, and where its gradients go.

    Attributes:
        parameters: their names, sorted.
        pull: takes the per-example gradients of this tensor's use and hands them on to what it was derived from.
    """

    parameters: tuple[str, ...]
    watch: Recording
    plain: Tensor
    pull: Callable[[Factors], None]

    def derived(self, plain: Tensor, pull: Callable[[Factors], None]) -> WatchedParameter:
        """The weight `plain`, computed from this one."""
        # Watched all the same: a reentrant checkpoint computes without gradients what it computes again later.
        pull = pull if torch.is_grad_enabled() else _dropped
        return WatchedParameter.of(self._replace(plain=plain.detach(), pull=pull))


def _dropped(factors: Factors) -> None:
    """Of what was computed without gradients nothing reaches a parameter."""


class WatchedParameter(torch.Tensor):
    """Stands for a trainable parameter, or a value computed from parameters alone, during a recording."""

    source: Source

    @staticmethod
    def of(source: Source) -> WatchedParameter:
        """A leaf that requires grad: should a use slip past the rules, its gradient lands here and is seen."""
        made: WatchedParameter = torch.Tensor._make_subclass(WatchedParameter, source.plain, True)
        return made.becoming(source)

    def becoming(self, source: Source) -> WatchedParameter:
        """Itself, as what `source` says."""
        self.source = source
        with torch._C.DisableTorchFunctionSubclass():
            # No closure: of thousands of uses that is as many objects more, which Python looks through for garbage.
            self.register_hook(functools.partial(_leaked, source.watch.leaked, source.parameters))  # type: ignore[no-untyped-call]
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _DETACHING:
            return args[0].source.plain.detach()
        if func in _DERIVING and (derivation := _derive(func, args, kwargs)) is not None:
            return derivation
        watched = watched_in(args, kwargs) if kwargs else watched_in(*args)
        return watched[0].source.watch.call(func, args, kwargs, watched)


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in `values`, as `flatten` finds them."""
    return [a for a in flatten(values) if isinstance(a, Tensor)]


def watched_in(*values: Any) -> list[WatchedParameter]:
    """The watched ones."""
    return [a for a in flatten(values) if isinstance(a, WatchedParameter)]


def names_of(sources: Iterable[Source]) -> list[str]:
    """The parameters behind them, sorted."""
    groups = [source.parameters for source in sources]
    return list(groups[0]) if len(groups) == 1 else sorted({name for group in groups for name in group})


def _leaked(leaked: set[str], names: Iterable[str], gradient: Tensor) -> None:
    leaked.update(names)


@contextmanager
def in_place(
    modules: Sequence[nn.Module], originals: Mapping[str, nn.Parameter], watched: Mapping[int, WatchedParameter]
) -> Iterator[None]:
    """Inside, watched tensors stand wherever `modules` hold parameters of these ids, and no original has a gradient.

    At the end all is as it was.
    """
    with torch._C.DisableTorchFunction():  # of a check's modes, each would be asked for each attribute
        gradients = {name: p.grad for name, p in originals.items()}
    places = [
        (module._parameters, key, p)
        for module in modules
        for key, p in module._parameters.items()
        if p is not None and id(p) in watched
    ]
    # A recurrent layer keeps lists of its weights beside them, which it makes anew once these are others.
    lists = [(m.__dict__, m._flat_weights, m._flat_weight_refs) for m in modules if isinstance(m, nn.RNNBase)]
    try:
        for holder, key, p in places:
            holder[key] = watched[id(p)]  # type: ignore[assignment]
        with torch._C.DisableTorchFunction():
            for p in originals.values():
                p.grad = None
        yield
    finally:
        for holder, key, p in places:
            holder[key] = p
        for attributes, weights, references in lists:
            attributes.update(_flat_weights=weights, _flat_weight_refs=references)
        with torch._C.DisableTorchFunction():
            for name, p in originals.items():
                p.grad = gradients[name]


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


METADATA = {
    *(_getter(n) for n in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad")),
    *(_getter(n) for n in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu")),
    *(_getter(n) for n in ("itemsize", "nbytes", "grad_fn", "is_nested", "is_mkldnn", "_version")),
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
_REPLACES_ROWS = {torch.Tensor.index_copy, torch.index_copy}
_DERIVING = _CASTS | _TRANSPOSES | _SCALES.keys() | _REPLACES_ROWS


def _derive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A weight derived from one watched tensor alone, if its factors can be pulled back as they are."""
    watched = watched_in(args, kwargs)
    if len(watched) != 1:
        return None
    source = watched[0].source
    values = tuple(map(plain, args))
    if func in _CASTS:
        cast = func(*values, **mapped(plain, kwargs))
        if cast is source.plain and args[0] is watched[0]:
            return watched[0]
        if isinstance(cast, Tensor) and (cast.is_complex() or source.plain.is_complex()):
            return None
        # The name of a type, or whole numbers: no gradient comes back from these. Nor does one where something else
        # is cast to the parameter's type.
        is_weight = args[0] is watched[0] and isinstance(cast, Tensor) and cast.is_floating_point()
        return source.derived(cast, source.pull) if is_weight else cast
    if func in _TRANSPOSES and source.plain.dim() == 2:
        swapped = _swaps(args[1:], kwargs)
        return source.derived(
            func(*values, **kwargs), (lambda f: source.pull(f.transposed)) if swapped else source.pull
        )
    if func in _TRANSPOSES and source.plain.dim() == 3:
        swapped = func(*values, **kwargs)
        if swapped.stride() == source.plain.mT.stride() and swapped.shape == source.plain.mT.shape:
            return source.derived(swapped, lambda f: source.pull(_each_transposed(f, swapped.shape)))
    if func in _REPLACES_ROWS:
        return _rows_replaced(source, *values, **mapped(plain, kwargs))
    scale = None if kwargs else _scale(_SCALES.get(func), [a for a in args if a is not watched[0]], args[0], watched[0])
    if scale is None:
        return None
    return source.derived(func(*values), lambda f: source.pull(f.scaled(scale)))


def _each_transposed(factors: Factors, shape: torch.Size) -> Factors:
    """Those of several matrices (n, p, d) from those of their transposes, of this `shape`."""
    if isinstance(factors, Routed):
        return factors.transposed
    values = factors.instantiated() if isinstance(factors, Outer) else factors
    return replace(values, values=values.values.reshape(-1, *shape).mT)


def _scale(kind: str | None, others: list[Any], first: Any, parameter: Any) -> float | None:
    """How much the image grows with the parameter, if the operation is scalar-affine."""
    if kind is None or not all(
        isinstance(a, (int, float))
        or (isinstance(a, Tensor) and a.dim() == 0 and not (a.requires_grad or a.is_complex()))
        for a in others
    ):
        return None
    constant, is_first = float(others[0]) if others else 1.0, first is parameter
    if kind == "div":
        return 1.0 / constant if is_first else None
    scales = {"add": 1.0, "sub": 1.0 if is_first else -1.0, "rsub": -1.0 if is_first else 1.0, "neg": -1.0}
    return constant if kind == "mul" else scales[kind]


def _swaps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    axes = [*args, *kwargs.values()]
    return not axes or axes[0] % 2 != axes[1] % 2


def _rows_replaced(
    new: Source, input: Any = None, dim: Any = 0, index: Any = None, source: Any = None
) -> WatchedParameter | None:
    """`input.index_copy(0, index, source)`, where the rows `source` alone are trained (PEFT's trainable tokens)."""
    if source is not new.plain or dim != 0 or input.dim() != 2 or input.requires_grad:
        return None
    return new.derived(input.index_copy(0, index, source), lambda f: new.pull(f.rows(index)))


_HOLDERS = (tuple, list, dict, slice)


def flatten(value: Any, found: list[Any] | None = None) -> list[Any]:
    """What is in tuples, lists, dictionaries and slices, however deep; added to `found`, if there is such."""
    # For each operation on a parameter it is called several times: generators within generators took twice as long,
    # and a call for each item half as long again.
    found = [] if found is None else found
    if isinstance(value, (tuple, list)):
        items: Iterable[Any] = value
    elif isinstance(value, dict):
        items = value.values()
    else:
        items = (value.start, value.stop, value.step) if isinstance(value, slice) else (value,)
    for item in items:
        if isinstance(item, _HOLDERS):
            flatten(item, found)
        else:
            found.append(item)
    return found


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to what `flatten` yields."""
    if isinstance(value, (tuple, list)):
        items = [mapped(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(function(value.start), function(value.stop), function(value.step))
    return function(value)


def plain(value: Any) -> Any:
    """What a watched tensor stands for; anything else as it is."""
    return value.source.plain if isinstance(value, WatchedParameter) else value
