"""The Gaussian mechanism on a truncated Poisson sample: what one use of it costs.

Each of n units is drawn with probability q; of more than B, B are kept, chosen uniformly. Zero-out, n public: in D' one
unit adds nothing to any sum, and is drawn as in D. So the sample is distributed alike, whatever the data. Let K be how
many others are drawn. Given that K < B nobody is left out, and the unit is there with probability q: a Poisson-sampled
Gaussian. Given that K >= B, B others, or the unit in the place of one of them; that, whatever K is, with probability

    p = P(the unit is kept | K >= B) = P(n draw more than B) B / (n P(K >= B)).

Let b be what the unit adds and a what the other one would have, both at most as long as the sensitivity, 1. Seen from
the sum of the B others, the sum is 0 or b - a under D, and 0 or -a under D'. `dp_accounting` composes what is no
smaller: 0 or 2 against 0 or -2, the pair of replace-one with sensitivity 2.

- By advanced joint convexity (Balle et al. 2018, arXiv:1807.01647) the divergence of two mixtures with one common part
  is p times that of N(b - a) and a mixture of N(0) and N(-a), or of N(-a) and one of N(0) and N(b - a). Each is the
  mean of a convex function of a sum of likelihood ratios, which is largest where these rise together, and rises with
  each distance (comonotone sums; Choquette-Choo et al. 2023, arXiv:2310.15526). The distances are at most 2 and 1,
  or 1 and 1; in the pair that is composed, 2 and 4.
- Joint convexity puts the cases together: who is told which one it is, and who the others are, learns no less.

Several queries of one sample, each chosen with a look at the answers before: their likelihood ratios are dominated by
those of one Gaussian whose precision is the sum of theirs, and so are the sums of these. Such a step is one Gaussian
here too.

It is an upper bound, close where K >= B is rare (Ganesh 2025, arXiv:2508.15089, has it for add-or-remove, where the
other's place is left empty). The accountant by Renyi divergences does not have it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp
from dp_accounting import pld as dp_pld
from dp_accounting.pld import privacy_loss_mechanism
from scipy import stats

from hf_dp.accounting.composition import StepLoss, as_step_loss
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.accounting.group import MOST_OF_PERSON, ByDistributions, Group
from hf_dp.accounting.truncated_group import TruncatedGroup
from hf_dp.config.ranges import check_max_batch_size, is_count, is_noise, is_number
from hf_dp.errors import ConfigurationError
from hf_dp.versions import library_versions

# dp_accounting has it since 0.6.
EVENT: type[dp.DpEvent] | None = getattr(dp, "TruncatedSubsampledGaussianDpEvent", None)
# What is as rare is counted as if it told everything. Numbers near the smallest float64 have few digits.
_RARE = 1e-100


@dataclass(frozen=True, order=True)
class Truncated(ByDistributions):
    """A sum with Gaussian noise over a truncated Poisson sample; see `Primitive`.

    Attributes:
        number: n, how many units there are.
        probability: with which each unit is drawn, in [0, 1].
        most: how many of them are kept, at least 1.
        noise: standard deviation, in units of the sensitivity.
    """

    number: int
    probability: float
    most: int
    noise: float

    @classmethod
    def of(cls, event: Any) -> Truncated | None:
        """Of a `TruncatedSubsampledGaussianDpEvent`; None if its numbers are none."""
        n, q, most = event.dataset_size, event.sampling_probability, event.truncated_batch_size
        if not (is_count(n, at_least=1) and is_count(most, at_least=1) and is_noise(event.noise_multiplier)):
            return None
        return cls(n, float(q), most, float(event.noise_multiplier)) if is_number(q) and 0 <= q <= 1 else None

    @property
    def event(self) -> dp.DpEvent:
        return sampled(dp.GaussianDpEvent(self.noise), self.number, self.probability, self.most)

    @property
    def is_free(self) -> bool:
        return self.probability == 0

    @property
    def is_finite(self) -> bool:
        return Gaussian(self.probability, self.noise / 2).is_finite

    def of_group(self, rows: int) -> Truncated | TruncatedGroup | None:
        if rows == 1 or not 0 < self.probability < 1:
            return self if rows == 1 else None
        group = Group(self.probability, self.noise, rows)
        return TruncatedGroup(self.number, self.most, group) if rows <= MOST_OF_PERSON else None

    @property
    def full(self) -> float:
        """The probability that B or more of the others are drawn, of each step."""
        return float(stats.binom.sf(self.most - 1, self.number - 1, self.probability))

    @property
    def kept(self) -> float:
        """p, the probability that the unit is kept, given that B or more of the others are drawn."""
        more = float(stats.binom.sf(self.most, self.number, self.probability))
        return more * self.most / self.full / self.number

    def losses(self, cell: float) -> tuple[StepLoss, StepLoss]:
        return _losses(self, cell)

    def scale(self) -> tuple[float, float]:
        deviation, width = Gaussian(self.probability, self.noise).scale()
        if self.full < _RARE:
            return deviation, width
        bounds = privacy_loss_mechanism.GaussianPrivacyLoss(
            self.noise / 2, sampling_prob=self.kept, adjacency_type=privacy_loss_mechanism.AdjacencyType.REPLACE
        ).connect_dots_bounds()
        # The variance of a mixture is no smaller than its part from one of the two.
        return deviation * math.sqrt(1 - self.full), max(width, bounds.epsilon_upper - bounds.epsilon_lower)


@functools.lru_cache(maxsize=8)
def _losses(one: Truncated, cell: float) -> tuple[StepLoss, StepLoss]:
    if one.full < _RARE:
        remove, add = Gaussian(one.probability, one.noise).losses(cell)
        return _or_all(remove, one.full), _or_all(add, one.full)
    pld = dp_pld.privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=one.number,
        sampling_probability=one.probability,
        truncated_batch_size=one.most,
        noise_multiplier=one.noise,
        value_discretization_interval=cell,
        neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL,
    )
    # Not public; a test holds what is made of them against exact integrals.
    remove, add = (as_step_loss(pmf.to_dense_pmf()) for pmf in (pld._pmf_remove, pld._pmf_add))
    return remove, add


def _or_all(loss: StepLoss, probability: float) -> StepLoss:
    return StepLoss(loss.lowest, loss.masses, loss.infinite + probability)


def sampled(inner: dp.DpEvent, number: int | None, probability: float, most: int) -> dp.DpEvent:
    """The event of `inner`, Gaussian noise, on a truncated Poisson sample (`ConfigurationError` of anything else)."""
    if EVENT is None or number is None or not isinstance(inner, dp.GaussianDpEvent):
        raise ConfigurationError(
            f"a truncated Poisson sample of {number or 'a secret number of'} units for {inner!r}.",
            why="what it costs is known of Gaussian noise and a public number of units, from dp-accounting 0.6 on.",
            fix="use Gaussian noise, and leave out sampling_probability or max_batch_size.",
        )
    return EVENT(number, float(probability), most, inner.noise_multiplier)


def check_cap(max_batch_size: int, expected_batch_size: float) -> None:
    """Refuse a cap that is no number, below the expected batch size, or of unknown cost (`ConfigurationError`)."""
    check_max_batch_size(max_batch_size)
    if EVENT is None:
        raise ConfigurationError(
            f"max_batch_size={max_batch_size} with dp-accounting {library_versions()['dp_accounting']}.",
            why="what a truncated batch costs is known to it from version 0.6 on.",
            fix="install dp-accounting>=0.6, or leave out max_batch_size.",
        )
    if max_batch_size < expected_batch_size:
        # Five standard deviations: one draw in millions is larger.
        ample = math.ceil(expected_batch_size + 5 * math.sqrt(expected_batch_size))
        raise ConfigurationError(
            f"max_batch_size={max_batch_size} below the expected batch size of {expected_batch_size:g}.",
            why="most draws would be cut, while sums are divided by the expected batch size, and each cut costs "
            "privacy: drawing fewer gives more for less.",
            fix="lower per_device_train_batch_size x gradient_accumulation_steps x processes, or give "
            f"max_batch_size={ample}, which next to no draw exceeds.",
        )
