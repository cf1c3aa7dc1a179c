"""Which rows of the embedding tables get a gradient and noise in one step (Ghazi et al. 2023, arXiv:2311.08357)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy import special
from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.errors import HfDpError
from hf_dp.noise.source import NoiseSource
from hf_dp.randomness import bernoulli

# With no threshold given, a row that no example touched survives so often.
_DEFAULT_FALSE_POSITIVE_RATE = 1e-4


@dataclass(frozen=True)
class Survivors:
    """The rows of one step.

    Attributes:
        rows: (k,) ascending numbers; a private release, as good as public.
        false_positives: how many of them no example of the batch touched; not private.
    """

    rows: Tensor
    false_positives: int


class AdaptiveSelection:
    """DP-AdaFEST: rows whose noisy count reaches a threshold (algorithm 1).

    The count of a row that no example touches is noise alone, so it survives with probability
    p = P[N(0, sd^2) >= threshold], independently of all others. Such rows are drawn by the gaps between them: the
    same distribution as one normal for each row, in time of what survives.

    Args:
        rows: how many rows there are, numbered from 0.
        standard_deviation: of the noise on the counts, sigma1 x C1.
        threshold: tau > 0; None for the default.
        noise: where it comes from, and all that is drawn.
        among: (k,) ascending: only these rows can survive (DP-AdaFEST+); None for all.
    """

    def __init__(
        self,
        rows: int,
        standard_deviation: float,
        threshold: float | None,
        noise: NoiseSource,
        among: Tensor | None = None,
    ) -> None:
        self._deviation, self._noise, self._among = standard_deviation, noise, among
        self._size = rows if among is None else len(among)
        default = -standard_deviation * float(special.ndtri(_DEFAULT_FALSE_POSITIVE_RATE))
        self.threshold = default if threshold is None else threshold

    @property
    def false_positive_rate(self) -> float:
        """With which probability a row survives that no example touches."""
        return float(special.ndtr(-self.threshold / self._deviation)) if self._deviation else 0.0

    @property
    def candidates(self) -> int:
        """How many rows can survive."""
        return self._size

    def survivors(self, rows: Tensor, counts: Tensor, step: int) -> Survivors:
        """The rows that survive one step. The caller has charged it.

        On several ranks all call it together; rank 0 draws, and its rows survive on all.

        Args:
            rows: (k,) those that any example touches, ascending.
            counts: (k,) float64, how many do, clipped; of all ranks.
            step: which logical batch this is.
        """
        survivors = ranks.drawn_by_first(lambda: self._drawn(rows, counts, step))
        return Survivors(survivors, int((~torch.isin(survivors, rows)).sum()))

    def _drawn(self, rows: Tensor, counts: Tensor, step: int) -> Tensor:
        if self._among is not None and not bool(torch.isin(rows, self._among).all()):
            raise HfDpError(
                "examples touch embedding rows that are not trained.",
                why="which rows survive would be drawn with other odds than were paid for.",
                fix="restrict gradients to the rows that are kept before they are counted (`TableRows.restricted`).",
            )
        noisy = counts.clone()
        self._noise.add_([noisy], self._deviation, step, "contribution noise")
        true = rows[noisy >= self.threshold]
        places = rows if self._among is None else torch.searchsorted(self._among, rows)
        generator = self._noise.generator("false positives", step)
        rate = self.false_positive_rate
        drawn = bernoulli(generator, self._size - len(rows), rate) if rate > 0 else []
        false = _skipping(torch.tensor(drawn, dtype=torch.int64), places)
        false = false if self._among is None else self._among[false]
        return torch.cat([true, false]).sort().values


def _skipping(indices: Tensor, taken: Tensor) -> Tensor:
    """The whole numbers at `indices` of those that are left when the ascending `taken` are left out."""
    return indices + torch.searchsorted(taken - torch.arange(len(taken)), indices, right=True)
