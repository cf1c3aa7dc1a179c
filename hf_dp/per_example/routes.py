"""Whose rows are, once a module has sorted them: experts multiply those of all examples that they were given at once.

A module of experts gets the positions of all examples in order, (B k, ...), and picks rows by numbers that follow from
the data. Inside it each operation is looked at: what picks rows by their numbers picks their owners with them, and what
works on each row by itself leaves them. After any other operation nobody knows, and what needs to is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.watched import tensors_in

# Each row of what they give follows from that row of their first argument, and of others with as many.
_BY_ROWS = frozenset(
    (
        *("add", "sub", "mul", "div", "true_divide", "floor_divide", "neg", "pow", "rsqrt", "sqrt", "exp", "log"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__floordiv__"),
        *("__neg__", "__pow__", "__iadd__", "__imul__", "__isub__", "add_", "mul_", "sub_", "div_"),
        *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardtanh", "relu6", "mish"),
        *("logsigmoid", "hardswish", "hardsigmoid", "selu", "celu", "square", "abs", "relu_"),
        *("clamp", "clamp_", "clamp_min", "clamp_max", "minimum", "maximum", "masked_fill", "masked_fill_", "where"),
        *("zeros_like", "empty_like", "new_zeros", "expand", "expand_as", "type_as", "contiguous", "clone"),
        *("to", "type", "float", "half", "bfloat16", "double", "int", "long"),
        *("dropout", "linear", "_grouped_mm", "grouped_mm_fallback"),
    )
)
_NORMS = ("rms_norm", "layer_norm")
# The same, if it is another axis than the first that they are asked to work along, as the argument of this number.
_ALONG_OTHERS = {"chunk": 2, "split": 2, "unsqueeze": 1, "squeeze": 1, "glu": 1, "mean": 1, "sum": 1, "softmax": 1}


class Places(NamedTuple):
    """Which row of (B k, ...), one example after another, each row of a tensor follows from.

    Attributes:
        rows: (n,) their numbers.
        of: B k.
    """

    rows: Tensor
    of: int

    def owners(self, batch_size: int) -> Tensor:
        """(n,) the examples."""
        return self.rows // (self.of // batch_size)


# Of tensors by their identity.
Known = dict[int, Places | None]


class Routes:
    """Where the rows of tensors come from, in one micro-batch of `batch_size` examples, B."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # With torch's count of writes then: who writes through a view changes whose rows they are.
        self._places: Any = WeakIdKeyDictionary()
        self._in_order: dict[tuple[int, torch.device], Places] = {}

    @property
    def were_followed(self) -> bool:
        """Whether a module was given rows of the examples in order, and may have sorted them."""
        return bool(self._in_order)

    def order(self, tensor: Tensor, is_sorted: bool) -> Tensor | None:
        """(n,) where the rows of the first example are, as they were before they were sorted, and those of the others.

        Args:
            tensor: with n rows.
            is_sorted: whether it is asked of rows that are in order as well.

        Returns:
            None where they are not known, or are more of one example than of another.
        """
        if self._batch_size == 1:
            return torch.arange(len(tensor), device=tensor.device) if is_sorted else None
        places = self.of(tensor)
        if places is None or len(places.rows) % self._batch_size or (self._are_in_order(places) and not is_sorted):
            return None
        order: Tensor = places.rows.argsort(stable=True)
        owners = places.owners(self._batch_size)[order].view(self._batch_size, -1)
        return order if bool((owners == torch.arange(self._batch_size, device=owners.device)[:, None]).all()) else None

    def of(self, tensor: Tensor) -> Places | None:
        """Where its rows come from, if that is known."""
        places, version = self._places.get(tensor, (None, 0))
        return places if version == _writes(tensor) else None

    def note(self, tensor: Tensor, places: Places | None) -> None:
        """Where its rows come from, or that nobody knows."""
        if places is None:
            self._places.pop(tensor, None)
        elif tensor.shape[:1] == places.rows.shape:
            self._places[tensor] = places, _writes(tensor)

    def in_order(self, rows: int, device: torch.device) -> Places:
        """Those of so many rows that lie in order."""
        return self._in_order.setdefault((rows, device), Places(torch.arange(rows, device=device), rows))

    def followed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, known: Known
    ) -> Places | None:
        """Those of what an operation gave, from what was known of its arguments before."""
        source = args[0] if args and isinstance(args[0], Tensor) else None
        before = None if source is None else known.get(id(source))
        if source is None or before is None:
            return None
        name = str(getattr(func, "__name__", ""))
        if name in ("__getitem__", "index_select"):
            index = _picked_by(name, args, kwargs)
            if index is not None:
                return self._sorted_back(before._replace(rows=before.rows[index]))
            return before if name == "__getitem__" and _keeps_first(args[1], source.dim()) else None
        if name in ("repeat_interleave", "repeat"):
            return self._repeated(name, before, args[1:], kwargs)
        if name in ("index_add", "index_add_"):
            return before if self._are_added_back(before, args, kwargs, known) else None
        if name == "sort":
            return before._replace(rows=before.rows[output[1]]) if source.dim() == 1 else None
        if name in ("view", "reshape", "flatten") and isinstance(output, Tensor) and output.dim():
            if len(output) == len(before.rows):
                return before
            # What lies in order lies so in longer and in shorter rows, if each example has a whole number of them.
            is_whole = len(output) % self._batch_size == 0
            return self.in_order(len(output), output.device) if is_whole and self._are_in_order(before) else None
        is_by_rows = name in _BY_ROWS or (name in _ALONG_OTHERS and _is_along_others(name, args, kwargs))
        # Norms are over as many of the last axes as they are given sizes.
        is_by_rows |= name in _NORMS and len(args) > 1 and len(args[1]) < source.dim()
        made = tensors_in(output)
        others = [a for a in tensors_in(args[1:], kwargs) if known.get(id(a)) is not None]
        if not is_by_rows or not all(one.shape[:1] == before.rows.shape for one in made):
            return None
        # What has fewer axes is not laid beside the first one.
        dims = {a.dim() for a in (source, *others)} if name in _BY_ROWS else set()
        is_aligned = dims <= {one.dim() for one in made}
        return before if is_aligned and all(self._are_same(before, known[id(a)]) for a in others) else None

    def is_restored(self, tensor: Tensor) -> bool:
        """Whether its rows are known to lie in order."""
        places = self.of(tensor)
        return places is not None and self._are_in_order(places)

    def _sorted_back(self, places: Places) -> Places:
        """The same, called what it is where all rows are in order, as often as each other."""
        rows, of = places
        known = self.in_order(len(rows), rows.device)
        is_whole = len(rows) % of == 0 and torch.equal(rows, known.rows // (len(rows) // of))
        return known if is_whole else places

    def _repeated(self, name: str, before: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Places | None:
        """Of each row several: one after another, or all once more after all."""
        times = args[0] if args else kwargs.get("repeats")
        if name == "repeat_interleave":
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            rows = before.rows.repeat_interleave(times) if isinstance(times, int) and axis == 0 else None
            return None if rows is None else self._sorted_back(before._replace(rows=rows))
        sizes = times if isinstance(times, (tuple, list)) else args
        return before._replace(rows=before.rows.repeat(sizes[0])) if sizes and isinstance(sizes[0], int) else None

    def _are_added_back(self, before: Places, args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> bool:
        """Whether each row is added to one of the same example."""
        if len(args) != 4 or kwargs or args[1] != 0 or (added := known.get(id(args[3]))) is None:
            return False
        return self._are_same(added, before._replace(rows=before.rows[args[2]]))

    def _are_same(self, first: Places, second: Places | None) -> bool:
        """Whether rows are of the same examples."""
        if first is second or second is None:
            return first is second
        return torch.equal(*(one.owners(self._batch_size) for one in (first, second)))

    def _are_in_order(self, places: Places) -> bool:
        return places is self._in_order.get((places.of, places.rows.device))


class _Following(TorchFunctionMode):
    """Follows rows through the operations inside."""

    def __init__(self, routes: Routes) -> None:
        super().__init__()
        self._routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [(a, _writes(a)) for a in tensors_in(args, kwargs)]
            known = {id(a): self._routes.of(a) for a, _ in given}
        output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            places = self._routes.followed(func, args, kwargs, output, known)
            changed = [tensor for tensor, count in given if _writes(tensor) != count]
            for one in (*tensors_in(output), *changed):
                self._routes.note(one, places)
        return output


@contextmanager
def followed(
    modules: Iterable[nn.Module],
    routes: Routes,
    in_order: Callable[[list[Tensor]], list[Tensor]],
    restored: Callable[[Tensor], None],
) -> Iterator[None]:
    """Inside, the rows that `modules` of experts are given are followed while they run, also where they run once more.

    Args:
        modules: of a model.
        routes: what is found of their tensors.
        in_order: of what a module is given, that of which all rows are the examples', one after another.
        restored: gets what a module gives if its rows are in order.
    """
    wrapped = [module for module in modules if _may_route(module)]
    before = [module.__dict__.get("forward") for module in wrapped]

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [a for a in tensors_in(args, kwargs) if a.dim()]
        known = [a for a in given if routes.of(a) is not None]
        # Within another such module, of rows that were sorted there, no others are taken for rows in order.
        for one in in_order(given) if all(map(routes.is_restored, known)) else ():
            if routes.of(one) is None:
                routes.note(one, routes.in_order(len(one), one.device))
        with _Following(routes):
            output = forward(*args, **kwargs)
        for one in filter(routes.is_restored, tensors_in(output)):
            restored(one)
        return output

    try:
        for module in wrapped:
            module.__dict__["forward"] = functools.partial(run, module.forward)
        yield
    finally:
        for module, own in zip(wrapped, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def _may_route(module: nn.Module) -> bool:
    """Whether a module may hold matrices of experts: some parameter has three axes, and torch does not say what for."""
    weights = module._modules.get("parametrizations")
    own = [*module._parameters.values(), *([] if weights is None else weights.parameters())]
    if not any(p is not None and p.dim() == 3 for p in own):
        return False
    return not all(kind.__module__.startswith("torch.") for kind in type(module).__mro__[:-1])


def _writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _picked_by(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The numbers of the rows that are picked, all else being left as it is."""
    if name == "index_select":
        axis, index = kwargs.get("dim", args[1] if len(args) > 1 else None), kwargs.get("index", args[-1])
        return index if axis == 0 and _are_numbers(index) else None
    first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(first, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in first):
        first = torch.tensor(first, device=args[0].device)
    is_all = all(part is Ellipsis or part == slice(None) for part in rest if not isinstance(part, Tensor))
    return first if _are_numbers(first) and is_all and not any(isinstance(part, Tensor) for part in rest) else None


def _are_numbers(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 1 and index.dtype in (torch.int32, torch.int64)


def _keeps_first(index: Any, dimensions: int) -> bool:
    """Whether an index leaves the first axis as it is."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (part is None or part is Ellipsis or isinstance(part, (slice, int))) for part in parts):
        return False
    if parts[:1] == [slice(None)]:
        return True
    return parts[:1] == [Ellipsis] and sum(part is not None for part in parts[1:]) < dimensions


def _is_along_others(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation works along another axis than the first."""
    place, dimensions = _ALONG_OTHERS[name], args[0].dim() + (name == "unsqueeze")
    axis = kwargs.get("dim", args[place] if len(args) > place else 0)
    return isinstance(axis, int) and axis % dimensions > 0
