"""The privacy section of a model card, and its metadata: what the record says, in words."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hf_dp.accounting import (
    NO_NOISE,
    REPRODUCIBLE,
    TRAINING_STEP,
    Ledger,
    PrivacyReport,
    clipping_in_words,
    in_words,
    noise_in_words,
)
from hf_dp.accounting.accountants import is_composed
from hf_dp.accounting.caveats import TOGETHER
from hf_dp.accounting.risk import Risk, group_epsilons, groups_in_words, rates, risk
from hf_dp.audit.outcome import LOW_AND_TOLD, Audit
from hf_dp.config import AccountantName, PrivacyConfig
from hf_dp.config.asked import notes
from hf_dp.figures import at_most, one_in, percent, times, upper
from hf_dp.hub.charged import charged_with
from hf_dp.hub.record import INSTALL, RECORD_FILE, PrivacyRecord

BEGIN, END = "<!-- hf_dp privacy begins -->", "<!-- hf_dp privacy ends -->"
METADATA_KEY = "differential_privacy"
TAGS = ("differential-privacy", "dp-sgd")
_BASE_MODEL = "The data that the base model was trained on before this run is not covered."
_BASE_OF_ALL = "The data that a base model was trained on before all of these trainings is not covered."
_LARGEST_EXPONENT = 700  # of a float
_SECRET, _AUDITED = "secret", "**Audited.** "
_NO_RENYI = "not offered for mixtures of Gaussians", "not offered for truncated batches"
_SAVED = "saved"
# Each row of the table, for who reads none of these words every day.
_IN_A_WORD = {
    "epsilon, PLD accountant": "how far the model may depend on one of them: 0 is not at all",
    "epsilon, RDP accountant": "the same, added up in another way",
    "delta": "a chance that this does not hold",
    "budget of attacks": "what this training was to keep to",
    "privacy unit": "what is hidden as one",
    "neighbouring datasets": "what is compared with what",
    "number of units": "how many there are in the data",
    "sampling": "how each step chose what it learnt from",
    "steps": "how often the weights were changed",
    "noise multiplier": "how much random noise each step has, beside the most that one of them can add",
    "clipping norm": "the most that one of them can add to a step",
    "versions": "the programs that computed epsilon",
    _SAVED: "when, by the clock of the machine that saved it",
}
# What somebody writes right behind it would be read as a part of it.
_THE_END = "*Here ends what hf_dp wrote of privacy.*"
_EVALUATION = "Evaluation data, and metrics computed from it, are not covered."


def privacy_section(
    report: PrivacyReport, ledger: Ledger, config: PrivacyConfig, audit: Audit | None = None, saved: str | None = None
) -> str:
    """The section as Markdown, between its two markers."""
    found = ledger.epsilons(report.delta)
    lines = [BEGIN, "## Privacy", "", *_promise(report, found, config), *_together(report)]
    known = risk(ledger.event, rates(report.target_tpr, report.at_fpr)) if report.private else None
    lines += [] if known is None else _for_a_person(report, found, config, known)
    lines += ["", "| quantity | value | which is |", "| --- | --- | --- |"]
    rows = _rows(report, ledger, found, config) | ({} if saved is None else {_SAVED: f"{saved} (UTC)"})
    lines += [f"| {name} | {value} | {_IN_A_WORD[name.split(' (')[0]]} |" for name, value in rows.items()]
    lines += [] if known is None else _risk(known, "example" if config.unit is None else "unit")
    lines += ["", "Everything that was released of the training data:", "", "| release | times | mechanism |"]
    lines += ["| --- | --- | --- |"]
    lines += [f"| {label} | {count} | {in_words(event)} |" for event, count, label in ledger.entries]
    lines += ["", "**What is not covered.**", ""]
    base = _BASE_OF_ALL if report.earlier else _BASE_MODEL
    lines += [f"- {caveat}" for caveat in (*report.caveats, base, _EVALUATION, _people(report, ledger, config))]
    lines += [line for note in notes(config) for line in ("", note)]
    lines += [] if audit is None else ["", _audited(audit)]
    lines += [
        "",
        f"**How to verify.** Install hf_dp, version {report.versions.get('hf_dp', 'unknown')}, {INSTALL}. "
        "Then `hf-dp verify OWNER/NAME`, with the name of this repository, "
        f"computes epsilon again from the ledger in `{RECORD_FILE}`, and compares it with this card and the files with "
        "their digests. That the ledger is a true record of the training is the word of whoever published it.",
        "",
        _THE_END,
        END,
    ]
    return "\n".join(lines)


def _audited(audit: Audit) -> str:
    return f"{_AUDITED}{audit} {LOW_AND_TOLD}"


def without_audit(section: str, audit: Audit | None) -> str:
    """The section as it was before the audit, as `card_sha256` has it; nothing where it does not say what was found."""
    if audit is None:
        return section
    # Whatever version trained: other words would be in no digest, and anybody's.
    said = f"\n\n{_audited(audit)}"
    return section.replace(said, "") if section.count(said) == 1 else ""


def _people(report: PrivacyReport, ledger: Ledger, config: PrivacyConfig) -> str:
    found = group_epsilons(ledger.event, report.delta, report.epsilon) if report.private else {}
    if config.unit is None:
        return groups_in_words(found)
    return f"Whose each example is says its column {config.unit!r}. {groups_in_words(found, 'values of it')}"


def _promise(report: PrivacyReport, found: dict[AccountantName, float], config: PrivacyConfig) -> list[str]:
    if not report.private:
        reason = NO_NOISE if not math.isfinite(report.epsilon) else REPRODUCIBLE
        return [f"**This model is not private.** {reason} The numbers below describe the run; they protect nobody."]
    return [
        "Fine-tuned with differential privacy (DP-SGD) by hf_dp.",
        "",
        f'**What is protected:** {report.unit}, in the sense of "{report.adjacency}". Had {_any(config)} '
        f"{_absent(report)}, every conclusion that anyone can draw from these weights, or from what is made "
        f"of them alone, would have been at most {_likelier(found)} times (the exponential of epsilon) as likely or as "
        f"unlikely, but for a probability of {_delta(report, 3)}.",
    ]


def _likelier(found: dict[AccountantName, float]) -> str:
    pld = found["pld"]
    return times(math.exp(pld)) if pld < _LARGEST_EXPONENT else "exp(epsilon)"


def _delta(report: PrivacyReport, digits: int) -> str:
    return f"{upper(report.delta, digits)}, at most {one_in(report.delta)}"


def _for_a_person(
    report: PrivacyReport, found: dict[AccountantName, float], config: PrivacyConfig, known: Risk
) -> list[str]:
    gave = "as one training example" if config.unit is None else f"in all examples with one value of {config.unit!r}"
    return [
        "",
        f"**If something of yours was in the data.** What you gave {gave} could change each step of this training by "
        "so much and no more, and random noise was added to every step. So whatever somebody concludes about you from "
        f"these weights, or from what is made of them, today or later, is at most {_likelier(found)} times as likely "
        f"or as unlikely as it would be had that {_absent(report)} (1 would be no difference; the larger this number, "
        f"the weaker the promise), but for a chance of at most {one_in(report.delta)}. Somebody who asks whether it "
        f"was used, and holds yes and no for as likely, is right in at most {at_most(known.posterior, 2)} of all cases "
        "afterwards; guessing is right in 50%. What others wrote about you, and what holds of people in general, a "
        "model may learn with or without you. If you gave more than that, you are protected less, as the last list of "
        "this section says.",
    ]


def _together(report: PrivacyReport) -> list[str]:
    if not report.earlier:
        return []
    said = ["", f"**Trained before on the same people.** {TOGETHER}", ""]
    said += [f"- {one}" for one in report.earlier]
    return [*said, "", "Rows of one person that are counted below are as many in each of these data sets."]


def _any(config: PrivacyConfig) -> str:
    return "any single one" if config.unit is None else f"those with any single value of {config.unit!r}"


def _risk(found: Risk, one: str) -> list[str]:
    lines = ["", "**What that means for one of them.**", "", found.in_words(one), ""]
    lines += ["| an attack | at most |", "| --- | --- |"]
    return lines + [f"| {name} | {value} |" for name, value in found.rows(one).items()]


def _absent(report: PrivacyReport) -> str:
    return "added nothing to the training" if report.dataset_size is not None else "not been in the data"


def _in_which_steps(ledger: Ledger) -> str:
    steps = [(charged_with(event, 1.0), count) for event, count, label in ledger.entries if label == TRAINING_STEP]
    last = list(itertools.takewhile(lambda step: step[0] == steps[-1][0], reversed(steps)))
    if len(last) == len(steps):
        return "in each step"
    return (
        f"in each of the last {sum(count for _, count in last)} steps (before them as below, under what was released)"
    )


def _budget_of_attacks(report: PrivacyReport) -> dict[str, str]:
    if report.target_tpr is None:
        return {}
    most, wrongly = percent(report.target_tpr), percent(report.at_fpr)
    return {"budget of attacks": f"at most {most} found, while {wrongly} of the others are taken for used"}


def _number(report: PrivacyReport, config: PrivacyConfig) -> str:
    if report.dataset_size is not None:
        return f"{report.dataset_size}"
    if config.dataset_size is None:
        return _SECRET
    it = "it" if config.unit_sampling == "units" else "that of the examples that are drawn from"
    return f"{_SECRET}; {config.dataset_size} stands for {it}"


def _drawn(report: PrivacyReport, config: PrivacyConfig) -> str:
    if report.drawn_from is not None:
        return f"of {report.drawn_from} examples"
    return "unit" if config.unit_sampling == "units" else "example"


def _rows(
    report: PrivacyReport, ledger: Ledger, found: dict[AccountantName, float], config: PrivacyConfig
) -> dict[str, str]:
    budget = "" if report.target_epsilon is None else f" (budget {report.target_epsilon:g})"
    tight = "an upper bound" if "truncat" in report.sampling else "tight"
    tight = tight if is_composed(ledger.event) else "of so many mechanisms the RDP bound"
    size = f"{report.expected_batch_size:g}"
    rdp = upper(found["rdp"], 5) if "rdp" in found else _NO_RENYI["truncat" in report.sampling]
    return {
        f"epsilon, PLD accountant ({tight})": upper(found["pld"], 5) + budget,
        "epsilon, RDP accountant (looser)": rdp,
        "delta": _delta(report, 4),
        **_budget_of_attacks(report),
        "privacy unit": report.unit,
        "neighbouring datasets": report.adjacency,
        "number of units": _number(report, config),
        "sampling": f"{report.sampling}: each {_drawn(report, config)} with probability "
        f"{report.sampling_probability:.4g} "
        f"{_in_which_steps(ledger)}, "
        + (f"sums divided by {size}" if report.dataset_size is None else f"{size} on average"),
        "steps": f"{report.steps}",
        "noise multiplier": noise_in_words(report.noise, report.noise_multiplier),
        "clipping norm": clipping_in_words(report.clipping, report.clipping_norm, report.clipping_groups),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }


def metadata(record: PrivacyRecord, record_sha256: str) -> dict[str, Any]:
    """What stands under `differential_privacy` in the card's YAML."""
    report = record.report
    found = {f"epsilon_{name}": value for name, value in record.ledger.epsilons(report.delta).items()}
    return {
        **{name: "inf" if value == math.inf else value for name, value in found.items()},
        **({} if record.saved is None else {"date": record.saved}),
        "delta": report.delta,
        "private": report.private,
        "unit": report.unit,
        "adjacency": report.adjacency,
        "sampling": report.sampling,
        "dataset_size": _SECRET if report.dataset_size is None else report.dataset_size,
        "record": RECORD_FILE,
        "record_sha256": record_sha256,
    }
