"""What a step is made of, each term a kind of its own: unit, sampling, clipping, noise. Plain values, checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import dp_accounting as dp

import hf_dp.accounting.truncated as truncated
from hf_dp.accounting.events import check_sampling_probability
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.accounting.units import (
    ColumnExamplesUnit,
    ColumnUnit,
    ExampleUnit,
    UncountedColumnExamplesUnit,
    UncountedColumnUnit,
    UncountedExampleUnit,
    UnitTerms,
)
from hf_dp.config import PrivacyConfig
from hf_dp.config.clipping import CLIPPINGS, ClippingTerms
from hf_dp.config.computed import NoiseName
from hf_dp.config.plain import Terms, refuse_term
from hf_dp.config.ranges import check_noise_multiplier, is_number, shown
from hf_dp.config.secret import GIVEN_SIZE
from hf_dp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class PoissonSampling(Terms):
    """Each unit enters each step independently, or each example of a unit that has several.

    Attributes:
        probability: q, in (0, 1].
        expected_batch_size: what sums are divided by, above 0. Of units whose number is public, q n.
    """

    probability: float
    expected_batch_size: float
    kind: str = "poisson"
    name: ClassVar[str] = "Poisson"

    def _check(self) -> None:
        check_sampling_probability(self.probability)
        if not (is_number(self.expected_batch_size) and 0 < self.expected_batch_size < math.inf):
            refuse_term("expected_batch_size", self.expected_batch_size, "it is a finite number above 0")

    def event(self, inner: dp.DpEvent, unit: UnitTerms) -> dp.DpEvent:
        """What a step costs whose release would cost `inner` on all units, were they one example each."""
        sampled = _poisson_sampled(self.probability, inner)
        one = Gaussian.of(sampled) if unit.apart > 1 else None
        return sampled if one is None else one.of_group(unit.apart).event


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonSampling(Terms):
    """Each unit is drawn for each step independently; of more than `max_batch_size`, so many are kept, at random.

    Attributes:
        probability: q, in (0, 1].
        expected_batch_size: of the draw; what sums are divided by, above 0.
        max_batch_size: B, at least the expected batch size.

    Raises:
        ConfigurationError: besides, dp_accounting without an event for it.
    """

    probability: float
    expected_batch_size: float
    max_batch_size: int
    kind: str = "truncated_poisson"

    def _check(self) -> None:
        PoissonSampling(probability=self.probability, expected_batch_size=self.expected_batch_size)
        truncated.check_cap(self.max_batch_size, self.expected_batch_size)

    @property
    def name(self) -> str:
        return f"Poisson before truncation to {self.max_batch_size}"

    def event(self, inner: dp.DpEvent, unit: UnitTerms) -> dp.DpEvent:
        """As of `PoissonSampling`; here the number that is drawn from counts.

        Raises:
            ConfigurationError: besides, units of which several examples are drawn, each by itself.
        """
        if unit.apart > 1:
            refuse_term("unit", unit.name, "of a truncated sample it is one example")
        if isinstance(inner, dp.NonPrivateDpEvent):
            return inner
        return truncated.sampled(inner, unit.drawn, self.probability, self.max_batch_size)


SamplingTerms = PoissonSampling | TruncatedPoissonSampling


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Terms):
    """Independent Gaussian noise on each query of a step.

    Queries of one sampled batch are one Gaussian mechanism, whose precision is the sum of theirs (in units of their
    sensitivities; Ghazi et al. 2023, arXiv:2311.08357): what the step costs follows from that sum alone, whichever
    source makes the noise.

    Attributes:
        multiplier: sigma = (sum of sigma_i^-2)^(-1/2) over all queries of a step, in units of the sensitivity; 0 for
            no noise.
        kind: which source makes it.
    """

    multiplier: float
    kind: str = "gaussian"

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        return get_args(NoiseName)

    def _check(self) -> None:
        check_noise_multiplier(self.multiplier)

    def event(self) -> dp.DpEvent:
        """What a step would cost on all units, whatever its queries."""
        return dp.NonPrivateDpEvent() if self.multiplier == 0 else dp.GaussianDpEvent(float(self.multiplier))

    def of_queries(self, ratios: Mapping[str, float]) -> dict[str, float]:
        """sigma_i of further queries, given their ratios to that of the gradient."""
        return {
            label: self.multiplier * math.hypot(*(ratio / other for other in ratios.values()), ratio)
            for label, ratio in ratios.items()
        }

    def of_gradient(self, ratios: Mapping[str, float]) -> float:
        """sigma_0, of the clipped sum."""
        label = next(iter(ratios), None)
        return self.multiplier if label is None else self.of_queries(ratios)[label] / ratios[label]


def step_event(noise_multiplier: float, sampling_probability: float) -> dp.DpEvent:
    """The event of one private step: a Poisson-sampled sum with Gaussian noise (Abadi et al. 2016, arXiv:1607.00133).

    Args:
        noise_multiplier: standard deviation of the noise, in units of the sensitivity of the sum. 0 gives an event
            with infinite epsilon.
        sampling_probability: probability in (0, 1] with which each unit enters the batch, independently.

    Raises:
        ConfigurationError: a noise multiplier or a probability out of range.
    """
    check_sampling_probability(sampling_probability)
    return _poisson_sampled(sampling_probability, GaussianNoise(multiplier=noise_multiplier).event())


def _poisson_sampled(probability: float, inner: dp.DpEvent) -> dp.DpEvent:
    if isinstance(inner, dp.NonPrivateDpEvent):
        return inner
    return dp.PoissonSampledDpEvent(float(probability), inner)


# By the field of a mechanism, then by their kind in JSON.
TERMS: dict[str, dict[str, type[Any]]] = {
    "unit": {
        "example": ExampleUnit,
        "uncounted example": UncountedExampleUnit,
        "column": ColumnUnit,
        "uncounted column": UncountedColumnUnit,
        "column, by examples": ColumnExamplesUnit,
        "uncounted column, by examples": UncountedColumnExamplesUnit,
    },
    "sampling": {"poisson": PoissonSampling, "truncated_poisson": TruncatedPoissonSampling},
    "clipping": CLIPPINGS,
    "noise": dict.fromkeys(get_args(NoiseName), GaussianNoise),
}


def sampling_terms(number: int | None, expected_batch_size: float, asked: Mapping[str, Any]) -> SamplingTerms:
    """The sampling from `number` units or examples (None if it is secret) that a config asks for, given what it
    promises, as it stands in ledgers (`ConfigurationError` where none follows)."""
    q, most = asked.get("sampling_probability"), asked.get("max_batch_size")
    if q is None:
        size = asked.get(GIVEN_SIZE, number)
        if size is None:
            refuse_term("number", size, "the probability of sampling follows from it")
        q = expected_batch_size / size
    said = {"probability": q, "expected_batch_size": expected_batch_size}
    given = {} if most is None else {"max_batch_size": most}
    terms: SamplingTerms = TERMS["sampling"]["truncated_poisson" if given else "poisson"](**said, **given)
    return terms


def clipping_terms(config: PrivacyConfig) -> ClippingTerms:
    """The clipping that a config promises."""
    given = {} if config.groups is None else {"groups": config.groups}
    terms: ClippingTerms = TERMS["clipping"][config.clipping](norm=config.clipping_norm, **given)
    return terms


def terms_from_dict(field: str, values: object) -> Any:
    """The terms that `to_dict` wrote of this field of a mechanism.

    Raises:
        ConfigurationError: an unknown kind, a missing or unknown value, or one out of range.
    """
    kind = values.get("kind") if isinstance(values, dict) else None
    known = TERMS[field]
    if not isinstance(values, dict) or not isinstance(kind, str) or kind not in known:
        raise ConfigurationError(
            f"{field} is {shown(values)}.",
            why="what is not known here could cost any amount of privacy.",
            fix=f"use one of the kinds {', '.join(map(repr, known))}, or a newer hf_dp.",
        )
    if set(values) != {item.name for item in dataclasses.fields(known[kind])}:
        refuse_term(field, values, f"of kind {kind!r} it has other values")
    # A column may have that name too.
    return known[kind](**{k: math.inf if (k, v) == ("norm", "inf") else v for k, v in values.items()})
