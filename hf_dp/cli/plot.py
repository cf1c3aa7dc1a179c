"""The figure of `hf-dp plan --plot`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import dp_accounting as dp

from hf_dp import accounting
from hf_dp.errors import ConfigurationError
from hf_dp.planning.proposal import candidate

_BLUE, _ORANGE, _GREY = "#0072b2", "#d55e00", "#7f7f7f"
_POINTS = 13
_FORMATS = (".png", ".svg", ".pdf")


def draw_plan(answer: dict[str, Any], clipping_norm: float, path: Path) -> None:
    """Epsilon over steps at the plan's noise, and noise per coordinate over batch size at the plan's compute.

    Args:
        answer: of `hf-dp plan`.
        clipping_norm: C.
        path: whose ending says in which format.

    Raises:
        ConfigurationError: a plan without noise or with epsilon 0, an ending that Matplotlib does not know, or a place
            that cannot be written to.
    """
    spent = answer["pld"]["epsilon"]
    if not 0 < spent < math.inf:
        found, value = ("noise so large that epsilon is 0", 0) if spent == 0 else ("no noise", "infinite")
        raise ConfigurationError(
            f"--plot of a plan with {found}.", why=f"its epsilon is {value} at every step.", fix="give --epsilon."
        )
    figure = canvas((10, 4.2))
    left, right = figure.subplots(1, 2)
    _epsilon_over_steps(left, answer)
    _noise_over_batch(right, answer, clipping_norm)
    written(figure, path, "--plot")


def canvas(size: tuple[float, float]) -> Any:
    """An empty figure of so many inches."""
    # Not through pyplot, whose global state belongs to the caller.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def written(figure: Any, path: Path, option: str) -> None:
    """Saves a figure.

    Raises:
        ConfigurationError: an ending that Matplotlib does not know, or a place that cannot be written to.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{option} {str(path)!r}: {error}.",
            why="the figure cannot be written there.",
            fix="give a path like plan.png.",
        ) from error


def refuse_no_place(path: Path, option: str) -> None:
    """Refuses a path of another format, or in no directory, before anything is computed."""
    # Without an ending Matplotlib would choose one, and write beside a directory of that name.
    if not path.suffix or path.is_dir() or not path.parent.is_dir():
        found = "no ending" if path.parent.is_dir() and not path.is_dir() else "no such place for a file"
        raise ConfigurationError(
            f"{option} {str(path)!r}: {found}.",
            why="the figure cannot be written there.",
            fix="give a path like plan.png, in a directory that is there.",
        )
    if path.suffix.lower() not in _FORMATS:
        raise ConfigurationError(
            f"{option} {str(path)!r}: {path.suffix} is none of {', '.join(_FORMATS)}.",
            why="the figure is drawn to be read: with sharp lines, in a format that pages and papers take.",
            fix="give a path like plan.png.",
        )


def _epsilon_over_steps(axes: Any, answer: dict[str, Any]) -> None:
    event = accounting.step_event(answer["pld"]["noise_multiplier"], answer["sampling_probability"])
    last = answer["steps"]
    steps = sorted({max(1, round(last * i / (_POINTS - 1))) for i in range(_POINTS)})
    runs = [dp.SelfComposedDpEvent(event, count) for count in steps]
    axes.plot(steps, [accounting.epsilon(run, answer["delta"]) for run in runs], color=_BLUE, marker=".", label="PLD")
    rdp = [accounting.epsilon(run, answer["delta"], "rdp") for run in runs]
    axes.plot(steps, rdp, color=_GREY, linestyle="--", label="RDP")
    if answer["target_epsilon"] is not None:
        axes.axhline(answer["target_epsilon"], color=_ORANGE, linewidth=1, label="budget")
    multiplier = answer["pld"]["noise_multiplier"]
    axes.set_title(f"Spent, with noise multiplier {multiplier:.3g}", fontsize="medium")
    axes.set(xlabel="steps", ylabel="epsilon", ylim=(0, None))
    axes.legend()


def _noise_over_batch(axes: Any, answer: dict[str, Any], clipping_norm: float) -> None:
    n, examples = answer["dataset_size"], answer["examples_processed"]
    if n is None:  # that of which the probability would draw the batch
        n = max(1, round(answer["expected_batch_size"] / answer["sampling_probability"]))
    budget = answer["target_epsilon"] or answer["pld"]["epsilon"]
    largest = min(n, int(examples))
    drawn = {max(1, round(largest ** (i / (_POINTS - 1)))) for i in range(_POINTS // 4, _POINTS)}
    sizes = sorted({*drawn, max(1, round(answer["expected_batch_size"]))})
    found = [
        candidate(size, dataset_size=n, examples=examples, target_epsilon=budget, target_delta=answer["delta"])
        for size in sizes
    ]
    of_step = [plan.noise_of_a_step(clipping_norm) for plan in found]
    of_run = [plan.noise_of_the_run(clipping_norm) for plan in found]
    axes.loglog(sizes, of_step, color=_BLUE, marker=".", label="of one step's mean gradient")
    axes.loglog(sizes, of_run, color=_GREY, marker=".", label="averaged over all steps")
    axes.axvline(answer["expected_batch_size"], color=_ORANGE, linewidth=1, label="this plan")
    axes.set_title(f"Noise per coordinate, epsilon {budget:.3g}, {examples:,.0f} examples", fontsize="medium")
    axes.set(xlabel="expected batch size", ylabel=f"standard deviation (C = {clipping_norm:g})")
    axes.legend()
