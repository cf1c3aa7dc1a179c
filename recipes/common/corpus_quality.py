"""Is a sampled corpus of use, and does it hold near copies? What only the owner may see is kept apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

from common.hub_names import pretrained
from common.labelled_texts import Texts
from common.near_copies import compare, words
from common.plain_classifier import pooled
from common.results import measured

NEAR_COPIES, BASELINE = "for_owner_only_near_copies.json", "for_owner_only_real_baseline.json"
Features = Callable[[Sequence[str]], Tensor]
_STEPS, _LEARNING_RATE, _WEIGHT_DECAY = 200, 0.1, 1e-5


def statistics(texts: Sequence[str], reference: Sequence[str]) -> dict[str, float]:
    """Length and variety of `texts`, and how much of them is made of words that stand in `reference`."""
    split = [words(text) for text in texts]
    lengths = [len(text) for text in split]
    pairs = [pair for text in split for pair in pairwise(text)]
    known = {word for text in reference for word in words(text)}
    of_these = [word in known for text in split for word in text]
    return {
        "texts": len(texts),
        "words in a text, mean": float(np.mean(lengths)),
        "words in a text, standard deviation": float(np.std(lengths)),
        "different words": len({word for text in split for word in text}),
        "pairs of words that are different, share": len(set(pairs)) / max(1, len(pairs)),
        "texts that are different, share": len(set(split)) / len(split),
        "words that the test texts have, share": float(np.mean(of_these)) if of_these else 0.0,
    }


def bag_of_words(training: Sequence[str]) -> Features:
    """Counts of the words of `training`, each row of unit length, as sparse (texts, words)."""
    numbers = {word: i for i, word in enumerate(sorted({word for text in training for word in words(text)}))}

    def features(texts: Sequence[str]) -> Tensor:
        rows, columns, values = [], [], []
        for row, text in enumerate(texts):
            counts = Counter(numbers[word] for word in words(text) if word in numbers)
            norm = sum(count**2 for count in counts.values()) ** 0.5
            rows += [row] * len(counts)
            columns += counts
            values += [count / norm for count in counts.values()]
        places = torch.tensor([rows, columns], dtype=torch.long).view(2, -1)
        size = (len(texts), max(1, len(numbers)))
        return torch.sparse_coo_tensor(places, torch.tensor(values), size, check_invariants=True).coalesce()

    return features


def predicted(
    training: tuple[Sequence[str], Sequence[int]], test: Sequence[str], labels: int, features: Features
) -> list[int]:
    """What a linear classifier (softmax, full-batch Adam) that learnt `training` says of the test texts.

    Args:
        training: texts and the numbers of their labels.
        test: texts.
        labels: how many labels there are.
        features: (texts, features) of texts, dense or sparse.
    """
    inputs, targets = features(training[0]), torch.tensor(training[1])
    weight = torch.zeros(inputs.shape[1], labels, requires_grad=True)
    bias = torch.zeros(labels, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(inputs @ weight + bias, targets).backward()
        optimizer.step()
    with torch.no_grad():
        return (features(test) @ weight + bias).argmax(1).tolist()


def encoded_by(name: str, at_once: int = 128) -> Features:
    """Mean-pooled embeddings of an encoder."""
    tokenizer, encoder = pretrained(AutoTokenizer, name), pretrained(AutoModel, name).eval()

    @torch.no_grad()
    def features(texts: Sequence[str]) -> torch.Tensor:
        found = []
        for start in tqdm(range(0, len(texts), at_once), desc="features"):
            part = list(texts[start : start + at_once])
            batch = tokenizer(part, truncation=True, max_length=128, padding=True, return_tensors="pt")
            found.append(F.normalize(pooled(encoder, batch["input_ids"], batch["attention_mask"]), dim=1))
        return torch.cat(found)

    return features


def judge(
    corpus: Texts,
    train: Texts,
    test: Texts,
    names: Sequence[str],
    output: Path,
    *,
    features: Features | None = None,
    compared: int = 1000,
) -> dict[str, Any]:
    """Prints quality and near copies, and keeps what only the owner may see in files of that name in `output`.

    Args:
        corpus: the samples.
        train: the private texts.
        test: held-out texts.
        names: of the labels.
        output: which is not shared.
        features: to classify by; None for a bag of words.
        compared: how many samples, and as many held-out texts, to search for near copies.

    Returns:
        What depends on the private texts through the corpus alone. It depends on the test texts without noise.
    """
    scores = {}
    for name, source in {"synthetic": corpus, "real": train}.items():
        known = features or bag_of_words(source.texts)
        said = predicted((source.texts, source.labels), test.texts, len(names), known)
        scores[name] = measured(("accuracy", "macro_f1"), said, test.labels)
    ours, theirs = statistics(corpus.texts, test.texts), statistics(test.texts, test.texts)
    table = Table(title="The corpus beside the test texts", caption="Publish these if the test texts are public.")
    for column in ("", "samples", "test texts"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in scores["synthetic"].items():
        table.add_row(f"{name.replace('_', ' ')} on the test texts of a classifier that learnt", f"{value:.1%}", "")
    for name in ours:
        table.add_row(name, f"{ours[name]:.4g}", f"{theirs[name]:.4g}")
    Console().print(table)
    held_out = test.texts[:: max(1, len(test.texts) // compared)][:compared]
    close = compare(corpus.texts[:compared], held_out, train.texts)
    for_the_owner(scores["real"], close)
    (output / BASELINE).write_text(json.dumps({"trained on real texts": scores["real"]}), encoding="utf-8")
    (output / NEAR_COPIES).write_text(json.dumps(close, indent=2, ensure_ascii=False), encoding="utf-8")
    return {"corpus": {"trained_on_samples": scores["synthetic"], "samples": ours, "test_texts": theirs}}


def for_the_owner(baseline: dict[str, float], close: dict[str, Any]) -> None:
    """Prints what was computed from the private texts without noise."""
    table = Table(
        title="FOR THE OWNER ONLY: this reads the private texts",
        caption=f"Not covered by epsilon: publish neither this table nor {NEAR_COPIES} and {BASELINE}, and choose "
        "nothing by them. They prove no privacy; the guarantee is epsilon.",
    )
    for column in ("closest to a training text", "samples", "held-out texts"):
        table.add_column(column, justify="left" if column.startswith("closest") else "right")
    for name, value in close["samples"].items():
        table.add_row(name, f"{value:.4g}", f"{close['held out'][name]:.4g}")
    for name, value in close["samples closer than 99 % of held-out texts"].items():
        table.add_row(f"closer than 99 % of held-out texts, {name}", f"{value:.1%}", "")
    Console().print(table)
    learnt = ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in baseline.items())
    Console().print(f"FOR THE OWNER ONLY: a classifier that learnt the real training texts has {learnt}.")
