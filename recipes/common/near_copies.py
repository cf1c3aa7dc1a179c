"""How close texts come to the training texts, beside texts that were never trained on. Reads private data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Words = tuple[str, ...]
# Training texts compared at a time: a block of distances stays in the cache.
_BLOCK = 512


def words(text: str) -> Words:
    """Words and punctuation marks in lower case: what two texts are compared by, whatever the model's tokenizer."""
    return tuple(re.findall(r"\w+|[^\w\s]", text.lower()))


def longest_common_runs(texts: Sequence[Words], training: Sequence[Words]) -> list[int]:
    """For each text the length, in words, of its longest run of words that stands in some training text."""
    found = [0] * len(texts)
    alive = [i for i, text in enumerate(texts) if text]
    n = 0
    # A run that is shared has only shared runs in it, so a text without one of length n has no longer one.
    while alive:
        n += 1
        known = {text[i : i + n] for text in training for i in range(len(text) - n + 1)}
        alive = [t for t in alive if any(texts[t][i : i + n] in known for i in range(len(texts[t]) - n + 1))]
        for t in alive:
            found[t] = n
    return found


class EditSimilarity:
    """The nearest training text by 1 - Levenshtein distance / length of the longer one, in words, exactly.

    Args:
        training: the texts to be near to, at least one.
    """

    def __init__(self, training: Sequence[Words]) -> None:
        # In order of length, so that a block holds little padding.
        self._order = sorted(range(len(training)), key=lambda i: len(training[i]))
        self._numbers: dict[str, int] = {}
        for text in training:
            for word in text:
                self._numbers.setdefault(word, len(self._numbers))
        self._blocks = []
        for start in range(0, len(self._order), _BLOCK):
            chosen = self._order[start : start + _BLOCK]
            lengths = np.array([len(training[i]) for i in chosen])
            ids = np.full((len(chosen), int(lengths.max(initial=0))), -1)
            for row, i in enumerate(chosen):
                ids[row, : lengths[row]] = [self._numbers[word] for word in training[i]]
            self._blocks.append((start, ids, lengths))

    def nearest(self, text: Words) -> tuple[float, int]:
        """Similarity in [0, 1] to the nearest training text, and which that is."""
        # Words that no training text has get a number that none has.
        wanted = [self._numbers.get(word, -2) for word in text]
        best, where = -1.0, 0
        for start, ids, lengths in self._blocks:
            longest = np.maximum(lengths, len(wanted)).clip(1)
            # No text can be nearer than the difference in length allows.
            if float((1 - np.abs(lengths - len(wanted)) / longest).max()) <= best:
                continue
            similarity = 1 - _distances(wanted, ids)[np.arange(len(ids)), lengths] / longest
            row = int(similarity.argmax())
            if similarity[row] > best:
                best, where = float(similarity[row]), self._order[start + row]
        return best, where


def _distances(text: list[int], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Levenshtein distances of `text` to each beginning of each row: (R, L) to (R, L + 1). Wagner and Fischer 1974."""
    columns = np.arange(rows.shape[1] + 1, dtype=np.int32)
    distance = np.broadcast_to(columns, (len(rows), len(columns))).copy()
    for i, word in enumerate(text):
        replaced = distance[:, :-1] + (rows != word)
        distance = distance + 1  # a word of the text left out
        np.minimum(distance[:, 1:], replaced, out=distance[:, 1:])
        distance[:, 0] = i + 1
        # A word of the row put in: along the row, distance[j] <= distance[k] + j - k.
        distance = np.minimum.accumulate(distance - columns, axis=1) + columns
    return distance


@dataclass(frozen=True)
class Closeness:
    """How close each of some texts comes to the training texts.

    Attributes:
        runs: words in the longest run that it shares with a training text.
        similarities: edit similarity to the nearest training text.
        nearest: index of that training text.
        copies: whether it is a training text, word for word.
    """

    runs: list[int]
    similarities: list[float]
    nearest: list[int]
    copies: list[bool]

    @classmethod
    def measure(cls, texts: Sequence[str], training: Sequence[str]) -> Closeness:
        """Of `texts` to `training`."""
        split, known = [words(text) for text in texts], [words(text) for text in training]
        index = EditSimilarity(known)
        found = [index.nearest(text) for text in split]
        verbatim = set(known)
        return cls(
            longest_common_runs(split, known),
            [similarity for similarity, _ in found],
            [where for _, where in found],
            [text in verbatim for text in split],
        )

    def summary(self) -> dict[str, float]:
        """Means and the upper ends, of which a leak would be part."""
        return {
            "texts": len(self.runs),
            "copies, word for word": sum(self.copies),
            "longest common run of words, mean": float(np.mean(self.runs)),
            "longest common run of words, 99th percentile": float(np.percentile(self.runs, 99)),
            "longest common run of words, longest": max(self.runs),
            "edit similarity, mean": float(np.mean(self.similarities)),
            "edit similarity, 99th percentile": float(np.percentile(self.similarities, 99)),
            "edit similarity, highest": max(self.similarities),
        }


def compare(
    samples: Sequence[str], held_out: Sequence[str], training: Sequence[str], shown: int = 20
) -> dict[str, Any]:
    """Closeness of samples and, as the control, of held-out texts to the training texts. For the owner only.

    Args:
        samples: that were drawn from the model.
        held_out: texts of the same kind that were never trained on.
        training: the private texts.
        shown: how many of the closest samples to list, each with the training text that it is closest to.

    Returns:
        "samples" and "held out", as `Closeness.summary`; "samples closer than 99 % of held-out texts", as shares of
        the samples: 0.01 is what held-out texts have; and "closest".
    """
    ours, control = Closeness.measure(samples, training), Closeness.measure(held_out, training)
    limits = np.percentile(control.runs, 99), np.percentile(control.similarities, 99)
    order = sorted(range(len(samples)), key=lambda i: (ours.similarities[i], ours.runs[i]), reverse=True)
    return {
        "samples": ours.summary(),
        "held out": control.summary(),
        "samples closer than 99 % of held-out texts": {
            "by longest common run of words": float(np.mean(np.array(ours.runs) > limits[0])),
            "by edit similarity": float(np.mean(np.array(ours.similarities) > limits[1])),
        },
        "closest": [
            {
                "sample": samples[i],
                "training text": training[ours.nearest[i]],
                "edit similarity": ours.similarities[i],
                "longest common run of words": ours.runs[i],
            }
            for i in order[:shown]
        ],
    }
