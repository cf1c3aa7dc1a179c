"""The near-copy check of the recipe synthetic_text: against brute force, and that it finds planted copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.common.near_copies import Closeness, EditSimilarity, Words, compare, longest_common_runs, words

TEXT = st.lists(st.sampled_from("abcd"), max_size=7).map(tuple)
SOME = st.lists(TEXT, min_size=1, max_size=6)


def edit_distance(a: Words, b: Words) -> int:
    """By its recursive definition."""
    if not a or not b:
        return len(a) + len(b)
    row = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        previous, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (word != other)))
    return row[-1]


def longest_run(a: Words, training: list[Words]) -> int:
    runs = {b[i:j] for b in training for i in range(len(b)) for j in range(i + 1, len(b) + 1)}
    return max((j - i for i in range(len(a)) for j in range(i + 1, len(a) + 1) if a[i:j] in runs), default=0)


@given(TEXT, SOME)
def test_edit_similarity_equals_brute_force(text: Words, training: list[Words]) -> None:
    found, where = EditSimilarity(training).nearest(text)
    each = [1 - edit_distance(text, other) / max(1, len(text), len(other)) for other in training]
    assert found == pytest.approx(max(each))
    assert each[where] == pytest.approx(found)


@given(SOME, SOME)
def test_longest_common_runs_equal_brute_force(texts: list[Words], training: list[Words]) -> None:
    assert longest_common_runs(texts, training) == [longest_run(text, training) for text in texts]


def test_more_training_texts_than_a_block_holds() -> None:
    training = [tuple(f"{i} {i % 7} {'x ' * (i % 5)}".split()) for i in range(1300)]
    for i in (0, 511, 512, 1299):
        assert EditSimilarity(training).nearest(training[i]) == (1.0, i)


def test_words_that_no_training_text_has_match_nothing() -> None:
    assert EditSimilarity([("a", "b")]).nearest(("x", "y")) == (0.0, 0)
    assert EditSimilarity([()]).nearest(()) == (1.0, 0)


def test_what_counts_as_a_word() -> None:
    assert words("Where's my CARD?") == ("where", "'", "s", "my", "card", "?")


def texts(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(f"w{draw.integers(300)}" for _ in range(draw.integers(6, 15))) for _ in range(count)]


def test_planted_copies_are_found() -> None:
    training, held_out, samples = texts(400, 1), texts(200, 2), texts(200, 3)
    copied = [training[7], training[7].upper(), " ".join(training[99].split()[1:])]
    found = compare([*samples[:100], *copied, *samples[100:]], held_out, training)
    assert found["samples"]["copies, word for word"] == 2
    assert [one["training text"] for one in found["closest"][:3]] == [training[7], training[7], training[99]]
    assert found["samples"]["edit similarity, highest"] == 1
    assert found["samples"]["longest common run of words, longest"] >= len(training[7].split())


def test_a_model_that_copies_half_of_the_time_is_not_like_held_out_texts() -> None:
    training, held_out = texts(400, 1), texts(200, 2)
    found = compare(training[:100] + texts(100, 3), held_out, training)
    assert min(found["samples closer than 99 % of held-out texts"].values()) >= 0.5


@pytest.mark.slow
def test_texts_that_were_not_copied_are_like_held_out_texts() -> None:
    """The control of the control: nothing is found where nothing was planted."""
    training, held_out, samples = texts(400, 1), texts(400, 2), texts(400, 3)
    found = compare(samples, held_out, training)
    assert found["samples"]["copies, word for word"] == found["held out"]["copies, word for word"] == 0
    assert max(found["samples closer than 99 % of held-out texts"].values()) <= 0.03
    assert found["samples"]["edit similarity, mean"] == pytest.approx(found["held out"]["edit similarity, mean"], 0.05)


def test_blank_samples_are_close_to_nothing() -> None:
    found = Closeness.measure(["", "w1"], ["w1 w2", "w3"])
    assert found.runs == [0, 1]
    assert found.similarities == [0.0, 0.5]
    assert found.copies == [False, False]
