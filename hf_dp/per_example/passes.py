"""Two passes, where memory decides: one for the norms, one for the sum, and factors dropped once they are read.

Ghost clipping in its original form (Li et al. 2022, arXiv:2110.05679). The second pass makes the factors of the first
again, from the same random numbers, and adds them to the sums as one pass would; so ties, 16 bits and adapters are as
exact. Kept are those of a parameter that is used several times, until all of its uses have come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size
from hf_dp.per_example.factors import Factors, Outer, squared_norms
from hf_dp.per_example.grouped import Grouping
from hf_dp.per_example.precision import full_precision
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients, adding, checked_run, stacked
from hf_dp.per_example.rows import RowSum
from hf_dp.per_example.rule import Certificate, Rule, Use, refusal, refuse_changed
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import Shard, is_sharded, trainable
from hf_dp.per_example.watch import Watch
from hf_dp.randomness import state_to_return_to, unchanged_global_state

Take = Callable[[str, list[Factors]], None]


@dataclass(eq=False)
class TakenWatch(Watch):
    """A watch that keeps the factors of a parameter no longer than until all its uses have come.

    Attributes:
        take: gets them, once.
    """

    take: Take = lambda name, uses: None
    _to_come: Counter[str] = field(default_factory=Counter)
    _open: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)
    _noted: dict[str, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def found_any(self) -> bool:
        """Whether any parameter got a gradient."""
        return bool(self._taken)

    def run(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """As of any watch; afterwards `factors` are empty."""
        losses = super().run(model, loss_fn, batch)
        for name in [name for name, uses in self.factors.items() if uses]:
            self._hand_on(name)
        return losses

    def _use(self, rule: Rule, bound: Any, parameters: list[str], function: Any, args: Any, kwargs: Any) -> Any:
        # What checkpoints compute again, in the backward pass, was counted in the forward pass.
        if not self.is_final:
            self._to_come.update(parameters)
        return super()._use(rule, bound, parameters, function, args, kwargs)

    def _constant(self, parameters: list[str], value: Tensor, hand_on: Callable[[Tensor], None]) -> Any:
        # How often its gradient comes back through constants is known at the end.
        self._open.update(parameters)
        return super()._constant(parameters, value, hand_on)

    def _keep(self, name: str, factors: Factors) -> None:
        if name in self._taken:
            raise refusal([name], "an operation in the backward pass", "all of its uses in the forward pass had come")
        before = len(self.versions)
        super()._keep(name, factors)
        self._noted[name] += self.versions[before:]
        del self.versions[before:]
        if name not in self._open and len(self.factors[name]) == self._to_come[name]:
            self._hand_on(name)

    def _hand_on(self, name: str) -> None:
        refuse_changed(self._noted.pop(name, ()))
        uses, self.factors[name] = self.factors[name], []
        self._taken.add(name)
        first = uses[0]
        with torch.no_grad(), full_precision(first.device if isinstance(first, Outer) else first.values.device):
            self.take(name, uses)


class TwoPasses(PerExampleGradients):
    """Per-example gradients of which nothing is kept but norms; a weighted sum is a pass of its own.

    Attributes:
        differing: how many losses were others in the last pass than in the first, (), on the device.
    """

    def __init__(
        self,
        run: Callable[[Take], tuple[Tensor, frozenset[Use]]],
        size: int,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        owners: Sequence[int] | None = None,
        elsewhere: tuple[int, int] = (0, 0),
    ) -> None:
        self._run, self._back = run, state_to_return_to()
        self._grouping = None if owners is None or any(elsewhere) else Grouping(owners)
        rows = torch.zeros(size, device=device)
        super().__init__(rows, {name: [] for name in parameters}, parameters, elsewhere=elsewhere)
        self._is_first = any(elsewhere)
        # Rows of an example that has more elsewhere are summed as they are: its norm is that of the sum.
        if not self._is_first:
            self._measure()

    def _measure(self) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        losses, self.uses = self._run(lambda name, uses: pairs.append(squared_norms(self._grouped(uses))))
        self.losses = losses if self._grouping is None else self._grouping.summed(losses)
        self._norms = stacked(pairs, losses.device)

    def _grouped(self, uses: list[Factors]) -> list[Factors]:
        return uses if self._grouping is None else [self._grouping.of(use) for use in uses]

    def add_weighted_sum_(
        self, out: Mapping[str, Tensor | Shard], coefficients: Tensor, rows: Mapping[str, RowSum] = {}
    ) -> None:
        """As of kept factors, by one more pass with the random numbers of the first.

        Raises:
            UnsupportedModelError: it computed other losses; on a device that has to be waited for, `differing` says so.
        """
        if coefficients.shape != self.losses.shape:
            raise ValueError(f"coefficients {tuple(coefficients.shape)} for losses {tuple(self.losses.shape)}")
        add = adding(self, out, coefficients, rows)
        if self._is_first:
            losses, self.uses = self._run(add)
            self.losses, self._is_first = losses, False
            return
        with unchanged_global_state():
            self._back()
            losses, _ = self._run(lambda name, uses: add(name, self._grouped(uses)))
        again = losses if self._grouping is None else self._grouping.summed(losses)
        self.differing = (again.ne(self.losses) & ~(again.isnan() & self.losses.isnan())).sum()


def refuse_two_passes(model: nn.Module) -> None:
    """Refuses what two passes cannot do for this model.

    Raises:
        UnsupportedModelError: parameters in shards; a device on which the second pass may not be as the first.
    """
    if is_sharded(model):
        raise UnsupportedModelError(
            "passes=2 with FSDP2.",
            why="sums would be scattered in the middle of the backward pass, where FSDP2 sends by itself.",
            fix="train under DDP, or leave passes out.",
        )
    kinds = {p.device.type for p in model.parameters()} - {"cpu"}
    if kinds and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedModelError(
            f"passes=2 on {', '.join(sorted(kinds))} without deterministic algorithms.",
            why="the gradients of the second pass would differ from those whose norms were taken, and pass the bound.",
            fix="call torch.use_deterministic_algorithms(True), or set TrainingArguments(full_determinism=True).",
        )


def record_in_two_passes(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate,
    rules: Mapping[Any, Rule] = RULES,
    owners: tuple[Sequence[int], int, int] | None = None,
) -> TwoPasses:
    """What `record` gives, with the memory of an ordinary step.

    Args:
        model: as for `record`, as are the others; its parameters are not in shards.
        loss_fn: called once in each pass.
        batch: is kept until the sum was made.
        certificate: from `preflight`.
        rules: the table of operations.
        owners: whose each row is, and how many rows of a single example are in micro-batches before and after; as for
            `PerExampleGradients.grouped`.

    Raises:
        UnsupportedModelError: as for `record`, and for `refuse_two_passes`.
    """
    refuse_two_passes(model)
    size, parameters = batch_size(batch), trainable(model)

    def run(take: Take) -> tuple[Tensor, frozenset[Use]]:
        watch = TakenWatch(Reader(size, None, certificate.readings), rules, take=take)
        losses = checked_run(watch, model, loss_fn, batch, certificate)
        return losses, frozenset(watch.uses)

    device = next(iter(parameters.values())).device
    if owners is None:
        return TwoPasses(run, size, parameters, device)
    return TwoPasses(run, size, parameters, device, owners[0], owners[1:])
