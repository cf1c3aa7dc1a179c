"""The share of predictions that are right."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """accuracy = right predictions / all predictions."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="labels", features=datasets.Features(features)
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, Any]:
        right = sum(a == b for a, b in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
