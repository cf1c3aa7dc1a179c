"""The command `hf-dp`. Imports no torch: a plan is answered before there is a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.errors import ConfigurationError, HfDpError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Differentially private fine-tuning of Hugging Face models."""


@app.command()
def plan(
    n: Annotated[int, typer.Option("--n", help="Number of training examples.")],
    batch_size: Annotated[
        float,
        typer.Option(help="Expected logical batch: per-device batch size x accumulation steps x number of devices."),
    ],
    epochs: Annotated[float | None, typer.Option(help="Passes over the data. Give this or --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the whole run.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget to calibrate the noise to.")] = None,
    noise: Annotated[float | None, typer.Option(help="A noise multiplier, to ask for its epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Probability of failure, below 1/n. Default: n ** -1.1.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's name or directory, to estimate memory and communication.")
    ] = None,
    world_size: Annotated[int, typer.Option(help="Ranks to estimate for, with --model.")] = 1,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="LoRA on every matrix of the blocks.")] = None,
    length: Annotated[int, typer.Option(help="Positions of each example, with --model.")] = 512,
    micro_batch: Annotated[int, typer.Option(help="Examples at a time on each rank, with --model.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print strict JSON and nothing else.")] = False,
) -> None:
    """How much noise a budget needs, or what a noise costs, before any training.

    Example: 10 epochs over 10,003 examples in batches of 512, epsilon 8:

        hf-dp plan --n 10003 --batch-size 512 --epochs 10 --epsilon 8

    Give --epsilon to learn the noise multiplier, or --noise to learn epsilon.
    Sampling is Poisson with probability batch-size / n; neighbouring datasets
    differ by one added or removed example. PLD is the tight accountant and the
    default in training; RDP is a looser cross-check. With --model, also how much
    memory each of --world-size ranks needs and what it sends (docs/scaling.md).
    """
    try:
        answer = _plan(n, batch_size, epochs, steps, epsilon, noise, delta)
        sizes = {} if model is None else _sizes(model, lora_rank, world_size, length, micro_batch, batch_size)
    except HfDpError as error:
        typer.echo(f"Refused: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_strict({**answer, **sizes}), indent=2, allow_nan=False))
    else:
        Console().print(_table(answer), *([_size_table(sizes["per_rank"], world_size)] if sizes else []))


@app.command()
def demo(
    output_dir: Annotated[
        Path,
        typer.Option(
            help="Where the private model, its privacy report and the figure go.", file_okay=False, writable=True
        ),
    ] = Path("hf-dp-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute; a weaker contrast.")] = False,
    data_seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of the generated messages and initial weights, not of the private noise."),
    ] = 1,
) -> None:
    """A model that leaks planted secrets, and one that does not: offline, on a CPU, in a few minutes.

    Pretrains a small GPT-2 on generated public messages, then fine-tunes it on private ones with secret codes among
    them, once ordinarily and once with differential privacy (epsilon 8). Exits with 1 if the contrast did not show.
    """
    # torch and transformers take seconds to import; the other commands should not wait for them.
    from hf_dp.demo.run import FULL, QUICK, run

    if not run(output_dir, QUICK if quick else FULL, data_seed, Console()):
        raise typer.Exit(1)


def _plan(
    n: int,
    batch_size: float,
    epochs: float | None,
    steps: int | None,
    target_epsilon: float | None,
    noise: float | None,
    delta: float | None,
) -> dict[str, Any]:
    # dp_accounting and scipy take most of a second to import; --help should not wait for them.
    import dp_accounting as dp

    from hf_dp import accounting

    _exactly_one("--epsilon", target_epsilon, "--noise", noise)
    _exactly_one("--epochs", epochs, "--steps", steps)
    delta = accounting.default_delta(n) if delta is None else accounting.check_delta(delta, n)
    if not 1 <= batch_size <= n:
        raise ConfigurationError(
            f"--batch-size {batch_size:g} for a dataset of {n} examples.",
            why="each example enters a batch with probability batch-size / n, which must be at most 1.",
            fix=f"give the expected number of examples in a logical batch: between 1 and {n}.",
        )
    steps = _steps(n, batch_size, epochs) if steps is None else steps
    accounting.check_steps(steps)
    q = batch_size / n
    plans: dict[str, Any] = {}
    for accountant in ("pld", "rdp"):
        multiplier = noise
        if target_epsilon is not None:
            multiplier = accounting.calibrate_noise_multiplier(
                target_epsilon=target_epsilon,
                target_delta=delta,
                sampling_probability=q,
                steps=steps,
                accountant=accountant,
            )
        assert multiplier is not None
        event = dp.SelfComposedDpEvent(accounting.step_event(multiplier, q), steps)
        cost = accounting.epsilon(event, delta, accountant)
        plans[accountant] = {"noise_multiplier": multiplier, "epsilon": cost}
    common = {"dataset_size": n, "expected_batch_size": batch_size, "sampling_probability": q, "steps": steps}
    return {**common, "delta": delta, "target_epsilon": target_epsilon, **plans}


def _exactly_one(first: str, first_value: object, second: str, second_value: object) -> None:
    if (first_value is None) == (second_value is None):
        found = "neither of" if first_value is None else "both"
        raise ConfigurationError(
            f"{found} {first} and {second}.",
            why="one of them determines the other.",
            fix=f"give exactly one, {first} or {second}; `hf-dp plan --help` has an example.",
        )


def _steps(n: int, batch_size: float, epochs: float | None) -> int:
    if epochs is None or not 0 < epochs < math.inf:
        raise ConfigurationError(
            f"--epochs {epochs!r}.",
            why="the cost of a run is the cost of its steps, and there would be none, or no end.",
            fix="give a positive number such as 10, or --steps.",
        )
    return math.ceil(epochs * math.ceil(n / batch_size))


def _table(answer: dict[str, Any]) -> Table:
    wanted = answer["target_epsilon"]
    title = "What this noise costs" if wanted is None else f"Noise for epsilon {wanted:g}"
    table = Table(title=title, caption="PLD is tight and the default in training; RDP is a looser cross-check.")
    table.add_column("")
    table.add_column("PLD", justify="right")
    table.add_column("RDP", justify="right")
    table.add_row("noise multiplier", *(f"{answer[name]['noise_multiplier']:.4f}" for name in ("pld", "rdp")))
    table.add_row("epsilon", *(f"{answer[name]['epsilon']:.4g}" for name in ("pld", "rdp")))
    table.add_section()
    for label, value in {
        "delta": f"{answer['delta']:.3g}",
        "steps": str(answer["steps"]),
        "sampling probability": f"{answer['sampling_probability']:.4g}",
    }.items():
        table.add_row(label, value, value)
    return table


def _sizes(
    model: str, lora_rank: int | None, world_size: int, length: int, micro_batch: int, batch_size: float
) -> dict[str, Any]:
    """Bytes on each rank for both strategies."""
    # torch and transformers take seconds to import.
    from hf_dp import scaling

    size = scaling.model_size(model, lora_rank)
    parts = max(1, math.ceil(batch_size / max(1, world_size) / max(1, micro_batch)))
    found = {}
    for strategy in ("DDP", "FSDP2"):
        one = scaling.estimate(size, strategy, world_size, length=length, micro_batch=micro_batch, micro_batches=parts)
        found[strategy] = {
            "memory": {**one.memory, "in all": one.total_memory},
            "sent in one step": {**one.sent, "in all": one.total_sent},
        }
    return {"parameters": size.total, "trained": size.trained, "per_rank": found}


def _size_table(sizes: dict[str, Any], world_size: int) -> Table:
    table = Table(
        title=f"Each of {world_size} ranks, GB",
        caption="Weights, gradients and factors; the activations of ordinary training come on top.",
    )
    table.add_column("")
    for strategy in sizes:
        table.add_column(strategy, justify="right")
    for part in ("memory", "sent in one step"):
        rows = dict.fromkeys(row for one in sizes.values() for row in one[part] if row != "in all")
        for row, label in {**dict.fromkeys(rows), "in all": f"{part}, in all"}.items():
            values = [one[part].get(row) for one in sizes.values()]
            table.add_row(label or row, *("-" if v is None else f"{v / 1e9:.2f}" for v in values))
        table.add_section()
    return table


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return "inf" if value == math.inf else value
