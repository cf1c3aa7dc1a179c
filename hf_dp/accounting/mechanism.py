"""What a private run does, as one frozen value: its step's event, its promise and its report are derived from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp

from hf_dp.accounting.caveats import standard_caveats
from hf_dp.accounting.earlier import Earlier, check_same_people, event_of
from hf_dp.accounting.events import check_mechanisms, check_steps
from hf_dp.accounting.ledger import Ledger
from hf_dp.accounting.release import GRADIENT, TRAINING_STEP, Release, check_label
from hf_dp.accounting.report import PrivacyReport
from hf_dp.accounting.terms import (
    TERMS,
    GaussianNoise,
    SamplingTerms,
    clipping_terms,
    sampling_terms,
    terms_from_dict,
)
from hf_dp.accounting.units import ColumnExamplesUnit, UnitTerms, unit_terms
from hf_dp.config import PrivacyConfig
from hf_dp.config.after import names_of
from hf_dp.config.asked import Query, promised
from hf_dp.config.clipping import ClippingTerms
from hf_dp.config.ranges import check_target_delta
from hf_dp.errors import ConfigurationError, HfDpError, damaged

# Queries in a step, and kinds of release; each part of a training has one or two.
_MOST = 16
_FIELDS = {*TERMS, "steps", "delta", "queries", "releases", "reproducible"}
# Of runs that have one.
_EARLIER = "earlier"


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What is done with the data, in numbers. Whoever has it can compute what a run costs.

    Attributes:
        unit: whose presence is hidden, and how many there are where that is public.
        sampling: which units a step is made of.
        clipping: what each of them may add.
        noise: of a step.
        steps: how many are planned.
        delta: the promised delta.
        queries: what each step releases beside the gradient.
        releases: what is released beside the steps, in the order of their calibration.
        reproducible: sampling and noise follow from a seed that somebody knows, of this run or of an earlier one.
        earlier: trainings before on the same people, the first of them first.

    Raises:
        ConfigurationError: numbers out of range, two releases or queries of one label, earlier units that are hidden
            otherwise, a unit of which it is not known what it costs to be sampled so, or more different mechanisms
            than a record is verified with.
        LedgerError: a label that is no short name.
    """

    unit: UnitTerms
    sampling: SamplingTerms
    clipping: ClippingTerms
    noise: GaussianNoise
    steps: int
    delta: float
    queries: tuple[Query, ...] = ()
    releases: tuple[Release, ...] = ()
    reproducible: bool = False
    earlier: tuple[Earlier, ...] = ()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        check_same_people(self.earlier, self.unit)
        check_target_delta(self.delta)
        if len(self.queries) > _MOST or len(self.releases) > _MOST:
            raise ConfigurationError(
                f"a mechanism with {len(self.queries)} queries in a step and {len(self.releases)} kinds of release.",
                why=f"no training has more than {_MOST} of either, and adding up thousands takes minutes.",
                fix="use a record as hf_dp wrote it.",
            )
        labels = [GRADIENT, TRAINING_STEP, *(query.label for query in self.queries)]
        labels += [release.label for release in self.releases]
        for label in labels:
            check_label(label)
        is_said = isinstance(self.reproducible, bool) and self.reproducible >= any(e.reproducible for e in self.earlier)
        if len(set(labels)) < len(labels) or not is_said:
            raise ConfigurationError(
                f"a mechanism with the labels {', '.join(labels)}, and reproducible={self.reproducible!r}.",
                why="a label is the one way in which a release is known, and reproducible is True or False.",
                fix="give each release and each query a label of its own.",
            )
        # Not of all units is it known with all samplings (`ConfigurationError`).
        check_mechanisms(f"those of {len(self.earlier)} trainings before", self.event)

    @property
    def step_event(self) -> dp.DpEvent:
        """What one step costs, with all of its queries."""
        return self.sampling.event(self.noise.event(), self.unit)

    @property
    def event(self) -> dp.DpEvent:
        """What the whole run costs, as planned, and those before it."""
        releases = [dp.SelfComposedDpEvent(release.event, release.times) for release in self.releases]
        before = event_of(self.earlier)
        earlier = [] if before is None else [before]
        return dp.ComposedDpEvent([*earlier, *releases, dp.SelfComposedDpEvent(self.step_event, self.steps)])

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """Of each query of a step by its label, the gradient first, in units of its own sensitivity."""
        ratios = {query.label: query.ratio for query in self.queries}
        return {GRADIENT: self.noise.of_gradient(ratios), **self.noise.of_queries(ratios)}

    def release(self, label: str) -> Release:
        """The planned release of this label (`KeyError` if there is none)."""
        return {release.label: release for release in self.releases}[label]

    def noise_multiplier_of(self, label: str) -> float:
        """Of a query or a release (`KeyError` if there is none), in units of its own sensitivity."""
        queries = self.noise_multipliers
        return queries[label] if label in queries else self.release(label).noise_multiplier

    def promise(self, config: PrivacyConfig) -> dict[str, Any]:
        """What a ledger must share to be continued by a run of this config."""
        return {
            **{name: "inf" if value == math.inf else value for name, value in promised(config).items()},
            "dataset_size": self.unit.number,
            "expected_batch_size": self.sampling.expected_batch_size,
            "calibrated_noise_multiplier": self.noise.multiplier,
            "delta": self.delta,
            "planned_steps": self.steps,
            # Steps whose noise anyone can repeat stay steps that are not private.
            "reproducible": self.reproducible,
            **({_EARLIER: [one.record_sha256 for one in self.earlier]} if self.earlier else {}),
            **({} if self._drawn_from is None else {"drawn_from": self._drawn_from}),
        }

    @property
    def _drawn_from(self) -> int | None:
        """How many examples are drawn from, where these are not the units."""
        return self.unit.drawn if isinstance(self.unit, ColumnExamplesUnit) else None

    def beside(self, config: PrivacyConfig) -> dict[str, tuple[Any, Any]]:
        """By its name, what is said here and what the config asks for of it, where it does: pairs that must agree."""
        names, asked_for = {one.name for one in self.earlier}, {*names_of(config.after)}
        n, drawn, expected = self.unit.number, self.unit.drawn, self.sampling.expected_batch_size
        pairs = {
            "unit": (self.unit.to_dict(), _asked_for(lambda: unit_terms(n, config, drawn))),
            "clipping": (self.clipping.to_dict(), clipping_terms(config).to_dict()),
            "sampling": (
                self.sampling.to_dict(),
                _asked_for(lambda: sampling_terms(drawn, expected, promised(config))),
            ),
            "noise": (self.noise.kind, config.noise),
            "after": (sorted(names & asked_for) if asked_for else sorted(names), sorted(asked_for)),
            # The config may leave these to be found.
            "noise_multiplier": (self.noise.multiplier, config.noise_multiplier),
            "target_delta": (self.delta, config.target_delta),
        }
        return {name: (said, wanted) for name, (said, wanted) in pairs.items() if wanted is not None}

    def report(self, ledger: Ledger, config: PrivacyConfig) -> PrivacyReport:
        """What is promised, and what `ledger` says was spent so far."""
        return PrivacyReport(
            epsilon=ledger.epsilon(self.delta, config.accountant),
            delta=self.delta,
            noise_multiplier=self.noise.multiplier,
            clipping=self.clipping.kind,
            clipping_norm=self.clipping.norm,
            clipping_groups=self.clipping.budgets,
            noise=self.noise.kind,
            sampling_probability=self.sampling.probability,
            steps=ledger.steps,
            accountant=config.accountant,
            dataset_size=self.unit.number,
            drawn_from=self._drawn_from,
            expected_batch_size=self.sampling.expected_batch_size,
            target_epsilon=config.target_epsilon,
            target_tpr=config.target_tpr,
            at_fpr=config.at_fpr,
            epsilon_rdp=ledger.epsilons(self.delta).get("rdp"),
            queries=self.noise_multipliers,
            releases=ledger.releases,
            earlier=tuple(one.in_words() for one in self.earlier),
            reproducible=self.reproducible,
            unit=self.unit.name,
            adjacency=self.unit.adjacency,
            sampling=self.sampling.name,
            caveats=standard_caveats(
                withholds_logs=config.withhold_non_private_logs,
                shows_whose=self._drawn_from is not None,
                noise=self.noise.kind,
                goes_on=bool(self.earlier),
                equal_widths=config.equal_widths,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; `from_dict` is the inverse."""
        return {
            **{name: getattr(self, name).to_dict() for name in TERMS},
            "steps": self.steps,
            "delta": self.delta,
            "queries": [{"label": query.label, "ratio": query.ratio} for query in self.queries],
            "releases": [release.to_dict() for release in self.releases],
            "reproducible": self.reproducible,
            **({_EARLIER: [one.to_dict() for one in self.earlier]} if self.earlier else {}),
        }

    @classmethod
    def from_dict(cls, values: object) -> Mechanism:
        """The mechanism that `to_dict` wrote.

        Raises:
            LedgerError: anything else: an unknown kind, a missing field, a number out of range.
        """
        try:
            if not isinstance(values, Mapping) or set(values) - {_EARLIER} != _FIELDS:
                raise TypeError(f"expected the fields {', '.join(sorted(_FIELDS))}, found {str(values)[:100]}")
            for name in ("queries", "releases", _EARLIER):
                if not isinstance(values.get(name, []), list):
                    raise TypeError(f"{name} is no list: {str(values[name])[:100]}")
            terms = {name: terms_from_dict(name, values[name]) for name in TERMS}
            queries = tuple(Query(**query) for query in values["queries"])
            releases = tuple(Release.from_dict(release) for release in values["releases"])
            numbers = {name: values[name] for name in ("steps", "delta", "reproducible")}
            earlier = tuple(map(Earlier.from_dict, values.get(_EARLIER, ())))
            return cls(**terms, **numbers, queries=queries, releases=releases, earlier=earlier)
        except (TypeError, ConfigurationError) as error:
            raise damaged("no mechanism", error.found if isinstance(error, HfDpError) else str(error)) from error


def _asked_for(terms: Callable[[], Any]) -> Any:
    """As plain values, or why there are none."""
    try:
        return terms().to_dict()
    except ConfigurationError as error:
        return error.found
