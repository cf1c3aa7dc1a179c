"""BLEU for `evaluate`, in one file, so that it loads offline."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import datasets
import evaluate

_ORDER = 4


class Bleu(evaluate.Metric):
    """Corpus BLEU with n-grams up to 4 and several references, over lower-case words and punctuation.

    Source: Papineni et al. 2002, https://aclanthology.org/P02-1040. No smoothing: without a 4-gram in common it is 0.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="Papineni et al. 2002",
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        matched, said = [0] * _ORDER, [0] * _ORDER
        length = reference_length = 0
        for prediction, texts in zip(predictions, references, strict=True):
            words, wanted = _words(prediction), [_words(text) for text in texts]
            length += len(words)
            # Of two as close, the shorter one.
            reference_length += min((abs(len(one) - len(words)), len(one)) for one in wanted)[1]
            for n in range(1, _ORDER + 1):
                most: Counter[tuple[str, ...]] = Counter()
                for one in wanted:
                    most |= _grams(one, n)
                grams = _grams(words, n)
                matched[n - 1] += (grams & most).total()
                said[n - 1] += grams.total()
        if min(matched) == 0:
            return {"bleu": 0.0}
        precision = sum(math.log(m / s) for m, s in zip(matched, said, strict=True)) / _ORDER
        return {"bleu": math.exp(precision + min(0.0, 1 - reference_length / length))}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))
