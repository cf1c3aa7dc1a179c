"""Variances that noisy parameters give to activations, followed through a forward pass by operation.

A `Moments` is active during a forward pass and sees every torch function. Each activation that noise reaches has a
variance beside it, in a table of weak references: linear maps add up (Wang et al. 2016, natural-parameter networks,
arXiv:1611.00448), elementwise functions and normalisations are linearised at the numbers of the pass.
Terms of a sum are taken as independent. No model is known here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.watched import tensors_in

# Means over features are taken over so many of them at least, in evenly spaced runs: memory gives what lies together.
_SAMPLED, _RUN = 256, 16

Slope = Callable[[], Tensor]


@dataclass(frozen=True)
class Variance:
    """Of the noise of one tensor, with its shape, in at least float32; expanded where features share one.

    Attributes:
        own: of the noise that each position has for itself; averaged over positions it falls off.
        shared: of the noise that positions have in common, as averages over many positions have; None for 0.
    """

    own: Tensor
    shared: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """Of both parts."""
        return self.own if self.shared is None else self.own + self.shared

    def each(self, function: Callable[[Tensor], Tensor]) -> Variance:
        """The function of each part, for functions that are linear."""
        return Variance(function(self.own), None if self.shared is None else function(self.shared))

    def expanded(self, tensor: Tensor) -> Variance:
        """In the shape of a tensor."""
        return self.each(lambda part: part.expand(tensor.shape))

    def __add__(self, other: Variance) -> Variance:
        if self.shared is None or other.shared is None:
            return Variance(self.own + other.own, other.shared if self.shared is None else self.shared)
        return Variance(self.own + other.own, self.shared + other.shared)

    def __mul__(self, factor: Tensor | float) -> Variance:
        return self.each(lambda part: part * factor)


@dataclass(frozen=True)
class Tracked:
    """What is known of the noise of one tensor.

    Attributes:
        variance: of `base`.
        slope: the derivative of the tensor by its base, elementwise, over `Moments.sampled` features; None for 1.
        is_turned: whether pairs of features were turned by a right angle, as rotary embeddings turn them.
    """

    variance: Variance
    slope: Slope | None = None
    is_turned: bool = False


class Moments(TorchFunctionMode):
    """Follows variances through the operations of one forward pass.

    Args:
        of_parameters: the variance of each noisy parameter, by its address: a scalar, or (rows, 1).
        isotropic: one variance for all features of a token, or else one for each.
        rules: function -> what becomes of variances there.
    """

    def __init__(self, of_parameters: Mapping[int, Tensor], isotropic: bool, rules: Mapping[Any, Rule]) -> None:
        super().__init__()
        self._of_parameters, self.isotropic = of_parameters, isotropic
        self._rules = rules
        self._table: Any = WeakIdKeyDictionary()
        self._energies: Any = WeakIdKeyDictionary()
        self._is_paused = False
        self.lost: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._is_paused or not (isinstance(output, (Tensor, tuple, list)) or func is torch.Tensor.__setitem__):
            return output
        rule = self._rules.get(func)
        with torch.no_grad():
            if rule is not None:
                rule(self, func, output, args, kwargs)
            elif _is_unknown(func, output) and any(self.of(a) is not None for a in tensors_in(args, kwargs)):
                self.lost.add(getattr(func, "__name__", str(func)))
        return output

    def begin(self, of_parameters: Mapping[int, Tensor]) -> None:
        """A new forward pass; what caches of earlier ones keep stays known."""
        self._of_parameters, self._is_paused = of_parameters, False
        self.lost.clear()

    def end(self) -> None:
        """The forward pass is over."""
        self._energies.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is followed."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> None:
        """Nothing is followed from here on."""
        self._is_paused = True

    def of(self, tensor: Any) -> Tracked | None:
        """What is known of the noise of a tensor."""
        if not isinstance(tensor, Tensor):
            return None
        found: Tracked | None = self._table.get(tensor)
        # A watched parameter is a leaf; a frozen one, of a model that is only evaluated, is a Parameter.
        if found is None and tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
            variance = self._of_parameters.get(tensor.data_ptr())
            if variance is not None and (variance.dim() == 0 or variance.shape[0] == tensor.shape[0]):
                found = Tracked(Variance(variance.expand(tensor.shape)))
        return found

    def put(self, tensor: Tensor, tracked: Tracked | None) -> None:
        """Notes the noise of a tensor."""
        if tracked is not None:
            self._table[tensor] = tracked
        else:
            self._table.pop(tensor, None)

    def put_sum(self, tensor: Tensor, *parts: Variance) -> None:
        """Notes noise of several independent parts, broadcast to the tensor's shape; nothing where there are none."""
        if parts:
            total = functools.reduce(operator.add, parts)
            self.put(tensor, Tracked(total.expanded(tensor)))

    def variance(self, tensor: Tensor) -> Variance | None:
        """Of the tensor itself, in its shape; None without noise."""
        tracked = self.of(tensor)
        if tracked is None:
            return None
        if tracked.slope is None:
            return tracked.variance
        squares = self.over_features(wide(tracked.slope()).square())
        variance = (tracked.variance.each(self.over_features) * squares).expanded(tensor)
        self.put(tensor, Tracked(variance))
        return variance

    def over_features(self, values: Tensor) -> Tensor:
        """The mean over the last axis, kept as an axis, where features share one variance; else the values."""
        if not self.isotropic or values.dim() == 0 or values.shape[-1] == 1:
            return values
        return values[..., :1] if values.stride(-1) == 0 else values.mean(-1, keepdim=True)

    def sampled(self, values: Tensor) -> Tensor:
        """Features to take a mean over, evenly spaced runs; all where each feature has its own variance."""
        step = values.shape[-1] // _SAMPLED if self.isotropic and values.dim() > 1 else 1
        return values.unfold(-1, _RUN, step * _RUN).flatten(-2) if step > 1 else values

    def energy(self, tensor: Tensor) -> Tensor:
        """The squared length over the last axis, kept as an axis."""
        found: Tensor | None = self._energies.get(tensor)
        if found is None:
            found = torch.linalg.vector_norm(wide(tensor.detach()), dim=-1, keepdim=True).square()
            self._energies[tensor] = found
        return found

    def variances(self, *given: Any) -> list[Variance | None]:
        """Of each of some operands."""
        return [self.variance(t) if isinstance(t, Tensor) else None for t in given]


Rule = Callable[[Moments, Any, Any, tuple[Any, ...], dict[str, Any]], None]


def wide(values: Tensor) -> Tensor:
    """In at least float32."""
    return values if values.dtype == torch.float64 else values.float()


def _is_unknown(func: Any, output: Any) -> bool:
    # Attributes of tensors are functions too; noise in indices and truth values is not followed.
    return getattr(func, "__name__", "") != "__get__" and any(t.is_floating_point() for t in tensors_in(output))
