"""Numbers of a parameter that are looked up by several indices, as scores between two labels are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square


def ids(x: Tensor) -> Tensor:
    return (x * 7).long() % 4


def below(x: Tensor) -> tuple[Tensor, Tensor]:
    return ids(x)[:, :-1], ids(x)[:, 1:]


def along_time(m: Any, x: Tensor) -> Tensor:
    """As a CRF has it, time first."""
    tags = ids(x.T)
    found = sum(m.table[tags[i], tags[i + 1]] * x.T[i] for i in range(len(tags) - 1))
    assert isinstance(found, Tensor)
    return found[:, None]


LOOKED_UP: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "two": (lambda m, x: m.table[below(x)] * x[:, 1:], (4, 4)),
    "from the end": (lambda m, x: m.table[below(x)[0] - 4, below(x)[1]] * x[:, 1:], (4, 4)),
    "with a last axis": (lambda m, x: m.table[(*below(x), slice(None))].sum(-1) * x[:, 1:], (4, 4, 3)),
    "each with each": (lambda m, x: m.table[ids(x)[:, :, None], ids(x)[:, None]] * x[..., None], (4, 4)),
    "one of them a number": (lambda m, x: m.table[1, ids(x)] * x, (2, 4)),
    "one point in time after the other": (along_time, (4, 4)),
    "all points in time": (lambda m, x: (m.table[ids(x.T)[:-1], ids(x.T)[1:]] * x.T[1:]).T, (4, 4)),
    "and otherwise": (
        lambda m, x: m.table[below(x)] * x[:, 1:] + F.embedding(ids(x)[:, 1:], m.table).sum(-1),
        (4, 4),
    ),
}


@pytest.mark.parametrize("way", LOOKED_UP)
def test_they_are_exact(way: str) -> None:
    function, shape = LOOKED_UP[way]
    model = Small(function, table=parameter(*shape))
    certificate = preflight(model, square, batch(3, 7))
    for size in (1, 2, 5, 7):
        data = batch(size, 7)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_numbers_beyond_the_table_fail_as_they_do_in_torch() -> None:
    model = Small(lambda m, x: m.table[below(x)[0] + 3, below(x)[1]], table=parameter(4, 4))
    with pytest.raises(IndexError, match="out of bounds"):
        record(model, square, batch(3, 7))


@pytest.mark.parametrize(
    ("index", "words"),
    [(lambda x: (ids(x)[x > 0], ids(x)[x > 0]), "may be packed"), (lambda x: (slice(1), ids(x)), "row numbers")],
    ids=["picked", "a slice first"],
)
def test_other_indices_are_refused(index: Any, words: str) -> None:
    model = Small(lambda m, x: m.table[index(x)].sum() + 0 * x, table=parameter(4, 4))
    with pytest.raises(UnsupportedModelError, match=words):
        preflight(model, square, batch(3, 7))
