"""Rows that are copies of other shapes, with places of other axes changed: as many of each example, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, relative_error

CHANNELS, SIDE = 4, 6


def pictures(size: int) -> dict[str, Tensor]:
    """Each with a text of another length than there are windows."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, CHANNELS, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {"x": x, "ids": torch.randint(0, 9, (size, 5), generator=generator)}


def parts(x: Tensor) -> Tensor:
    """As of MobileViT: (B * 4, 9, channels), of each window the numbers in one of its four places."""
    rows = x.reshape(len(x) * CHANNELS * SIDE // 2, 2, SIDE // 2, 2).transpose(1, 2)
    return rows.reshape(len(x), CHANNELS, -1, 4).transpose(1, 3).reshape(len(x) * 4, -1, CHANNELS)


def heads(x: Tensor) -> Tensor:
    """As attention with relative positions has its queries: (B * 2, 18, 4), taken out of three."""
    several = torch.cat([x, x.sin(), x.cos()], 1).reshape(len(x), -1, 3, 2, CHANNELS).permute(2, 0, 3, 1, 4)
    _, second, _ = several.reshape(3, len(x) * 2, -1, CHANNELS).unbind(0)
    return second[:, 1:].reshape(-1, 17, CHANNELS)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "windows": parts,
    "channels": lambda x: x.permute(0, 2, 3, 1).flatten(1, 2).swapaxes(1, 2).reshape(-1, 9, CHANNELS),
    "moved": lambda x: x.movedim(1, -1).clone().reshape(-1, 9, CHANNELS),
    "heads": heads,
    "the first of several": lambda x: torch.stack([x, x.sin()], 1).movedim(1, 0)[0].reshape(-1, 9, CHANNELS),
    "turned where rows are": lambda x: x.reshape(-1, SIDE, SIDE).transpose(1, 2).reshape(-1, 9, CHANNELS),
}


def losses(model: Any, data: Any) -> Tensor:
    made: Tensor = model(data["x"].tanh())
    return made.square().view(len(data["ids"]), -1).mean(1) * data["ids"].double().mean(1)


def through(way: Callable[[Tensor], Tensor]) -> Small:
    return Small(lambda m, x: m.norm(m.linear(way(x))), linear=nn.Linear(CHANNELS, 3), norm=nn.LayerNorm(3))


@pytest.mark.parametrize("way", WAYS)
def test_they_are_cut_by_their_number(way: str) -> None:
    model = through(WAYS[way])
    certificate = preflight(model, losses, pictures(3))
    for size in (1, 2, 3, 4, 6, 9):
        data = pictures(size)
        found = record(model, losses, data, certificate=certificate)
        assert relative_error(found, loop(model, losses, data)) <= 1e-12


def written(x: Tensor) -> Tensor:
    rows = parts(x)
    rows[torch.arange(len(rows) - 1, -1, -1)] = parts(x)
    return rows.reshape(len(x), -1).reshape(-1, 9, CHANNELS)


def picked(x: Tensor) -> Tensor:
    """By an operation of which nobody knows that it works on each row by itself."""
    return parts(x[x.flatten(1).mean(1) > 0].logcumsumexp(1)).repeat(3, 1, 1)[: 4 * len(x)]


def through_numpy(x: Tensor) -> Tensor:
    order = x.flatten(1).mean(1).argsort().numpy()
    return parts(torch.cat([x, x])[order.tolist()])


@pytest.mark.parametrize("way", [written, picked, through_numpy])
def test_not_where_rows_were_picked_or_written_before(way: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedModelError):
        preflight(through(way), losses, pictures(3))


def test_what_changes_places_with_the_examples_is_not_known_to_be_in_order() -> None:
    """(C, B, ...), of which as many rows as of examples are some of each."""
    model = through(lambda x: x.transpose(0, 1).reshape(-1, 9, CHANNELS))
    with pytest.raises(UnsupportedModelError):
        preflight(model, losses, pictures(3))
