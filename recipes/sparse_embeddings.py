"""Private training of large embedding tables with sparse gradients: DP-FEST and DP-AdaFEST beside dense DP-SGD.

Arms: frozen (the tables are), dense (DP-SGD), adafest, adafest+, fest (rows chosen once), renewed (rows chosen in each
period of the task). The tasks are in common/sparse_tasks.py. Each arm has a folder of its own in the output directory,
with its model and its report by group.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments, set_seed

from common.arguments import OWN_OPTIMIZER, parse
from common.comparison import folder_of, percent, refuse_unknown, scored, trainer
from common.groups import report_by_group
from common.rates import check_batch
from common.results import save
from common.sparse_tasks import TASKS, Task, TaskArguments
from hf_dp import DPTrainer, PrivacyConfig, SparseEmbeddingConfig
from hf_dp.figures import upper

ARMS = ("frozen", "dense", "adafest", "adafest+", "fest", "renewed")
WITHOUT = "without privacy"


@dataclass(kw_only=True)
class RecipeArguments(TaskArguments):
    """What is compared, and how it is trained."""

    DECIDES_ITSELF: ClassVar = OWN_OPTIMIZER

    arms: str = field(default="adafest", metadata={"help": "With commas between; see above."})
    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train with the ordinary Trainer and dense gradients too, for the gap to it."}
    )
    thresholds: str = field(default="", metadata={"help": "Of AdaFEST, with commas between; empty for the default."})
    noise_ratios: str = field(default="2", metadata={"help": "sigma1 / sigma2 of AdaFEST, with commas between."})
    contribution_norm: float = 1.0
    kept_rows: int = field(default=100, metadata={"help": "Of FEST."})
    budget_share: float = field(default=0.2, metadata={"help": "Of epsilon, for FEST's choice."})
    table_learning_rate: float | None = field(default=None, metadata={"help": "Of sparse rows; else that of the rest."})
    figure: str | None = field(default=None, metadata={"help": "Where to draw accuracy over the reduction."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_examples is not None:
            self.kept_rows = min(self.max_examples, self.kept_rows)
        refuse_unknown("arms", self.arms.split(","), ARMS)
        for arm in planned(self):
            sparse(arm, self, None)


@dataclass(frozen=True)
class Arm:
    """One training through all periods; `WITHOUT` is the ordinary Trainer's."""

    kind: str
    noise_ratio: float | None = None
    threshold: float | None = None

    def __str__(self) -> str:
        if self.noise_ratio is None:
            return self.kind
        return f"{self.kind}, ratio {self.noise_ratio:g}, tau {self.threshold or 'default'}"


def planned(recipe: RecipeArguments) -> list[Arm]:
    """All arms, with each setting of AdaFEST."""
    thresholds = [float(value) for value in recipe.thresholds.split(",") if value] or [None]
    settings = list(itertools.product(map(float, recipe.noise_ratios.split(",")), thresholds))
    arms = [
        Arm(kind, *values)
        for kind in recipe.arms.split(",")
        for values in (settings if kind.startswith("adafest") else [()])
    ]
    return [*arms, Arm(WITHOUT)] if recipe.compare_without_privacy else arms


def sparse(arm: Arm, recipe: RecipeArguments, chosen: Path | None) -> SparseEmbeddingConfig | None:
    """The settings of one arm; `chosen` holds rows that an earlier period chose, which cost nothing more."""
    if arm.kind in ("dense", "frozen", WITHOUT):
        return None
    settings: dict[str, Any] = {"learning_rate": recipe.table_learning_rate}
    if arm.noise_ratio is not None:
        names = ("noise_ratio", "threshold")
        settings.update({name: getattr(arm, name) for name in names}, contribution_norm=recipe.contribution_norm)
    if arm.kind != "adafest":
        released = {"kept_rows": recipe.kept_rows, "budget_share": recipe.budget_share}
        settings.update({"row_choice": "public", "public_rows": str(chosen)} if chosen else released)
    return SparseEmbeddingConfig(method="fest" if arm.kind == "renewed" else arm.kind, **settings)  # type: ignore[arg-type]


def parameter_groups(
    model: nn.Module, tables: list[nn.Parameter], is_dense: bool, task: Task, recipe: RecipeArguments, rate: float
) -> list[dict[str, Any]]:
    """Parameters and their learning rates; sparse tables are left to their lazy optimizer."""
    held = {id(p) for p in tables}
    others = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    heads = [p for n, p in others if task.head_learning_rate is not None and n.startswith("classifier")]
    found = [
        {"params": [p for _, p in others if not any(p is head for head in heads)], "lr": rate},
        {"params": heads, "lr": task.head_learning_rate},
        {"params": [p for p in tables if is_dense and p.requires_grad], "lr": recipe.table_learning_rate or rate},
    ]
    return [group for group in found if group["params"]]


def run(
    arm: Arm, task: Task, recipe: RecipeArguments, arguments: TrainingArguments, privacy: PrivacyConfig
) -> tuple[dict[str, Any], list[float]]:
    """Trains through all periods.

    Returns:
        Accuracy after each, the mean reduction of the gradient, and epsilon; and for each test example 1.0 if it is
        right.
    """
    set_seed(arguments.seed)
    folder = folder_of(arguments.output_dir, arm)
    model, chosen, right, reductions, epsilon = task.model(), None, [], [], None
    for period, (train, test) in enumerate(task.periods):
        tables = [p for name, p in model.named_parameters() if name in task.tables]
        for parameter in tables:
            parameter.requires_grad_(arm.kind != "frozen")
        config = sparse(arm, recipe, chosen)
        groups = parameter_groups(model, tables, config is None, task, recipe, arguments.learning_rate)
        # The examples of a later period are others: what the earlier ones spent is not theirs.
        others = privacy.other_people or period > 0
        promise = None if arm.kind == WITHOUT else privacy.replace(sparse_embeddings=config, other_people=others)
        optimizers = torch.optim.Adam(groups), None
        made = trainer(
            model,
            arguments,
            folder,
            promise,
            train_dataset=train,
            data_collator=task.collate,
            optimizers=optimizers,
            processing_class=task.tokenizer,
        )
        made.train()
        batches = scored(model, test, task.collate, 256)
        right.append([float(hit) for logits, labels in batches for hit in logits.argmax(1) == labels])
        logs = [entry for entry in made.state.log_history if "sparse_embeddings/reduction_factor" in entry]
        reductions += [entry["sparse_embeddings/reduction_factor"] for entry in logs]
        if isinstance(made, DPTrainer):
            epsilon = max(epsilon or 0.0, made.privacy_report().epsilon)
            if task.plain is not None:
                made.model = made.model_wrapped = task.plain(model)
            save(made, task.usage, changed=task.plain is not None)
        if arm.kind == "fest" and chosen is None:
            kept = load_file(folder / "sparse_embeddings.safetensors")
            chosen = folder / "chosen_rows.json"
            rows = {name.removeprefix("rows/"): ids.tolist() for name, ids in kept.items() if name != "choice"}
            chosen.write_text(json.dumps(rows), encoding="utf-8")
    found = {
        "accuracy": [100 * sum(hits) / len(hits) for hits in right],
        "reduction": sum(reductions) / len(reductions) if reductions else 1.0,
        "epsilon": epsilon,
        "noise_ratio": arm.noise_ratio,
        "threshold": arm.threshold,
    }
    return found, [hit for hits in right for hit in hits]


def show(results: dict[str, dict[str, Any]]) -> None:
    """Accuracy in % after each period, by what factor the tables' gradient is smaller, and epsilon."""
    periods = len(next(iter(results.values()))["accuracy"])
    table = Table("", title="accuracy, %")
    for name in (*(["test"] if periods == 1 else [f"period {i + 1}" for i in range(periods)]), "reduction", "epsilon"):
        table.add_column(name, justify="right")
    for name, one in results.items():
        reduction = "" if name == "frozen" else f"{one['reduction']:,.0f}"
        epsilon = "" if one["epsilon"] is None else upper(one["epsilon"], 4)
        table.add_row(name, *(f"{score:.1f}" for score in one["accuracy"]), reduction, epsilon)
    Console().print(table)


def draw(results: dict[str, Any], path: str) -> None:
    """Accuracy over how much smaller the gradient of the tables is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    found = [one for name, one in results.items() if "adafest" in name]
    for ratio in sorted({one["noise_ratio"] for one in found}):
        points = sorted((one["reduction"], one["accuracy"][-1]) for one in found if one["noise_ratio"] == ratio)
        axes.semilogx(*zip(*points, strict=True), marker="o", label=f"AdaFEST, sigma1 / sigma2 = {ratio:g}")
    for name, one in results.items():
        if "adafest" not in name:
            axes.semilogx([one["reduction"]], [one["accuracy"][-1]], "s", label=name)
    axes.set_xlabel("gradient of the tables smaller by")
    axes.set_ylabel("test accuracy, %")
    axes.legend(fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Trains each arm, and prints a table of accuracy, reduction and epsilon, and accuracy by group if asked for."""
    recipe, arguments, privacy = parse(RecipeArguments)
    task, output = TASKS[recipe.task](recipe), Path(str(arguments.output_dir))
    output.mkdir(parents=True, exist_ok=True)
    for train, _ in task.periods:
        check_batch(arguments, privacy, len(train))
    results, right = {}, {}
    for arm in planned(recipe):
        found, right[arm] = run(arm, task, recipe, arguments, privacy)
        results[str(arm)] = found
        scores = " ".join(f"{score:.1f}" for score in found["accuracy"])
        spent = "no privacy" if found["epsilon"] is None else f"epsilon {upper(found['epsilon'], 4)}"
        print(f"{arm}: accuracy {scores} %, reduction {found['reduction']:.0f}, {spent}", flush=True)
        (output / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    without = right.pop(Arm(WITHOUT), None)
    for arm, hits in right.items() if task.groups is not None else ():
        print(arm)
        report_by_group(
            percent(hits),
            task.groups,
            measure="accuracy, %",
            larger_is_better=True,
            directory=folder_of(output, arm),
            without_privacy=None if without is None else percent(without),
        )
    show(results)
    if recipe.figure is not None:
        draw(results, recipe.figure)


if __name__ == "__main__":
    main()
