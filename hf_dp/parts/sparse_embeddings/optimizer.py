"""Optimizers that move only the rows that have a gradient, beside any other for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_dp.config import SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError


class RowWiseAdam(torch.optim.Optimizer):
    """Adam with one second moment for each row, and no first moment; for sparse gradients.

    A row is moved, and its moment decays, only in steps in which it has a gradient. Noise makes the squares of a row's
    coordinates alike, so their mean says as much as each of them, and a table of V rows needs 2 V numbers of state.
    (Row-wise moments as in Adagrad for embedding tables, Mudigere et al. 2022, arXiv:2104.05158.)

    Args:
        params: (V, d) tables, or groups of them.
        lr: learning rate.
        beta2: decay of the second moment.
        eps: added to its root.
    """

    def __init__(self, params: Any, lr: float = 1e-3, beta2: float = 0.999, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Raises `RuntimeError` for a dense gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the state of tables in 16 bits to theirs."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, held, strict=True):
            saved = state_dict["state"].get(number, {})
            self.state[p] = {name: value.to(p.device, copy=True) for name, value in saved.items()}

    def _move(self, p: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
        if not gradient.is_sparse:
            raise RuntimeError("RowWiseAdam moves rows of sparse gradients; this one is dense")
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values().float()
        state = self.state[p]
        if not state:
            state["step"], state["exp_avg_sq"] = torch.zeros(2, len(p), device=p.device)
        beta2 = group["beta2"]
        steps = state["step"][rows] + 1
        second = state["exp_avg_sq"][rows] * beta2 + values.square().mean(1) * (1 - beta2)
        state["step"][rows], state["exp_avg_sq"][rows] = steps, second
        rate = float(group["lr"]) / ((second / (1 - beta2**steps)).sqrt() + group["eps"])
        p.index_add_(0, rows, (values * -rate[:, None]).to(p.dtype))


class LazyRows(torch.optim.Optimizer):
    """Two optimizers as one: `rows` for embedding tables, `rest` for the other parameters.

    Their groups keep their own settings, and a scheduler or a checkpoint sees them as those of one optimizer, the
    groups of `rest` first.
    """

    def __init__(self, rest: torch.optim.Optimizer, rows: torch.optim.Optimizer) -> None:
        self.rest, self.rows = rest, rows
        # Groups and state are those of the parts, so there are none for Optimizer.__init__ to set up.
        self.__setstate__({"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of both; changing a group's settings changes that of the part."""
        return [*self.rest.param_groups, *self.rows.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Of both."""
        return {**self.rest.state, **self.rows.state}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = self.rest.step(closure) if closure is not None else self.rest.step()
        self.rows.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of each part, by its name."""
        return {"rest": self.rest.state_dict(), "rows": self.rows.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ConfigurationError: the state of another optimizer.
        """
        if set(state_dict) != {"rest", "rows"}:
            raise ConfigurationError(
                "an optimizer state without a part for embedding rows.",
                why="it was saved by a training without sparse embeddings.",
                fix="resume with the settings of the first run.",
            )
        self.rest.load_state_dict(state_dict["rest"])
        self.rows.load_state_dict(state_dict["rows"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to `rest`."""
        self.rest.add_param_group(param_group)

    def train(self) -> None:
        """For optimizers that have a training mode (schedule-free ones)."""
        getattr(self.rest, "train", _nothing)()

    def eval(self) -> None:
        """For optimizers that have an evaluation mode."""
        getattr(self.rest, "eval", _nothing)()


def _nothing() -> None: ...


def with_lazy_rows(
    rest: torch.optim.Optimizer, tables: Mapping[str, nn.Parameter], config: SparseEmbeddingConfig
) -> torch.optim.Optimizer:
    """`rest`, with a lazy optimizer for the tables that it does not hold.

    Raises:
        ConfigurationError: it holds a table, and would move rows that have no gradient, or cannot read a sparse one.
    """
    held: set[str] = set()
    for group in rest.param_groups:
        in_group = {id(p) for p in group["params"]}
        names = [name for name, p in tables.items() if id(p) in in_group]
        held.update(names)
        if names and not _is_lazy(rest, group):
            raise ConfigurationError(
                f"{type(rest).__name__} holds the embedding table {names[0]}, with weight_decay="
                f"{group.get('weight_decay', 0)} and momentum={group.get('momentum', group.get('betas', 0))}.",
                why="weight decay and dense momentum move all rows of a table in every step, so its gradient could not "
                "stay sparse.",
                fix="leave the table out of your optimizer (it gets a lazy one, see SparseEmbeddingConfig.optimizer), "
                "or use SGD without momentum and weight decay.",
            )
    lazy = [p for name, p in tables.items() if name not in held]
    if not lazy:
        return rest
    rate = config.learning_rate
    rate = float(rest.param_groups[0].get("initial_lr", rest.param_groups[0]["lr"])) if rate is None else rate
    kinds = {"row_wise_adam": RowWiseAdam, "sparse_adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}
    return LazyRows(rest, kinds[config.optimizer](lazy, lr=rate))


def _is_lazy(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    if isinstance(optimizer, (RowWiseAdam, torch.optim.SparseAdam)):
        return True
    return type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]
