"""What becomes of variances in each operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import hf_dp.parts.re_attention.moves as moves
from hf_dp.parts.re_attention.moments import Moments, Rule, Tracked, Variance, wide

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


# --- linear maps: Var(W x + b) = Var(x) W^2 + x^2 Var(W) + Var(b), at noisy x and W, whose squares have Var(x) Var(W) -


def _linear(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, weight, bias = _named(args, kwargs, "input", "weight", "bias")
    _mapped(m, output, x, weight.detach(), m.variance(weight), bias)


def _addmm(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    bias, x, weight = _named(args, kwargs, "input", "mat1", "mat2")
    _transposed(m, output, x, weight, bias)


def _matmul(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, other = args[:2]
    if other.dim() == 2 and x.dim() >= 2:
        _transposed(m, output, x, other, None)
    elif m.of(x) is not None or m.of(other) is not None:
        # Rotary frequencies are products without noise; attention outside the interface is not followed.
        m.lost.add("matmul")


def _transposed(m: Moments, output: Tensor, x: Tensor, weight: Tensor, bias: Any) -> None:
    of_weight = m.variance(weight)
    _mapped(m, output, x, weight.detach().T, None if of_weight is None else of_weight.each(lambda v: v.T), bias)


def _mapped(m: Moments, output: Tensor, x: Tensor, weight: Tensor, in_weight: Variance | None, bias: Any) -> None:
    """Noise of x W^T + b: x (..., d), W (p, d)."""
    noise, shift = m.variances(x, bias)
    of_weight = None if in_weight is None else in_weight.total
    parts = []
    if m.isotropic:
        outputs = weight.shape[0]
        if noise is not None:
            noise = noise.each(m.over_features)
            # Of a transposed view the norm is the same, and slow.
            stored = weight if weight.is_contiguous() else weight.T
            factor = torch.linalg.vector_norm(wide(stored)).square() / outputs
            parts.append(noise * factor)
        if of_weight is not None:
            parts.append(Variance(m.energy(x) * m.over_features(of_weight).mean()))
        if shift is not None:
            parts.append(_in_common(m.over_features(shift.total).mean()))
    else:
        squares = wide(weight).square()
        if noise is not None:
            parts.append(noise.each(lambda v: v @ squares.T))
        if of_weight is not None:
            second = wide(x.detach()).square()
            is_shared = of_weight.stride(1) == 0
            parts.append(
                Variance(second.sum(-1, keepdim=True) * of_weight[:, 0] if is_shared else second @ of_weight.T)
            )
        if shift is not None:
            parts.append(_in_common(shift.total))
    m.put_sum(output, *parts)


def _in_common(variance: Tensor) -> Variance:
    """Of noise that is added at every position."""
    return Variance(torch.zeros_like(variance), variance)


def _embedding(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    ids, weight = _named(args, kwargs, "input", "weight")
    of_weight = m.variance(weight)
    if of_weight is not None:
        m.put_sum(output, Variance(F.embedding(ids, of_weight.total[:, :1].contiguous())))


def _convolution(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, weight, bias, *rest = _named(args, kwargs, "input", "weight", "bias", "stride", "padding", "dilation", "groups")
    noise, of_weight, shift = m.variances(x, weight, bias)
    options = [default if value is None else value for value, default in zip(rest, (1, 0, 1, 1), strict=True)]
    parts = []
    if noise is not None:
        squares = wide(weight.detach()).square()
        parts.append(noise.each(lambda v: F.conv2d(v, squares, None, *options)))
    if of_weight is not None:
        second = wide(x.detach()).square()
        parts.append(Variance(F.conv2d(second, of_weight.total.contiguous(), None, *options)))
    if shift is not None:
        parts.append(_in_common(shift.total[:, None, None]))
    m.put_sum(output, *(part.each(lambda v: v.mean(-3, keepdim=True) if m.isotropic else v) for part in parts))


# --- normalisation --------------------------------------------------------------------------------------------


def _layer_norm(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, _, weight, bias, eps = _named(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    mean = wide(x.detach()).mean(-1, keepdim=True)
    # As good as two passes here, and far faster than torch.var.
    power = (m.energy(x) / x.shape[-1] - mean.square()).clamp_min(0) + (1e-5 if eps is None else eps)
    _normalized(m, output, x, weight, bias, power, mean)


def _rms_norm(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, _, weight, eps = _named(args, kwargs, "input", "normalized_shape", "weight", "eps")
    power = m.energy(x) / x.shape[-1] + (torch.finfo(x.dtype).eps if eps is None else eps)
    _normalized(m, output, x, weight, None, power, 0.0)


def _normalized(m: Moments, output: Tensor, x: Tensor, weight: Any, bias: Any, power: Tensor, mean: Any) -> None:
    """Noise of w (x - mean) / sqrt(power) + b."""
    noise, of_weight, shift = m.variances(x, weight, bias)
    parts = []
    if noise is not None:
        factor = 1 / power if weight is None else m.over_features(wide(weight.detach()).square()) / power
        parts.append(noise.each(m.over_features) * factor)
    if of_weight is not None:
        normal = 1.0 if m.isotropic else (wide(x.detach()) - mean).square() / power
        parts.append(Variance(normal * m.over_features(of_weight.total)))
    if shift is not None:
        parts.append(_in_common(m.over_features(shift.total)))
    m.put_sum(output, *parts)


# --- elementwise functions, linearised ----------------------------------------------------------------------------


def _unary(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, rest = args[0], args[1:]
    tracked = m.of(x)
    if tracked is None:
        return
    value, before = x.detach(), tracked.slope

    def slope() -> Tensor:
        # Checkpointing's own hooks would take this for part of the layer, and run it again.
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, Tensor.detach):
            leaf = wide(m.sampled(value)).requires_grad_()
            made = func(leaf, *rest, **{k: v for k, v in kwargs.items() if k not in ("inplace", "input")})
            (own,) = torch.autograd.grad(made.sum(), leaf)
        return own if before is None else own * before()

    m.put(output, replace(tracked, slope=slope))


def _negated(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x = args[0] if args else kwargs["input"]
    tracked = m.of(x)
    if tracked is not None:
        before = _slope(tracked, x)
        m.put(output, replace(tracked, slope=lambda: -before()))


def _mean(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    _added_up(m, output, args[0], kwargs.get("dim", args[1] if len(args) > 1 else None), kwargs, mean=True)


def _sum_over(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    _added_up(m, output, args[0], kwargs.get("dim", args[1] if len(args) > 1 else None), kwargs, mean=False)


def _added_up(m: Moments, output: Tensor, x: Tensor, axis: Any, kwargs: _Kwargs, *, mean: bool) -> None:
    """Of sums over positions or experts. One over features is a statistic, whose own noise is not followed."""
    axes = [] if axis is None else [a % x.dim() for a in ([axis] if isinstance(axis, int) else axis)]
    noise = m.variance(x) if axes and x.dim() - 1 not in axes else None
    if noise is not None:
        count = math.prod(x.shape[a] for a in axes) if mean else 1
        m.put_sum(output, noise.each(lambda v: v.sum(axes).reshape(output.shape) / count**2))


def _sum(sign: float) -> Rule:
    def rule(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
        x, y = _pair(args)
        factor = float(kwargs.get("alpha", 1.0)) * sign
        first, second = m.of(x), m.of(y)
        if first is not None and second is not None and first.variance is second.variance:
            one, two = _slope(first, x), _slope(second, y)
            m.put(output, replace(first, slope=lambda: one() + factor * two()))
        elif first is not None and second is not None and (first.is_turned or second.is_turned):
            # By any angle. The covariance that this gives a pair is not followed; the variance of both in the middle
            # is what leaves the noise of scores, as the scores, to differences of positions alone.
            squares = [m.over_features(wide(_slope(*one)()).square()) for one in ((first, x), (second, y))]
            noise = first.variance.each(m.over_features) + second.variance.each(m.over_features)
            m.put_sum(output, noise * (sum(squares) / 2))
        elif first is not None and second is not None:
            noise, another = (v.each(m.over_features) for v in m.variances(x, y) if v is not None)
            m.put_sum(output, noise, another if abs(factor) == 1 else another * factor**2)
        elif first is not None:
            _shifted(m, output, first)
        elif second is not None:
            before = _slope(second, y)
            _shifted(m, output, second if factor == 1 else replace(second, slope=lambda: factor * before()))

    return rule


def _reversed(rule: Rule) -> Rule:
    return lambda m, func, output, args, kwargs: rule(m, func, output, args[::-1], kwargs)


def _shifted(m: Moments, output: Tensor, tracked: Tracked) -> None:
    if tracked.variance.own.shape == output.shape:
        m.put(output, tracked)
    elif tracked.slope is None:
        m.put_sum(output, tracked.variance)
    else:
        squares = m.over_features(wide(tracked.slope()).square())
        m.put_sum(output, tracked.variance.each(m.over_features) * squares)


def _product(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, y = _pair(args)
    first, second = m.of(x), m.of(y)
    if first is None and second is None:
        return
    if first is None:
        x, y, first, second = y, x, second, first
    assert first is not None
    if second is None:
        _scaled(m, output, x, first, wide(y.detach()) if isinstance(y, Tensor) else torch.tensor(float(y)))
    elif first.variance is second.variance:
        one, two = _slope(first, x), _slope(second, y)
        value, other = x.detach(), y.detach()
        m.put(output, replace(first, slope=lambda: one() * m.sampled(other) + two() * m.sampled(value)))
    else:
        noise, another = (v.each(m.over_features) for v in m.variances(x, y) if v is not None)
        square, other_square = (m.over_features(wide(m.sampled(t.detach())).square()) for t in (x, y))
        m.put_sum(output, _half_shared(noise * other_square + another * square))


def _half_shared(variance: Variance) -> Variance:
    # Times numbers that differ between positions, in sign too, common noise is less common, and how much less depends
    # on the numbers. Kept whole, deep keys of small random Llama and Gemma 2 models have 1.1 and 1.5 of the drawn
    # variance, with none of it 0.8 of it both, with half of it 0.9.
    if variance.shared is None:
        return variance
    half = variance.shared / 2
    return Variance(variance.own + half, half)


def _quotient(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    x, y = _pair(args)
    if m.of(x) is not None and m.of(y) is None:
        factor = 1 / (wide(y.detach()) if isinstance(y, Tensor) else torch.tensor(float(y)))
        _scaled(m, output, x, m.of(x), factor)  # type: ignore[arg-type]
    elif m.of(x) is not None or m.of(y) is not None:
        m.lost.add("div")


def _scaled(m: Moments, output: Tensor, x: Tensor, tracked: Tracked, factor: Tensor) -> None:
    factor = factor.to(tracked.variance.own.device)
    if tracked.variance.own.shape == output.shape:
        part, before = (m.sampled(factor) if factor.dim() and factor.shape[-1] > 1 else factor), tracked.slope
        m.put(output, replace(tracked, slope=lambda: part if before is None else part * before()))
    else:
        noise = m.variance(x)
        assert noise is not None
        squares = m.over_features(factor.square())
        m.put_sum(output, noise.each(m.over_features) * squares)


def _slope(tracked: Tracked, tensor: Tensor) -> Callable[[], Tensor]:
    return tracked.slope or (lambda: torch.ones((), device=tensor.device))


def _nothing(m: Moments, func: Any, output: Any, args: _Args, kwargs: _Kwargs) -> None:
    """Statistics, scores and choices, whose own noise is not followed."""


# --- the table ----------------------------------------------------------------------------------------------------


def _pair(args: _Args) -> tuple[Any, Any]:
    return args[0], args[1]


def _named(args: _Args, kwargs: _Kwargs, *names: str) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _both(*names: str) -> list[Any]:
    """The function and the method of each name."""
    found = [getattr(place, name, None) for place in (torch, torch.Tensor, F) for name in names]
    return [f for f in found if f is not None]


def _all(rule: Rule, functions: Iterable[Any]) -> dict[Any, Rule]:
    return dict.fromkeys(functions, rule)


_SQUARES = {*_both("pow", "square"), torch.Tensor.__pow__}
_METHODS = operator.attrgetter(*(f"__{n}__" for n in ("add", "radd", "iadd", "sub", "isub", "mul", "rmul", "imul")))
_add, _radd, _iadd, _sub, _isub, _mul, _rmul, _imul = _METHODS(torch.Tensor)

RULES = MappingProxyType(
    {
        F.linear: _linear,
        torch.addmm: _addmm,
        **_all(_matmul, [torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm]),
        F.embedding: _embedding,
        torch.conv2d: _convolution,
        F.layer_norm: _layer_norm,
        F.rms_norm: _rms_norm,
        **_all(_unary, _both("gelu", "silu", "relu", "tanh", "sigmoid", "erf", "exp", "softplus", "mish")),
        **_all(_unary, _both("rsqrt", "sqrt")),
        **_all(_unary, [*_SQUARES, F.leaky_relu, F.elu, F.hardtanh, F.hardswish]),
        **_all(_negated, [*_both("neg", "negative"), torch.Tensor.__neg__]),
        **_all(_mean, _both("mean")),
        **_all(_sum_over, _both("sum")),
        **_all(_sum(1.0), [*_both("add", "add_"), _add, _radd, _iadd]),
        **_all(_reversed(_sum(-1.0)), [torch.rsub, torch.Tensor.__rsub__]),
        **_all(_sum(-1.0), [*_both("sub", "sub_"), _sub, _isub]),
        **_all(_product, [*_both("mul", "mul_"), _mul, _rmul, _imul]),
        **_all(_quotient, [*_both("div", "div_"), torch.Tensor.__truediv__]),
        **_all(moves.same, _both("dropout", "contiguous", "clone", "detach", "alpha_dropout")),
        torch.Tensor.data.__get__: moves.same,  # type: ignore[attr-defined]
        **_all(
            moves.same,
            [
                getattr(torch.Tensor, n)
                for n in ("to", "float", "half", "bfloat16", "double", "type_as", "requires_grad_")
            ],
        ),
        **_all(moves.moved, _both("reshape", "transpose", "permute", "unsqueeze", "squeeze", "split", "chunk")),
        **_all(moves.moved, _both("flatten", "unflatten", "narrow", "select", "swapaxes", "index_select", "roll")),
        **_all(moves.moved, _both("unbind", "t", "tile", "movedim", "repeat_interleave")),
        **_all(moves.moved, [getattr(torch.Tensor, n) for n in ("view", "expand", "expand_as", "repeat")]),
        torch.Tensor.__getitem__: moves.moved,
        **_all(moves.moved, [torch.Tensor.T.__get__, torch.Tensor.mT.__get__]),  # type: ignore[attr-defined]
        **_all(moves.joined, [torch.cat, torch.concat, torch.stack]),
        torch.where: moves.chosen,
        **_all(moves.masked, _both("masked_fill", "masked_fill_")),
        torch.Tensor.__setitem__: moves.assigned,
        torch.Tensor.index_copy_: moves.copied,
        **_all(_nothing, _both("var", "std", "softmax", "log_softmax", "norm", "amax", "amin", "max")),
        **_all(_nothing, _both("zeros_like", "ones_like", "empty_like", "full_like", "argmax", "logsumexp")),
        **_all(_nothing, [torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full]),
        **_all(_nothing, [F.cross_entropy, F.nll_loss, F.mse_loss, F.binary_cross_entropy_with_logits, F.one_hot]),
    }
)
