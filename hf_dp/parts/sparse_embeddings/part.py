"""Sparse embeddings in a private training: their tables, the choice of rows and what it costs, at each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.agreement import agree
from hf_dp.config import SparseEmbeddingConfig
from hf_dp.config.asked import ROW_COUNTS
from hf_dp.errors import ConfigurationError
from hf_dp.parts.part import Logs, Part, Run, Setting
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows, find_tables, with_lazy_rows
from hf_dp.parts.sparse_embeddings.hidden import frozen, hide_from_wrapper, show_to_wrapper
from hf_dp.parts.sparse_embeddings.kept_rows import KeptRows
from hf_dp.per_example import PerExampleGradients, Tables

logger = logging.getLogger(__name__)


class SparseTraining(Part):
    """Keeps the sparse embeddings of one model in step with its private training.

    Attributes:
        tables: the embedding tables.
        rows: what chooses rows in the next step; None until it is known which are kept.
        choice: the rows that are kept for many steps.
    """

    name = "sparse_embeddings"
    rows: TableRows | None = None
    tables: Tables
    choice: KeptRows

    def __init__(self, config: SparseEmbeddingConfig) -> None:
        self._config = config
        self._seen: dict[str, list[float]] = {}

    def refuse(self, setting: Setting) -> None:
        """FSDP2."""
        if setting.is_sharded:
            raise ConfigurationError(
                "sparse embeddings with FSDP2.",
                why="a table would be in shards, and rows are looked up, chosen and moved in whole tables.",
                fix="train under DDP, or without sparse_embeddings.",
            )

    def make_optimizer(
        self, run: Run, make: Callable[[], torch.optim.Optimizer], weight_decay: float
    ) -> torch.optim.Optimizer:
        """A lazy optimizer for the tables beside any other, which does not see them.

        Raises:
            ConfigurationError: weight decay, or an optimizer that would move rows without a gradient.
            UnsupportedModelError: no table, or one whose gradient is not that of lookups.
        """
        if run.optimizer is not None and run.by_rows:
            return make()
        uses = run.uses()
        tables = find_tables(run.model, uses | uses.read, self._config.tables)
        if run.optimizer is None and weight_decay:
            raise ConfigurationError(
                f"weight_decay={weight_decay} with sparse gradients of {', '.join(tables)}.",
                why="weight decay moves all rows of a table in every step, so nothing about it would stay sparse.",
                fix="set weight_decay=0, or pass an optimizer of your own for the other parameters: "
                "optimizers=(AdamW([...], weight_decay=...), None).",
            )
        # Trainer leaves out what is frozen.
        with frozen(tables.values()):
            rest = make()
        optimizer = with_lazy_rows(rest, tables, self._config)
        run.by_rows.clear()
        run.by_rows.update(tables)
        hide_from_wrapper(run.model, tables)
        return optimizer

    @classmethod
    def wrapped(cls, model: nn.Module) -> None:
        """From now on nothing is hidden."""
        show_to_wrapper(model)

    def checked(self, run: Run) -> None:
        """Refuses tables that were not looked for, or whose rows are all kept (`ConfigurationError`)."""
        self._plan, self.tables = run.plan, Tables.of(run.by_rows)
        if not run.by_rows:
            raise ConfigurationError(
                "sparse embeddings, and an optimizer that was made without looking for their tables.",
                why="create_optimizer was overridden, or a loop of one's own made it, so all gradients would be dense.",
                fix="call super().create_optimizer() in yours, or pass optimizers=(...) to the trainer; without one, "
                "run.make_optimizer(lambda trained: ...).",
            )
        kept = self._config.kept_rows
        if kept is not None and kept >= self.tables.rows:
            raise ConfigurationError(
                f"kept_rows={kept} of {self.tables.rows} rows in {', '.join(self.tables.sizes)}.",
                why="all rows would get noise, and the choice of them would be paid for.",
                fix="keep fewer, or leave sparse_embeddings out.",
            )

    def begin(self, run: Run, checkpoint: Path | None, earlier: Self | None) -> None:
        """Takes over the rows that were chosen before; see `KeptRows.begin`. The ranks must have the same."""
        self.choice = KeptRows(self.tables, self._config, run.plan)
        self.choice.begin(checkpoint, None if earlier is None else earlier.choice)
        kept = self.choice.kept
        agree(
            {
                "the embedding tables": dict(self.tables.sizes),
                "the embedding rows that are trained": None if kept is None else kept.tolist(),
                "the embedding rows chosen before": [
                    (due, rows.tolist()) for due, rows in sorted(self.choice.choices.items())
                ],
            }
        )
        self._set_rows()

    def before_step(self, run: Run) -> None:
        """Chooses rows where it is time to; see `KeptRows.before_step`."""
        if self.choice.before_step(run.ledger.steps, run.ledger, run.model, run.record, run.examples):
            self._set_rows()

    def restrict(self, gradients: PerExampleGradients) -> PerExampleGradients:
        """Without rows that are not kept."""
        return gradients if self.rows is None else self.rows.restricted(gradients)

    def _set_rows(self) -> None:
        config = self._config
        if config.keeps_rows and self.choice.kept is None:
            return
        selection = None
        if config.adapts:
            noise = self._plan.noise
            deviation = noise.deviation(self._plan.noise_multiplier_of(ROW_COUNTS), config.contribution_norm)
            selection = AdaptiveSelection(
                self.tables.rows,
                deviation,
                config.threshold,
                noise,
                self.choice.kept,
            )
            if self.rows is None:
                expected = selection.false_positive_rate * selection.candidates
                ranks.warn(
                    logger,
                    "DP-AdaFEST on %s: threshold %.4g examples, noise on the counts %.4g; of %d rows about %.3g "
                    "survive a step by chance.",
                    *(", ".join(self.tables.sizes), selection.threshold, deviation),
                    *(selection.candidates, expected),
                )
        self.rows = TableRows(self.tables, self.choice.kept, selection, config.contribution_norm)

    def after_step(self) -> None:
        """Remembers the latest step for the logs."""
        assert self.rows is not None
        assert self.rows.last is not None
        last = self.rows.last
        parts = self.tables.split(last.rows)
        coordinates = sum(len(rows) * self.tables.widths[name] for name, rows in parts.items())
        seen = {
            "surviving_rows": len(last.rows),
            "false_positives": last.false_positives,
            "gradient_density": coordinates / self.tables.coordinates,
            "reduction_factor": self.tables.coordinates / max(1, coordinates),
        }
        for name, value in seen.items():
            self._seen.setdefault(name, []).append(float(value))

    def logs(self) -> Logs:
        """The means over the steps since the last call. All but the false positives follow from what is released."""
        released = {name: sum(values) / len(values) for name, values in self._seen.items()}
        exact = {name: released.pop(name) for name in ("false_positives",) if name in released}
        self._seen = {}
        return Logs(released, exact)

    def save(self, directory: Path) -> None:
        """Writes the rows that were chosen."""
        self.choice.save(directory)
