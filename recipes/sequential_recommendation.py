"""Next item from the items before it, privately and from scratch on long-tailed data, with and without Re-Attention.

The privacy unit is a user: one sequence of items, of which the last is the test and the one before it the target of
training. Item embeddings are tied. By default the data is generated, with a known long tail.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from arguments import parse
from torch import Tensor
from transformers import GPT2Config, GPT2Model, GPT2PreTrainedModel, TrainerCallback, set_seed

from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig, re_attention

PADDING = 0
ARMS = ("off", "on", "shuffled", "constant")


@dataclass
class RecipeArguments:
    """The data, the model, and what is compared."""

    interactions_file: str | None = field(
        default=None, metadata={"help": "Lines 'user item', in time order; generated data if it is left out."}
    )
    users: int = 15000
    items: int = 6000
    longest: int = 20
    width: int = 64
    arms: str = field(default="on", metadata={"help": "Of off, on, shuffled and constant, with commas between."})
    epsilons: str = field(default="3", metadata={"help": "Target epsilons, with commas between; inf for no privacy."})
    seeds: str = field(default="0", metadata={"help": "Of the model's first weights, with commas between."})
    error: str = "paper"
    fidelity: str = "isotropic"
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
    test_users: int = 6000
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many users."})
    figure: str | None = field(default=None, metadata={"help": "Where to draw NDCG@10 over scales."})


def generated(users: int, items: int, genres: int = 40) -> list[list[int]]:
    """Sequences of 8 to 21 items: 60 % of each, and the last two, are from the user's genre."""
    draw = np.random.default_rng(0)
    popularity = 1 / np.arange(1, items + 1) ** 1.1
    genre_of = draw.integers(genres, size=items)
    weights = 1 / np.arange(1, genres + 1) ** 0.5
    members = [np.flatnonzero(genre_of == g) for g in range(genres)]

    def of(chosen: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        shares = popularity[chosen]
        return draw.choice(chosen, count, p=shares / shares.sum())

    sequences = []
    for genre in draw.choice(genres, users, p=weights / weights.sum()):
        length = int(draw.integers(8, 22))
        own = draw.random(length) < 0.6
        own[-2:] = True
        sequence = np.where(own, of(members[genre], length), of(np.arange(items), length))
        sequences.append([int(item) + 1 for item in sequence])
    return sequences


def read(path: str) -> list[list[int]]:
    """The items of each user, numbered from 1 in order of appearance, users with fewer than 3 left out."""
    numbers: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        user, item = line.split()[:2]
        users.setdefault(user, []).append(numbers.setdefault(item, len(numbers) + 1))
    return [sequence for sequence in users.values() if len(sequence) >= 3]


def rows(sequences: list[list[int]], longest: int, target: int) -> list[dict[str, Any]]:
    """Items before the `target` last one, padded on the right, and that one as the label."""
    made = []
    for sequence in sequences:
        items = sequence[:-target][-longest:]
        padded = items + [PADDING] * (longest - len(items))
        mask = [1] * len(items) + [0] * (longest - len(items))
        made.append({"input_ids": padded, "attention_mask": mask, "labels": sequence[-target]})
    return made


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    arm: str
    token_frequencies: str
    scale: float

    def __str__(self) -> str:
        return self.arm if self.arm == "off" else f"{self.arm}, {self.token_frequencies}, scale {self.scale:g}"


def variants(recipe: RecipeArguments) -> list[Variant]:
    """What is compared; plain attention only once."""
    given = itertools.product(
        recipe.arms.split(","), recipe.token_frequencies.split(","), map(float, recipe.scales.split(","))
    )
    return list(dict.fromkeys(Variant("off", "", 0.0) if arm == "off" else Variant(arm, *rest) for arm, *rest in given))


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


class Recommender(DPTrainer):
    """The loss is that of the next item."""

    def compute_per_example_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Cross-entropy (B,)."""
        scores = model(inputs["input_ids"], inputs["attention_mask"])
        return F.cross_entropy(scores, inputs["labels"], reduction="none")


class Control(TrainerCallback):
    """Gives rows of the item table the noise of others, or that of their root mean square."""

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After Re-Attention was put on the model."""
        installed = re_attention.installed(model)
        if installed is None:
            return
        table = installed.errors["transformer.wte.weight"]
        if self.arm == "shuffled":
            table.copy_(table[torch.randperm(len(table))])
        elif self.arm == "constant":
            table.fill_(float(table.square().mean().sqrt()))


def quality(model: Any, test: list[dict[str, Any]], batch_size: int = 500) -> tuple[float, float]:
    """NDCG@10 and HIT@10, in %, over all items."""
    gains, hits = 0.0, 0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(test), batch_size):
            part = collate(test[start : start + batch_size])
            scores = model(part["input_ids"], part["attention_mask"])
            scores[:, PADDING] = -math.inf
            ranks = (scores > scores.gather(1, part["labels"][:, None])).sum(1)
            found = ranks < 10
            hits += int(found.sum())
            gains += float((1 / (ranks[found] + 2.0).log2()).sum())
    return 100 * gains / len(test), 100 * hits / len(test)


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of tensors."""
    return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}


def popularity(train: list[dict[str, Any]], test: list[dict[str, Any]], items: int) -> tuple[float, float]:
    """NDCG@10 and HIT@10 of the most frequent targets, for everyone (not private: a yardstick)."""
    counts = np.bincount([row["labels"] for row in train], minlength=items + 1)
    place = {int(item): rank for rank, item in enumerate(np.argsort(-counts)[:10])}
    ranks = [place[row["labels"]] for row in test if row["labels"] in place]
    return 100 * sum(1 / math.log2(rank + 2) for rank in ranks) / len(test), 100 * len(ranks) / len(test)


def shown(found: tuple[float, float]) -> str:
    """Both measures."""
    return f"NDCG@10 {found[0]:.2f}, HIT@10 {found[1]:.2f}"


def main() -> None:
    """Trains each arm at each epsilon from each seed, and prints a table. Runs in `results.json` are not repeated."""
    recipe, arguments, privacy = parse(RecipeArguments)
    made = recipe.interactions_file is None
    users = min(recipe.users, recipe.max_examples or recipe.users)
    sequences = generated(users, recipe.items) if made else read(recipe.interactions_file)
    items = recipe.items if made else max(max(sequence) for sequence in sequences)
    sequences = sequences[: recipe.max_examples]
    train, test = (rows(sequences, recipe.longest, target) for target in (2, 1))
    test = test[: recipe.test_users]
    print("popularity:", shown(popularity(train, test, items)))
    true_shares = Path(str(arguments.output_dir)) / "true_shares.json"
    true_shares.parent.mkdir(parents=True, exist_ok=True)
    counts = np.bincount([item for row in train for item in set(row["input_ids"])], minlength=items + 1)
    true_shares.write_text(json.dumps((counts / len(train)).tolist()), encoding="utf-8")
    kept = Path(str(arguments.output_dir)) / "results.json"
    known: dict[str, tuple[float, float]] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    results: dict[str, list[tuple[float, float]]] = {}
    runs = itertools.product(recipe.epsilons.split(","), recipe.seeds.split(","), variants(recipe))
    for epsilon, seed, variant in runs:
        name = f"epsilon {epsilon}, {variant}"
        if f"{name}, seed {seed}" in known:
            results.setdefault(name, []).append(known[f"{name}, seed {seed}"])
            continue
        set_seed(int(seed))
        config = GPT2Config(
            vocab_size=items + 1, n_positions=recipe.longest, n_embd=recipe.width, n_layer=1,
            n_head=recipe.width // 32, initializer_range=0.05, bos_token_id=None, eos_token_id=None,
            pad_token_id=PADDING, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        made = privacy.replace(seed=int(seed)) if recipe.paired else privacy
        trainer = Recommender(
            model=NextItem(config),
            args=replace(arguments, remove_unused_columns=False),
            train_dataset=train,  # type: ignore[arg-type]
            data_collator=collate,
            privacy=promise(made, float(epsilon), variant, recipe, true_shares, len(train)),
        )
        trainer.add_callback(Control(variant.arm))
        trainer.train()
        found = known[f"{name}, seed {seed}"] = quality(trainer.model, test)
        kept.write_text(json.dumps(known, indent=2), encoding="utf-8")
        results.setdefault(name, []).append(found)
        print(f"epsilon {epsilon}, seed {seed}, Re-Attention {variant}: {shown(found)}", flush=True)
        trainer.save_model()
    for name, values in results.items():
        gains, hits = (np.array(column) for column in zip(*values, strict=True))
        print(f"{name}: NDCG@10 {gains.mean():.2f} +- {gains.std():.2f}, HIT@10 {hits.mean():.2f} +- {hits.std():.2f}")
    if recipe.figure is not None:
        draw(results, recipe.figure)


def promise(
    privacy: PrivacyConfig, epsilon: float, variant: Variant, recipe: RecipeArguments, true_shares: Path, n: int
) -> PrivacyConfig:
    """What one run promises; without privacy there is no noise."""
    if math.isinf(epsilon):
        return PrivacyConfig(noise_multiplier=0.0, clipping_norm=privacy.clipping_norm)
    attention = None
    if variant.arm != "off":
        is_true = variant.token_frequencies == "true"
        attention = ReAttentionConfig(
            error=recipe.error,  # type: ignore[arg-type]
            fidelity=recipe.fidelity,  # type: ignore[arg-type]
            token_frequencies="public" if is_true else variant.token_frequencies,  # type: ignore[arg-type]
            public_frequencies=str(true_shares) if is_true else None,
            budget_share=recipe.budget_share,
            presence_clipping_norm=recipe.presence_clipping_norm,
            scale=variant.scale,
        )
    return privacy.replace(target_epsilon=epsilon, target_delta=1 / (2 * n), re_attention=attention)


def draw(results: dict[str, list[tuple[float, float]]], path: str) -> None:
    """Mean NDCG@10 over scales, one line for each source of frequencies; plain attention as a level."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
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
