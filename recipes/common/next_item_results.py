"""What the recipe sequential_recommendation keeps of its settings, and how it shows its results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.data.files import read_text
from hf_dp.errors import ConfigurationError

Measures = tuple[float, float]
OF_COUNTS = "popularity alone"
# What names a run in results.json, or changes no training.
_NAMED = {
    "arms", "epsilons", "seeds", "token_frequencies", "scales", "compare_without_privacy", "group_column", "figure",
}  # fmt: skip
_OF_TRAINING = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip


def check_same_settings(output: Path, recipe: Any, training: TrainingArguments, privacy: PrivacyConfig) -> None:
    """That the results in the output directory are of trainings with these settings; the first to come notes its own.

    Raises:
        ConfigurationError: they are not.
    """
    of_data = {name: value for name, value in asdict(recipe).items() if name not in _NAMED}
    promised = {name: value for name, value in privacy.to_dict().items() if name != "target_epsilon"}
    parts = {name: getattr(training, name) for name in _OF_TRAINING} | {"privacy_seed": promised.pop("seed")} | promised
    now: dict[str, Any] = json.loads(json.dumps(of_data | parts, default=str))
    path = output / "settings.json"
    if not (output / "results.json").exists() or not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2), encoding="utf-8")
        return
    then = json.loads(read_text(path))
    differing = [f"{name} {then.get(name)}, now {value}" for name, value in now.items() if then.get(name) != value]
    if differing:
        raise ConfigurationError(
            f"{output / 'results.json'} has results with other settings: {'; '.join(differing)}.",
            why="a run that is in it is not repeated, and its numbers would pass for those of these settings.",
            fix="choose another output_dir, or the settings of the first run.",
        )


def show(results: dict[str, list[Measures]], popular: Measures | None) -> None:
    """Mean and standard deviation over seeds, and what popularity alone gives, which is counted in private data."""
    said = (
        None
        if popular is None
        else f"{OF_COUNTS} is computed from counts of the private data, without noise: show it to nobody."
    )
    table = Table("", title="next item", caption=said)
    for name in ("NDCG@10, %", "HIT@10, %", "seeds"):
        table.add_column(name, justify="right")
    if popular is not None:
        table.add_row(OF_COUNTS, *(f"{value:.2f}" for value in popular), end_section=True)
    for name, values in results.items():
        cells = [f"{mean:.2f}" for mean in np.mean(values, axis=0)]
        if len(values) > 1:
            cells = [f"{cell} ± {deviation:.2f}" for cell, deviation in zip(cells, np.std(values, axis=0), strict=True)]
        table.add_row(name, *cells, str(len(values)))
    Console().print(table)


def draw(results: dict[str, list[Measures]], path: str) -> None:
    """Mean NDCG@10 over scales, one line for each source of frequencies; plain attention as a level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, values in results.items():
        gains = np.array(values)[:, 0]
        label, _, scale = name.partition(", scale ")
        if scale:
            lines.setdefault(label, []).append((float(scale), gains.mean(), gains.std()))
        else:
            axes.axhline(gains.mean(), color="black", linewidth=0.8, label=label)
    for label, points in lines.items():
        axes.errorbar(*np.array(sorted(points)).T, marker="o", capsize=3, label=label)
    axes.set(xscale="log", xlabel="scale", ylabel="NDCG@10, %")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
