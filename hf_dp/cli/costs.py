"""What a budget costs, or what a noise does, from numbers alone; and a batch for a budget and a compute."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hf_dp.cli.planned import ACCOUNTANTS
from hf_dp.config.clipping import GROUPS_ARE, GroupClipping, as_groups
from hf_dp.config.ranges import check_given_probability, check_target_delta
from hf_dp.errors import ConfigurationError


def proposal(
    n: int,
    epochs: float | None,
    steps: int | None,
    examples: float | None,
    epsilon: float | None,
    delta: float | None,
    min_steps: int,
    of: str,
) -> tuple[float, int]:
    if epsilon is None or steps is not None:
        raise ConfigurationError(
            "no --batch-size, with " + ("--noise or --tpr." if epsilon is None else "--steps."),
            why="a batch is proposed for a privacy budget and a compute budget (batch size x steps).",
            fix="give --batch-size; or --epsilon, and --epochs or --examples, for a proposal.",
        )
    from hf_dp.planning.proposal import propose

    delta = _delta(n, delta, of)
    if examples is None:
        examples = n * positive("--epochs", epochs)
    chosen = propose(
        dataset_size=n,
        examples=positive("--examples", examples),
        target_epsilon=epsilon,
        target_delta=delta,
        min_steps=min_steps,
    )
    return chosen.batch_size, chosen.steps


def budgets_of_groups(groups: list[str], clipping_norm: float) -> dict[str, dict[str, float]]:
    """The norm that each group of parameters is clipped to, by its pattern; nothing without groups.

    Args:
        groups: PATTERN=WEIGHT each.

    Raises:
        ConfigurationError: something else.
    """
    pairs = []
    for text in groups:
        pattern, _, weight = text.rpartition("=")
        try:
            pairs.append((pattern, float(weight)))
        except ValueError:
            pairs.append((pattern, math.nan))
    if groups and as_groups(pairs) is None:
        raise ConfigurationError(
            f"--group {' --group '.join(groups)}.",
            why=f"each is PATTERN=WEIGHT, and no pattern is there twice: {GROUPS_ARE}.",
            fix="give such as --group '*attn*=2' --group '*=1'; '*' is every parameter that no other pattern matches.",
        )
    return {"clipping_groups": GroupClipping(norm=clipping_norm, groups=tuple(pairs)).budgets} if groups else {}


def costs(
    n: int | None,
    q: float | None,
    batch_size: float,
    epochs: float | None,
    steps: int | None,
    examples: float | None,
    target_epsilon: float | None,
    target_tpr: float | None,
    at_fpr: float,
    noise: float | None,
    delta: float | None,
    shares: list[float],
    max_batch_size: int | None,
    after: list[str] | None,
    other_people: bool,
    of: str,
    drawn_from: int | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Of n units, each with at most `most` of the `drawn_from` examples, which are drawn each by itself (where n is
    secret, so is the number of these); or of n that are drawn whole (None)."""
    # dp_accounting and scipy take most of a second to import; --help should not wait for them.
    import dp_accounting as dp

    from hf_dp import accounting
    from hf_dp.accounting.earlier import check_same_people, event_of
    from hf_dp.accounting.risk import rates, risk

    unit: accounting.UnitTerms
    is_given, earlier = delta is not None, _trainings(after, other_people)
    if n is None:
        delta, size, unit = _own_delta(q, batch_size, epochs, delta), math.nan, accounting.UncountedExampleUnit()
        if most is not None:
            unit = accounting.UncountedColumnExamplesUnit(column="unit", max_examples=most)
    else:
        delta, unit = _delta(n, delta, of), accounting.ExampleUnit(number=n)
        if drawn_from is not None and most is not None:
            unit = accounting.ColumnExamplesUnit(number=n, column="unit", max_examples=most, examples=drawn_from)
        size = float(unit.drawn)
    check_same_people(earlier, _as_trained(unit, earlier, drawn_whole=of == "units"))
    delta = accounting.delta_after(earlier, delta, is_given=is_given)
    if n is not None and not 1 <= batch_size <= size:
        raise ConfigurationError(
            f"--batch-size {batch_size:g} for {'n = ' if drawn_from is None else 'examples '}{size:.0f}.",
            why="each example (or unit) enters a batch with probability batch-size / n, which must be at most 1.",
            fix=f"give the expected number of them in a logical batch: between 1 and {size:.0f}.",
        )
    if steps is None:
        # Trainer counts epochs in whole batches.
        steps = (
            math.ceil(positive("--epochs", epochs) * math.ceil(size / batch_size))
            if examples is None
            else max(1, int(positive("--examples", examples) / batch_size))
        )
    accounting.check_steps(steps)
    if q is not None and max_batch_size is not None:
        raise ConfigurationError(
            "--max-batch-size with --sampling-probability.",
            why="what a truncated batch costs follows from n, which is secret then.",
            fix="leave out one of the two.",
        )
    asked_for = {"sampling_probability": q, "max_batch_size": max_batch_size}
    sampling = accounting.sampling_terms(unit.drawn, batch_size, asked_for)

    def step(noise: float) -> dp.DpEvent:
        return sampling.event(accounting.GaussianNoise(multiplier=noise).event(), unit)

    plans: dict[str, Any] = {}
    asked = [accounting.Share(f"release {i}", share, 1) for i, share in enumerate(shares, start=1)]
    wanted: Any = {"target_epsilon": target_epsilon, "target_tpr": target_tpr, "at_fpr": at_fpr}
    before = event_of(earlier)
    by_pld_alone = target_tpr is not None or bool(earlier) or not accounting.has_renyi(step(1.0))
    for accountant in ACCOUNTANTS[:1] if by_pld_alone else ACCOUNTANTS:
        try:
            paid, multiplier = accounting.calibrated(
                step, steps=steps, delta=delta, shares=asked, accountant=accountant, noise_multiplier=noise,
                earlier=earlier, **wanted,
            )  # fmt: skip
        except ConfigurationError:
            if not plans:
                raise
            continue  # The looser of the two shows no noise for so small an epsilon; training asks the other.
        run = dp.SelfComposedDpEvent(step(multiplier), steps)
        whole = dp.ComposedDpEvent([*(release.event for release in paid), run, *([] if before is None else [before])])
        cost = accounting.epsilon(whole, delta, accountant)
        plans[accountant] = {"noise_multiplier": multiplier, "epsilon": cost}
        if before is not None:
            plans[accountant]["spent_before"] = accounting.epsilon(before, delta, accountant)
        if accountant == "pld":
            plans["risk"] = risk(whole, rates(target_tpr, at_fpr))
    common: dict[str, Any] = {
        "dataset_size": n,
        **({} if drawn_from is None else {"drawn_from": drawn_from}),
        **({} if most is None else {"max_examples_per_unit": most}),
        "expected_batch_size": batch_size,
        "sampling_probability": sampling.probability,
    }
    common |= {"max_batch_size": max_batch_size, "steps": steps, "delta": delta}
    common |= {"after": [one.name for one in earlier]} if earlier else {}
    return {**common, **wanted, "shares": shares, **plans}


def _trainings(after: list[str] | None, other_people: bool) -> tuple[Any, ...]:
    """That the same people's data was used for before, checked and read (`LedgerError`, `HubError`); refused as a
    training would be (`ConfigurationError`)."""
    if not after:
        if other_people:
            raise ConfigurationError(
                "--other-people without --after.",
                why="it would change nothing: a training of other people has an epsilon of its own.",
                fix="leave it out, or give --after.",
            )
        return ()
    from hf_dp.hub import read_earlier
    from hf_dp.hub.earlier import check_other_people, trainings

    found = read_earlier(tuple(after))
    check_other_people(found, other_people)
    return trainings(tuple(after), found)


def _as_trained(unit: Any, earlier: tuple[Any, ...], *, drawn_whole: bool) -> Any:
    """What would be hidden: the column is that of the trainings before, since a plan does not ask for its name; nor,
    where n is secret, whether units are drawn whole."""
    from hf_dp.accounting.units import ColumnUnit, UncountedColumnUnit

    columns = [one.unit.column for one in earlier if hasattr(one.unit, "column")]
    column = (columns or ["unit"])[0]
    if hasattr(unit, "column"):
        return dataclasses.replace(unit, column=column)
    if unit.number is None:
        return next((one.unit for one in earlier if isinstance(one.unit, UncountedColumnUnit)), unit)
    return ColumnUnit(number=unit.number, column=column, max_examples=1) if drawn_whole else unit


def _delta(n: int, delta: float | None, of: str) -> float:
    """The one that is given, or the default; `of` is what n counts, for refusals (`ConfigurationError`)."""
    from hf_dp import accounting

    return accounting.default_delta(n, of) if delta is None else accounting.check_delta(delta, n, of)


def _own_delta(q: float | None, batch_size: float, epochs: float | None, delta: float | None) -> float:
    """Of a plan that must not follow from n (`ConfigurationError`)."""
    check_given_probability(q)
    if epochs is not None or delta is None:
        raise ConfigurationError(
            "--sampling-probability " + ("with --epochs." if epochs is not None else "without --delta."),
            why="n is secret then, and from n the steps of an epoch and the default delta would follow.",
            fix="give --steps and --delta, each a number of its own; to choose them from a public guess of n, leave "
            "out --sampling-probability and give --n.",
        )
    check_target_delta(delta)
    if delta >= 1 / 2:
        raise ConfigurationError(
            f"--delta {delta:g} with --sampling-probability.",
            why="delta is below 1/n in every training, and below 1/2 in that of a single one.",
            fix="give a number well below 1 over the most examples that there could be, such as 1e-8.",
        )
    if not 1 <= batch_size < math.inf:
        raise ConfigurationError(
            f"--batch-size {batch_size:g}.", why="sums are divided by it.", fix="give a finite number of at least 1."
        )
    return delta


def compute(examples: float | None, minutes: float | None, rows_per_second: float | None) -> float | None:
    """The examples that a run may process, where they are given as minutes at a speed (`ConfigurationError`)."""
    if minutes is None and rows_per_second is None:
        return examples
    if minutes is None or rows_per_second is None:
        raise ConfigurationError(
            "--minutes without --rows-per-second." if minutes is not None else "--rows-per-second without --minutes.",
            why="how many examples a run may process follows from both.",
            fix="give both, with the speed of a short training on public rows; or --examples in place of them.",
        )
    return 60 * positive("--minutes", minutes) * positive("--rows-per-second", rows_per_second)


def exactly_one(options: dict[str, object]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        *names, last = options
        either = f"{', '.join(names)} or {last}"
        raise ConfigurationError(
            f"{' and '.join(given)} together." if given else f"none of {', '.join(names)} and {last}.",
            why="each of them determines the others.",
            fix=f"give exactly one, {either}; `hf-dp plan --help` has an example.",
        )


def positive(option: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise ConfigurationError(
            f"{option} {value!r}.",
            why="a plan follows from it, and there would be none, or no end.",
            fix="give a positive number such as 10.",
        )
    return value
