"""ROUGE-L for `evaluate`, in one file, so that it loads offline."""

from __future__ import annotations

import re
from collections.abc import Sequence

import datasets
import evaluate


class RougeL(evaluate.Metric):
    """Mean over texts of the best F1 with one of their references, over lower-case words, letters and digits alone.

    F1 = 2 LCS / (words said + words wanted), of the longest common subsequence. Source: Lin 2004,
    https://aclanthology.org/W04-1013, with beta 1 and without stemming, as the package rouge-score has it.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="Lin 2004",
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
        best = [
            max(_f1(_words(prediction), _words(text)) for text in texts)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {"rouge_l": sum(best) / len(best)}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(said: list[str], wanted: list[str]) -> float:
    longest = [0] * (len(wanted) + 1)  # of what was said so far, with the first j wanted
    for word in said:
        above = longest
        longest = [0]
        for j, other in enumerate(wanted, 1):
            longest.append(above[j - 1] + 1 if word == other else max(above[j], longest[-1]))
    return 2 * longest[-1] / (len(said) + len(wanted)) if longest[-1] else 0.0
