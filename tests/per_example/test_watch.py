"""What a recording sees: every use is exact, or refused by name; nothing is silently wrong, certificate or not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import RULES, Certificate, Dense, Outer, Rule, loop, preflight, record
from hf_dp.per_example.rule import Bound
from tests.per_example.small import Small, batch, parameter, relative_error, square


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def near(x: Tensor) -> Tensor:
    return (positions(x)[:, None] - positions(x)[None]).clamp(-4, 4) + 4


def ids(x: Tensor) -> Tensor:
    return (9 * x[..., 0].abs()).long().clamp(max=8)


def time_major(model: Any, x: Tensor) -> Tensor:
    return model.second(torch.tanh(model.first(x)).transpose(0, 1)).transpose(0, 1)


def in_place(model: Any, x: Tensor) -> Tensor:
    y = model.linear(x)
    y += model.w
    return y


EXACT: dict[str, Small] = {
    "used twice in one product": Small(lambda m, x: x * m.w * m.w, w=parameter(4)),
    "a scalar": Small(lambda m, x: torch.tanh(m.w * x), w=parameter()),
    "a scalar in one entry": Small(lambda m, x: torch.tanh(x * m.w), w=parameter(1)),
    "a matrix added transposed": Small(lambda m, x: torch.tanh(x + m.w.T), w=parameter(4, 5)),
    "a square matrix added transposed": Small(lambda m, x: torch.tanh(x[:, :4] + m.w.T), w=parameter(4, 4)),
    "2 - w / 3, transposed": Small(lambda m, x: F.linear(x, (2 - m.w / 3).T), w=parameter(4, 4)),
    "1 + w and w in one layer norm": Small(lambda m, x: F.layer_norm(x, (4,), 1 + m.w, m.w), w=parameter(4)),
    "rsub": Small(lambda m, x: F.linear(x, torch.rsub(m.w, 1)), w=parameter(4, 4)),
    "detached in part": Small(lambda m, x: F.linear(x, m.w * m.w.detach().abs().max()), w=parameter(4, 4)),
    "module and F.linear": Small(lambda m, x: m.linear(x) + F.linear(x.cos(), m.linear.weight), linear=nn.Linear(4, 4)),
    "frozen weight, trainable bias": Small(
        lambda m, x: F.linear(x, m.w, m.b), w=parameter(4, 4).requires_grad_(False), b=parameter(4)
    ),
    "keyword arguments": Small(
        lambda m, x: F.linear(bias=m.b, weight=m.w, input=torch.tanh(F.linear(weight=m.w, input=x))),
        w=parameter(4, 4),
        b=parameter(4),
    ),
    "norms": Small(lambda m, x: m.rms(m.layer(x) * 2).cos(), rms=nn.RMSNorm(4), layer=nn.LayerNorm(4)),
    "folded": Small(lambda m, x: m.linear(x.flatten(0, 1)).view(x.shape).cos(), linear=nn.Linear(4, 4)),
    "positions as (1, T) ids": Small(
        lambda m, x: torch.tanh(x + m.table(positions(x)[None])), table=nn.Embedding(12, 4)
    ),
    "positions squeezed": Small(
        lambda m, x: torch.tanh(x + m.table(positions(x)[None]).squeeze(0)), table=nn.Embedding(12, 4)
    ),
    "a constant (1, T, d) input": Small(
        lambda m, x: torch.tanh(x + m.linear(positions(x).double()[None, :, None] / 9)), linear=nn.Linear(1, 4)
    ),
    "a class token": Small(
        lambda m, x: torch.tanh(torch.cat([m.token.expand(len(x), -1, -1), x], 1)), token=parameter(1, 1, 4)
    ),
    "a class token that is a vector": Small(
        lambda m, x: torch.tanh(torch.cat([m.token.expand(len(x), 2, -1), x], 1)), token=parameter(4)
    ),
    "x @ w": Small(lambda m, x: torch.tanh(x) @ m.w, w=parameter(4, 6)),
    "addmm": Small(
        lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w).view(*x.shape[:2], 6), w=parameter(4, 6), b=parameter(6)
    ),
    "a shared layer in a loop": Small(
        lambda m, x: [x := torch.tanh(m.linear(x)) for _ in range(3)][-1], linear=nn.Linear(4, 4)
    ),
    "positions (T,)": Small(lambda m, x: torch.tanh(x + m.table(positions(x))), table=nn.Embedding(12, 4)),
    "token types zeros(T)": Small(lambda m, x: torch.tanh(x + m.table(0 * positions(x))), table=nn.Embedding(12, 4)),
    "constant (T, d)": Small(
        lambda m, x: torch.tanh(x + m.linear(torch.ones(x.shape[1], 2).double())), linear=nn.Linear(2, 4)
    ),
    "a row of (1, T)": Small(lambda m, x: torch.tanh(x + m.table(positions(x)[None])[0]), table=nn.Embedding(12, 4)),
    "a mean over (1, T)": Small(
        lambda m, x: torch.tanh(x + m.table(positions(x)[None]).mean(0)), table=nn.Embedding(12, 4)
    ),
    "expanded to positions": Small(lambda m, x: torch.tanh(x + m.w.expand(x.shape[1], -1)), w=parameter(1, 4)),
    "weight norm": Small(lambda m, x: m.linear(x), linear=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
    "tanh(w)": Small(lambda m, x: F.linear(x, torch.tanh(m.w)), w=parameter(4, 4)),
    "exp(w)": Small(lambda m, x: x * m.w.exp(), w=parameter(4)),
    "w * w": Small(lambda m, x: x * (m.w * m.w), w=parameter(4)),
    "w * max|w|": Small(lambda m, x: F.linear(x, m.w * m.w.abs().max()), w=parameter(4, 4)),
    "a slice": Small(lambda m, x: x + m.w[: x.shape[1]], w=parameter(9, 4)),
    "in place between two layers": Small(
        lambda m, x: m.second(m.linear(x).add_(x).mul_(2)), linear=nn.Linear(4, 4), second=nn.Linear(4, 4)
    ),
    "a table of relative positions, (T, T)": Small(
        lambda m, x: torch.einsum("bts,bsd->btd", torch.tanh(x @ x.mT + m.table(near(x)).permute(2, 0, 1)), x),
        table=nn.Embedding(9, 1),
    ),
    "a table of relative positions, indexed": Small(
        lambda m, x: torch.einsum("bts,bsd->btd", (x @ x.mT + m.w[near(x)]).softmax(-1), x), w=parameter(9)
    ),
    "a table of relative positions, added in place": Small(
        lambda m, x: torch.einsum("bts,bsd->btd", m.linear(x).matmul(x.mT).add_(m.w[near(x)][None]).tanh(), x),
        linear=nn.Linear(4, 4),
        w=parameter(9),
    ),
    "a constant through layers that data takes too": Small(
        lambda m, x: m.norm(m.linear(x)) @ m.norm(m.linear(m.w)).mT.repeat(len(x), 1, 1),
        linear=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
        w=parameter(6, 4),
    ),
    "heads of a constant, repeated": Small(
        lambda m, x: torch.bmm(
            x.repeat_interleave(2, 0), m.linear(m.w).view(6, 2, 4).transpose(0, 1).mT.repeat(len(x), 1, 1)
        ).view(len(x), -1),
        linear=nn.Linear(4, 8),
        w=parameter(6, 4),
    ),
    "some rows of a table": Small(
        lambda m, x: (
            F.embedding(ids(x), m.table.index_copy(0, torch.tensor([7, 2]), m.w))
            @ m.table.index_copy(0, torch.tensor([7, 2]), m.w).T
        ),
        table=parameter(9, 4).requires_grad_(False),
        w=parameter(2, 4),
    ),
    "rows chosen by each example": Small(
        lambda m, x: torch.einsum("btde,btd->bte", m.w[ids(x)], x).tanh(), w=parameter(9, 4, 3)
    ),
    "rows chosen by each example, folded": Small(
        lambda m, x: torch.bmm(m.w[ids(x).flatten()], x.reshape(-1, 4, 1)).view(len(x), -1).tanh(), w=parameter(9, 3, 4)
    ),
    "split, concatenated and normalised": Small(
        lambda m, x: F.linear(x, F.normalize(torch.cat(m.w.split(2)[::-1]), dim=0)), w=parameter(4, 4)
    ),
    "a parameter in the loss itself": Small(
        lambda m, x: m.linear(x) * m.w.square().mean(), linear=nn.Linear(4, 4), w=parameter(3)
    ),
    "a bias of attention": Small(
        lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], m.w[near(x)][None, None]),
        w=parameter(9),
    ),
    "a bias of attention under a mask": Small(
        lambda m, x: torch.where(x[..., :1] > 0, m.w[near(x)], -1.0).softmax(-1) @ x, w=parameter(9)
    ),
    "differences and ratios": Small(lambda m, x: (m.w - x) / (m.w.exp() + 2) - m.w, w=parameter(4)),
    "x @ w with a vector w": Small(
        lambda m, x: (m.linear(x) @ m.w)[..., None].cos(), linear=nn.Linear(4, 4), w=parameter(4)
    ),
    "F.linear with a vector": Small(lambda m, x: F.linear(x, m.w)[..., None].cos(), w=parameter(4)),
    "w @ x": Small(lambda m, x: torch.tanh(m.w @ m.linear(x).mT), linear=nn.Linear(4, 4), w=parameter(6, 4)),
    "x @ w for each head": Small(
        lambda m, x: m.linear(x).unflatten(2, (2, 2)).transpose(1, 2) @ m.w.cos()[None],
        linear=nn.Linear(4, 4),
        w=parameter(2, 2, 3),
    ),
    "expanded as another": Small(lambda m, x: x * m.w.expand_as(x), w=parameter(4)),
    "expanded along several axes": Small(
        lambda m, x: torch.cat([x, m.w.view(1, 1, -1).expand(len(x), x.shape[1], -1)], 2), w=parameter(3)
    ),
    "sinks of attention": Small(
        lambda m, x: (
            torch.cat([x @ x.mT, m.w.view(1, 1, 1).expand(len(x), x.shape[1], -1)], 2).softmax(-1)[..., :-1] @ x
        ),
        w=parameter(1),
    ),
    "nn.MultiheadAttention": Small(
        lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2, batch_first=True)
    ),
    "nn.MultiheadAttention, positions first, without weights": Small(
        lambda m, x: m.attention(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
        attention=nn.MultiheadAttention(4, 2),
    ),
    "nn.MultiheadAttention, masked": Small(
        lambda m, x: m.attention(
            x,
            x,
            x,
            attn_mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool(),
            key_padding_mask=(x[..., 0] > 0).logical_and(positions(x) > 0),
        )[0],
        attention=nn.MultiheadAttention(4, 2, batch_first=True, bias=False),
    ),
    "nn.MultiheadAttention of a learned query": Small(
        lambda m, x: m.attention(m.query.repeat(len(x), 1, 1), x, x.cos())[0],
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        query=parameter(1, 2, 4),
    ),
    "nn.MultiheadAttention over other features": Small(
        lambda m, x: m.attention(x, x[..., :3], x[..., 1:])[0],
        attention=nn.MultiheadAttention(4, 2, batch_first=True, kdim=3, vdim=3),
    ),
    "nn.TransformerEncoderLayer": Small(
        lambda m, x: m.layer(x), layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    ),
    "x += w": Small(in_place, linear=nn.Linear(4, 4), w=parameter(4)),
    "x.mul_(w)": Small(lambda m, x: m.linear(x).mul_(m.w), linear=nn.Linear(4, 4), w=parameter(4)),
}


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("name", EXACT)
def test_exact_without_a_certificate(name: str, size: int) -> None:
    """Also where the batch is as long as a sequence (5) or as wide as the features (4)."""
    model, data = EXACT[name], batch(size, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


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


@pytest.mark.parametrize("padding_idx", [None, 0, -4, 3, -1])
def test_failure_16_padding_does_not_count(padding_idx: int | None) -> None:
    model = Small(lambda m, x: F.embedding(m.ids(x), m.w, padding_idx), w=parameter(4, 4))
    model.ids = lambda x: (x[..., 0] * 9).long() % 4
    data = batch(3, 5, 4)
    found = record(model, square, data)
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    if padding_idx is not None:
        assert not found.weighted_sum(torch.ones(3))["w"][padding_idx].any()


def test_failure_17_four_dimensional_activations_have_a_norm() -> None:
    model = Small(lambda m, x: m.linear(x.view(len(x), 5, 2, 2)), linear=nn.Linear(2, 3))
    data = batch(3, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


def test_failure_17_freezing_after_a_recording_is_respected() -> None:
    model, data = EXACT["norms"], batch(3, 5, 4)
    model.rms.weight.requires_grad_(False)
    try:
        assert sorted(record(model, square, data).factors) == ["layer.bias", "layer.weight"]
    finally:
        model.rms.weight.requires_grad_(True)
    assert sorted(record(model, square, data).factors) == ["layer.bias", "layer.weight", "rms.weight"]


def test_failure_24_norm_weights_are_trained() -> None:
    sums = record(EXACT["norms"], square, batch(3, 5, 4)).weighted_sum(torch.ones(3))
    assert all(bool(value.any()) for value in sums.values())


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.detach().T, x.flatten(0, 1).T @ gradient.flatten(0, 1)


@torch.jit.script
def scripted(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


HIDDEN: list[Tensor] = []
_LINEAR = nn.Linear(4, 4)
REFUSED: dict[str, tuple[Small, str]] = {
    "time-major": (
        Small(time_major, first=nn.Linear(4, 4), second=nn.Linear(4, 4)),
        "second.bias, second.weight|linear",
    ),
    "time-major, folded": (
        Small(
            lambda m, x: m.linear(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], -1, 4).transpose(0, 1).cos(),
            linear=nn.Linear(4, 4),
        ),
        "linear",
    ),
    "chosen and rejected in one batch": (
        Small(lambda m, x: torch.mul(*torch.tanh(m.linear(torch.cat([x, 2 * x]))).chunk(2)), linear=nn.Linear(4, 4)),
        "linear",
    ),
    "data as the summand of addmm": (
        Small(
            lambda m, x: torch.addmm(m.linear(x[:, 0]), x[:, 1], m.w),
            linear=nn.Linear(4, 4),
            w=parameter(4, 4),
        ),
        "addmm with a summand of shape",
    ),
    "a generated weight": (
        Small(lambda m, x: F.linear(x, m.linear(x).mean((0, 1)).diag(), m.b), linear=nn.Linear(4, 4), b=parameter(4)),
        "another of its operands needs a gradient",
    ),
    "einsum": (Small(lambda m, x: torch.einsum("btd,de->bte", x, m.w), w=parameter(4, 4)), "parameter w .*einsum"),
    "out=": (
        Small(lambda m, x: torch.matmul(x, m.w, out=torch.empty_like(x)), w=parameter(4, 4)),
        "parameter w is used by operation matmul",
    ),
    "alpha=2": (Small(lambda m, x: torch.add(x, m.w, alpha=2), w=parameter(4)), "alpha=2"),
    "max_norm": (
        Small(lambda m, x: m.table(positions(x)[None]) + x, table=nn.Embedding(12, 4, max_norm=1.0)),
        "max_norm",
    ),
    "scale_grad_by_freq": (
        Small(
            lambda m, x: m.table((9 * x[..., 0].abs()).long().clamp(max=11)),
            table=nn.Embedding(12, 4, scale_grad_by_freq=True),
        ),
        "mixes the counts",
    ),
    "a closure": (
        Small(lambda m, x: m.linear(x) + F.linear(x, HIDDEN[0]), linear=_LINEAR),
        "gradient reached linear.weight",
    ),
    "a custom function": (
        Small(lambda m, x: _Function.apply(m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w by a use that no rule saw",
    ),
    "a custom function on 1 + w": (
        Small(lambda m, x: _Function.apply(m.linear(x), 1 + m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w by a use that no rule saw",
    ),
    "a scripted function": (
        Small(lambda m, x: scripted(m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w",
    ),
    "a scripted function on 1 + w": (
        Small(lambda m, x: scripted(m.linear(x), 1 + m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w",
    ),
    "nn.LSTM": (Small(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 4, batch_first=True)), "rnn.weight_ih_l0.*lstm"),
    "nn.MultiheadAttention": (
        Small(
            lambda m, x: m.attention(x, x, x)[0],
            attention=nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
        ),
        "attention.in_proj_weight.*multi_head_attention",
    ),
    "a compiled module": (
        Small(
            lambda m, x: m.inner(m.linear(x)),
            linear=nn.Linear(4, 4),
            inner=torch.compile(nn.Linear(4, 4), backend="eager"),
        ),
        "inner is compiled",
    ),
}
HIDDEN.append(_LINEAR.weight)


@pytest.mark.parametrize("size", [2, 3, 5, 10])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_at_every_batch_size(name: str, size: int) -> None:
    """Ten positions: batches that divide them, equal them, half of them, and neither."""
    model, message = REFUSED[name]
    data = batch(size, 10, 4)
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        record(model, square, data)
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())


def penalised(create_graph: bool) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        y = model(x).square().flatten(1).mean(1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        return y + gradient.flatten(1).square().sum(1) if create_graph else square(model, {"x": batch["x"] + gradient})

    return loss


@pytest.mark.parametrize("create_graph", [True, False])
def test_gradients_taken_inside_the_loss_are_refused(create_graph: bool) -> None:
    """They would be recorded as uses of their own, and second derivatives not at all."""
    with pytest.raises(UnsupportedModelError, match=r"linear.weight.*(?s:.*)differentiates it by itself"):
        record(EXACT["folded"], penalised(create_graph), batch(3, 5, 4))


@pytest.mark.parametrize("size", [1, 6, 7])
def test_an_empty_axis_is_a_zero_gradient(size: int) -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    found = record(model, lambda m, b: m(b["x"]).flatten(1).sum(1), batch(size, 0, 4))
    assert found.squared_norms().eq(0).all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout_mask(use_reentrant: bool) -> None:
    def inner(model: Any, x: Tensor) -> Tensor:
        return model.two(F.dropout(torch.tanh(model.one(x)), 0.5))

    model = Small(
        lambda m, x: checkpoint(lambda y: inner(m, y), m.zero(x), use_reentrant=use_reentrant),
        zero=nn.Linear(4, 4),
        one=nn.Linear(4, 4),
        two=nn.Linear(4, 4),
    )
    data = batch(3, 5, 4)
    torch.manual_seed(3)
    sums = record(model, square, data).weighted_sum(torch.ones(3))
    torch.manual_seed(3)
    square(model, data).sum().backward()
    assert all(torch.allclose(sums[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


def test_an_unseen_use_is_refused_under_a_certificate() -> None:
    model, data = EXACT["norms"], batch(3, 5, 4)
    uses = record(model, square, data).uses
    record(model, square, data, certificate=Certificate(uses))
    lacking = Certificate(use for use in uses if use.parameter != "rms.weight")
    with pytest.raises(UnsupportedModelError, match=r"rms.weight is used by rms_norm .*preflight did not see"):
        record(model, square, data, certificate=lacking)


def test_a_rule_of_ones_own() -> None:
    def bind(equation: str, x: Tensor, w: Tensor) -> Bound:
        return Bound(x, {"w": w}, {"equation": equation})

    def backward(saved: Any, operands: Any, gradient: Tensor, axis: Any, needs_input: bool) -> Any:
        outer = Outer(Dense(axis.positions(saved[0])), Dense(axis.positions(gradient)))
        return gradient @ operands.parameters["w"].T, {"w": outer}

    rule = Rule(
        "einsum", bind, lambda x, o: (torch.einsum(o.options["equation"], x, o.parameters["w"]), (x,)), backward
    )
    model, data = REFUSED["einsum"][0], batch(3, 5, 4)
    found = record(model, square, data, rules={**RULES, torch.functional.einsum: rule})
    assert relative_error(found, loop(model, square, data)) <= 1e-12


class Labelled(nn.Module):
    """Scores each example against the embeddings of six label names, from the table of its own tokens."""

    def __init__(self, clamp: bool) -> None:
        super().__init__()
        self.table, self.clamp = nn.Embedding(9, 4).double(), clamp
        self.register_buffer("names", torch.arange(12).view(6, 2) % 9)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.clamp(min=0) if self.clamp else tokens
        return self.table(tokens).mean(1).tanh() @ self.table(self.names).mean(1).T


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("clamp", [False, True])
def test_one_table_for_what_examples_have_and_what_they_share(clamp: bool, size: int) -> None:
    """Six labels are six rows, as of six, of three or of two examples: never read as theirs."""
    model, generator = Labelled(clamp), torch.Generator().manual_seed(0)
    data = {"tokens": torch.randint(0, 9, (size, 5), generator=generator)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["tokens"]).logsumexp(1)

    five = {"tokens": torch.randint(0, 9, (7, 5), generator=generator)}
    certificates: list[Certificate | None] = [None]
    try:
        certificates.append(preflight(model, loss, five))
    except UnsupportedModelError:
        assert clamp
    truth = loop(model, loss, data)
    for certificate in certificates:
        try:
            found = record(model, loss, data, certificate=certificate)
        except UnsupportedModelError as refused:
            assert "table.weight" in str(refused)  # noqa: PT017
            assert 6 % size == 0 or certificate is None
        else:
            assert relative_error(found, truth) <= 1e-12


@pytest.mark.parametrize("name", EXACT)
def test_memory_is_freed_without_the_garbage_collector(name: str) -> None:
    """Factors are as large as the activations; a cycle would keep those of several batches."""
    model, data = EXACT[name], batch(3, 5, 4)
    certificate = Certificate(record(model, square, data).uses)
    gc.collect()
    gc.disable()
    try:
        found = record(model, square, data, certificate=certificate)
        kept = [weakref.ref(factors) for uses in found.factors.values() for factors in uses]
        del found
        assert not any(reference() for reference in kept)
    finally:
        gc.enable()
