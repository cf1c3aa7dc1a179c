"""Operations written out in others, beside a loop over single examples and beside what torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square


def _ids(x: Tensor) -> Tensor:
    return (x.detach() * 9).long() % 7


def _bag(**options: Any) -> Any:
    return lambda m, x: m.linear(F.embedding_bag(_ids(x[..., 0]), m.w, **options))


class _Still2d(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class _Still1d(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def _images(x: Tensor) -> Tensor:
    return x.view(len(x), 4, 3, 2)


def _put(x: Tensor, index: Any, value: Tensor) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


_MODELS: dict[str, Small] = {
    "a mask's token": Small(
        lambda m, x: m.linear(_put(m.linear(x), x[..., 0] > 0, m.token)).cos(),
        linear=nn.Linear(4, 4), token=parameter(1, 1, 4),
    ),
    "a first token": Small(lambda m, x: m.linear(_put(m.linear(x), (slice(None), 0), m.token)).cos(),
        linear=nn.Linear(4, 4),
        token=parameter(4),
   ),
    "a number in some places": Small(lambda m, x: m.linear(_put(m.linear(x), x > 1, m.number)).cos(),
        linear=nn.Linear(4, 4),
        number=parameter(),
   ),
    "PReLU": Small(lambda m, x: m.act(m.first(x)).cos(), first=nn.Linear(4, 6), act=nn.PReLU()),
    "PReLU of channels": Small(
        lambda m, x: m.act(m.first(_images(x))).cos(), first=nn.Conv2d(4, 3, 2, padding=1), act=nn.PReLU(3)
    ),
    "PReLU at nought": Small(lambda m, x: m.act(m.first(x).relu()).cos(), first=nn.Linear(4, 6), act=nn.PReLU()),
    "PReLU of data": Small(lambda m, x: m.act(x).cos(), act=nn.PReLU()),
    "bilinear": Small(
        lambda m, x: m.both(x, m.first(x)).cos(), first=nn.Linear(4, 3), both=nn.Bilinear(4, 3, 5)
    ),
    "bilinear without a bias": Small(lambda m, x: m.both(x, x.cos()), both=nn.Bilinear(4, 4, 2, bias=False)),
    **{
        f"bags of embeddings, {options}": Small(_bag(**options), w=parameter(7, 4), linear=nn.Linear(4, 2))
        for options in (
            {"mode": "sum"},
            {"mode": "mean"},
            {"mode": "max"},
            {"mode": "mean", "padding_idx": 2},
            {"mode": "sum", "padding_idx": -1},
        )
    },
    "weighted bags": Small(
        lambda m, x: F.embedding_bag(_ids(x[..., 0]), m.w, mode="sum", per_sample_weights=m.linear(x)[..., 0]),
        w=parameter(7, 4),
        linear=nn.Linear(4, 1),
    ),
    "instance norm": Small(
        lambda m, x: m.norm(m.first(_images(x))).cos(),
        first=nn.Conv2d(4, 4, 2, padding=1),
        norm=nn.InstanceNorm2d(4, affine=True),
    ),
    "instance norm of a line": Small(lambda m, x: m.norm(x.mT).cos(), norm=nn.InstanceNorm1d(4, affine=True)),
    "batch norm in eval mode": Small(
        lambda m, x: m.norm(m.first(_images(x))).cos(),
        first=nn.Conv2d(4, 4, 2, padding=1),
        norm=_Still2d(4).eval(),
    ),
    "batch norm of rows, in eval mode": Small(
        lambda m, x: m.norm(m.first(x[:, 0])).cos(), first=nn.Linear(4, 3), norm=_Still1d(3).eval()
    ),
    "batch norm of all positions, in eval mode": Small(
        lambda m, x: m.norm(m.first(x).flatten(0, 1)).view(len(x), -1, 3).cos(),
        first=nn.Linear(4, 3),
        norm=_Still1d(3).eval(),
    ),
    "batch norm of pairs of positions, in eval mode": Small(
        lambda m, x: m.norm(m.first(x).view(-1, 2)).view(len(x), -1, 2).cos(),
        first=nn.Linear(4, 1),
        norm=_Still1d(2).eval(),
    ),
    "instance norm of several series of each": Small(
        lambda m, x: m.norm(m.first(x).view(-1, 3, 5)).view(len(x), -1, 5).cos(),
        first=nn.Linear(4, 5),
        norm=nn.InstanceNorm1d(3, affine=True),
    ),
    "instance norm of a parameter": Small(
        lambda m, x: x * m.norm(m.w[None])[0].T.cos(), norm=nn.InstanceNorm1d(4, affine=True), w=parameter(4, 6)
    ),
    "distances to prototypes": Small(
        lambda m, x: torch.cdist(m.first(x), m.w).cos(), first=nn.Linear(4, 3), w=parameter(5, 3)
    ),
    "distances in l1": Small(lambda m, x: torch.cdist(x, m.w, 1.0).cos(), w=parameter(5, 4)),
    "layer norm over several axes": Small(
        lambda m, x: m.norm(m.first(x)).cos(), first=nn.Linear(4, 3), norm=nn.LayerNorm((6, 3))
    ),
    "layer norm over several axes, no bias": Small(lambda m, x: m.norm(x), norm=nn.LayerNorm((6, 4), bias=False)),
    "rms norm over several axes": Small(
        lambda m, x: m.norm(m.first(x)).cos(), first=nn.Linear(4, 3), norm=nn.RMSNorm((6, 3))
    ),
    "products of experts, each of all tokens": Small(
        lambda m, x: torch.bmm(m.first(x).reshape(1, -1, 4).repeat(3, 1, 1) * m.of(x), m.w)
        .view(3, len(x), -1, 2).sum(0).cos(),
        first=nn.Linear(4, 4),
        of=lambda x: torch.arange(1.0, 4.0, dtype=x.dtype).view(3, 1, 1),
        w=parameter(3, 4, 2),
    ),
    "products of heads, and biases": Small(
        lambda m, x: torch.baddbmm(m.b[:, None], m.first(x).reshape(-1, 2, 2).transpose(0, 1), m.w)
        .transpose(0, 1).reshape(len(x), -1, 6).cos(),
        first=nn.Linear(4, 4),
        w=parameter(2, 2, 3),
        b=parameter(2, 3),
    ),
    "cosines to prototypes": Small(
        lambda m, x: F.cosine_similarity(m.w, m.first(x).unsqueeze(-2), dim=3),
        first=nn.Linear(4, 3),
        w=parameter(5, 3),
    ),
    "cosines, of no length": Small(
        lambda m, x: F.cosine_similarity(x * (x > 0).all(-1, keepdim=True), m.w, -1, 1.5) + m.v, w=parameter(4),
        v=parameter(6),
    ),
    "rows of a table": Small(
        lambda m, x: m.w.index_select(0, _ids(x[..., 0]).flatten()).view_as(x).cos() * m.v.index_select(
            -2, torch.arange(6)),
        w=parameter(7, 4),
        v=parameter(8, 4),
    ),
    "tokens, broadcast": Small(
        lambda m, x: torch.cat([x, m.w.broadcast_to(len(x), 2, 4), torch.broadcast_to(m.v, (len(x), 2, 4))], 1).cos(),
        w=parameter(1, 2, 4),
        v=parameter(4),
    ),
    "tokens, repeated": Small(
        lambda m, x: torch.cat([x, m.w.repeat_interleave(len(x), dim=0)], 1).cos() + m.v.repeat_interleave(2, 0),
        w=parameter(1, 2, 4),
        v=parameter(2),
    ),
    "lerp": Small(lambda m, x: torch.lerp(x, m.w, m.s.sigmoid()), w=parameter(4), s=parameter()),
    "addcmul": Small(lambda m, x: torch.addcmul(x, m.w, x.cos(), value=2), w=parameter(4)),
    "addcdiv": Small(lambda m, x: torch.addcdiv(m.w, x, m.v.exp()), w=parameter(4), v=parameter(6, 1)),
    "the larger": Small(lambda m, x: torch.maximum(x, m.w) + x.min(m.w) * 2, w=parameter(4)),
    "clamped": Small(lambda m, x: x.clamp(m.w, m.w.exp()) + x.clamp(min=m.w), w=parameter(4)),
    "powers": Small(lambda m, x: x.exp() ** m.w + m.v.exp() ** x.cos(), w=parameter(4), v=parameter(1)),
    "angles": Small(lambda m, x: torch.atan2(m.first(x), m.w), first=nn.Linear(4, 3), w=parameter(3)),
    "logaddexp": Small(lambda m, x: torch.logaddexp(x, m.w).sub(m.w), w=parameter(6, 4)),
}  # fmt: skip


@pytest.mark.few(50)
@pytest.mark.parametrize("size", [1, 3, 4, 6])
@pytest.mark.parametrize("name", _MODELS)
def test_exact(name: str, size: int) -> None:
    """Also with as many examples as features (4) or positions (6); forwards they are torch's own."""
    model, data = _MODELS[name], batch(size, 6, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(5, 6, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    torch.testing.assert_close(found.losses, square(model, data).detach())


@pytest.mark.parametrize(
    ("function", "members"),
    [
        (lambda m, x: F.embedding_bag(_ids(x).flatten(), m.w, torch.arange(0, x.numel(), 24)), {"w": parameter(7, 4)}),
        (lambda m, x: m.norm(x.mT), {"norm": nn.InstanceNorm1d(4, affine=True, track_running_stats=True)}),
        (lambda m, x: torch.cdist(m.w, x), {"w": parameter(3, 4)}),
        (lambda m, x: F.embedding_bag(_ids(x[..., 0]), m.w, max_norm=1.0), {"w": parameter(7, 4)}),
        (lambda m, x: _put(x, (slice(None), slice(None), slice(2)), m.w), {"w": parameter(2)}),
        (lambda m, x: _put(x, (..., 0), m.w), {"w": parameter(6)}),
    ],
    ids=[
        *("bags by offsets", "running statistics", "distances of a parameter", "a norm that is kept"),
        *("a part of some", "along another axis"),
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(function: Any, members: dict[str, Any]) -> None:
    model = Small(function, **members).train()
    with pytest.raises(HfDpError) as caught:
        preflight(model, square, batch(4, 6, 4))
    assert isinstance(caught.value, UnsupportedModelError) or "example" in str(caught.value)
