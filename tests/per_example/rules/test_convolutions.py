"""Convolutions of lines, images and volumes, and transposed ones, beside a loop over single examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square

_OPTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "dilation": 2},
    {"bias": False, "stride": 3},
    {"groups": 2, "padding": 1},
]


@pytest.mark.parametrize(
    "options",
    [
        {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
        {"stride": 2, "padding": 1},
        {"bias": False},
        {"dilation": 2, "padding": "valid"},
    ],
)
def test_convolutions_are_exact(options: dict[str, Any]) -> None:
    model = Small(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=nn.Conv2d(3, 3, 3, padding=1), two=nn.Conv2d(3, 6, 2, **options)
    )
    data = batch(3, 3, 7, 6)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize(
    "options", [{"stride": 2, "padding": 1}, {"stride": (2,), "dilation": 2}, {"bias": False, "padding": (2,)}]
)
@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_convolutions_over_time_are_exact(size: int, options: dict[str, Any]) -> None:
    """Also with as many examples as channels (3, 6) or as points in time (7)."""
    model = Small(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=nn.Conv1d(3, 6, 3, padding=1), two=nn.Conv1d(6, 4, 2, **options)
    )
    data = batch(size, 3, 7)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [*_OPTIONS, {"padding": "same"}], ids=str)
def test_convolutions_of_volumes_are_exact(options: dict[str, Any], size: int) -> None:
    model = Small(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=nn.Conv3d(2, 4, (1, 2, 3)), two=nn.Conv3d(4, 6, 2, **options)
    )
    data = batch(size, 2, 4, 6, 6)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("options", [*_OPTIONS, {"stride": 2, "output_padding": 1}], ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolutions_are_exact(axes: int, options: dict[str, Any]) -> None:
    kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    model = Small(lambda m, x: m.two(torch.tanh(m.one(x))).cos(), one=kind(2, 4, 2), two=kind(4, 6, 3, **options))
    data = batch(3, 2, *(5, 4, 3)[:axes])
    found = record(model, square, data, certificate=preflight(model, square, batch(4, 2, *(5, 4, 3)[:axes])))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_what_pads_the_output_by_more_than_a_stride_is_exact() -> None:
    """Where another patch would fit in than there are places."""
    options: Any = {"stride": 2, "dilation": 3, "output_padding": 2, "padding": 1}
    model = Small(lambda m, x: m.one(torch.tanh(x * m.scale)), one=nn.ConvTranspose1d(3, 2, 2, **options))
    model.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))
    data = batch(3, 3, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


_TIED: dict[str, Any] = {
    "to what follows from it": lambda m, x: F.conv1d(F.conv1d(x, m.w).sin(), m.w.cos()),
    "transposed": lambda m, x: F.conv1d(F.conv1d(x, m.w).sin(), m.w.transpose(0, 1)),
    "to a factor": lambda m, x: F.conv1d(x * m.w[:, 0, :1], m.w),
    "to a layer": lambda m, x: F.conv1d(x, m.w).mean(2) + F.linear(x.mean(2), m.w[..., 0]),
    "to one in groups": lambda m, x: F.conv1d(F.conv1d(x, m.w[:, :1], groups=4).sin(), m.w),
    "to rows that are looked up": lambda m, x: F.conv1d(x, m.w).mean(2) + m.w[(9 * x[:, 0, 0]).long() % 4].sum(2),
}


@pytest.mark.few(25)
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("name", _TIED)
def test_failure_88_a_weight_that_is_tied(name: str, kernel: int, size: int) -> None:
    """Also with as many examples as channels (4), where matrices and weights would broadcast."""
    model, data = Small(_TIED[name], w=parameter(4, 4, kernel)), batch(size, 4, 9)
    found = record(model, square, data, certificate=preflight(model, square, batch(5, 4, 9)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12
