"""The mean over labels of F1 = 2 TP / (2 TP + FP + FN), each label counted alike however rare it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import datasets
import evaluate


class MacroF1(evaluate.Metric):
    """Over the labels that are predicted or right at least once; what is never predicted has F1 0."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="labels", features=datasets.Features(features)
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, Any]:
        right = Counter(a for a, b in zip(predictions, references, strict=True) if a == b)
        # 2 TP + FP + FN is how often a label is predicted and how often it is right to, together.
        named = Counter(predictions) + Counter(references)
        return {"macro_f1": sum(2 * right[label] / named[label] for label in named) / len(named)}
