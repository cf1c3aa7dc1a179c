"""The embedding tables of a private step: which of their rows get a gradient and noise."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from hf_dp.parts.sparse_embeddings.contributions import ContributionSum
from hf_dp.parts.sparse_embeddings.selection import AdaptiveSelection, Survivors
from hf_dp.per_example import PerExampleGradients, Tables


class TableRows:
    """Chooses rows for a step: those that are kept for many steps, those that survive in this one, or both.

    Args:
        tables: the embedding tables.
        kept: (k,) ascending numbers of the rows that are trained at all (DP-FEST); None for all.
        selection: chooses among them in each step (DP-AdaFEST); None for all of them.
        contribution_norm: C1, for `selection`.

    Attributes:
        contributions: how many examples of the logical batch touch each row; None if they are not counted.
        last: what was chosen in the latest step.
    """

    def __init__(
        self,
        tables: Tables,
        kept: Tensor | None = None,
        selection: AdaptiveSelection | None = None,
        contribution_norm: float = 1.0,
    ) -> None:
        if kept is None and selection is None:
            raise ValueError("nothing chooses rows: all of them would get noise")
        self.tables, self.selection = tables, selection
        self._kept, self._norm = kept, contribution_norm
        self.contributions: ContributionSum | None = None
        self._masks: dict[str, Tensor] = {}
        if kept is not None:
            mask = torch.zeros(tables.rows, dtype=torch.bool)
            mask[kept] = True
            starts = tables.offsets
            self._masks = {name: mask[starts[name] : starts[name] + size] for name, size in tables.sizes.items()}
        self.last: Survivors | None = None

    def restricted(self, gradients: PerExampleGradients) -> PerExampleGradients:
        """The gradients without rows that are not kept, which are frozen: they take no share of the clipping norm."""
        if self._kept is None:
            return gradients
        self._masks = {name: mask.to(gradients.losses.device) for name, mask in self._masks.items()}
        return gradients.restricted(self._masks)

    @property
    def names(self) -> Collection[str]:
        """Of the tables."""
        return self.tables.sizes

    def begin(self) -> None:
        """Nothing counted yet of one logical batch."""
        self.contributions = None if self.selection is None else ContributionSum(self.tables, self._norm)

    def add(self, gradients: PerExampleGradients, used: Tensor) -> None:
        """Counts the examples that add a gradient."""
        if self.contributions is not None:
            self.contributions.add(gradients, used)

    def choose(self, step: int) -> dict[str, Tensor]:
        """The rows of this step in each table. The caller has charged it."""
        if self.selection is None:
            assert self._kept is not None
            self.last = Survivors(self._kept, 0)
        else:
            assert self.contributions is not None
            self.last = self.selection.survivors(*self.contributions.touched(), step)
        return self.tables.split(self.last.rows)
