"""Slot coverage for `evaluate`: how much of a table its description says."""

from __future__ import annotations

import re
from collections.abc import Sequence

import datasets
import evaluate


class SlotCoverage(evaluate.Metric):
    """The share of values of tables like `name[Blue Spice], area[city centre]` that their texts say word for word.

    Values of yes or no are left out, since texts say them in other words. Nothing if no table has another value.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        said = total = 0
        for text, table in zip(predictions, references, strict=True):
            values = [value for value in re.findall(r"\w+\[([^\]]*)\]", table) if value not in ("yes", "no")]
            said += sum(value.lower() in text.lower() for value in values)
            total += len(values)
        return {"slot_coverage": said / total} if total else {}
