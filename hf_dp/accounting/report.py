"""What is told to others about the privacy of a run: numbers, assumptions and caveats."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, get_args

from hf_dp.accounting.caveats import NO_NOISE, REPRODUCIBLE, STANDARD_CAVEATS, TOGETHER
from hf_dp.accounting.events import in_words
from hf_dp.accounting.neighbours import ADD_OR_REMOVE, ZERO_OUT
from hf_dp.accounting.release import GRADIENT, Release, check_label
from hf_dp.config import AccountantName
from hf_dp.config.clipping import ClippingName, are_budgets, clipping_in_words
from hf_dp.config.computed import NoiseName
from hf_dp.config.plain import values_or_error
from hf_dp.config.ranges import is_count, is_number, is_one_of
from hf_dp.config.target import AT_FPR, is_target_tpr
from hf_dp.errors import damaged
from hf_dp.figures import lower, percent, upper
from hf_dp.versions import library_versions


def noise_in_words(kind: str, multiplier: float) -> str:
    """The noise multiplier, and what makes the noise where that is not the usual generator."""
    said = lower(multiplier, 4)
    made = {"grid": "on a grid, from the generator chacha20"}.get(kind, f"from the generator {kind}")
    return said if kind == "gaussian" else f"{said} (Gaussian, {made})"


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """The privacy that a run gave, with everything needed to judge or recompute it.

    Attributes:
        epsilon: in nats, at `delta`, of everything released; infinite without noise.
        delta: probability with which the bound may fail.
        noise_multiplier: standard deviation of a step's noise, in units of the sensitivity.
        clipping_norm: l2 norm to which each unit's gradient was clipped.
        clipping: the kind of clipping rule.
        clipping_groups: the part of the clipping norm that each group of parameters was clipped to, by its pattern.
        noise: the kind of source that made the noise.
        sampling_probability: of each unit in each step, or of each example; see `drawn_from`.
        steps: training steps charged.
        accountant: which bound `epsilon` is, "pld" or "rdp".
        target_epsilon: the budget, or None if the noise was given, or the budget as the next two say.
        target_tpr, at_fpr: the budget as what an attack may find of the members, and at which share of the others that
            it takes for members; None and 0.01 if it was not given so.
        epsilon_rdp: the Renyi bound as a cross-check; None where there is none.
        queries: the noise multiplier of each query of a step by its label, in units of its own sensitivity.
            `noise_multiplier` is that of all together.
        releases: what was released beside the steps, those of earlier trainings included.
        earlier: trainings before on the same people, each in words; epsilon is of all together.
        dataset_size: number of units; None where it is secret.
        drawn_from: number of examples that are drawn from, where units have several and each is drawn by itself; None
            where it is secret.
        expected_batch_size: what the sum of a step is divided by; where the number of units is public, the mean
            number of them, or of examples, in a step.
        reproducible: a seed was given, so that the noise is not secret and the run is not private.
        unit: whose contribution is replaced by nothing, or whose presence is secret.
        adjacency: how neighbouring datasets differ; the first records say "add or remove one" of zero-out.
        sampling: how each step's batch was drawn.
        caveats: what the numbers do not cover.
        versions: of the libraries that computed epsilon.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    clipping_norm: float
    sampling_probability: float
    steps: int
    accountant: AccountantName
    dataset_size: int | None
    expected_batch_size: float
    clipping: str = "flat"
    clipping_groups: dict[str, float] = field(default_factory=dict)
    noise: str = "gaussian"
    target_epsilon: float | None = None
    target_tpr: float | None = None
    at_fpr: float = AT_FPR
    epsilon_rdp: float | None = None
    queries: dict[str, float] = field(default_factory=dict)
    releases: tuple[Release, ...] = ()
    earlier: tuple[str, ...] = ()
    reproducible: bool = False
    unit: str = "one training example"
    adjacency: str = ZERO_OUT
    sampling: str = "Poisson"
    drawn_from: int | None = None
    caveats: tuple[str, ...] = STANDARD_CAVEATS
    versions: dict[str, str] = field(default_factory=library_versions)

    @property
    def private(self) -> bool:
        """Epsilon is finite and the randomness was secret."""
        return math.isfinite(self.epsilon) and not self.reproducible

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON, infinities as the string "inf". `private` is included, for readers.

        Flat clipping and the usual noise are not named, as in reports of before there was another kind.
        """
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values = {name: "inf" if value == math.inf else value for name, value in values.items()}
        values = {name: value for name, value in values.items() if name not in _PLAIN or value != _PLAIN[name]}
        values |= {"earlier": list(self.earlier)} if self.earlier else {}
        values |= {"queries": dict(self.queries), "releases": [release.to_dict() for release in self.releases]}
        return {**values, "caveats": list(self.caveats), "versions": dict(self.versions), "private": self.private}

    @classmethod
    def from_dict(cls, values: object) -> PrivacyReport:
        """The report that `to_dict` wrote.

        Raises:
            LedgerError: a missing or unknown field, a number that is none, or a `private` that does not follow from
                the rest.
        """
        report = _read(cls, values)
        if isinstance(report, str):
            raise damaged("not a privacy report", report)
        return report

    def to_json(self) -> str:
        """The report as strict JSON; `from_json` is the inverse."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyReport:
        """The inverse of `to_json`. Raises `LedgerError` for anything else."""
        values = values_or_error(text)
        return cls.from_dict(f"{values}: {text[:100]}" if isinstance(values, Exception) else values)

    def __str__(self) -> str:
        budget = "" if self.target_epsilon is None else f" of a budget of {self.target_epsilon:g}"
        if self.target_tpr is not None:
            budget = f" of a budget of {percent(self.target_tpr)} found at {percent(self.at_fpr)} false positives"
        lines = [f"Differential privacy: epsilon {upper(self.epsilon, 4)} at delta {upper(self.delta, 3)}{budget}"]
        if not self.private:
            reason = NO_NOISE if not math.isfinite(self.epsilon) else REPRODUCIBLE
            lines = [f"NOT PRIVATE. {reason}", lines[0] + (" (if the noise were secret)" if self.reproducible else "")]
        rows = {
            "unit": self.unit,
            "neighbours": self.adjacency,
            "sampling": f"{self.sampling}, probability {self.sampling_probability:.4g} a step ({self._of_how_many()})",
            "noise multiplier": noise_in_words(self.noise, self.noise_multiplier),
            "clipping norm": clipping_in_words(self.clipping, self.clipping_norm, self.clipping_groups),
            "steps": f"{self.steps}",
            "accountant": self.accountant.upper()
            + ("" if self.epsilon_rdp is None else f" (RDP cross-check: epsilon {upper(self.epsilon_rdp, 4)})"),
            **self._besides(),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        lines += [f"  {name:<17} {value}" for name, value in rows.items()]
        for title, texts in ((TOGETHER, self.earlier), ("Not covered:", self.caveats)):
            lines += [textwrap.fill(title, 100)] * bool(texts)
            lines += [textwrap.fill(c, 100, initial_indent="  - ", subsequent_indent="    ") for c in texts]
        return "\n".join(lines)

    def _of_how_many(self) -> str:
        size = f"{self.expected_batch_size:g}"
        if self.dataset_size is None:
            return f"sums divided by {size}"
        if self.drawn_from is not None:
            return f"on average {size} of {self.drawn_from} examples of {self.dataset_size} units"
        return f"on average {size} of {self.dataset_size}"

    def _besides(self) -> dict[str, str]:
        """What took of the budget beside the gradients, by its label, for reading."""
        rows = {}
        for release in self.releases:
            times = "once" if release.times == 1 else f"{release.times} times"
            rows[release.label] = f"released {times}: {in_words(release.event)}"
        for label, noise in self.queries.items():
            if label != GRADIENT:
                share = (self.noise_multiplier / noise) ** 2 if noise else 0.0
                rows[label] = (
                    f"released in each step, noise multiplier {noise:.4g}, gradient {self.queries[GRADIENT]:.4g}: "
                    f"{share:.1%} of a step's precision"
                )
        return rows


_PLAIN: dict[str, Any] = {
    "clipping": "flat", "noise": "gaussian", "target_tpr": None, "at_fpr": AT_FPR, "earlier": (), "drawn_from": None,
    "clipping_groups": {}
}  # fmt: skip
_OPTIONAL = ("target_epsilon", "target_tpr", "epsilon_rdp")
_VERSION = re.compile(r"[\w.+!-]{1,60}", re.ASCII)
_NUMBERS = (
    "epsilon", "delta", "noise_multiplier", "clipping_norm", "sampling_probability", "expected_batch_size", "at_fpr"
)  # fmt: skip


def _read(cls: type[PrivacyReport], values: object) -> PrivacyReport | str:
    if not isinstance(values, dict):
        return f"found {str(values)[:100]}"
    fields = _PLAIN | {key: value for key, value in values.items() if key != "private"}
    known = {item.name for item in dataclasses.fields(cls)}
    if set(fields) != known:
        return f"missing or unknown fields {sorted(map(str, set(fields) ^ known))}"
    fields = {key: math.inf if value == "inf" else value for key, value in fields.items()}
    optional = {n for n in _OPTIONAL if fields[n] is not None}
    for name in (*_NUMBERS, *optional):
        if not (is_number(fields[name]) and fields[name] >= 0):
            return f"{name} is {fields[name]!r}"
    if fields["target_tpr"] is not None and not is_target_tpr(fields["target_tpr"], fields["at_fpr"]):
        return f"target_tpr is {fields['target_tpr']!r}, at_fpr is {fields['at_fpr']!r}"
    is_secret = fields["adjacency"] == ADD_OR_REMOVE
    if (fields["dataset_size"] is None) != is_secret:
        return f"dataset_size is {fields['dataset_size']!r}, for neighbours {str(fields['adjacency'])[:100]!r}"
    for name in ("steps",) if is_secret else ("steps", "dataset_size"):
        if not is_count(fields[name]):
            return f"{name} is {fields[name]!r}"
    if fields["drawn_from"] is not None and (is_secret or not is_count(fields["drawn_from"], at_least=1)):
        return f"drawn_from is {fields['drawn_from']!r}"
    if not isinstance(fields["reproducible"], bool) or fields["accountant"] not in ("pld", "rdp"):
        return f"reproducible is {fields['reproducible']!r}, accountant is {fields['accountant']!r}"
    for name, kinds in (("clipping", ClippingName), ("noise", NoiseName)):
        if not is_one_of(fields[name], get_args(kinds)):
            return f"{name} is {fields[name]!r}"
    if not are_budgets(fields["clipping"], fields["clipping_groups"]):
        return f"clipping_groups is {str(fields['clipping_groups'])[:100]}, with clipping {fields['clipping']!r}"
    texts = [fields[name] for name in ("unit", "adjacency", "sampling")]
    texts += fields["caveats"] if isinstance(fields["caveats"], list) else [None]
    texts += fields["earlier"] if isinstance(fields["earlier"], (list, tuple)) else [None]
    if not all(isinstance(text, str) for text in texts):
        return f"unit, adjacency, sampling, a caveat or an earlier training is no text: {texts!r}"
    versions = fields["versions"].items() if isinstance(fields["versions"], dict) else [(None, None)]
    # They are printed, and stand on cards: nothing but versions may be said there.
    is_version = all(_VERSION.fullmatch(str(text)) for pair in versions for text in pair)
    if not is_version or not all(type(v) is str for _, v in versions):
        return f"versions is {fields['versions']!r}"
    queries, releases = fields["queries"], fields["releases"]
    if not isinstance(queries, dict) or not all(is_number(noise) and noise >= 0 for noise in queries.values()):
        return f"queries is {str(queries)[:100]}"
    if queries and GRADIENT not in queries:
        return f"queries has none of the gradient: {', '.join(map(str, queries))[:100]}"
    if not isinstance(releases, list):
        return f"releases is {str(releases)[:100]}"
    for label in queries:
        check_label(label)
    found = tuple(map(Release.from_dict, releases))
    said = {name: tuple(fields[name]) for name in ("caveats", "earlier")}
    report = cls(**{**fields, **said, "clipping_groups": {**fields["clipping_groups"]}, "releases": found})
    if values.get("private", report.private) != report.private:
        return f"it says private={values['private']!r}, which does not follow from its epsilon and its seed"
    return report
