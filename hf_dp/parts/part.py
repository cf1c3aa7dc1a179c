"""What a part of a private training is: a feature that one field of the promise asks for, in hooks that do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.per_example import Certificate, PerExampleGradients
from hf_dp.step.clipped_sum import SummedByRows
from hf_dp.step.plan import Plan


@dataclass(frozen=True)
class Setting:
    """What a training is made of, as far as a part may not go with it.

    Attributes:
        config: the promise.
        is_sharded: whether FSDP2 takes the model apart.
    """

    config: PrivacyConfig
    is_sharded: bool = False


@dataclass(frozen=True)
class Logs:
    """Numbers for the logs.

    Attributes:
        released: what follows from what is released, and is as good as public.
        exact: functions of the private data with no noise, which `withhold_non_private_logs` drops.
    """

    released: Mapping[str, float] = field(default_factory=dict)
    exact: Mapping[str, float] = field(default_factory=dict)

    def shown(self, withheld: bool) -> dict[str, float]:
        """What may be logged."""
        return dict(self.released) if withheld else {**self.exact, **self.released}

    def under(self, name: str) -> Logs:
        """The same with names that begin with that of a part."""
        released, exact = ({f"{name}/{key}": v for key, v in some.items()} for some in (self.released, self.exact))
        return Logs(released, exact)

    def __or__(self, other: Logs) -> Logs:
        return Logs({**self.released, **other.released}, {**self.exact, **other.exact})


class Run(Protocol):
    """What a part sees of the training that it belongs to.

    Attributes:
        model: unwrapped.
        plan: of this training.
        ledger: to be charged before a release.
        optimizer: as it is to step; None until there is one.
        tokenizer: of the model; None where there is none.
        loader: of the training data, with its dataset and its `LogicalBatchCollator`.
        by_rows: the parameters whose gradients are summed by rows, by name. They stay for all trainings of an
            optimizer.
        parts: all of this training, by their names.
    """

    plan: Plan
    ledger: Ledger
    optimizer: torch.optim.Optimizer | None
    tokenizer: Any
    by_rows: dict[str, nn.Parameter]
    parts: dict[str, Part]

    @property
    def model(self) -> nn.Module: ...

    @property
    def loader(self) -> Any: ...

    def uses(self) -> Certificate:
        """Which operations use which parameters, for a few rows of the data."""
        ...

    def record(self, micro_batch: Any) -> PerExampleGradients:
        """The per-example gradients of a micro-batch, as no part restricts them."""
        ...

    def examples(self, indices: Sequence[int]) -> Iterator[Any]:
        """These training examples, in micro-batches for `record`."""
        ...


class Part:
    """One part of one training, from the promise alone; each training has its own. The order is that of a training.

    Args:
        config: what the user chose.

    Attributes:
        name: the field of the promise, and how names in the logs begin.
        rows: the parameters that are summed by rows, and what chooses these in the next step; None for most parts.
    """

    name: ClassVar[str]
    rows: SummedByRows | None = None

    def __init__(self, config: Any) -> None:
        self._config = config

    @classmethod
    def of(cls, config: PrivacyConfig) -> Self | None:
        """The part that a promise asks for, if it does."""
        settings = getattr(config, cls.name)
        return None if settings is None else cls(settings)

    def refuse(self, setting: Setting) -> None:
        """Refuses what the part does not go with, when the trainer is made. The one place for it."""

    def settled(self, config: PrivacyConfig, model: nn.Module) -> PrivacyConfig:
        """The promise, without what this model makes no use of."""
        return config

    def make_optimizer(
        self, run: Run, make: Callable[[], torch.optim.Optimizer], weight_decay: float
    ) -> torch.optim.Optimizer:
        """The optimizer, made by `make`, which gives back the user's own where `run` has one.

        Args:
            run: before its beginning.
            make: what the parts after this one, and the trainer, make.
            weight_decay: what a new one would have.
        """
        return make()

    @classmethod
    def wrapped(cls, model: nn.Module) -> None:
        """The model has been wrapped (DDP), in a training with this part or with another one."""

    def install(self, run: Run) -> None:
        """Changes the model, before the check of per-example gradients."""

    def checked(self, run: Run) -> None:
        """Refuses what the check has shown. Nothing was spent yet."""

    def begin(self, run: Run, checkpoint: Path | None, earlier: Self | None) -> None:
        """Takes over what was released before, or releases it: charged, and paid for by the plan.

        Args:
            run: whose parts before this one have begun.
            checkpoint: a directory to continue from.
            earlier: of the training of this model before, in this process: what it released is not released again.
        """

    def before_step(self, run: Run) -> None:
        """Prepares the next step, which the budget pays for. May charge what was planned."""

    def restrict(self, gradients: PerExampleGradients) -> PerExampleGradients:
        """The gradients without what is not trained; before they are clipped."""
        return gradients

    def after_step(self) -> None:
        """Looks at what the private step has done; the optimizer has not stepped yet."""

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at what the optimizer has done."""

    def logs(self) -> Logs:
        """What happened since the last call."""
        return Logs()

    def save(self, directory: Path) -> None:
        """Writes what belongs to the model and is not in its weights, in a file of the part's own."""

    def load(self, checkpoint: Path) -> None:
        """Goes back to an earlier model of this training."""

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Takes off a model what this part has put on it, in this training or in one before."""
