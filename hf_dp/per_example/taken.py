"""Watches that hand factors on as they come: of each parameter, with checksums of them, or of groups of parameters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction
from hf_dp.per_example.bits import bits_of
from hf_dp.per_example.factors import Factors, Outer
from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.rule import ALONE, Axis, Rule, refusal, refuse_changed
from hf_dp.per_example.watch import Watch

Take = Callable[[str, list[Factors]], None]


@dataclass(eq=False)
class TakenWatch(Watch):
    """A watch that hands on the factors of a parameter.

    Attributes:
        take: gets them.
        joined: whether it gets all uses of a parameter together, and those of `tables` are kept; else each as it comes.
        in_order: whether all come at the end, in the order of the parameters, also of those that have no uses.
        adds_bits: whether checksums are kept.
        bits: (B,) checksums of each example's factors, int64, whatever the order of the uses.
    """

    take: Take = lambda name, uses: None
    joined: bool = True
    in_order: bool = False
    adds_bits: bool = True
    bits: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    _to_come: Counter[str] = field(default_factory=Counter)
    _open: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)
    _noted: dict[str, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def found_any(self) -> bool:
        """Whether any parameter got a gradient."""
        return bool(self._taken) or super().found_any

    def run(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """As of any watch; afterwards `factors` are those of the tables, if any are kept."""
        losses = super().run(model, loss_fn, batch)
        self._hand_on_rest()
        if self.adds_bits:
            self.bits = self.bits.to(losses.device) + bits_of(losses)
        return losses

    def _hand_on_rest(self) -> None:
        rest = [name for name, uses in self.factors.items() if uses or (self.in_order and name not in self._taken)]
        for name in rest:
            if name not in self.tables:
                self._hand_on(name)

    def _use(self, rule: Rule, bound: Any, parameters: list[str], function: Any, args: Any, kwargs: Any) -> Any:
        # What checkpoints compute again, in the backward pass, was counted in the forward pass.
        if not self.is_final:
            self._to_come.update(parameters)
        return super()._use(rule, bound, parameters, function, args, kwargs)

    def _note(self, operation: str, parameters: list[str], given: Tensor | None, axis: Axis, doubtful: bool) -> None:
        # Those of single examples come together at the end.
        self._open.update(parameters if axis.reading == ALONE else ())
        super()._note(operation, parameters, given, axis, doubtful)

    def _constant(self, parameters: list[str], *made: Any) -> Any:
        # How often its gradient comes back through constants is known at the end.
        self._open.update(parameters)
        return super()._constant(parameters, *made)

    def _on_constants(self, function: Any, args: Any, kwargs: Any, parameters: list[str], refused: Any) -> Any:
        # What a reentrant checkpoint computes without gradients comes back in the backward pass.
        self._open.update(parameters)
        return super()._on_constants(function, args, kwargs, parameters, refused)

    def _keep(self, name: str, factors: Factors) -> None:
        before = len(self.versions)
        super()._keep(name, factors)
        kept = self.factors[name][-1]
        if self.adds_bits:
            self.bits = self.bits.to(_device_of(kept)) + checksums(kept)
        if self.joined and name in self.tables:
            return
        self._noted[name] += self.versions[before:]
        del self.versions[before:]
        if not self.joined:
            self._hand_on(name)
        elif name in self._taken:
            raise refusal([name], "an operation in the backward pass", "all of its uses in the forward pass had come")
        elif not self.in_order and name not in self._open and len(self.factors[name]) == self._to_come[name]:
            self._hand_on(name)

    def _hand_on(self, name: str) -> None:
        refuse_changed(self._noted.pop(name, ()))
        uses, self.factors[name] = self.factors[name], []
        self._taken.update([name] if uses else [])
        with torch.no_grad(), full_precision(_device_of(uses[0])) if uses else nullcontext():
            self.take(name, uses)


@dataclass(eq=False)
class GroupWatch(TakenWatch):
    """A watch that hands on a group of parameters when all uses of all of them have come, so no more than one is kept.

    Of tables the factors are kept, and their groups come last; so do groups with parameters that the loss does not
    follow from, or that constants are computed from.

    Attributes:
        groups: names of parameters.
        take_group: gets the number of a group, the losses (B,), and its factors in the order of the parameters.
    """

    adds_bits: bool = False
    groups: Sequence[Collection[str]] = ()
    take_group: Callable[[int, Tensor, dict[str, list[Factors]]], None] = lambda number, losses, factors: None
    _losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    _missing: dict[int, set[str]] = field(default_factory=dict)

    def forward(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """As of any watch; afterwards it is known which parameters of each group are used."""
        losses = super().forward(model, loss_fn, batch)
        self._losses = losses.detach()
        used = self._to_come.keys() | self._open
        self._missing = {number: used & set(names) for number, names in enumerate(self.groups)}
        return losses

    def _keep(self, name: str, factors: Factors) -> None:
        is_gone = not any(name in self.groups[number] for number in self._missing)
        if self.is_final and name not in self._taken and is_gone:
            raise refusal([name], "an operation in the backward pass", "its group had been handed on before")
        super()._keep(name, factors)

    def _hand_on(self, name: str) -> None:
        self._taken.add(name)
        number = next(number for number, names in enumerate(self.groups) if name in names)
        self._missing[number].discard(name)
        if not self._missing[number]:
            self._hand_on_group(number)

    def _hand_on_rest(self) -> None:
        for number in list(self._missing):
            self._hand_on_group(number)

    def _hand_on_group(self, number: int) -> None:
        del self._missing[number]
        names = [name for name in self.factors if name in self.groups[number]]
        self._taken.update(name for name in names if self.factors[name])
        for name in names:
            refuse_changed(self._noted.pop(name, ()))
        refuse_changed(self.versions)
        found = {name: self.factors[name] for name in names}
        self.factors.update({name: [] for name in names if name not in self.tables})
        with torch.no_grad(), full_precision(self._losses.device):
            self.take_group(number, self._losses, found)


def _device_of(factors: Factors) -> torch.device:
    """Where they lie."""
    return factors.device if isinstance(factors, Outer) else factors.values.device


def checksums(factors: Factors) -> Tensor:
    """(B,) int64: the bits of each example's factors, added up as whole numbers, so in whatever order."""
    if isinstance(factors, Outer):
        return bits_of(factors.left.tensor) + bits_of(factors.right.tensor)
    return bits_of(factors.values)
