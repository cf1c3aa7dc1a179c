"""What recipes/classify.yaml is held against: plain linear probes on the features that it learns from.

    python scripts/probe.py --encoder ENCODER_DIRECTORY --train_file TRAIN.csv --test_file TEST.csv \
      --labels_file LABELS.json

Each private probe is 100 steps of plain SGD (or --steps) on batches of 3,000 (at most all rows) from weights of zero,
each feature vector of length 1. Without privacy it is the same loss, and a penalty on the weights, by L-BFGS. Rates and
penalties are those that do best on the *test* file, which nobody may do with a probe of their own: it is to flatter
them.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, DataCollatorWithPadding, default_data_collator

from hf_dp import PrivacyConfig, PrivateRun

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import classify
from common.classification import build, by_length, read
from common.data import public_labels
from common.plain_classifier import seen_from

RATES, PENALTIES, BATCH = (1.0, 4.0, 16.0, 64.0), (1e-3, 1e-4, 1e-5), 3000


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy (B,)."""
    return F.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")


def prepared(recipe: classify.RecipeArguments) -> tuple[list[dict[str, Any]], Tensor, Tensor, int]:
    """Training rows of features and label, those of the test as tensors, and how many labels there are."""
    tokenizer, names = AutoTokenizer.from_pretrained(recipe.encoder), public_labels(recipe)
    model, found = build(recipe, tokenizer, names), []
    for split, path in (("train", recipe.train_file), ("test", recipe.test_file)):
        texts = by_length(read(path, split, recipe, tokenizer, names))
        rows = classify.features(model, texts, DataCollatorWithPadding(tokenizer), 128, None, recipe.features_dir)
        found.append((seen_from(torch.zeros(model.origin.shape), rows["features"][:]), rows["labels"][:]))
    (features, labels), (test, wanted) = found
    rows = [{"features": one, "labels": int(label)} for one, label in zip(features, labels, strict=True)]
    return rows, test, wanted, len(names)


def private(rows: list[dict[str, Any]], labels: int, epsilon: float, rate: float, steps: int) -> nn.Linear:
    """One probe."""
    model = nn.Linear(len(rows[0]["features"]), labels)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    batch = min(BATCH, len(rows))
    run = PrivateRun(
        model, rows, PrivacyConfig(target_epsilon=epsilon, target_delta=1e-5, clipping_norm=1.0), default_data_collator,
        expected_batch_size=batch, micro_batch_size=batch, steps=steps, loss=loss,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run.begin(optimizer)
    for one in run.batches():
        run.step(one)
        optimizer.step()
    return model


def ordinary(rows: list[dict[str, Any]], labels: int, penalty: float) -> nn.Linear:
    """Without privacy."""
    model = nn.Linear(len(rows[0]["features"]), labels)
    batch = default_data_collator(rows)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model, batch).mean() + penalty * model.weight.square().sum()
        value.backward()
        return value

    optimizer.step(closure)
    return model


def main() -> None:
    """Prints a line for each epsilon, and one for none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("encoder", "train_file", "test_file", "labels_file"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--features_dir", help="as the recipe has it")
    parser.add_argument("--label_column")
    parser.add_argument("--epsilons", default="8,3,1")
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    given = vars(parser.parse_args())
    epsilons, steps = [float(one) for one in given.pop("epsilons").split(",")], given.pop("steps")
    rows, test, wanted, labels = prepared(classify.RecipeArguments(**given))

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float((model(test).argmax(1) == wanted).float().mean())

    for epsilon in epsilons:
        best = max((accuracy(private(rows, labels, epsilon, rate, steps)), rate) for rate in RATES)
        print(f"epsilon {epsilon:g}: {best[0]:.1f} % at rate {best[1]:g}", flush=True)
    found = max((accuracy(ordinary(rows, labels, penalty)), penalty) for penalty in PENALTIES)
    error = 100 * math.sqrt(0.01 * found[0] * (1 - 0.01 * found[0]) / len(wanted))
    print(f"without privacy: {found[0]:.1f} % at penalty {found[1]:g}, standard error {error:.1f}")


if __name__ == "__main__":
    main()
