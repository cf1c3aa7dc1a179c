"""Rows with the least, the greatest and no number are found in lists and tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Array2D, Dataset, Features, Sequence, Value

from hf_dp.data.outlying_rows import outlying_rows

LEAST, GREATEST, MISSING = 3, 7, 11
SPECIAL = {LEAST: -999.0, GREATEST: 500.0, MISSING: math.nan}


def made(shape: Callable[[float], Any]) -> list[dict[str, Any]]:
    return [{"x": shape(SPECIAL.get(i, i / 100)), "labels": i % 2} for i in range(20)]


@pytest.mark.parametrize(
    "shape",
    [
        lambda v: v,
        lambda v: [0.5, v, 0.1],
        lambda v: [[0.5, v], [0.1, 0.2]],
        lambda v: np.array([0.5, v], dtype=np.float32),
        lambda v: torch.tensor([[0.5], [v]]),
        torch.tensor,
    ],
)
def test_of_a_list(shape: Callable[[float], Any]) -> None:
    assert outlying_rows(made(shape)) == [MISSING, LEAST, GREATEST]


@pytest.mark.parametrize("shape", [lambda v: v, lambda v: [0.5, v, 0.1], lambda v: [[0.5, v], [0.1]]])
def test_of_a_table(shape: Callable[[float], Any]) -> None:
    table = Dataset.from_list(made(shape))
    assert outlying_rows(table) == outlying_rows(table.with_format("torch")) == [MISSING, LEAST, GREATEST]
    assert outlying_rows(table.select([7, 0, 3, 1, 11])) == [4, 2, 0]
    assert outlying_rows(table.with_transform(lambda batch: batch)) == []


@pytest.mark.parametrize("kind", [Sequence(Value("float32"), length=2), Array2D((1, 2), "float32")])
def test_of_rows_of_one_length_and_of_tables_in_rows(kind: Any) -> None:
    rows = made(lambda v: [[0.5, v]] if isinstance(kind, Array2D) else [0.5, v])
    table = Dataset.from_list(rows, features=Features({"x": kind, "labels": Value("int64")}))
    assert outlying_rows(table) == [MISSING, LEAST, GREATEST]


def test_what_stands_out_the_most_comes_first_of_many_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [{f"f{j}": float(v) for j, v in enumerate(row)} for row in torch.randn(300, 12, generator=generator)]
    rows[201]["f5"], rows[250]["f7"] = -999.0, math.nan
    assert outlying_rows(rows)[:2] == outlying_rows(Dataset.from_list(rows))[:2] == [250, 201]
    assert outlying_rows([{"x": [None, 0.5]}, {"x": [0.1, 0.2]}])[0] == 0


def test_of_lists_of_unequal_lengths_and_of_none() -> None:
    rows = [{"x": [0.0, 1.0]}, {"x": []}, {"x": None}, {"x": [5.0]}, {"x": [-5.0, 1.0, 2.0]}]
    assert outlying_rows(Dataset.from_list(rows)) == outlying_rows(rows) == [3, 4]


def test_nothing_stands_out_among_whole_numbers_and_texts() -> None:
    rows = [{"x": [i, 2], "text": "a", "pair": ("a", 1.0), "uneven": [[1.0], [2.0, 3.0]], "y": i} for i in range(4)]
    assert outlying_rows(rows) == []
    assert outlying_rows([1.0, 2.0]) == outlying_rows(object()) == []
