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


def _heads(x: Tensor) -> Tensor:
    """Of (T, B, d), as fairseq's attention has them: no copy is made."""
    return x.view(len(x), -1, 2).softmax(-1).view(x.shape)


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
    "a matrix for each head, as Zamba has them": Small(
        lambda m, x: (m.w[:, None] @ m.one(x).unflatten(-1, (2, -1)).permute(2, 0, 3, 1) + m.v[:, None, :, None])
        .transpose(0, 1).cos(),
        one=nn.Linear(4, 4),
        w=parameter(2, 3, 2),
        v=parameter(2, 3),
    ),
    "a matrix for each position, behind the examples' rows": Small(
        _turned(lambda m, x: torch.matmul(m.one(x).view(len(x), -1, 2, 2), m.w)),
        one=nn.Linear(4, 4),
        w=parameter(5, 1, 2, 3),
    ),
    "a matrix for each head, in Einstein's notation": Small(
        lambda m, x: torch.einsum("hbtk,hkn->hbtn", m.one(x).unflatten(-1, (2, -1)).permute(2, 0, 1, 3), m.w)
        .transpose(0, 1).cos(),
        one=nn.Linear(4, 4),
        w=parameter(2, 2, 3),
    ),
    "a vector": Small(_turned(lambda m, x: (m.one(x) @ m.w).cos()), one=nn.Linear(4, 3), w=parameter(3)),
    "heads of all examples, as one view": Small(
        _turned(lambda m, x: _heads(m.norm(m.one(x))) + _heads(F.embedding(_ids(x), m.w))),
        one=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
        w=parameter(7, 4),
    ),
    "encoder": Small(_turned(lambda m, x: m.layer(x)), layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)),
    "decoder": Small(
        _turned(lambda m, x: m.layer(m.one(x), x.cos())),
        one=nn.Linear(4, 4),
        layer=nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0),
    ),
}  # fmt: skip


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


class Ordered(nn.Module):
    """Tokens (B, T), whose examples `pick` puts in another order where they lie second, and `back` puts back."""

    def __init__(self, pick: Any, back: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pick, self.back, self.inner = pick, back, nn.Linear(6, 6)
        self.table, self.lstm, self.out = nn.Embedding(9, 6), nn.LSTM(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
        h, order = self.table(ids), kind.argsort(stable=True)
        made = self.back(self.pick(self, h, order), order.argsort())
        return self.out((h + made).mean(1))


def _of_kinds(*kinds: int, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(kinds))
    ids = torch.randint(0, 9, (len(kinds), length), generator=generator)
    return {"ids": ids, "kind": torch.tensor(kinds), "labels": torch.arange(len(kinds)) % 3}


def _losses(model: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data["ids"], data["kind"]), data["labels"], reduction="none")


def _gathered(h: Tensor, order: Tensor) -> Tensor:
    return h.gather(1, order[None, :, None].expand(len(h), -1, h.shape[2]))


def _in_pieces(h: Tensor, order: Tensor) -> Tensor:
    return torch.cat([h[:, i : i + 1] for i in order.tolist()], 1)


_ORDERED: dict[str, Any] = {
    "indexed": lambda m, h, order: m.inner(h.transpose(0, 1)[:, order]).cos(),
    "selected": lambda m, h, order: m.inner(h.permute(1, 0, 2).index_select(1, order)).cos(),
    "gathered": lambda m, h, order: m.inner(_gathered(h.movedim(0, 1), order)).cos(),
    "along": lambda m, h, order: m.inner(h.swapaxes(0, 1).take_along_dim(order[None, :, None], 1)).cos(),
    "in pieces": lambda m, h, order: m.inner(_in_pieces(h.transpose(0, 1), order)).cos(),
    "split": lambda m, h, order: m.inner(torch.cat([h.transpose(0, 1).split(1, 1)[i] for i in order], 1)).cos(),
    "written": lambda m, h, order: m.inner(
        torch.zeros_like(h.transpose(0, 1)).index_copy(1, order, h.transpose(0, 1))
    ).cos(),
    "rolled": lambda m, h, order: m.inner(h.transpose(0, 1).roll(int(order[0]), 1)).cos(),
    "by an equation": lambda m, h, order: m.inner(torch.einsum("btd->tbd", h)[:, order]).cos(),
    "before a recurrent layer": lambda m, h, order: m.lstm(h.transpose(0, 1)[:, order])[0],
    "last": lambda m, h, order: m.inner(h.permute(1, 2, 0)[..., order].permute(0, 2, 1)).cos(),
    "first after one of one": lambda m, h, order: m.inner(h[None][:, order].squeeze(0)).cos().transpose(0, 1),
}


def _back(made: Tensor, order: Tensor) -> Tensor:
    return made.transpose(0, 1)[order]


@pytest.mark.parametrize("pick", _ORDERED.values(), ids=_ORDERED)
def test_failure_107_examples_picked_along_another_axis_are_held_to_be_one_of_each(pick: Any) -> None:
    """Also of as many positions as examples, or a multiple."""
    model = Ordered(
        pick, lambda made, order: made.transpose(0, 1) if pick is _ORDERED["rolled"] else _back(made, order)
    )
    certificate = preflight(model, _losses, _of_kinds(0, 0, 0))
    for data in (_of_kinds(*[0] * 5), _of_kinds(*[1] * 5, length=10), _of_kinds(0, 1, 2)):
        found = record(model, _losses, data, certificate=certificate)
        assert relative_error(found, loop(model, _losses, data)) <= 1e-12
    for data in (_of_kinds(1, 0, 2, 0, 0), _of_kinds(1, 2, 0, 0, 1, length=10), _of_kinds(2, 0, length=3)):
        with pytest.raises(UnsupportedModelError, match="its rows were picked, and are not one of each"):
            record(model, _losses, data, certificate=certificate)


def test_failure_108_examples_behind_positions_that_a_model_stacks() -> None:
    """Put back by a product, of which nobody knows that it picks."""

    def stacked(m: Any, h: Tensor, order: Tensor) -> Tensor:
        return m.inner(torch.stack([h[:, t] for t in range(h.shape[1])])[:, order]).cos()  # type: ignore[no-any-return]

    def back(made: Tensor, order: Tensor) -> Tensor:
        return torch.einsum("bc,tcd->btd", F.one_hot(order, len(order)).double(), made)

    model = Ordered(stacked, back)
    certificate = preflight(model, _losses, _of_kinds(0, 0, 0))
    found = record(model, _losses, data := _of_kinds(*[0] * 5), certificate=certificate)
    assert relative_error(found, loop(model, _losses, data)) <= 1e-12
    for data in (_of_kinds(1, 0, 2, 0, 0), _of_kinds(1, 2, 0, 0, 1, length=10), _of_kinds(2, 0, length=3)):
        with pytest.raises(UnsupportedModelError, match="its rows were picked, and are not one of each"):
            record(model, _losses, data, certificate=certificate)


def test_what_is_no_data_may_be_written_into_examples() -> None:
    def filled(m: Any, h: Tensor, order: Tensor) -> Tensor:
        return m.inner(h.transpose(0, 1).index_fill(1, (order < 0).nonzero()[:, 0], 1.0)).cos()  # type: ignore[no-any-return]

    preflight(Ordered(filled, lambda made, order: made.transpose(0, 1)), _losses, _of_kinds(0, 0, 0))


def test_positions_that_are_picked_of_some_examples_and_written_back_to_these() -> None:
    """As Longformer does with global ones."""

    def spread(m: Any, h: Tensor, order: Tensor) -> Any:
        h = h.transpose(0, 1)
        size = h.shape[1]
        places = torch.arange(2).repeat_interleave(size), torch.arange(size).repeat(2)
        few = torch.zeros_like(h[:2])
        few[places] = h[places]
        return m.inner(few).cos()

    model = Ordered(spread, lambda made, order: made.transpose(0, 1).repeat(1, 3, 1)[:, :5])
    certificate = preflight(model, _losses, _of_kinds(0, 0, 0))
    for data in (_of_kinds(*range(5)), _of_kinds(*range(4)), _of_kinds(0, 1)):
        found = record(model, _losses, data, certificate=certificate)
        assert relative_error(found, loop(model, _losses, data)) <= 1e-12


_OF_TIME: dict[str, Any] = {
    "backwards": lambda m, h: m.inner(m.inner(h.flip(0)).cos().flip(0)),
    "by numbers": lambda m, h: m.inner(m.inner(h)[torch.arange(len(h)).flip(0)].cos()),
    "shifted": lambda m, h: m.inner(torch.cat([h.new_zeros(1, *h.shape[1:]), h[:-1]])),
    "in halves": lambda m, h: m.inner(torch.cat(h.chunk(2)[::-1])),
    "sorted": lambda m, h: m.inner(h.sort(0).values),
    "heads": lambda m, h: m.inner(h.reshape(len(h), -1, 3).transpose(0, 1).cos().transpose(0, 1).reshape(h.shape)),
    "stacked, and backwards": lambda m, h: m.inner(torch.stack(h.unbind(0)).flip(0)),
    "stacked, and shifted": lambda m, h: m.inner(torch.stack([h[t].cos() for t in range(len(h))]).roll(1, 0)),
    "without an order": lambda m, h: m.inner(h[:, torch.arange(h.shape[1])]),
}


@pytest.mark.parametrize("function", _OF_TIME.values(), ids=_OF_TIME)
def test_what_is_done_to_positions_that_come_first_leaves_examples_as_they_are(function: Any) -> None:
    """Where rows are followed, since some were picked; of as many positions as examples too."""

    def pick(m: Any, h: Tensor, order: Tensor) -> Any:
        return function(m, h[torch.arange(len(h))].transpose(0, 1))

    model = Ordered(pick, lambda made, order: made.transpose(0, 1))
    certificate = preflight(model, _losses, _of_kinds(0, 0, 0))
    for data in (_of_kinds(*range(5)), _of_kinds(*range(5), length=10), _of_kinds(0, 1)):
        found = record(model, _losses, data, certificate=certificate)
        assert relative_error(found, loop(model, _losses, data)) <= 1e-12
