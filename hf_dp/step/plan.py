"""One config made concrete for one dataset: a mechanism, and the sampler, clipping and noise that are made from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dp_accounting as dp

import hf_dp.accounting as accounting
from hf_dp.accounting import GRADIENT, Ledger, Mechanism, Query, Release, Share
from hf_dp.accounting.events import primitives
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.clipping.rule import ClippingRule
from hf_dp.clipping.table import rule_of
from hf_dp.config import PrivacyConfig
from hf_dp.config.ranges import is_number
from hf_dp.errors import BudgetExceededError, ConfigurationError
from hf_dp.figures import steps_in_words, upper
from hf_dp.hub.earlier import check_other_people, trainings
from hf_dp.noise.source import NoiseSource
from hf_dp.noise.table import source_of
from hf_dp.randomness import Entropy
from hf_dp.sampling.sampler import BatchSampler
from hf_dp.sampling.table import SAMPLERS

# Of a calibration by other versions of the same computation. Epsilon changes by no more than that, relatively.
_ROUNDING = 1e-9
_DECIDE_THE_NOISE = ("accountant", "target_epsilon", "target_tpr", "at_fpr", "noise_multiplier")


@dataclass(frozen=True, eq=False)
class Plan:
    """What a private run does at each step, and what it costs.

    Attributes:
        config: the promise.
        mechanism: what the run does, in numbers; all that runs is made from it.
        sampler: draws each logical batch.
        entropy: where sampling and noise get their randomness.
        clipping: each example's contribution to the sum.
        noise: what is added to the sum, once for each logical batch.
        earlier: the records of the trainings before on the same people, as they were written.

    Raises:
        ConfigurationError: a sampler or an entropy that is not the mechanism's, a mechanism that is not the config's,
            or noise whose package is missing.
    """

    config: PrivacyConfig
    mechanism: Mechanism
    sampler: BatchSampler
    entropy: Entropy
    earlier: tuple[str, ...] = ()
    clipping: ClippingRule = field(init=False)
    noise: NoiseSource = field(init=False)

    def __post_init__(self) -> None:
        sampler, said = self.sampler, self.mechanism
        # Terms say what a draw costs, and the class draws.
        draws_alike = type(sampler) is SAMPLERS[said.sampling.kind]
        draws_alike &= (sampler.terms, sampler.unit) == (said.sampling, said.unit)
        pairs = said.beside(self.config)
        as_promised = all(one == other for one, other in (pairs.pop("unit"), pairs.pop("sampling")))
        if not (draws_alike and as_promised) or self.entropy.reproducible > said.reproducible:
            raise ConfigurationError(
                f"a mechanism of {said.unit} and {said.sampling}, reproducible={said.reproducible}, and a "
                f"{type(sampler).__name__} of {sampler.unit} and {sampler.terms} with {self.entropy}, for a config "
                f"with unit={self.config.unit}, sampling_probability={self.config.sampling_probability}, "
                f"dataset_size={self.config.dataset_size} and "
                f"max_batch_size={self.config.max_batch_size}.",
                why="what runs would not be what is accounted for.",
                fix="make plans with Plan.make, from the sampler that draws.",
            )
        check_other_people(self.earlier, self.config.other_people)
        pairs["earlier"] = said.earlier, trainings(self.config.after, self.earlier)
        if differing := [f"{name} {one!r} and not {other!r}" for name, (one, other) in pairs.items() if one != other]:
            raise ConfigurationError(
                f"a mechanism with {', '.join(differing)}.",
                why="these are not those of the config, and what was promised would not be what is done.",
                fix="make plans with Plan.make.",
            )
        object.__setattr__(self, "clipping", rule_of(self.mechanism.clipping))
        object.__setattr__(self, "noise", source_of(self.mechanism.noise, self.entropy))

    @classmethod
    def make(
        cls,
        config: PrivacyConfig,
        sampler: BatchSampler,
        steps: int,
        entropy: Entropy,
        shares: Sequence[Share] = (),
        queries: Sequence[Query] = (),
        earlier: tuple[str, ...] = (),
        n: int | None = None,
    ) -> Plan:
        """Calibrates the noise to the config's budget, for `steps` steps of `sampler` and all that is released besides.

        Args:
            shares: releases that are paid for with a share of the target epsilon each, before the steps are.
            queries: what each step releases beside the gradient.
            earlier: the records of the trainings before on the same people, as they were written.
            n: how many units there are, also where that is secret; None if these are what the sampler draws.

        Raises:
            ConfigurationError: delta at or above 1/n, shares that are no part of a budget, or a budget that no noise
                can meet.
            BudgetExceededError: the earlier trainings have spent it.
        """
        # A refusal is seen by nobody else: it may depend on n where n is secret.
        unit = sampler.unit
        own = accounting.promised_delta(config, unit.number or n or sampler.dataset_size)
        before = trainings(config.after, earlier)
        delta = accounting.delta_after(before, own, is_given=config.target_delta is not None)
        releases, noise_multiplier = accounting.calibrated(
            lambda noise: sampler.terms.event(accounting.GaussianNoise(multiplier=noise).event(), unit),
            steps=steps,
            delta=delta,
            shares=shares,
            earlier=before,
            **{name: getattr(config, name) for name in _DECIDE_THE_NOISE},
        )
        mechanism = Mechanism(
            unit=sampler.unit,
            sampling=sampler.terms,
            clipping=accounting.clipping_terms(config),
            noise=accounting.GaussianNoise(multiplier=noise_multiplier, kind=config.noise),
            steps=steps,
            delta=delta,
            queries=tuple(queries),
            releases=releases,
            reproducible=entropy.reproducible or config.seed is not None or any(one.reproducible for one in before),
            earlier=before,
        )
        return cls(config, mechanism, sampler, entropy, earlier)

    def continuing(self, ledger: accounting.Ledger) -> Plan:
        """This plan, with the noise of `ledger` where the two differ by rounding alone.

        Another version of scipy or dp_accounting calibrates to other last digits; what was begun goes on as it was.
        """
        noise = self.mechanism.noise
        saved: Any = ledger.promise.get("calibrated_noise_multiplier")
        if self.config.noise_multiplier is None and is_number(saved) and _is_rounding(noise.multiplier, saved):
            noise = replace(noise, multiplier=saved)
        made = {release.label: release.event for release in ledger.releases}
        releases = tuple(
            replace(planned, event=made[planned.label])
            if planned.label in made and _is_rounding_of(planned.event, made[planned.label])
            else planned
            for planned in self.releases
        )
        return replace(self, mechanism=replace(self.mechanism, noise=noise, releases=releases))

    @property
    def steps(self) -> int:
        """How many steps are planned, and, under a budget, the most that the budget pays for."""
        return self.mechanism.steps

    @property
    def delta(self) -> float:
        """The promised delta."""
        return self.mechanism.delta

    @property
    def noise_multiplier(self) -> float:
        """Of all that a step releases, together: given, or calibrated so that `steps` steps and all `releases` stay
        within the budget."""
        return self.mechanism.noise.multiplier

    @property
    def event(self) -> dp.DpEvent:
        """What one step costs."""
        return self.mechanism.step_event

    @property
    def releases(self) -> tuple[Release, ...]:
        """What the budget pays for beside the steps."""
        return self.mechanism.releases

    def release(self, label: str) -> Release:
        """The release of this label (`KeyError` if there is none)."""
        return self.mechanism.release(label)

    def release_to_make(self, label: str, ledger: Ledger) -> Release:
        """The same, before it is made once more.

        Raises:
            BudgetExceededError: the ledger has as many as the budget pays for.
        """
        release = self.release(label)
        made = sum(count for _, count, own in ledger.entries if own == label)
        if made >= release.times:
            raise BudgetExceededError(
                f"{label} was released as often as was planned: {release.times} in all.",
                why="once more would spend more than was promised.",
                fix="resume from the latest checkpoint, which holds what was released, or begin with a new trainer and "
                "a new model object.",
            )
        return release

    def noise_multiplier_of(self, label: str) -> float:
        """Of a release or of a query of each step (`KeyError` if there is none), in units of its own sensitivity."""
        return self.mechanism.noise_multiplier_of(label)

    @property
    def gradient_noise_multiplier(self) -> float:
        """On the clipped sum, in units of the clipping norm. Without further queries it is all of a step's noise."""
        return self.noise_multiplier_of(GRADIENT)

    @property
    def noise_standard_deviation(self) -> float:
        """Of the noise on the clipped sum: sigma x C, or what the source makes of it. 0 without noise, whatever C."""
        multiplier, sensitivity = self.gradient_noise_multiplier, self.clipping.sensitivity
        return self.noise.deviation(multiplier, sensitivity) if self.noise_multiplier else 0.0

    @property
    def budgeted_steps(self) -> float:
        """After how many steps training must stop; infinite if no budget was promised."""
        return math.inf if self.config.noise_multiplier is not None else self.steps

    @property
    def promise(self) -> dict[str, Any]:
        """What a ledger must share to be continued under this plan."""
        return self.mechanism.promise(self.config)

    def report(self, ledger: accounting.Ledger) -> accounting.PrivacyReport:
        """What is promised, and what `ledger` says was spent so far."""
        return self.mechanism.report(ledger, self.config)

    def __str__(self) -> str:
        said = self.mechanism.clipping
        clipping = accounting.clipping_in_words(said.kind, said.norm, said.budgets)
        noise = accounting.noise_in_words(self.mechanism.noise.kind, self.noise_multiplier)
        unit = "" if self.config.unit is None else f"{self.mechanism.unit.name}, "
        return (
            f"{unit}delta {upper(self.delta, 3)}, noise multiplier {noise}, clipping norm {clipping}, "
            f"{self.mechanism.sampling.name} with sampling probability {self.sampler.sampling_probability:.4g}, "
            f"{steps_in_words(self.steps)} of expected batch size {self.sampler.expected_batch_size}"
        )


def _is_rounding(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=0.0)


def _is_rounding_of(event: dp.DpEvent, other: dp.DpEvent) -> bool:
    """Whether both are one Gaussian mechanism, on samples of one probability, with noise alike."""
    ones = [tuple((primitives(each) or {}).items()) for each in (event, other)]
    match ones:
        case [((Gaussian() as one, 1),), ((Gaussian() as two, 1),)]:
            return one.probability == two.probability and _is_rounding(one.noise, two.noise)
    return False
