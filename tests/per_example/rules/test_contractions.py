"""Products in other notations than x @ W, also of complex numbers, and what is picked, beside a loop over examples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.factors import Outer
from tests.per_example.small import Small, batch, parameter, relative_error, square

SOME, SEVERAL = torch.arange(16).view(4, 4) % 5 == 1, torch.tensor([3, 0, 1])


def ids(x: Tensor) -> Tensor:
    return (x[..., 0].detach() * 9).long() % 7


def complex_of(w: Tensor) -> Tensor:
    return torch.view_as_complex(w)


def kernel(m: Any, length: int) -> Tensor:
    """As of S4: a sum of decaying waves."""
    decay = torch.complex(-m.decay.exp(), m.wave)
    return (complex_of(m.size)[:, :, None] * (decay[..., None] * torch.arange(length)).exp()).sum(1).real


def long_convolution(m: Any, x: Tensor) -> Tensor:
    length = 2 * x.shape[1]
    of_kernel, of_x = torch.fft.rfft(kernel(m, x.shape[1]), length), torch.fft.rfft(m.linear(x).mT, length)
    return torch.fft.irfft(of_kernel * of_x, length)[..., : x.shape[1]].mT


def spectral(m: Any, x: Tensor) -> Tensor:
    """As of Fourier neural operators."""
    modes = torch.einsum("bxi,xio->bxo", torch.fft.rfft(m.linear(x), dim=1)[:, :3], complex_of(m.w))
    return torch.fft.irfft(modes, x.shape[1], dim=1)


def expand(x: Tensor, w: Tensor) -> Tensor:
    return w.expand(len(x), *w.shape)


def linear(*sizes: int) -> dict[str, nn.Module]:
    first, last = sizes or (4, 4)
    return {"linear": nn.Linear(first, last)}


_MODELS: dict[str, Small] = {
    "mm": Small(lambda m, x: torch.mm(m.linear(x[:, 0]), m.w).cos().mm(m.w), **linear(), w=parameter(4, 4)),
    "mm of all positions": Small(
        lambda m, x: m.linear(x).view(-1, 4).mm(m.w).view(len(x), -1, 3), **linear(), w=parameter(4, 3)
    ),
    "mv": Small(lambda m, x: (torch.mv(m.linear(x[:, 0]), m.w) + x[:, 1].mv(m.w))[:, None], **linear(), w=parameter(4)),
    "the parameter on the left": Small(
        lambda m, x: (m.w @ m.linear(x).mT).mT + (m.w @ x[:, 0].T).T[:, None], **linear(), w=parameter(3, 4)
    ),
    "mm with the parameter on the left": Small(
        lambda m, x: torch.mm(m.w, m.linear(x[:, 0]).T).T, **linear(), w=parameter(3, 4)
    ),
    "over positions": Small(lambda m, x: m.w @ m.linear(x), **linear(), w=parameter(3, 6)),
    "over positions, of several heads": Small(
        lambda m, x: (m.w @ m.linear(x).unflatten(2, (2, 2)).transpose(1, 2)).flatten(1), **linear(), w=parameter(3, 6)
    ),
    "a vector on the left": Small(lambda m, x: m.w @ m.linear(x) + (m.v @ x.mT.cos())[:, :4], **linear(),
        w=parameter(6), v=parameter(4)),
    "inner of time first": Small(lambda m, x: torch.inner(m.linear(x.transpose(0, 1)), m.w).transpose(0, 1), **linear(),
        w=parameter(3, 4)),
    "data as the summand": Small(
        lambda m, x: torch.addmm(m.linear(x[:, 0]), x[:, 1], m.w) + torch.addmm(m.b, x[:, 2], m.w, beta=2, alpha=0.5),
        **linear(), w=parameter(4, 4), b=parameter(4),
    ),
    "a summand that is left out": Small(
        lambda m, x: torch.addmm(x[:, 0] / 0, m.linear(x[:, 1]), m.w, beta=0), **linear(), w=parameter(4, 4)
    ),
    "products by name": Small(
        lambda m, x: torch.addmm(x[:, 0], mat1=torch.mm(x[:, 1], mat2=m.w), mat2=m.w.mm(mat2=m.w))
        + torch.mv(x[:, 2], vec=m.w.mv(vec=m.w[0]))[:, None] + m.w[1].addmv(mat=m.w, vec=m.w[2]),
        w=parameter(4, 4),
    ),
    "addmv": Small(lambda m, x: torch.addmv(x[:, 0, 0], m.linear(x[:, 1]), m.w)[:, None], **linear(), w=parameter(4)),
    "tensordot": Small(lambda m, x: torch.tensordot(m.linear(x), m.w, dims=1).cos(), **linear(), w=parameter(4, 3)),
    "tensordot over two axes": Small(
        lambda m, x: torch.tensordot(m.linear(x), m.w, dims=([1, 2], [0, 1])).cos(), **linear(), w=parameter(6, 4, 3)
    ),
    "tensordot, the parameter first": Small(
        lambda m, x: torch.tensordot(m.w, m.linear(x), dims=([1], [-1])).permute(1, 2, 0).cos(), **linear(),
        w=parameter(3, 4),
    ),
    "inner": Small(lambda m, x: torch.inner(m.linear(x), m.w).cos() * m.linear(x).inner(m.v)[..., None], **linear(),
        w=parameter(3, 4), v=parameter(4)),
    "outer": Small(lambda m, x: torch.outer(m.linear(x[:, 0])[:, 0], m.w).cos() + torch.outer(m.w, x[:, 1, 1]).T.sin(),
        **linear(), w=parameter(3)),
    "vecdot": Small(lambda m, x: torch.linalg.vecdot(m.linear(x), m.w).cos(), **linear(), w=parameter(4)),
    "einsum that says no output": Small(
        lambda m, x: torch.einsum("btd,de", m.linear(x), m.w).mT.cos(), **linear(), w=parameter(4, 3)
    ),
    "einsum of numbered axes": Small(
        lambda m, x: torch.einsum(m.linear(x), [0, 1, 2], m.w, [2, 3], [0, 3]).cos(), **linear(), w=parameter(4, 3)
    ),
    "einsum over an axis of the data alone": Small(
        lambda m, x: torch.einsum("btd,de->be", m.linear(x), m.w).cos(), **linear(), w=parameter(4, 3)
    ),
    "einsum over an axis of the parameter alone": Small(
        lambda m, x: torch.einsum("btd,ed->btd", m.linear(x), m.w).cos(), **linear(), w=parameter(3, 4)
    ),
    "einsum to one number": Small(lambda m, x: torch.einsum("btd,td->b", m.linear(x), m.w)[:, None], **linear(),
        w=parameter(6, 4)),
    "einsum over heads": Small(
        lambda m, x: torch.einsum("bthk,hk->bht", m.linear(x).unflatten(2, (2, 2)), m.w).cos(), **linear(),
        w=parameter(2, 2),
    ),
    "einsum of time first": Small(
        lambda m, x: torch.einsum("tbhd,de->bthe", m.linear(x).transpose(0, 1).unflatten(2, (2, 2)), m.w).cos(),
        **linear(), w=parameter(2, 3),
    ),
    "einsum of time first, a scale for each head": Small(
        lambda m, x: torch.einsum("tbhd,h->tbhd", m.linear(x).transpose(0, 1).unflatten(2, (2, 2)), m.w)
        .transpose(0, 1).cos(),
        **linear(), w=parameter(2),
    ),
    "einsum of two parameters": Small(
        lambda m, x: torch.einsum("btd,dr,re->bte", m.linear(x), m.w, m.v).cos(), **linear(), w=parameter(4, 2),
        v=parameter(2, 3),
    ),
    "einsum, the same parameter twice": Small(
        lambda m, x: torch.einsum("de,btd,ef->btf", m.w, m.linear(x), m.w).cos(), **linear(), w=parameter(4, 4)
    ),
    "einsum with data on both sides": Small(
        lambda m, x: torch.einsum("btd,de,bse->bts", m.linear(x), m.w, x).softmax(-1) @ x, **linear(),
        w=parameter(4, 4),
    ),
    "einsum of chosen experts": Small(
        lambda m, x: torch.einsum("btd,kde,bk->bte", x, m.w, m.linear(x[:, 0]).softmax(-1)), **linear(4, 3),
        w=parameter(3, 4, 2),
    ),
    "einsum of what all examples share": Small(
        lambda m, x: torch.einsum("kd,de,bte->btk", torch.eye(4, dtype=x.dtype)[:3], m.w, m.linear(x)).cos(),
        **linear(), w=parameter(4, 4),
    ),
    "a long convolution": Small(long_convolution, **linear(), decay=parameter(4, 2), wave=parameter(4, 2),
        size=parameter(4, 2, 2)),
    "a spectral layer": Small(spectral, **linear(), w=parameter(3, 4, 2, 2)),
    "a scale in the frequencies": Small(lambda m, x: (torch.fft.fft(x) * m.w).real, w=parameter(4)),
    "the same, cast": Small(lambda m, x: (torch.fft.fft(x) * m.w.to(torch.complex128)).real, w=parameter(4)),
    "complex outputs": Small(
        lambda m, x: torch.view_as_real(torch.fft.rfft(x) * complex_of(m.w)), w=parameter(3, 2)
    ),
    "learnt rotations": Small(
        lambda m, x: torch.view_as_real(
            complex_of(m.linear(x).unflatten(2, (2, 2)))
            * torch.polar(torch.ones(6, 2).to(x), torch.arange(6).to(x)[:, None] * m.w)
        ).flatten(2).cos(),
        **linear(), w=parameter(2),
    ),
    "a complex matrix": Small(
        lambda m, x: (torch.fft.fft(m.linear(x)) @ complex_of(m.w)).abs()
        + (x.to(torch.complex128) @ complex_of(m.w).conj()).imag,
        **linear(), w=parameter(4, 3, 2),
    ),
    "a complex matrix on the left": Small(
        lambda m, x: (complex_of(m.w) @ torch.fft.fft(m.linear(x), dim=1)).real, **linear(), w=parameter(3, 6, 2)
    ),
    "gather": Small(
        lambda m, x: m.linear(x).cos() * m.w.gather(0, ids(x).view(-1)).view(len(x), -1, 1), **linear(), w=parameter(7)
    ),
    "gather of columns": Small(lambda m, x: torch.gather(m.w, 0, ids(x)[:, :3]).cos(), w=parameter(7, 4)),
    "gather of copies": Small(
        lambda m, x: expand(x, m.w).gather(1, ids(x)[..., None].expand(-1, -1, 4)).cos(), w=parameter(7, 4)
    ),
    "take": Small(lambda m, x: m.w.take(ids(x)) + torch.take(m.v, ids(x) - 7).cos(), w=parameter(7), v=parameter(2, 4)),
    "take_along_dim": Small(
        lambda m, x: torch.take_along_dim(m.w[None], ids(x)[..., None], 1).cos() + m.v.take_along_dim(
            torch.tensor([1, 0, 1, 1])), w=parameter(7, 4), v=parameter(2, 1),
    ),
    "columns": Small(lambda m, x: m.w[:, ids(x)].permute(1, 2, 0).cos() + m.w[..., ids(x)[:, 0]].T[:, None],
        w=parameter(4, 7)),
    "columns of matrices": Small(
        lambda m, x: m.w[:, :, ids(x), 1].permute(2, 3, 0, 1).cos().flatten(1)
        * m.w[:, :, ids(x)[:, 0]].sum((0, 1, 3))[:, None],
        w=parameter(2, 3, 7, 2),
    ),
    "columns by masks of several axes": Small(
        lambda m, x: (m.linear(x)[..., :1] * torch.cat([m.w[..., SOME], m.v[..., SOME][1], m.v[:, SOME][2]])).cos(),
        **linear(), w=parameter(4, 4), v=parameter(4, 4, 4),
    ),
    "columns apart": Small(
        lambda m, x: (m.linear(x)[:, :3, :1, None] * m.w[:, SEVERAL, :, SEVERAL][:, :, 1:]).cos() * x[:, :3, :, None],
        **linear(), w=parameter(4, 4, 4, 4),
    ),
    "no index": Small(lambda m, x: m.linear(x) * m.w[()], **linear(), w=parameter(4)),
    "selected columns": Small(
        lambda m, x: m.w.index_select(1, ids(x)[:, 0]).T.cos() + m.v.index_select(2, ids(x)[:, 1]).sum((0, 1))[:, None],
        w=parameter(4, 7), v=parameter(2, 3, 7),
    ),
    "a number in the places of a mask": Small(
        lambda m, x: m.linear(x).masked_fill(x > 0, m.w).cos(), **linear(), w=parameter()
    ),
    "attention with a position of its own": Small(
        lambda m, x: m.attention(x, m.linear(x), x, key_padding_mask=(x[..., 0] > 1) & (x[..., 1] > 0))[0],
        **linear(), attention=nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
    ),
    "attention with a position of zeros, and another, masked": Small(
        lambda m, x: m.attention(x, x, x, attn_mask=torch.ones(6, 6).triu(1).bool())[0],
        attention=nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ),
    "attention to what came before, and zeros": Small(
        lambda m, x: m.attention(x, x, x, attn_mask=torch.ones(6, 6).triu(1).bool(), is_causal=True,
            need_weights=False)[0],
        attention=nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True),
    ),
    "a state of all": Small(
        lambda m, x: m.layer(x, m.w.expand(1, len(x), 3))[0] + m.layer(x, m.w.cos().repeat(1, len(x), 1))[0].cos(),
        layer=nn.GRU(4, 3, batch_first=True), w=parameter(3),
    ),
    "first tokens, time first": Small(
        lambda m, x: m.linear(torch.cat([one.expand(1, len(x), 4) for one in (m.v, m.w)] + [x.transpose(0, 1)]))
        .cos().transpose(0, 1),
        **linear(), w=parameter(4), v=parameter(1, 4),
    ),
}  # fmt: skip


@pytest.mark.few(60)
@pytest.mark.parametrize("size", [1, 3, 4, 6, 7])
@pytest.mark.parametrize("name", _MODELS)
def test_exact(name: str, size: int) -> None:
    """Also with as many examples as features (4), positions (6) or rows of a table (7); forwards it is torch's own."""
    model, data = _MODELS[name], batch(size, 6, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(5, 6, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    torch.testing.assert_close(found.losses, square(model, data).detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["a spectral layer", "einsum of chosen experts", "the parameter on the left", "columns"]
)
def test_exact_in_checkpoints(name: str, use_reentrant: bool) -> None:
    """Twice, with the same weights."""
    inner = _MODELS[name]

    def function(m: Any, x: Tensor) -> Tensor:
        x = m.before(x)
        made = [checkpoint(m.inner, one, use_reentrant=use_reentrant).flatten(1) for one in (x, x.cos())]
        return torch.stack(made).prod(0)

    model, data = Small(function, before=nn.Linear(4, 4), inner=inner), batch(4, 6, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(5, 6, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: torch.mm(x[:, 0], w),
        lambda w, x: (w @ x.mT).mT,
        lambda w, x: torch.tensordot(x, w, dims=1),
        lambda w, x: torch.einsum("btd,de", x, w),
        lambda w, x: torch.einsum("btd,de,bse->bts", x, w, x),
    ],
)
def test_no_gradient_is_formed_of_what_is_a_product_of_matrices(function: Any) -> None:
    model = Small(lambda m, x: function(m.w, m.linear(x)).cos(), linear=nn.Linear(40, 40), w=parameter(40, 40))
    (factors,) = record(model, square, batch(3, 6, 40)).factors["w"]
    assert isinstance(factors, Outer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_torch_has_it_under_autocast(dtype: torch.dtype) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("btd,de", m.linear(x), m.w) + torch.tensordot(x, m.w, dims=1).mT + (m.w @ x.mT)

    model = Small(function, linear=nn.Linear(4, 4), w=parameter(4, 4)).to(dtype)
    data = {"x": batch(4, 6, 4)["x"].to(dtype)}
    found = record(model, square, data)
    assert relative_error(found, loop(model, square, data)) <= 0.03
    torch.testing.assert_close(found.losses, square(model, data).detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "angles", [torch.outer, lambda places, w: torch.einsum("i,j->ij", places, w), lambda places, w: places[:, None] * w]
)
def test_what_sums_nothing_keeps_its_bits_under_autocast(angles: Any) -> None:
    """Learnt frequencies of rotations: of a thousandth position 16 bits would leave nothing."""

    def function(m: Any, x: Tensor) -> Tensor:
        made: Tensor = m.linear(x)
        with torch.autocast("cpu", torch.bfloat16):
            return made * angles(torch.arange(1000.0), m.w).cos()

    model, data = Small(function, linear=nn.Linear(4, 4), w=parameter(4)).float(), batch(3, 1000, 4)["x"].float()
    found = record(model, square, {"x": data})
    assert relative_error(found, loop(model, square, {"x": data})) <= 1e-5
    torch.testing.assert_close(found.losses, square(model, {"x": data}).detach())


@pytest.mark.parametrize("name", ["a spectral layer", "a long convolution", "learnt rotations"])
def test_complex_numbers_are_multiplied_as_they_are_under_autocast(name: str) -> None:
    inner = copy.deepcopy(_MODELS[name]).float()

    def function(m: Any, x: Tensor) -> Tensor:
        made: Tensor = m.inner(m.before(x))
        with torch.autocast("cpu", torch.bfloat16):
            return made + m.inner(x)

    model = Small(function, before=nn.Linear(4, 4), inner=inner).float()
    data = {"x": batch(4, 6, 4)["x"].float()}
    found = record(model, square, data, certificate=preflight(model, square, {"x": batch(5, 6, 4)["x"].float()}))
    assert relative_error(found, loop(model, square, data)) <= 0.03
    torch.testing.assert_close(found.losses, square(model, data).detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: torch.einsum("btd,be->bte", x, w.expand(len(x), 4)[:, :3].flip(0)),
        lambda w, x: torch.einsum("btd,de->bte", x.flip(0), torch.diag(w)),
        lambda w, x: torch.outer(x.mean((1, 2)).cumsum(0), w),
        lambda w, x: torch.tensordot(x.softmax(0), torch.diag(w), dims=1),
        lambda w, x: w.take(ids(x).sort(0).values),
        lambda w, x: (torch.fft.fft(x, dim=0) * w).real,
    ],
)
def test_what_is_not_known_to_be_exact_is_refused(function: Any) -> None:
    model = Small(lambda m, x: function(m.w, m.linear(x)), linear=nn.Linear(4, 4), w=parameter(4))
    with pytest.raises(HfDpError) as caught:
        preflight(model, square, batch(4, 6, 4))
    assert isinstance(caught.value, UnsupportedModelError) or "example" in str(caught.value)
