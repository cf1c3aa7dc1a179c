from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.errors import ConfigurationError

X = torch.zeros(2, 3)


def collated(returned: Any) -> Any:
    return LogicalBatchCollator(2, lambda examples: returned)([0, 1])


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"input_ids": X}, "a dict with tensors in it"),
        ({"deeper": [{"ids": X}]}, "a dict with tensors in it"),
        ((X, X), "a tuple with tensors in it"),
        ([X, X, X], "a list of 3, with tensors in it"),
        ([np.zeros(3)], "a list of 1, with tensors in it"),
        (np.zeros(2), r"a NumPy array of shape \(2,\)"),
    ],
)
def test_rows_that_would_not_be_found_are_refused_by_name(value: Any, found: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s)returned 'more' as {found}.*under a name of its own"):
        collated({"x": X, "more": value})


@pytest.mark.parametrize(
    "value",
    [
        [{"class_labels": torch.zeros(3), "boxes": torch.zeros(3, 4)}, {"class_labels": X}],
        [torch.zeros(3), torch.zeros(4)],
        *("a name", ["a", "b"], ("a", "b"), {"a": 1}, None, 3),
        *(np.array(["a", "b"]), np.float64(2)),
    ],
)
def test_lists_with_an_entry_for_each_example_and_names_stay(value: Any) -> None:
    assert LogicalBatchCollator(2, lambda examples: {"x": X, "more": value}).collated([0, 1])["more"] is value


@pytest.mark.parametrize("shared", [torch.tensor(0.5), torch.ones(7)])
def test_what_is_the_same_for_all_rows_is_refused_and_the_way_out_works(shared: torch.Tensor) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)'weights'.*shared\.expand\(len\(rows\), \*shared\.shape\)"):
        collated({"x": X, "weights": shared})
    assert collated({"x": X, "weights": shared.expand(2, *shared.shape)})
