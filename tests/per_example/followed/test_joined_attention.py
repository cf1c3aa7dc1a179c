"""Pairs of texts that go through one encoder at once, laid below one another: rows of attention are each example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, relative_error, square
from tests.zoo import tiny

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)).masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    shape = q.shape
    q, k, v = (one.reshape(len(one), -1, 2) for one in (q, k, v))
    return torch.bmm(torch.bmm(q, k.permute(0, 2, 1)).tanh(), v).reshape(shape)


def at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def encoded(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    q, k, v = m.inner(h).view(len(h), -1, 3, 2, 2).permute(0, 3, 2, 1, 4).unbind(2)
    places = torch.arange(len(h))[:, None, None, None], torch.arange(h.shape[1])[None, None, None]
    mixed = m.attention(q, k, v, mask[places].logical_or(torch.eye(h.shape[1]).bool()[None, None]))
    return m.outer(mixed.transpose(1, 2).flatten(2)).tanh()


def compared(m: Any, x: Tensor, ran: Callable[..., Tensor] = encoded) -> Tensor:
    first, second = ran(m, torch.cat([x, x.flip(1)]), torch.cat([x[..., 0] > 0, x[..., 1] > 0])).mean(1).chunk(2)
    return first * second


def model(attention: Attention, function: Callable[[Any, Tensor], Tensor] = compared) -> Small:
    made = Small(function, inner=nn.Linear(4, 12), outer=nn.Linear(4, 4))
    made.attention = attention  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("attention", [by_hand, by_bmm, at_once])
def test_pairs_through_one_encoder_are_exact(attention: Attention, size: int) -> None:
    mine, data = model(attention), batch(size, 5, 4)
    found = record(mine, square, data, certificate=preflight(mine, square, batch(4, 5, 4)))
    assert relative_error(found, loop(mine, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [2, 3, 5])
def test_after_other_rows_and_twice(size: int) -> None:
    """The second time in another order."""

    def function(m: Any, x: Tensor) -> Tensor:
        made = compared(m, x)
        third, fourth = encoded(m, torch.cat([x.cos(), x]), torch.cat([x, x.cos()])[..., 2] > 0).mean(1).chunk(2)
        return made + third - 2 * fourth

    mine, data = model(at_once, function), batch(size, 5, 4)
    found = record(mine, square, data, certificate=preflight(mine, square, batch(4, 5, 4)))
    assert relative_error(found, loop(mine, square, data)) <= 1e-12


@pytest.mark.parametrize(
    "turned",
    [
        lambda q: q.roll(1, 0),
        lambda q: q.flip(0),
        lambda q: torch.cat(q.chunk(2)[::-1]).roll(1, 0),
        lambda q: q[torch.arange(len(q)).roll(1)],
        lambda q: q[q[:, 0, 0, 0].argsort()],
        lambda q: q.cumsum(0),
        lambda q: q.transpose(0, 3).softmax(-1).transpose(0, 3),
    ],
)
def test_rows_beside_those_of_others_are_refused(turned: Callable[[Tensor], Tensor]) -> None:
    mine = model(lambda q, k, v, mask: at_once(q, turned(k), v, mask))
    with pytest.raises(HfDpError):
        preflight(mine, square, batch(4, 5, 4))


class Pairs(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = tiny(name, "sequence", torch.float64).base_model

    def forward(self, data: Any) -> Tensor:
        given = {name: torch.cat([data[f"{which} {name}"] for which in ("first", "second")]) for name in _GIVEN}
        if not any("token_type" in name for name, _ in self.encoder.named_parameters()):
            del given["token_type_ids"]
        hidden, mask = self.encoder(**given).last_hidden_state, given["attention_mask"]
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.cosine_similarity(*pooled.chunk(2))


_GIVEN = ("input_ids", "attention_mask", "token_type_ids")


def pairs(size: int, length: int) -> dict[str, Tensor]:
    generator, data = torch.Generator().manual_seed(size), dict[str, Tensor]()
    for which in ("first", "second"):
        lengths = torch.randint(2, length + 1, (size, 1), generator=generator)
        mask = torch.arange(length) < lengths
        ids = torch.randint(5, 30, (size, length), generator=generator)
        data |= {f"{which} {name}": value.long() for name, value in zip(_GIVEN, (ids, mask, ids * 0), strict=True)}
    return data


def far(model: nn.Module, data: Any) -> Tensor:
    return (1 - model(data)).square()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "llama", "modernbert"])
def test_pairs_through_one_encoder_of_transformers_are_exact(name: str) -> None:
    mine = Pairs(name).eval()
    certificate = preflight(mine, far, pairs(4, 7))
    for size, length in ((1, 5), (2, 7), (3, 2), (6, 6)):
        data = pairs(size, length)
        found = record(mine, far, data, certificate=certificate)
        assert relative_error(found, loop(mine, far, data)) <= 1e-10
