"""Follows whose rows are through the operations of a model: inside its experts, and where it picks rows, everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dp.per_example.followed.numbers import writes
from hf_dp.per_example.followed.operations import CELLS
from hf_dp.per_example.followed.owners import below, beside
from hf_dp.per_example.followed.picking import Operation, placed
from hf_dp.per_example.followed.picks import is_write, may_pick_or_write, name_of
from hf_dp.per_example.followed.results import Enter, Results
from hf_dp.per_example.followed.routes import Routes
from hf_dp.per_example.watched import METADATA, tensors_in


class Following(TorchFunctionMode):
    """Follows rows through the operations inside.

    Args:
        routes: what is known of rows.
        enter: as `Results` has it; inside experts, which were given theirs, None.
        restored: gets what lies in order again, and what was known of what it was computed from; whether it counts.
        takes_each: whether what was picked is one of each example anyway.
        is_data: whether anything of the batch is in a tensor.
        unknown: gets rows that may not, or do not, lie in order, and what was laid below one another there.
        is_across: as `Results` has it.
    """

    def __init__(
        self,
        routes: Routes,
        enter: Enter | None = None,
        restored: Callable[[Tensor, list[Tensor]], bool] = lambda tensor, parts: True,
        takes_each: Callable[[Tensor], bool] = lambda tensor: False,
        is_data: Callable[[Tensor], bool] = lambda tensor: tensor.requires_grad,
        unknown: Callable[[Tensor, list[Tensor]], None] = lambda tensor, parts: None,
        is_across: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        super().__init__()
        self._routes, self._enter, self._restored = routes, enter, restored
        self._takes_each, self._is_data, self._unknown = takes_each, is_data, unknown
        self._results = Results(routes, is_data, enter, is_across)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if func in METADATA or (self._enter is not None and self._routes.are_in_experts):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            places = placed(name, args, kwargs)
            first: Any = places[0][0] if places[0] else None
            given = [(a, writes(a)) for a in tensors_in(args, kwargs)]
            known = {id(a): self._routes.known(a) for a, _ in given}
            is_blank = all(self._routes.is_blank(a) or not self._is_data(a) for a in tensors_in([first]))
            is_written = is_write(name) and not is_blank and known.get(id(first)) is None
            entered = self._enter(first) if is_written and self._enter is not None else None
            is_cell = name in CELLS
            inside = beside(tensors_in(places[0][:2]), known, self._is_data) if is_cell else None
        with self._routes.within(inside) if is_cell else nullcontext():
            output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._routes.note_made(op := Operation(name, func, *places, output), self._enter is None)
        if all(owners is None for owners in known.values()) and not may_pick_or_write(name):
            with torch._C.DisableTorchFunction():
                is_across = self._results.lays_below(name, first)
            if not is_across:
                return output
        with torch._C.DisableTorchFunction():
            made = tensors_in(output)
            if known.get(id(first)) is None and any(map(self._takes_each, made)):
                return output
            owners = self._results.followed(op, known, is_blank, entered)
            if isinstance(owners, list):
                for piece, own in zip(made, owners, strict=True):
                    self._routes.note(piece, own)
                return output
            changed = [tensor for tensor, count in given if writes(tensor) != count]
            if owners is None and (parts := below(op, self._routes.batch_size)):
                for one in (*made, *changed):
                    self._unknown(one, parts)
            for one in (*made, *changed):
                self._routes.note(one, owners)
                if owners is not None and self._routes.is_restored(one):
                    if not self._restored(one, [a for a, _ in given if known.get(id(a)) is not None]):
                        self._routes.note(one, None)
                elif owners is not None and not self._routes.are_one_of_each(owners):
                    self._unknown(one, [one])
        return output


@contextmanager
def in_experts(
    modules: Iterable[nn.Module],
    routes: Routes,
    in_order: Callable[[list[Tensor]], list[Tensor]],
    restored: Callable[[Tensor], None],
    sorted_before: Callable[[], None] = lambda: None,
    is_data: Callable[[Tensor], bool] = lambda tensor: tensor.requires_grad,
) -> Iterator[None]:
    """Inside, the rows that `modules` of experts are given are followed while they run, also where they run once more.

    Args:
        modules: of a model.
        routes: what is found of their tensors.
        in_order: of what a module is given, that of which all rows are the examples', one after another.
        restored: gets what a module gives if its rows are in order.
        is_data: as `Following` has it.
        sorted_before: is called where rows had been sorted, or picked, before a module got them.
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [a for a in tensors_in(args, kwargs) if a.dim()]
        known = [a for a in given if routes.of(a) is not None]
        elsewhere = [a for a in known if not routes.is_restored(a)]
        # Masks of positions, of which there may be as many as examples, are no rows that were sorted.
        if any(a.requires_grad for a in elsewhere) and not routes.are_in_experts:
            sorted_before()
        # Where some were sorted, in another such module or elsewhere, no others are taken for rows in order.
        for one in () if elsewhere else in_order(given):
            if routes.of(one) is None:
                routes.note(one, routes.in_order(len(one), one.device))
        with routes.inside_experts(), Following(routes, is_data=is_data):
            output = forward(*args, **kwargs)
        for one in filter(routes.is_restored, tensors_in(output)):
            restored(one)
        return output

    with wrapped(filter(may_route, modules), run):
        yield


@contextmanager
def wrapped(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Inside, the `modules` run as `run(forward, *args, **kwargs)`."""
    several = list(modules)
    before = [module.__dict__.get("forward") for module in several]
    try:
        for module in several:
            module.__dict__["forward"] = functools.partial(run, module.forward)
        yield
    finally:
        for module, own in zip(several, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def may_route(module: nn.Module) -> bool:
    """Whether a module may hold matrices of several experts: some parameter has three axes, and torch does not say what
    for."""
    weights = module._modules.get("parametrizations")
    own = [*module._parameters.values(), *([] if weights is None else weights.parameters())]
    return any(p is not None and p.dim() == 3 and len(p) > 1 for p in own) and not is_of_torch(module)


def is_of_torch(module: nn.Module) -> bool:
    """Whether all that a module does is torch's own."""
    return all(kind.__module__.startswith("torch.") for kind in type(module).__mro__[:-1])
