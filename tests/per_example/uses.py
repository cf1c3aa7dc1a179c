"""What a parameter can be used by: a small model for each, of which every recording is exact."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.per_example.small import Small, parameter


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def near(x: Tensor) -> Tensor:
    return (positions(x)[:, None] - positions(x)[None]).clamp(-4, 4) + 4


def ids(x: Tensor) -> Tensor:
    return (9 * x[..., 0].abs()).long().clamp(max=8)


def in_place(model: Any, x: Tensor) -> Tensor:
    y = model.linear(x)
    y += model.w
    return y


class Hadamard(torch.autograd.Function):
    """A product of parameters, as LoHa computes it."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(one, two, scale)
        return one * two * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        one, two, scale = ctx.saved_tensors
        return gradient * two * scale, gradient * one * scale, None


class OneByOne(torch.autograd.Function):
    """Whose backward pass asks for a number, which vmap cannot give."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient * (gradient.sum().item() == gradient.sum().item())


class Scaled(torch.autograd.Function):
    """A product of two parameters and of what all examples share, as RandLora computes it."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, one: Tensor, two: Tensor) -> Tensor:
        ctx.save_for_backward(shared, one, two)
        return shared * one[:, None] * two

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        shared, one, two = ctx.saved_tensors
        return None, (gradient * shared * two).sum(1), (gradient * shared * one[:, None]).sum(0)


class Product(torch.autograd.Function):
    """Of data and a parameter, as C3A computes it: its gradient is summed over all positions of all examples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.detach().T, x.reshape(-1, x.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])


def skew(w: Tensor) -> Tensor:
    """As OFT writes it."""
    rows, columns = torch.triu_indices(4, 4, 1)
    matrix = torch.zeros(len(w), 4, 4, dtype=w.dtype)
    matrix[:, rows, columns] = w
    return matrix - matrix.transpose(-2, -1)


def neumann(w: Tensor) -> Tensor:
    """A series of powers that are added in place."""
    one = skew(w)
    total, power = torch.eye(4, dtype=w.dtype).repeat(len(w), 1, 1), one
    total.add_(one, alpha=2.0)
    for _ in range(2):
        power = torch.bmm(power, one)
        total.add_(power)
    total *= w.square().mean()
    return total


def waves(w: Tensor) -> Tensor:
    """As FourierFT computes it."""
    dense = torch.zeros(6, 4, dtype=w.dtype)
    dense[torch.tensor([0, 2, 5]), torch.tensor([1, 1, 3])] = w
    return torch.fft.ifft2(dense).real * 3.0


def sparse(w: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2, 5], [1, 1, 3]]), w * 2.0, (6, 4), check_invariants=True)


EXACT: dict[str, Small] = {
    "written into zeros": Small(
        lambda m, x: torch.einsum("...rk,rkc->...rc", x[..., None, :].expand(-1, -1, 2, -1), skew(m.w)),
        w=parameter(2, 6),
    ),
    "written several times": Small(
        lambda m, x: torch.einsum("...rk,rkc->...rc", torch.stack([m.linear(x), x], 2), neumann(m.w)).flatten(2),
        linear=nn.Linear(4, 4),
        w=parameter(2, 6),
    ),
    "a Fourier transform": Small(
        lambda m, x: F.linear(m.linear(x), waves(m.w)), linear=nn.Linear(4, 4), w=parameter(3)
    ),
    "through complex numbers": Small(
        lambda m, x: F.linear(x, (m.w.to(torch.complex128) * 1j + torch.view_as_complex(m.v)).abs()),
        v=parameter(4, 4, 2),
        w=parameter(4, 4),
    ),
    "the real part of a complex cast": Small(
        lambda m, x: F.linear(x, (torch.complex(m.w, m.w.cos()).conj() * (2 + 1j)).real.contiguous()),
        w=parameter(4, 4),
    ),
    "added to a frozen weight, sparsely": Small(
        lambda m, x: F.linear(x, m.frozen.clone().add_(sparse(m.w))).cos(),
        frozen=parameter(6, 4).requires_grad_(False),
        w=parameter(3),
    ),
    "a sparse product": Small(
        lambda m, x: (
            torch.sparse.mm(sparse(m.w).coalesce(), torch.tanh(m.linear(x)).flatten(0, 1).t()).t().view(*x.shape[:2], 6)
        ),
        linear=nn.Linear(4, 4),
        w=parameter(3),
    ),
    "einsum": Small(
        lambda m, x: torch.einsum("btd,de->bte", m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 3)
    ),
    "einsum transposed, the parameter first": Small(
        lambda m, x: torch.einsum("ed,b...d->eb...", m.w, m.linear(x)).transpose(0, 1),
        linear=nn.Linear(4, 4),
        w=parameter(3, 4),
    ),
    "einsum over two axes at once": Small(
        lambda m, x: torch.einsum("bthd,fhed->btef", m.linear(x).unflatten(2, (2, 2)), m.w.cos()).flatten(2),
        linear=nn.Linear(4, 4),
        w=parameter(3, 2, 5, 2),
    ),
    "einsum of blocks": Small(
        lambda m, x: torch.einsum("btnd, dne -> bent", m.linear(x).unflatten(2, (2, 2)), m.w).flatten(2).mT,
        linear=nn.Linear(4, 4),
        w=parameter(2, 2, 3),
    ),
    "einsum without a sum": Small(
        lambda m, x: torch.einsum("btd,d->bdt", m.linear(x), m.w).mT, linear=nn.Linear(4, 4), w=parameter(4)
    ),
    "einsum of parameters": Small(
        lambda m, x: F.linear(x, torch.einsum("ij,jk->ik", m.v, m.w)), v=parameter(5, 3), w=parameter(3, 4)
    ),
    "a Function of parameters and what all share": Small(
        lambda m, x: F.linear(x, Scaled.apply(m.frozen, m.v, m.w)),
        frozen=parameter(5, 4).requires_grad_(False),
        v=parameter(5),
        w=parameter(4),
    ),
    "a Function of data": Small(
        lambda m, x: Product.apply(m.linear(x), m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5)
    ),
    "a Function of data, on 1 + w": Small(
        lambda m, x: Product.apply(m.linear(x), 1 + m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5)
    ),
    "a Function of data, folded": Small(
        lambda m, x: Product.apply(m.linear(x).flatten(0, 1), m.w.exp()).view(*x.shape[:2], 5),
        linear=nn.Linear(4, 4),
        w=parameter(4, 5),
    ),
    "a Function of data and of positions": Small(
        lambda m, x: torch.tanh(
            Product.apply(x, m.w) + Product.apply(positions(x).double()[:, None].expand(-1, 4), m.w)
        ),
        w=parameter(4, 5),
    ),
    "a Function of parameters alone": Small(
        lambda m, x: F.linear(x, Hadamard.apply(m.w, m.v.T, torch.tensor(3.0).double())),
        w=parameter(5, 4),
        v=parameter(4, 5),
    ),
    "a Function that vmap cannot": Small(lambda m, x: F.linear(x, OneByOne.apply(m.w * m.w)), w=parameter(5, 4)),
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
    "expanded to three, as preflight has examples": Small(
        lambda m, x: m.linear(x) * (m.w.expand(3, -1) * torch.arange(3.0).double()[:, None]).sum(0),
        linear=nn.Linear(4, 4),
        w=parameter(4),
    ),
    "expanded to three heads": Small(
        lambda m, x: (m.linear(x)[:, None] * m.w.expand(1, 3, 1, 4).cos()).sum(1),
        linear=nn.Linear(4, 4),
        w=parameter(1, 1, 1, 4),
    ),
    "queries before the tokens, examples second": Small(
        lambda m, x: m.linear(torch.cat([m.w.unsqueeze(1).repeat(1, len(x), 1), x.transpose(0, 1)])).cos().mean(0),
        linear=nn.Linear(4, 4),
        w=parameter(3, 4),
    ),
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
    "some rows of a table, one of them twice": Small(
        lambda m, x: F.embedding(ids(x), m.table.index_copy(0, torch.tensor([7, 2, 7]), m.w)),
        table=parameter(9, 4).requires_grad_(False),
        w=parameter(3, 4),
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
    "copies for examples, and for positions of each": Small(
        lambda m, x: torch.tanh(torch.cat([x, m.w.repeat(len(x), 5, 1)], 1)), w=parameter(1, 1, 4)
    ),
    "tiled along several axes": Small(
        lambda m, x: torch.tanh(torch.cat([x, m.w.tile(len(x), 2, 2), torch.tile(m.w, (len(x), 1, 2))], 1)),
        w=parameter(3, 2),
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
