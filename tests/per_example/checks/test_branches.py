"""Branches that only few examples of the check before the first step take: compared, wherever these stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, relative_error, square

# Of how many rows there are in the check, with axes of four and six, and of four and five.
FIVE, THREE = (5, 6, 4), (7, 5, 4)


def rarely(rare: Callable[[Any, Tensor], Tensor]) -> Small:
    """Rows that begin high go through a layer of their own."""

    def function(m: Any, x: Tensor) -> Tensor:
        h, is_rare = m.usual(x), x[:, 0, 0] > 10
        if is_rare.any():
            h = h.clone()
            h[is_rare] = rare(m, h[is_rare])
        return h.cos()  # type: ignore[no-any-return]

    return Small(function, usual=nn.Linear(4, 4), rare=nn.Linear(4, 4))


def with_high(place: int, *shape: int) -> dict[str, Tensor]:
    data = batch(*shape)
    data["x"][place, 0, 0] = 20
    return data


@pytest.mark.parametrize(
    ("shape", "place"), [*((FIVE, place) for place in (0, 2, 3, 4)), *((THREE, place) for place in (0, 2, 3, 6))]
)
def test_a_branch_that_one_example_takes_is_certified_wherever_it_stands(shape: Any, place: int) -> None:
    model, data = rarely(lambda m, h: m.rare(h).cos()), with_high(place, *shape)
    certificate = preflight(model, square, data)
    for size in (1, 2, 5):
        few = {"x": data["x"].roll(-place, 0)[:size]}
        found = record(model, square, few, certificate=certificate)
        assert relative_error(found, loop(model, square, few)) <= 1e-10


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "centred": lambda m, h: m.rare(h - h.mean(0, keepdim=True)).cos(),
    "times their mean": lambda m, h: m.rare(h).cos() * h.mean(0, keepdim=True),
    "normed together": lambda m, h: m.rare(h).cos() / h.square().mean().sqrt(),
    "divided by how many they are": lambda m, h: m.rare(h).cos() / len(h),
    "beside the largest": lambda m, h: m.rare(h).cos() + h.amax(0, keepdim=True),
}


@pytest.mark.parametrize("way", MIXING)
@pytest.mark.parametrize(("shape", "place"), [(FIVE, 3), (FIVE, 4), (THREE, 3), (THREE, 6)])
def test_a_branch_that_one_example_takes_and_in_which_several_mix_is_refused(way: str, shape: Any, place: int) -> None:
    with pytest.raises(PreflightError, match="per-example gradients"):
        preflight(rarely(MIXING[way]), square, with_high(place, *shape))
