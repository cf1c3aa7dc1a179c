"""What becomes of variances where numbers are moved and none is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dp.parts.re_attention.moments import Moments, Tracked, Variance
from hf_dp.per_example.watched import tensors_in

_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def same(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    """The numbers themselves, in another dtype, on another device or with some left out."""
    x = args[0] if args else kwargs["input"]
    # A cast may give a parameter itself, whose noise in later passes is another.
    if output is not x:
        m.put(output, m.of(x))


def moved(m: Moments, func: Any, output: Any, args: _Args, kwargs: _Kwargs) -> None:
    """Numbers in other places, or some of them."""
    x, *rest = args
    tracked = m.of(x)
    if tracked is None:
        return
    # Features that share a variance are no copy of it; a view of them would not always be possible.
    move: Any = torch.Tensor.reshape if func is torch.Tensor.view else func
    noise = m.variance(x)
    assert noise is not None
    own = tensors_in(move(noise.own, *rest, **kwargs))
    shared = [None] * len(own) if noise.shared is None else tensors_in(move(noise.shared, *rest, **kwargs))
    for one, mine, common in zip([output] if isinstance(output, Tensor) else output, own, shared, strict=True):
        m.put(one, Tracked(Variance(mine, common), is_turned=tracked.is_turned))


def joined(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    """Several tensors in one."""
    parts = args[0] if args else kwargs["tensors"]
    options = {k: v for k, v in kwargs.items() if k != "tensors"}
    known_of = [m.of(part) for part in parts]
    noises = m.variances(*parts)
    axis: Any = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    is_last = axis % output.dim() == output.dim() - 1
    if m.isotropic and func is not torch.stack and is_last:
        # Without copies of one number for each feature, as of the halves that rotary embeddings swap.
        shares = [part.shape[-1] / output.shape[-1] for part in parts]
        known = [(noise, share) for noise, share in zip(noises, shares, strict=True) if noise is not None and share]
        m.put_sum(output, *(noise.each(m.over_features) * share for noise, share in known))
    elif m.isotropic and is_last:
        # As of the pairs of neighbours that rotary embeddings may turn instead.
        shares = [noise.each(_narrow) * (1 / len(parts)) for noise in noises if noise is not None]
        m.put_sum(output, *(share.each(lambda part: part[..., None]) for share in shares))
    elif any(noise is not None for noise in noises):
        if m.isotropic:
            noises = [None if noise is None else noise.each(m.over_features) for noise in noises]
            parts = [part[..., :1] for part in parts]
        merged = _merged(lambda *made: func(made, *args[1:], **options), noises, parts)
        m.put(output, Tracked(merged.expanded(output), is_turned=is_last and _are_turned(known_of)))


def _narrow(values: Tensor) -> Tensor:
    """One number of those that the last axis shares."""
    return values[..., :1] if values.dim() and values.stride(-1) == 0 else values


def _are_turned(pair: Sequence[Tracked | None]) -> bool:
    """Whether of two parts the first was negated, as in (-y, x)."""
    if len(pair) != 2 or pair[0] is None or pair[1] is None:
        return False
    first, second = pair[0].slope, pair[1].slope
    return first is not None and second is None and bool(first().eq(-1).all())


def chosen(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    """torch.where."""
    if len(args) < 3:
        return  # the places where a condition holds
    where, x, y = args
    noises = m.variances(x, y)
    if any(noise is not None for noise in noises):
        nothing = torch.zeros((), device=where.device)
        m.put_sum(output, _merged(lambda one, two: torch.where(where, one, two), noises, (nothing, nothing)))


def masked(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    """Some numbers replaced by one without noise."""
    noise = m.variance(args[0])
    if noise is not None:
        m.put_sum(output, noise.each(lambda v: v.masked_fill(args[1], 0.0)))


def assigned(m: Moments, func: Any, output: Any, args: _Args, kwargs: _Kwargs) -> None:
    """tensor[index] = source."""
    target, index, source = args

    def assigned(before: Tensor, noise: Tensor) -> Tensor:
        made = before.clone()
        made[index] = noise
        return made

    noises = m.variances(target, source)
    if any(noise is not None for noise in noises):
        nothing = torch.zeros((), device=target.device)
        m.put(target, Tracked(_merged(assigned, noises, (target, nothing))))


def copied(m: Moments, func: Any, output: Tensor, args: _Args, kwargs: _Kwargs) -> None:
    """index_copy_(dim, index, source), as static caches do."""
    target, axis, index, source = args
    noises = m.variances(target, source)
    if any(noise is not None for noise in noises):

        def copied(before: Tensor, noise: Tensor) -> Tensor:
            return before.index_copy(axis, index, noise.contiguous())

        m.put(output, Tracked(_merged(copied, noises, (target, source))))


def _merged(function: Callable[..., Tensor], noises: Sequence[Variance | None], values: Sequence[Tensor]) -> Variance:
    """The function of several noises, part by part, with zeros like its value where one has none."""

    def filled(parts: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = zip(parts, values, strict=True)
        return [torch.zeros(value.shape, device=value.device) if part is None else part for part, value in pairs]

    shared = [None if noise is None else noise.shared for noise in noises]
    own = function(*filled([None if noise is None else noise.own for noise in noises]))
    return Variance(own, None if all(part is None for part in shared) else function(*filled(shared)))
