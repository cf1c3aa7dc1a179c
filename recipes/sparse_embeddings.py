"""Private training of large embedding tables with sparse gradients: DP-FEST and DP-AdaFEST beside dense DP-SGD.

Three tasks. `banking77`: a pretrained encoder, all of it trained, word embeddings included. `table`: a table as large
as XLM-R's under an encoder of one layer, on generated long-tailed text. `stream`: categorical features whose frequent
values drift from period to period, generated; each period has its own examples, so the epsilon of one training holds
for each of them. Arms: frozen (the tables are), dense (DP-SGD), adafest, adafest+, fest (rows chosen once), renewed
(rows chosen in each period).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import classify
import torch
import torch.nn.functional as F
from arguments import parse
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, DataCollatorWithPadding, set_seed

from hf_dp import DPTrainer, PrivacyConfig, SparseEmbeddingConfig

Rows = Any
# As in recipes/classify_full.yaml.
_HEAD_SCALE = 8.0


@dataclass
class RecipeArguments:
    """What is trained, and what is compared."""

    task: str = field(default="stream", metadata={"help": "banking77, table or stream."})
    arms: str = field(default="adafest", metadata={"help": "With commas between; see above."})
    thresholds: str = field(default="", metadata={"help": "Of AdaFEST, with commas between; empty for the default."})
    noise_ratios: str = field(default="2", metadata={"help": "sigma1 / sigma2 of AdaFEST, with commas between."})
    contribution_norm: float = 1.0
    kept_rows: int = field(default=100, metadata={"help": "Of FEST."})
    budget_share: float = field(default=0.2, metadata={"help": "Of epsilon, for FEST's choice."})
    table_learning_rate: float | None = field(default=None, metadata={"help": "Of sparse rows; else that of the rest."})
    examples: int = field(default=20000, metadata={"help": "Generated, in each period."})
    periods: int = 4
    rows: int = field(default=1_000_000, metadata={"help": "Of the largest table that is generated for."})
    seed_of_data: int = 0
    figure: str | None = field(default=None, metadata={"help": "Where to draw accuracy over the reduction."})
    max_examples: int | None = field(
        default=None, metadata={"help": "Use only the first so many of each split; shrinks tables too."}
    )
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    train_file: str = "../shared/data/banking77/train.csv"
    test_file: str = "../shared/data/banking77/test.csv"
    labels_file: str = "../shared/data/banking77/categories.json"
    head_learning_rate: float = 1e-2


@dataclass
class Task:
    """One comparison.

    Attributes:
        model: makes a model, the same each time.
        periods: training and test rows of each.
        collate: rows to a batch.
        logits: of a model for a batch.
        tables: the embedding tables' names.
        has_label_head: its head is made of the labels' names, and has a learning rate of its own.
    """

    model: Callable[[], nn.Module]
    periods: list[tuple[Rows, Rows]]
    collate: Callable[[list[Any]], dict[str, Tensor]]
    logits: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    tables: tuple[str, ...]
    has_label_head: bool = False


# --- the tasks ------------------------------------------------------------------------------------------------------


def banking77(recipe: RecipeArguments) -> Task:
    """Questions of bank customers, 77 intents."""
    files = {"train_file": recipe.train_file, "test_file": recipe.test_file, "labels_file": recipe.labels_file}
    parts = classify.RecipeArguments(
        encoder=recipe.encoder, method="full", head_scale=_HEAD_SCALE, max_examples=recipe.max_examples, **files
    )
    tokenizer = AutoTokenizer.from_pretrained(recipe.encoder)
    names = json.loads(Path(recipe.labels_file).read_text(encoding="utf-8"))
    splits = {"train": recipe.train_file, "test": recipe.test_file}
    train, test = (classify.read(path, split, parts, tokenizer, names) for split, path in splits.items())

    def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["input_ids"], batch["attention_mask"]).logits
        return found

    return Task(
        lambda: classify.build(parts, tokenizer, names),
        [(train, test)],
        DataCollatorWithPadding(tokenizer),
        logits,
        ("encoder.embeddings.word_embeddings.weight",),
        has_label_head=True,
    )


def stacked(examples: list[Any]) -> dict[str, Tensor]:
    """A batch of tensors."""
    return {name: torch.as_tensor([example[name] for example in examples]) for name in examples[0]}


def zipf(draw: torch.Generator, rows: int, *shape: int) -> Tensor:
    """Ranks from 1 to rows - 1, the r-th with a probability in proportion to 1 / r."""
    return torch.exp(torch.rand(*shape, generator=draw) * math.log(rows)).long().clamp(1, rows - 1)


def table(recipe: RecipeArguments) -> Task:
    """Long-tailed text of 16 tokens; the label is a vote of its tokens."""
    draw, rows = torch.Generator().manual_seed(recipe.seed_of_data), min(recipe.rows, 250_000)
    votes = torch.randn(rows, 4, generator=draw)

    def text(n: int) -> list[dict[str, Any]]:
        ids = zipf(draw, rows, n, 16)
        labels = votes[ids].sum(1).argmax(1)
        return [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]

    width = 768 if recipe.max_examples is None else 64
    config = BertConfig(
        vocab_size=rows, hidden_size=width, num_hidden_layers=1, num_attention_heads=width // 64,
        intermediate_size=width, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Task(
        lambda: BertForSequenceClassification(config),
        [(text(recipe.examples), text(2000))],
        stacked,
        lambda model, batch: model(batch["input_ids"]).logits,
        ("bert.embeddings.word_embeddings.weight",),
    )


class Features(nn.Module):
    """Clicks from three categorical features, by the sum of their embeddings."""

    def __init__(self, sizes: tuple[int, ...], width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2))
        for embedding in self.tables:
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, features: Tensor) -> Tensor:
        """(B, 3) ids to (B, 2) logits."""
        summed = sum(embedding(features[:, i]) for i, embedding in enumerate(self.tables))
        logits: Tensor = self.head(summed)
        return logits


def stream(recipe: RecipeArguments) -> Task:
    """In each period half of the frequent values are new ones."""
    draw, sizes = torch.Generator().manual_seed(recipe.seed_of_data), (recipe.rows, recipe.rows // 10, 1000)
    effects = [2 * torch.randn(size, generator=draw) for size in sizes]
    places = [torch.randperm(size, generator=draw) for size in sizes]

    def rows_of(n: int) -> list[dict[str, Any]]:
        ids = [place[zipf(draw, len(place), n)] for place in places]
        score = sum(effect[chosen] for effect, chosen in zip(effects, ids, strict=True))
        labels = (score + torch.randn(n, generator=draw) > 0).long()
        features = torch.stack(ids, dim=1)
        return [{"features": f, "labels": b} for f, b in zip(features.tolist(), labels.tolist(), strict=True)]

    periods = []
    for _ in range(recipe.periods):
        periods.append((rows_of(recipe.examples), rows_of(4000)))
        for place in places:
            moved = torch.arange(1, min(2000, len(place)), 2)
            others = torch.randint(1, len(place), moved.shape, generator=draw)
            place[moved] = place[others]
    names = tuple(f"tables.{i}.weight" for i in range(len(sizes)))
    return Task(lambda: Features(sizes), periods, stacked, lambda model, batch: model(batch["features"]), names)


TASKS = {"banking77": banking77, "table": table, "stream": stream}


# --- one run --------------------------------------------------------------------------------------------------------


class Comparison(DPTrainer):
    """The loss is the cross-entropy of the task's logits."""

    task: Task

    def compute_per_example_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Cross-entropy (B,)."""
        return F.cross_entropy(self.task.logits(model, inputs), inputs["labels"], reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, test: Rows) -> float:
    """In %."""
    model.eval()
    right = 0
    for start in range(0, len(test), 256):
        batch = task.collate([test[i] for i in range(start, min(start + 256, len(test)))])
        right += int((task.logits(model, batch).argmax(1) == batch["labels"]).sum())
    return 100 * right / len(test)


def sparse(
    arm: str, recipe: RecipeArguments, ratio: float, threshold: float | None, chosen: Path | None
) -> SparseEmbeddingConfig | None:
    """The settings of one arm; `chosen` holds rows that an earlier period chose, which cost nothing more."""
    if arm in ("dense", "frozen"):
        return None
    settings: dict[str, Any] = {"learning_rate": recipe.table_learning_rate}
    if arm.startswith("adafest"):
        settings.update(noise_ratio=ratio, threshold=threshold, contribution_norm=recipe.contribution_norm)
    if arm != "adafest":
        released = {"kept_rows": recipe.kept_rows, "budget_share": recipe.budget_share}
        settings.update({"row_choice": "public", "public_rows": str(chosen)} if chosen else released)
    return SparseEmbeddingConfig(method="fest" if arm == "renewed" else arm, **settings)  # type: ignore[arg-type]


def groups(
    model: nn.Module, tables: list[nn.Parameter], is_dense: bool, task: Task, recipe: RecipeArguments, rate: float
) -> list[dict[str, Any]]:
    """Parameters and their learning rates; sparse tables are left to their lazy optimizer."""
    held = {id(p) for p in tables}
    others = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    heads = [p for n, p in others if task.has_label_head and n.startswith("classifier")]
    found = [
        {"params": [p for _, p in others if not any(p is head for head in heads)], "lr": rate},
        {"params": heads, "lr": recipe.head_learning_rate / _HEAD_SCALE},
        {"params": [p for p in tables if is_dense and p.requires_grad], "lr": recipe.table_learning_rate or rate},
    ]
    return [group for group in found if group["params"]]


def run(
    arm: str,
    task: Task,
    recipe: RecipeArguments,
    arguments: Any,
    privacy: PrivacyConfig,
    ratio: float,
    tau: float | None,
) -> dict[str, Any]:
    """Trains through all periods; accuracy after each, the mean reduction of the gradient, and epsilon."""
    set_seed(arguments.seed)
    model, chosen, scores, reductions, epsilon = task.model(), None, [], [], 0.0
    for train, test in task.periods:
        tables = [p for name, p in model.named_parameters() if name in task.tables]
        for parameter in tables:
            parameter.requires_grad_(arm != "frozen")
        config = sparse(arm, recipe, ratio, tau, chosen)
        optimizer = torch.optim.Adam(groups(model, tables, config is None, task, recipe, arguments.learning_rate))
        trainer = Comparison(
            model=model,
            args=replace(arguments, remove_unused_columns=False),
            train_dataset=train,
            data_collator=task.collate,
            optimizers=(optimizer, None),
            privacy=privacy.replace(sparse_embeddings=config),
        )
        trainer.task = task
        trainer.train()
        scores.append(accuracy(model, task, test))
        logs = [entry for entry in trainer.state.log_history if "sparse_embeddings/reduction_factor" in entry]
        reductions += [entry["sparse_embeddings/reduction_factor"] for entry in logs]
        epsilon = max(epsilon, trainer.privacy_report().epsilon)
        trainer.save_model()
        if arm == "fest" and chosen is None:
            folder = Path(str(arguments.output_dir))
            kept = load_file(folder / "sparse_embeddings.safetensors")
            chosen = folder / "chosen_rows.json"
            rows = {name.removeprefix("rows/"): ids.tolist() for name, ids in kept.items() if name != "choice"}
            chosen.write_text(json.dumps(rows), encoding="utf-8")
    return {
        "accuracy": scores,
        "reduction": sum(reductions) / len(reductions) if reductions else 1.0,
        "epsilon": epsilon,
        "noise_ratio": ratio,
        "threshold": tau,
    }


def draw(results: dict[str, Any], path: str) -> None:
    """Accuracy over how much smaller the gradient of the tables is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
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
    """Trains each arm, and prints accuracy, reduction and epsilon."""
    recipe, arguments, privacy = parse(RecipeArguments)
    if recipe.max_examples is not None:
        few = recipe.max_examples
        recipe = replace(
            recipe,
            examples=min(few, recipe.examples),
            rows=min(100 * few, recipe.rows),
            kept_rows=min(few, recipe.kept_rows),
        )
    task = TASKS[recipe.task](recipe)
    results: dict[str, Any] = {}
    thresholds = [float(value) for value in recipe.thresholds.split(",") if value] or [None]
    ratios = [float(value) for value in recipe.noise_ratios.split(",")]
    for arm in recipe.arms.split(","):
        for ratio, tau in itertools.product(ratios, thresholds) if arm.startswith("adafest") else [(math.nan, None)]:
            named = f"{arm}, ratio {ratio:g}, tau {tau or 'default'}" if arm.startswith("adafest") else arm
            found = results[named] = run(arm, task, recipe, arguments, privacy, ratio, tau)
            scores = " ".join(f"{score:.1f}" for score in found["accuracy"])
            print(
                f"{named}: accuracy {scores} %, reduction {found['reduction']:.0f}, epsilon {found['epsilon']:.3f}",
                flush=True,
            )
    path = Path(str(arguments.output_dir)) / "results.json"
    path.write_text(json.dumps(results, indent=2), encoding="utf-8")
    if recipe.figure is not None:
        draw(results, recipe.figure)


if __name__ == "__main__":
    main()
