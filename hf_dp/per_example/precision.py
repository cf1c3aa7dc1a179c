"""Norms and sums are of the same numbers, in at least float32, whatever the model runs in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.per_example.ieee import beneath_modes

FEW = frozenset({torch.float16, torch.bfloat16})
_FEWER_BITS = {torch.float32: FEW, torch.float64: FEW | {torch.float32}}
# What Transformers puts on layers that can be checkpointed.
_IS_ON, _HOW = "gradient_checkpointing", "_gradient_checkpointing_func"
# Names of what writes into the first thing that it is given, beside those that end in "_".
_WRITING = ("__i", "__set")
_Computed = TypeVar("_Computed")
_CASTS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}
_WIDE = {Tensor.float: torch.float32, Tensor.double: torch.float64}
_WIDENING = {Tensor.to, Tensor.type, *_WIDE}


@contextmanager
def computed_in(
    model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype, *, checkpointed: bool = False, sparing: bool = False
) -> Iterator[dict[str, Any]]:
    """Lets `model` compute in no fewer bits than `dtype` (float32 or float64), autocast and its own casts included.

    What rounding does is told from what a model does. Parameters, buffers and `.grad` come back as they were, to the
    bit. Shards (FSDP2), integers and quantised weights are left alone.

    Args:
        checkpointed: whether layers that are checkpointed stay so: long rows need it, and what counts the numbers that
            are drawn, or changes them, cannot have it.
        sparing: whether time is spent where memory is short: frozen weights stay as they are, and each is lifted anew
            in the operations that use it; layers that can be checkpointed are, if `checkpointed`.

    Yields:
        `batch` in as many bits.
    """

    def lifted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _FEWER_BITS[dtype] else value

    named = [*model.named_parameters(), *model.named_buffers()]
    if any(isinstance(value, DTensor) for _, value in named):
        with checkpoints(model, are_kept=checkpointed):
            yield dict(batch)
        return
    # A weight of a quantised kind is a tensor of another class.
    low = [value for _, value in named if value.dtype in _FEWER_BITS[dtype] and type(value.data) is Tensor]
    whole = [value for value in low if not sparing or value.requires_grad or not isinstance(value, nn.Parameter)]
    kept = [(value, value.data, value.grad) for value in whole]
    try:
        for value in whole:
            value.grad = None
            value.data = lifted(value.data)
        kinds, widened = {value.device.type for _, value in named}, set(map(_place, whole)) - {None}
        mode = _NoFewerBits(dtype, kinds, widened, len(whole) < len(low))
        with checkpoints(model, are_kept=checkpointed, are_added=checkpointed and sparing), mode.saving_little(), mode:
            yield {name: lifted(value) for name, value in batch.items()}
    finally:
        for value, data, gradient in kept:
            value.grad = None
            value.data = data
            value.grad = gradient


def with_memory_to_spare(computed: Callable[[bool], _Computed]) -> _Computed:
    """What `computed` gives, without or, where an accelerator's memory does not suffice, with `sparing`.

    Raises:
        torch.OutOfMemoryError: it does not suffice for that either.
    """
    try:
        return computed(False)
    except torch.OutOfMemoryError as error:
        full = str(error)  # Only outside of the handler is nothing held any more by what has failed.
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    try:
        return computed(True)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        # What the model computes in a backward pass (checkpoints of its own) meets weights that are not widened there.
        raise torch.OutOfMemoryError(full) from error


@contextmanager
def noting_16_bits(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Whether `model` has weights in 16 bits, or what passes through it inside does so under autocast."""
    under, kinds = set[str](), {p.device.type for p in model.parameters()}

    def look(module: nn.Module, given: Any) -> None:
        under.update(filter(torch.is_autocast_enabled, kinds))

    with ExitStack() as hooks:
        # Of all: accelerate turns it on within the model's own forward.
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(look))
        yield lambda: bool(under) or any(p.dtype in FEW for p in model.parameters())


@contextmanager
def checkpoints(model: nn.Module, *, are_kept: bool, are_added: bool = False) -> Iterator[None]:
    """What gradient checkpointing computes again would be in 16 bits, under the autocast that it has noted, and with
    the dropout that is left out: it is computed under the modes of before, or nothing is checkpointed.

    Args:
        are_kept: whether layers that are checkpointed stay so.
        are_added: whether those that can be, are.
    """
    able: list[Any] = [module for module in model.modules() if isinstance(getattr(module, _IS_ON, None), bool)]
    before = [{name: value for name, value in vars(module).items() if name in (_IS_ON, _HOW)} for module in able]
    try:
        for module, own in zip(able, before, strict=True):
            is_on = getattr(module, _IS_ON)
            how = own.get(_HOW) if is_on else functools.partial(checkpoint, use_reentrant=False)
            if is_kept := how is not None and (are_kept if is_on else are_added):
                setattr(module, _HOW, functools.partial(_under_its_modes, how))
            if is_kept != is_on:  # Where a model reads it from its configuration, it is not for writing.
                setattr(module, _IS_ON, is_kept)
        yield
    finally:
        for module, own in zip(able, before, strict=True):
            for name in {_IS_ON, _HOW} & vars(module).keys():
                delattr(module, name)
            vars(module).update(own)


def _under_its_modes(checkpointed: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    modes = _get_current_function_mode_stack()

    def again(*args: Any, **kwargs: Any) -> Any:
        # In the forward pass they are there; a backward pass has left them behind when it comes to this.
        with ExitStack() as left:
            for mode in modes[len(_get_current_function_mode_stack()) :]:
                left.enter_context(mode)
            return function(*args, **kwargs)

    return checkpointed(again, *args, **kwargs)


class _NoFewerBits(TorchFunctionMode):
    """Where an operation would give fewer bits than `dtype`, it gives `dtype`; if `at_use`, it is given no fewer.

    What is cast of `widened` numbers, known by their places, is a copy, as it is of those of before.
    """

    def __init__(self, dtype: torch.dtype, kinds: set[str], widened: set[int | None], at_use: bool) -> None:
        self.dtype, self.kinds, self.fewer, self.at_use = dtype, kinds, _FEWER_BITS[dtype], at_use
        self.widened = widened
        # The copies that are in use, by where their numbers lie, and what each is a copy of.
        self.copies: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self.copied: Any = WeakTensorKeyDictionary()
        super().__init__()

    @contextmanager
    def saving_little(self) -> Iterator[None]:
        """Inside, of a copy of a weight nothing is kept for the backward pass: it is made again there."""
        if not self.at_use:
            yield
            return

        def packed(saved: Tensor) -> Any:
            copy = self.copies.get(place) if (place := _place(saved)) is not None else None
            if copy is None or copy._version:  # It is no copy any more, once something is written into it.
                return saved.detach()  # A result that is saved would hold on to the graph that holds it.
            return self.copied[copy], saved.size(), saved.stride(), saved.storage_offset()

        def unpacked(kept: Any) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            weight, *view = kept
            again: Tensor = weight.detach().to(self.dtype).as_strided(*view)
            return again

        with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # It is asked for every operation and every attribute of a tensor, so what changes nothing is found out first.
        if not self.at_use and getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        # Of 16 bits a wider cast is a copy, which a model may write into.
        if (
            func in _WIDENING
            and type(args[0]) in (Tensor, nn.Parameter)
            and not {_WIDE.get(func), *args[1:], *kwargs.values()}.isdisjoint(_WIDE.values())
            and _place(args[0]) in self.widened
        ):
            args = (args[0].clone(), *args[1:])
        if _CASTS.get(func) in self.fewer:
            func, args = Tensor.to, (args[0], self.dtype)
        if torch.dtype in map(type, (*args, *kwargs.values())):
            args, kwargs = [*map(self._enough, args)], {name: self._enough(value) for name, value in kwargs.items()}
        if self.at_use:
            name = getattr(func, "__name__", "")
            if name == "__get__":
                found = func(*args, **kwargs)
                return self._enough(found) if self._is_few(args[0]) else found
            # What is written into a weight must be there.
            written = int(name.startswith(_WRITING) or (name.endswith("_") and not name.startswith("__")))
            args = [*args[:written], *map(self._lifted, args[written:])]
            kwargs = {name: self._lifted(value) for name, value in kwargs.items()}
        if not any(map(torch.is_autocast_enabled, self.kinds)):
            return func(*args, **kwargs)
        with ExitStack() as without:
            for kind in filter(torch.is_autocast_enabled, self.kinds):
                without.enter_context(torch.autocast(kind, enabled=False))
            return func(*args, **kwargs)

    def _is_few(self, value: Any) -> bool:
        return type(value) in (Tensor, nn.Parameter) and value.dtype in self.fewer

    def _lifted(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._lifted, value))
        if not self._is_few(value):
            return value
        copy = value.to(self.dtype)
        if not value.requires_grad:
            self.copies[copy.untyped_storage().data_ptr()] = copy
            self.copied[copy] = value
        return copy

    def _enough(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in self.fewer else value


def _place(tensor: Tensor) -> int | None:
    """Where its numbers lie; None of a sparse one, which cannot be asked."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are accumulated in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """That of each, of which modes are not asked."""
    with beneath_modes():
        return {name: sum_dtype(tensor.dtype) for name, tensor in tensors.items()}


def accumulation(values: Tensor) -> Tensor:
    """`values` in the dtype that sums are accumulated in."""
    return values.to(sum_dtype(values.dtype))
