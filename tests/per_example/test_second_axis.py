"""Where the examples lie along the second axis, behind the positions: (T, B, ...)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square


def _turned(function: Any) -> Any:
    return lambda m, x: function(m, x.transpose(0, 1)).transpose(0, 1)


def _ids(x: Tensor) -> Tensor:
    return (x.detach()[..., 0] * 9).long() % 7


_MODELS: dict[str, Small] = {
    "linear": Small(_turned(lambda m, x: m.two(m.one(x).cos())), one=nn.Linear(4, 6), two=nn.Linear(6, 4)),
    "norms": Small(
        _turned(lambda m, x: m.three(m.two(m.one(x)))), one=nn.Linear(4, 6), two=nn.LayerNorm(6), three=nn.RMSNorm(6)
    ),
    "tied embedding": Small(
        _turned(lambda m, x: F.linear(F.embedding(_ids(x), m.w).cos(), m.w)),
        w=parameter(7, 4),
    ),
    "scale and bias": Small(
        _turned(lambda m, x: m.one(x) * m.w + m.v), one=nn.Linear(4, 3), w=parameter(3), v=parameter()
    ),
    "a row for each position": Small(
        _turned(lambda m, x: m.one(x) * m.w + m.w.cos()), one=nn.Linear(4, 4), w=parameter(5, 1, 4)
    ),
    "a number for each position": Small(
        _turned(lambda m, x: (m.one(x) - m.w).maximum(m.v)),
        one=nn.Linear(4, 4),
        w=parameter(5, 1, 1),
        v=parameter(5, 1, 4),
    ),
    "embedded positions": Small(
        _turned(lambda m, x: m.one(x + m.table(torch.arange(len(x))).unsqueeze(1)).cos()),
        one=nn.Linear(4, 4),
        table=nn.Embedding(9, 4),
    ),
    "positions, in place": Small(
        _turned(lambda m, x: m.one(x).add_(m.table.weight[: len(x), None])),
        one=nn.Linear(4, 4),
        table=nn.Embedding(9, 4),
    ),
    "a vector": Small(_turned(lambda m, x: (m.one(x) @ m.w).cos()), one=nn.Linear(4, 3), w=parameter(3)),
    "encoder": Small(_turned(lambda m, x: m.layer(x)), layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)),
    "decoder": Small(
        _turned(lambda m, x: m.layer(m.one(x), x.cos())),
        one=nn.Linear(4, 4),
        layer=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0),
    ),
}


@pytest.mark.few(22)
@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("name", _MODELS)
def test_exact(name: str, size: int) -> None:
    """Also with as many examples as positions (5) or features (4), with a certificate and without."""
    model, data = _MODELS[name], batch(size, 5, 4)
    for certificate in (None, preflight(model, square, batch(6, 5, 4))):
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize(
    ("function", "members"),
    [
        (lambda m, x: m.one(m.one(x).transpose(0, 1)).transpose(0, 1), {"one": nn.Linear(4, 4)}),
        (_turned(lambda m, x: m.norm(m.one(x))), {"one": nn.Linear(4, 4), "norm": nn.LayerNorm((6, 4))}),
    ],
    ids=["first in one place and second in another", "normalised over examples"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(function: Any, members: dict[str, Any]) -> None:
    model = Small(function, **members)
    with pytest.raises(UnsupportedModelError):
        preflight(model, square, batch(6, 5, 4))
    with pytest.raises(UnsupportedModelError):
        record(model, square, batch(6, 5, 4))


def test_examples_that_mix_along_the_second_axis_are_refused() -> None:
    def mixed(m: Any, x: Tensor) -> Tensor:
        y = m.one(x.transpose(0, 1))
        return (m.two(y) + y.mean(1, keepdim=True)).transpose(0, 1)

    with pytest.raises(HfDpError, match="neighbours|other"):
        preflight(Small(mixed, one=nn.Linear(4, 4), two=nn.Linear(4, 4)), square, batch(3, 5, 4))
