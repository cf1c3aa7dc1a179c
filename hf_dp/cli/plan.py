"""`hf-dp plan`: what a budget costs, before there is a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console

from hf_dp.cli.common import AsJson, count, print_json, refusals
from hf_dp.cli.costs import budgets_of_groups, compute, costs, exactly_one, positive, proposal
from hf_dp.cli.planned import answered, notes, plan_table, risk_table, start_table
from hf_dp.config.ranges import check_clipping_norm, is_one_of, shown
from hf_dp.config.target import AT_FPR, check_target_tpr
from hf_dp.config.units import UnitSamplingName
from hf_dp.errors import ConfigurationError
from hf_dp.planning.start import MIN_STEPS, start


def plan(
    n: Annotated[int | None, count("--n", help="Number of training examples.")] = None,
    units: Annotated[
        int | None, count(help="In place of --n, where a unit has several examples: the number of units.")
    ] = None,
    unit_sampling: Annotated[
        str, typer.Option(help="Of units: units (drawn whole) or examples (each by itself).")
    ] = "units",
    drawn_from: Annotated[
        int | None, count(help="With these, how many there are, at most --max-examples of one unit.")
    ] = None,
    max_examples: Annotated[
        int | None, typer.Option(help="With --unit-sampling examples: max_examples_per_unit.")
    ] = None,
    sampling_probability: Annotated[
        float | None, typer.Option(help="In place of --n, where that is secret; with --batch-size, --steps, --delta.")
    ] = None,
    batch_size: Annotated[
        float | None,
        typer.Option(
            help="Expected logical batch: per-device batch size x accumulation steps x number of devices. "
            "Leave it out to have one proposed."
        ),
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; or --steps or --examples.")] = None,
    steps: Annotated[int | None, count(help="Optimizer steps of the whole run.")] = None,
    examples: Annotated[float | None, typer.Option(help="Compute: examples to process, batch size x steps.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Compute as time, with --rows-per-second.")] = None,
    rows_per_second: Annotated[float | None, typer.Option(help="How many examples a second are trained on.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget to calibrate the noise to.")] = None,
    tpr: Annotated[
        float | None, typer.Option(help="In place of --epsilon: the share of members that any attack may find.")
    ] = None,
    fpr: Annotated[float, typer.Option(help="The share of others that it takes for members, with --tpr.")] = AT_FPR,
    noise: Annotated[
        float | None, typer.Option("--noise", "--noise-multiplier", help="A noise multiplier, to ask for its epsilon.")
    ] = None,
    max_batch_size: Annotated[
        int | None, count(help="The most examples of one step; of a larger draw so many, at random.")
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(help="Where an earlier private training on the same people was saved; of each.")
    ] = None,
    other_people: Annotated[
        bool, typer.Option("--other-people", help="With --after: nobody in any other data before is in this.")
    ] = False,
    delta: Annotated[float | None, typer.Option(help="Probability of failure, below 1/n. Default: n ** -1.1.")] = None,
    min_steps: Annotated[int, typer.Option(min=1, help="The fewest steps that a proposal may take.")] = MIN_STEPS,
    share: Annotated[list[float] | None, typer.Option(help="Of epsilon, for a release beside the steps.")] = None,
    clipping_norm: Annotated[float, typer.Option(help="For the noise per coordinate in the plot.")] = 1.0,
    group: Annotated[
        list[str] | None, typer.Option(help="Of clipping by groups, PATTERN=WEIGHT of one; of each: its clipping norm.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw epsilon over steps, and noise over batch size (PNG, SVG or PDF).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How much noise a budget needs, what a noise costs, or how best to spend compute, before any training.

    Example: 10 epochs over 10,003 examples in batches of 512, epsilon 8:

        hf-dp plan --n 10003 --batch-size 512 --epochs 10 --epsilon 8

    Give --epsilon to learn the noise multiplier, or --noise to learn epsilon;
    or --tpr, for noise with which no attack finds more than this share of the
    examples that were used, while it takes --fpr of the others for used.
    Leave out --batch-size to have batch, steps and noise proposed for the
    compute of --epochs or --examples:

        hf-dp plan --n 10003 --epochs 6 --epsilon 8 --plot plan.png

    Sampling is Poisson with probability batch-size / n, and of more than
    --max-batch-size so many are kept, if it is given; n is public, and in
    neighbouring datasets one example is replaced by nothing. Give
    --sampling-probability in place of --n, and batch size, steps and delta as
    numbers of their own, where n is secret and one example more or less is the
    claim (docs/privacy.md). Where all examples of one user are a unit, give
    the number of users as --units, and batches in units; or, with
    --unit-sampling examples, batches in examples, of which --drawn-from are
    there and at most --max-examples are one user's:

        hf-dp plan --units 500 --unit-sampling examples --drawn-from 1800
            --max-examples 4 --batch-size 200 --epochs 10 --epsilon 8

    With --after what earlier private trainings spent on the same people is
    part of the budget; --other-people is PrivacyConfig(other_people=True),
    which a training after one that said it says too. PLD is the tight
    accountant and the default in training; RDP is a looser cross-check. What
    memory a model takes, and how long a step, says `hf-dp size`.

    Options may also be given by their names in PrivacyConfig and
    TrainingArguments: --target_epsilon, --target_delta, --max_steps.

    Exit codes: 0, planned; 2, refused: there is no such plan.
    """
    with refusals(), Console(stderr=True).status("Computing"):
        if plot is not None:
            _refuse_no_place(plot, _not_of_plain_steps(share, max_batch_size, after, max_examples))
        of_data: dict[str, object] = {"--n": n, "--units": units, "--sampling-probability": sampling_probability}
        exactly_one(of_data)
        n, of = (n, "training examples") if units is None else (units, "units")
        _refuse_examples_of_none(units, unit_sampling, drawn_from, max_examples, sampling_probability)
        exactly_one({"--epsilon": epsilon, "--tpr": tpr, "--noise": noise})
        check_target_tpr(tpr, fpr)
        exactly_one({"--epochs": epochs, "--steps": steps, "--examples": examples, "--minutes": minutes})
        examples = compute(examples, minutes, rows_per_second)
        check_clipping_norm(positive("--clipping-norm", clipping_norm))
        budgets = budgets_of_groups(group or [], clipping_norm)
        proposed = batch_size is None
        if batch_size is None:
            if n is None:
                raise ConfigurationError(
                    "--sampling-probability without --batch-size.",
                    why="sums are divided by it, and must not follow from n.",
                    fix="give it; to have one proposed, give a public guess of n as --n.",
                )
            if more_than_steps := _not_of_plain_steps(share, max_batch_size, after, max_examples):
                raise ConfigurationError(
                    f"{more_than_steps[0]} without --batch-size.",
                    why="a batch is proposed for steps alone, of plain Poisson samples.",
                    fix="give it.",
                )
            batch_size, steps = proposal(n, epochs, steps, examples, epsilon, delta, min_steps, of)
        answer = costs(
            n, sampling_probability, batch_size, epochs, steps, examples, epsilon, tpr, fpr, noise, delta,
            share or [],
            max_batch_size, after, other_people, of, drawn_from, max_examples,
        )  # fmt: skip
        counts = "examples" if units is None or max_examples is not None else "units"
        answer |= {**_derived(answer, proposed, clipping_norm), "counts": counts, **budgets}
        if plot is not None:
            from hf_dp.cli.plot import draw_plan

            draw_plan(answer, clipping_norm, plot)
    found = answer.pop("risk")
    if as_json:
        print_json({**answer, "risk": found.to_dict()})
        return
    console = Console()
    console.print(plan_table(answer))
    one = "example" if units is None and max_examples is None else "unit"
    console.print(risk_table(found.rows(one)))
    console.print(found.in_words(one), highlight=False)
    for note in notes(answer):
        console.print(f"Note: {note}", highlight=False)
    if answer["proposed"]:
        console.print(start_table(answer["start"]))
    if plot is not None:
        console.print(f"Figure: {plot}", soft_wrap=True)


def _not_of_plain_steps(
    shares: list[float] | None, max_batch_size: int | None, after: list[str] | None, most: int | None
) -> list[str]:
    given = {
        "--share": shares or None,
        "--max-batch-size": max_batch_size,
        "--after": after or None,
        "--max-examples": most,
    }
    return [name for name, value in given.items() if value is not None]


def _refuse_no_place(plot: Path, more_than_steps: list[str]) -> None:
    if more_than_steps:
        raise ConfigurationError(
            f"--plot with {more_than_steps[0]}.",
            why="the figure is of steps alone, of plain Poisson samples.",
            fix="leave out one of the two.",
        )
    from hf_dp.cli.plot import refuse_no_place

    refuse_no_place(plot, "--plot")


def _refuse_examples_of_none(
    units: int | None, sampling: str, drawn_from: int | None, most: int | None, probability: float | None
) -> None:
    given = {"--units": units, "--drawn-from": drawn_from, "--max-examples": most}
    if sampling == "examples" and probability is not None:
        off = [] if most is not None else [" without --max-examples"]
        off += [] if drawn_from is None else [" with --drawn-from and --sampling-probability"]
    elif sampling == "examples":
        off = [f" without {name}" for name, value in given.items() if value is None]
    else:
        off = [f" with {name}" for name, value in given.items() if value is not None and name != "--units"]
    if off or not is_one_of(sampling, get_args(UnitSamplingName)):
        raise ConfigurationError(
            f"--unit-sampling {shown(sampling)}{''.join(off[:1])}.",
            why="units are drawn whole; or their examples are, each by itself, and what that costs follows from how "
            "many there are of all units together, and of one at most.",
            fix="give --units, --drawn-from and --max-examples with --unit-sampling examples, and only then; in place "
            "of the first two --sampling-probability, where n is secret.",
        )


def _derived(answer: dict[str, Any], proposed: bool, clipping_norm: float) -> dict[str, Any]:
    """What else is told of a plan."""
    batch_size = answer["expected_batch_size"]
    for name in answered(answer):
        answer[name]["noise_per_coordinate"] = answer[name]["noise_multiplier"] * clipping_norm / batch_size
    processed = batch_size * answer["steps"]
    told = {"proposed": proposed, "examples_processed": processed, "clipping_norm": clipping_norm}
    if proposed:
        told["start"] = start(batch_size, answer["steps"], answer["pld"]["noise_multiplier"] / batch_size)
    return told
