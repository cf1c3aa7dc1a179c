"""exp of the mean loss of a token, in nats."""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate


class Perplexity(evaluate.Metric):
    """From each example's mean loss (predictions) and the number of tokens it is the mean of (references)."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(
            description=__doc__, citation="", inputs_description="losses", features=datasets.Features(features)
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, Any]:
        total = sum(loss * tokens for loss, tokens in zip(predictions, references, strict=True))
        mean = total / sum(references)
        return {"perplexity": math.exp(mean) if mean < 700 else math.inf}
