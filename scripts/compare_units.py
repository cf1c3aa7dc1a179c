"""Users that are drawn whole beside users whose examples are drawn by themselves: accuracy at one epsilon and compute.

Rows of banking77 are given to made users of unequal size, each with some categories of its own; the head of
recipes/classify.py is trained on features that are computed once. Both ways draw with one probability, so that a step
computes about as many rows.

    python scripts/compare_units.py --encoder ENCODER_DIRECTORY --data DIRECTORY_OF_BANKING77 --users 1000 100
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorWithPadding, TrainingArguments, default_data_collator

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.randomness import Entropy
from hf_dp.training.planned import number_of, unit_of, units_of
from hf_dp.units.rows import UnitRows

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import classify
from common.classification import build, read
from common.data import public_labels

FAVOURITES, FAVOURED = 8, 20.0


def made_users(labels: np.ndarray, users: int) -> list[str]:
    """Of each row, whose it is: sizes are log-normal, and of its favourite categories a user has more. The same at each
    call."""
    draw = Entropy(0).generator("made users", users)
    size = draw.lognormal(0.0, 1.0, users)
    known = int(labels.max()) + 1
    likes = np.ones((users, known))
    for user in range(users):
        likes[user, draw.choice(known, min(FAVOURITES, known), replace=False)] = FAVOURED
    weights = (size[:, None] * likes).cumsum(axis=0)
    places = draw.random(len(labels))
    chosen = [
        int(np.searchsorted(weights[:, label], place * weights[-1, label]))
        for label, place in zip(labels, places, strict=True)
    ]
    return [f"u{user}" for user in chosen]


def accuracy(model: Any, test: Dataset) -> float:
    """Of the classifier on features, in percent."""
    with torch.no_grad():
        said = model(features=test["features"][:]).logits.argmax(-1)
    return 100 * float((said == test["labels"][:]).float().mean())


def trained(model: Any, train: Dataset, recipe: Any, privacy: PrivacyConfig, sampled: float, steps: int) -> Any:
    """Trains the head in place; gives the run."""
    units = units_of(train, privacy)
    unit = unit_of(train, privacy, units)
    batch_size = round(sampled * unit.drawn)
    with tempfile.TemporaryDirectory() as nowhere:
        sizes = TrainingArguments(
            nowhere, per_device_train_batch_size=batch_size, max_steps=steps, learning_rate=recipe.head_rate
        )
        optimizer = classify.make_optimizer(model, recipe.arguments, sizes, privacy, unit, number_of(train, units))
    run = PrivateRun(
        model, train, privacy, default_data_collator,
        expected_batch_size=batch_size, micro_batch_size=1000, steps=steps,
    )  # fmt: skip
    run.begin(optimizer)
    average = model.classifier.weight.detach().clone()
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        average.lerp_(model.classifier.weight.detach(), 1 - recipe.arguments.average)
    model.classifier.weight.data.copy_(average)
    return run


def main() -> None:
    """Prints a line for each way and bound on a user's examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--users", type=int, nargs="+", default=[1000])
    parser.add_argument("--most", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sampled", type=float, default=0.5, help="Probability of each unit, or example, in a step.")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="Of the rows of each split, chosen at random.")
    given = parser.parse_args()
    recipe = argparse.Namespace(head_rate=0.5)
    recipe.arguments = classify.RecipeArguments(
        encoder=given.encoder, train_file=str(given.data / "train.csv"), test_file=str(given.data / "test.csv"),
        labels_file=str(given.data / "categories.json"), center=True, temperature=0.1, average=0.9,
    )  # fmt: skip
    names = public_labels(recipe.arguments)
    tokenizer = AutoTokenizer.from_pretrained(given.encoder)
    model = build(recipe.arguments, tokenizer, names)
    collate = DataCollatorWithPadding(tokenizer)
    found = []
    for path in (given.data / "train.csv", given.data / "test.csv"):
        texts = read(str(path), "", recipe.arguments, tokenizer, names)
        some = Entropy(0).generator("rows to use", 0).permutation(len(texts))[: round(given.share * len(texts))]
        found.append(classify.features(model, texts.select(sorted(map(int, some))), collate, 128, None))
    print(f"before training: {accuracy(model, found[1]):.2f} %")
    for users in given.users:
        compare(model, *found, recipe, users, given)


def compare(model: Any, train: Dataset, test: Dataset, recipe: Any, users: int, given: Any) -> None:
    """Both ways, for so many users."""
    owners = made_users(np.array(train.with_format(None)["labels"]), users)
    train = train.add_column("user", owners)
    counts = sorted(np.unique(owners, return_counts=True)[1])
    middle = f"{np.median(counts):g} in the middle"
    print(f"{len(counts)} users with {counts[0]} to {counts[-1]} of {len(train)} rows, {middle}")
    delta = len(counts) ** -1.1
    for most, way in ((most, way) for most in given.most for way in ("units", "examples")):
        privacy = PrivacyConfig(
            target_epsilon=given.epsilon, target_delta=delta, unit="user", max_examples_per_unit=most, unit_sampling=way
        )
        reached, start = [], time.process_time()
        for _ in range(given.runs):
            own = copy.deepcopy(model)
            run = trained(own, train, recipe, privacy, given.sampled, given.steps)
            reached.append(accuracy(own, test))
        seconds = (time.process_time() - start) / given.runs
        units = UnitRows(owners, "user", most)
        rows = given.sampled * sum(units.count(unit) for unit in range(len(units)))
        print(
            f"{way:>8}, at most {most:>3}: {statistics.mean(reached):.2f} % ({min(reached):.2f} to {max(reached):.2f} "
            f"in {given.runs} runs), epsilon {run.report().epsilon:.3f} at delta {delta:.3g}, noise multiplier "
            f"{run.report().noise_multiplier:.3f}, {rows:.0f} rows a step, {seconds:.0f} CPU seconds",
            flush=True,
        )


if __name__ == "__main__":
    main()
