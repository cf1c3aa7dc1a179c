"""Next item from the items before it, privately and from scratch on long-tailed data, with and without Re-Attention.

The privacy unit is a user: one sequence of items, of which the last is the test and the one before it the target of
training. Item embeddings are tied. By default the data is generated, with a known long tail.

Each run has a folder of its own in the output directory, with its model, whether each test user was hit
(`hits.json`), and the report by group.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from arguments import parse
from comparison import VarianceControl, collate, folder_of, refuse_unknown, scored, trainer
from files import read_text
from groups import report_by_group
from rich.console import Console
from rich.table import Table
from sequences import PADDING, SequenceData, Sequences, load, popularity
from torch import Tensor
from transformers import GPT2Config, GPT2Model, GPT2PreTrainedModel, TrainingArguments, set_seed

from hf_dp import PrivacyConfig, ReAttentionConfig
from hf_dp.errors import ConfigurationError

ARMS = ("off", "on", "shuffled", "constant")
FREQUENCIES = ("released", "uniform", "true")
Measures = tuple[float, float]


@dataclass(kw_only=True)
class RecipeArguments(SequenceData):
    """The model, and what is compared."""

    width: int = 64
    arms: str = field(default="on", metadata={"help": "Of off, on, shuffled and constant, with commas between."})
    epsilons: str = field(
        default="3", metadata={"help": "Target epsilons, with commas between; inf for the same steps without noise."}
    )
    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train from each seed with the ordinary Trainer too, for the gap to it."}
    )
    seeds: str = field(default="0", metadata={"help": "Of the model's first weights, with commas between."})
    error: Literal["paper", "accumulated"] = "paper"
    fidelity: Literal["isotropic", "per_feature"] = "isotropic"
    token_frequencies: str = field(
        default="released",
        metadata={"help": "Of released, uniform and true (not private, to study their effect), with commas between."},
    )
    budget_share: float = 0.2
    presence_clipping_norm: float = 4.0
    scales: str = field(default="1", metadata={"help": "Of the noise's standard deviations, with commas between."})
    paired: bool = field(
        default=False,
        metadata={"help": "Batches and noise from the seed, the same for all arms: to compare them. Not private."},
    )
    figure: str | None = field(default=None, metadata={"help": "Where to draw NDCG@10 over scales."})

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("arms", self.arms.split(","), ARMS)
        refuse_unknown("token_frequencies", self.token_frequencies.split(","), FREQUENCIES)
        for value in (*self.epsilons.split(","), *self.scales.split(","), *self.seeds.split(",")):
            float(value)


@dataclass(frozen=True)
class Run:
    """One training; of the ordinary Trainer where there is no arm."""

    seed: int
    epsilon: str = ""
    arm: str | None = None
    token_frequencies: str = ""
    scale: float = 0.0

    @property
    def name(self) -> str:
        """The same for all seeds."""
        if self.arm is None:
            return "without privacy"
        settings = "" if self.arm == "off" else f", {self.token_frequencies}, scale {self.scale:g}"
        return f"epsilon {self.epsilon}, {self.arm}{settings}"

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def planned(recipe: RecipeArguments) -> list[Run]:
    """All runs; plain attention only once."""
    seeds, scales = list(map(int, recipe.seeds.split(","))), list(map(float, recipe.scales.split(",")))
    epsilons, arms, sources = (text.split(",") for text in (recipe.epsilons, recipe.arms, recipe.token_frequencies))
    private = [
        Run(seed, epsilon, arm) if arm == "off" else Run(seed, epsilon, arm, *settings)
        for epsilon, seed, arm, *settings in itertools.product(epsilons, seeds, arms, sources, scales)
    ]
    return [*dict.fromkeys(private), *(Run(seed) for seed in seeds if recipe.compare_without_privacy)]


class NextItem(GPT2PreTrainedModel):
    """GPT-2 whose last position scores all items with the embedding table."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Model(config)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores (B, items + 1)."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        last = attention_mask.sum(1) - 1
        return hidden[torch.arange(len(hidden)), last] @ self.transformer.wte.weight.T


def promise(
    privacy: PrivacyConfig, run: Run, recipe: RecipeArguments, true_shares: Path, n: int
) -> PrivacyConfig | None:
    """What one run promises; with an infinite epsilon there is no noise."""
    if run.arm is None:
        return None
    if math.isinf(float(run.epsilon)):
        return PrivacyConfig(noise_multiplier=0.0, clipping_norm=privacy.clipping_norm)
    attention = None
    if run.arm != "off":
        is_true = run.token_frequencies == "true"
        attention = ReAttentionConfig(
            error=recipe.error,
            fidelity=recipe.fidelity,
            token_frequencies="public" if is_true else run.token_frequencies,  # type: ignore[arg-type]
            public_frequencies=str(true_shares) if is_true else None,
            budget_share=recipe.budget_share,
            presence_clipping_norm=recipe.presence_clipping_norm,
            scale=run.scale,
        )
    return privacy.replace(
        target_epsilon=float(run.epsilon),
        target_delta=1 / (2 * n),
        re_attention=attention,
        seed=run.seed if recipe.paired else privacy.seed,
    )


def gains(model: Any, test: list[dict[str, Any]]) -> Tensor:
    """(users,): what each test user adds to NDCG@10 over all items; above 0 it is a hit."""
    found = []
    for scores, labels in scored(model, test, collate, 500):
        scores[:, PADDING] = -math.inf
        ranks = (scores > scores.gather(1, labels[:, None])).sum(1)
        found.append(torch.where(ranks < 10, 1 / (ranks + 2.0).log2(), 0.0).cpu())
    return torch.cat(found)


def measures(gains: Tensor) -> Measures:
    """NDCG@10 and HIT@10, in %."""
    return 100 * float(gains.double().mean()), 100 * float(gains.gt(0).double().mean())


def trained(
    run: Run,
    privacy: PrivacyConfig | None,
    recipe: RecipeArguments,
    arguments: TrainingArguments,
    data: Sequences,
    folder: Path,
) -> Measures:
    """Trains, saves what is private, and measures; the hits go into the folder."""
    set_seed(run.seed)
    config = GPT2Config(
        vocab_size=data.items + 1, n_positions=recipe.longest, n_embd=recipe.width, n_layer=1,
        n_head=recipe.width // 32, initializer_range=0.05, bos_token_id=None, eos_token_id=None,
        pad_token_id=PADDING, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    if privacy is None:
        arguments = replace(arguments, seed=run.seed)
    made = trainer(NextItem(config), arguments, folder, privacy, train_dataset=data.train, data_collator=collate)
    if run.arm is not None:
        made.add_callback(VarianceControl(run.arm))
    made.train()
    if privacy is not None:
        made.save_model()
    found = gains(made.model, data.test)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hits.json").write_text(json.dumps(found.gt(0).double().tolist()), encoding="utf-8")
    return measures(found)


# What names a run in results.json, or changes no training.
_NAMED = {
    "arms", "epsilons", "seeds", "token_frequencies", "scales", "compare_without_privacy", "group_column", "figure",
}  # fmt: skip
_OF_TRAINING = (
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip
_OF_PRIVACY = ("target_delta", "clipping_norm", "accountant")


def check_same_settings(
    output: Path, recipe: RecipeArguments, training: TrainingArguments, privacy: PrivacyConfig
) -> None:
    """That the results in the output directory are of trainings with these settings; the first to come notes its own.

    Raises:
        ConfigurationError: they are not.
    """
    of_data = {name: value for name, value in asdict(recipe).items() if name not in _NAMED}
    parts = {name: getattr(training, name) for name in _OF_TRAINING} | {n: getattr(privacy, n) for n in _OF_PRIVACY}
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


def hits(folder: Path) -> list[float]:
    """1.0 or 0.0 for each test user; empty where none are kept."""
    path = folder / "hits.json"
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def main() -> None:
    """Trains each arm at each epsilon from each seed, and prints a table. Runs in `results.json` are not repeated."""
    recipe, arguments, privacy = parse(RecipeArguments)
    data, output, runs = load(recipe), Path(str(arguments.output_dir)), planned(recipe)
    true_shares = output / "true_shares.json"
    # All before the first training: what is refused in one of them would come too late.
    promises = {run: promise(privacy, run, recipe, true_shares, len(data.train)) for run in runs}
    folders = {run: folder_of(output, run) for run in runs}
    kept = output / "results.json"
    known: dict[str, Measures] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if data.groups is not None:
        lost = [run for run in runs if str(run) in known and len(hits(folders[run])) != len(data.test)]
        if lost:
            raise ConfigurationError(
                f"--group_column, and a result of '{lost[0]}' in {kept} without the hits of these users.",
                why="a run that is in it is not repeated, and a mean says nothing of groups.",
                fix="choose another output_dir; trained once more, its epsilon adds up with the first.",
            )
    check_same_settings(output, recipe, arguments, privacy)
    counts = np.bincount([item for row in data.train for item in set(row["input_ids"])], minlength=data.items + 1)
    true_shares.write_text(json.dumps((counts / len(data.train)).tolist()), encoding="utf-8")
    for run in runs:
        if str(run) in known:
            continue
        found = known[str(run)] = trained(run, promises[run], recipe, arguments, data, folders[run])
        kept.write_text(json.dumps(known, indent=2), encoding="utf-8")
        print(f"{run}: NDCG@10 {found[0]:.2f}, HIT@10 {found[1]:.2f}", flush=True)
    results: dict[str, list[Measures]] = {}
    for run in runs:
        results.setdefault(run.name, []).append(known[str(run)])
    if data.groups is not None:
        report(runs, folders, data.groups)
    show(results, measures(popularity(data)))
    if recipe.figure is not None:
        draw(results, recipe.figure)


def report(runs: list[Run], folders: dict[Run, Path], groups: list[str]) -> None:
    """HIT@10 by group of each private run, beside the ordinary one from the same seed if there is one."""
    for run in (run for run in runs if run.arm is not None):
        beside = Run(run.seed)
        print(run)
        report_by_group(
            hits(folders[run]),
            groups,
            measure="HIT@10",
            larger_is_better=True,
            directory=folders[run],
            without_privacy=hits(folders[beside]) if beside in folders else None,
        )


def show(results: dict[str, list[Measures]], popular: Measures) -> None:
    """Mean and standard deviation over seeds."""
    table = Table("", title="next item")
    for name in ("NDCG@10, %", "HIT@10, %", "seeds"):
        table.add_column(name, justify="right")
    table.add_row("popularity alone", *(f"{value:.2f}" for value in popular), end_section=True)
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


if __name__ == "__main__":
    main()
