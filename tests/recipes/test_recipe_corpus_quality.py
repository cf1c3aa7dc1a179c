"""The quality check of the recipe synthetic_text: it tells a corpus that teaches from one that does not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch


@pytest.fixture
def quality(part: Any) -> Any:
    return part("common.corpus_quality")


def corpus(count: int, seed: int) -> tuple[list[str], list[int]]:
    """Texts with one telling word each among others."""
    draw = random.Random(seed)
    labels = [draw.randrange(4) for _ in range(count)]
    return [f"the sign{label} {draw.choice('abc')} of it" for label in labels], labels


def accuracy(said: list[int], labels: list[int]) -> float:
    return sum(a == b for a, b in zip(said, labels, strict=True)) / len(labels)


@pytest.mark.slow
def test_a_corpus_like_the_test_texts_teaches_and_one_with_shuffled_labels_does_not(quality: Any) -> None:
    texts, labels = corpus(400, 1)
    test, wanted = corpus(200, 2)
    known = quality.bag_of_words(texts)
    assert accuracy(quality.predicted((texts, labels), test, 4, known), wanted) == 1
    shuffled = random.Random(0).sample(labels, len(labels))
    assert accuracy(quality.predicted((texts, shuffled), test, 4, known), wanted) < 0.6
    dense = quality.predicted((texts, labels), test, 4, lambda some: known(some).to_dense())
    assert accuracy(dense, wanted) == 1


def test_a_bag_of_words_has_rows_of_unit_length_and_none_for_unknown_words(quality: Any) -> None:
    features = quality.bag_of_words(["b a", "a a"])(["a", "a a b", "x", ""]).to_dense()
    assert torch.allclose(features, torch.tensor([[1, 0], [2 / 5**0.5, 1 / 5**0.5], [0, 0], [0, 0]]))
    assert quality.bag_of_words([""])(["a", ""]).to_dense().tolist() == [[0], [0]]


def test_statistics(quality: Any) -> None:
    found = quality.statistics(["a b a b", "c d"], ["a b", "c"])
    assert found["words in a text, mean"] == 3
    assert found["words in a text, standard deviation"] == 1
    assert found["different words"] == 4
    assert found["pairs of words that are different, share"] == 3 / 4
    assert found["words that the test texts have, share"] == 5 / 6
    assert quality.statistics(["", ""], ["a"])["texts that are different, share"] == 0.5
