"""Products of factors, in at least float32: on tensor cores where 16-bit factors give that there, else after a cast."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.waiting import answers_at_once

# The longest sums that are left to one product: rounding grows with their length.
BLOCK = 4096
# The same of what `inner` makes: half as long would take more time, twice as long leaves more of each norm in doubt.
SHORT_BLOCK = 1024
# And of what it leaves to tensor cores, where rounding grows faster.
CUT_BLOCK = 512
# Of products of blocks and what is copied for them so many numbers are made at once, where there are so many blocks.
_TOGETHER, _FEWEST_TOGETHER = 1 << 26, 5
# So few positions decide nothing.
_FEW = 16
# To fewer columns than these a CPU's kernels take as long as to as many.
_NARROW = 16
_EXACT = (torch.bfloat16, torch.float16)


def is_instantiated(numbers: int, width: int, positions: int, on_cores: bool) -> bool:
    """Whether of one use gradients are kept rather than their factors.

    Where they are fewer numbers, which is also less arithmetic. Gram: T^2 (p + d) multiply-adds and T (p + d) numbers
    kept; instantiated: T p d and p d numbers, of which norm and sum are read without a further product. On tensor cores
    a sum of factors takes two products, and Gram matrices take time to read: there up to twice as many numbers, which
    are float32 beside 16 bits, so up to four times the bytes, are kept to save it.

    Args:
        numbers: of one example's gradient, p d.
        width: numbers in each position's factors, p + d, an id counting one.
        positions: T.
        on_cores: whether the factors are multiplied on tensor cores.
    """
    return positions >= instantiated_from(numbers, width, on_cores)


def instantiated_from(numbers: int, width: int, on_cores: bool) -> int:
    """From how many positions on, the others as of `is_instantiated`; on tensor cores 0 where these are few."""
    positions = -(-numbers // ((2 if on_cores else 1) * width))
    return 0 if on_cores and positions <= _FEW else positions


def inner(left: Tensor, right: Tensor, block: int | None = None, known: Tensor | None = None) -> Tensor:
    """The products (B, m, n) of left (B, m, k) and right (B, k, n), in at least float32.

    Args:
        left: of any floating-point dtype, as is `right`.
        right: beside it.
        block: how long the sums may be that are left to one product, if not as long as of norms.
        known: what is added to, in place.
    """
    if known is None and _is_narrow(left.shape[1], right.shape[2], left.device):
        return inner(right.mT, left.mT, block).mT.contiguous()
    if are_multiplied_as_they_are(left, right):
        return _on_cores(left, right, block or CUT_BLOCK, known)
    total = known
    for one, other in zip(_blocks(left, block or SHORT_BLOCK, 2), _blocks(right, block or SHORT_BLOCK, 1), strict=True):
        one, other = accumulation(one), accumulation(other)
        total = torch.bmm(one, other) if total is None else total.baddbmm_(one, other)
    assert total is not None
    return total


def blocks_at_once(batch: int, height: int, width: int, blocks: int, block: int = CUT_BLOCK) -> int:
    """How many blocks of a sum are multiplied together: each by itself takes longer to start on than to make.

    Where it does not, the copies that this takes would cost more; of these no more than some hundred MiB are made.

    Args:
        batch: B of a product (B, m, n), of which `height` is m and `width` n.
        blocks: of what is summed, in all.
        block: how long each is.
    """
    # Products are float32, and copies 16 bits.
    numbers = batch * (height * width + (height + width) * block // 2)
    together = min(blocks, _TOGETHER // max(1, numbers))
    return together if together >= _FEWEST_TOGETHER else 1


def _on_cores(left: Tensor, right: Tensor, block: int, known: Tensor | None) -> Tensor:
    """As of `inner`."""
    batch, height, length, width = (*left.shape, right.shape[2])
    if length <= block and known is None:
        return _to_float32(left, right)
    whole, total = length // block * block, known
    step = block * blocks_at_once(batch, height, width, whole // block, block)
    ends = sorted({*range(step, whole, step), whole, length} - {0}) or [0]
    for begin, end in zip([0, *ends], ends, strict=False):
        one, other = left[..., begin:end], right[:, begin:end]
        if end - begin > block:
            rows = _in_blocks(one, block)
            columns = rows if _is_same(one, other.mT) else _in_blocks(other.mT, block)
            summed: Tensor = _to_float32(rows, columns.mT).view(batch, (end - begin) // block, height, width).sum(1)
            total = summed if total is None else total.add_(summed)
        elif total is None:
            total = _to_float32(one, other)
        else:
            _add_(total, one, other)
    assert total is not None
    return total


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """(B k, m, block) from `values` (B, m, k block), as a view where the last axis is no row in memory."""
    blocks: Tensor = values.unflatten(2, (-1, block)).transpose(1, 2)
    return blocks.flatten(0, 1)


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Whether they are one tensor, laid out alike."""
    return first.data_ptr() == second.data_ptr() and (first.shape, first.stride()) == (second.shape, second.stride())


def times(rows: Tensor, matrix: Tensor) -> Tensor:
    """The products (..., n) of `rows` (..., k) and `matrix` (k, n), of one dtype, and in it."""
    # In 16 bits kernels may round otherwise beside other rows: there it stays as autograd would do it.
    if rows.dtype.itemsize < 4 or not _is_narrow(rows.shape[:-1].numel(), matrix.shape[1], rows.device):
        return rows @ matrix
    return (matrix.T @ rows.flatten(0, -2).T).T.contiguous().view(*rows.shape[:-1], matrix.shape[1])


def _is_narrow(height: int, width: int, device: torch.device) -> bool:
    """Whether a product takes a half or a third of the time with its sides exchanged, and transposed afterwards."""
    return width < _NARROW <= height and answers_at_once(device)


def _blocks(values: Tensor, block: int, axis: int) -> Sequence[Tensor]:
    """`values` along an axis, at most `block` at once."""
    return (values,) if values.shape[axis] <= block else values.split(block, axis)


def add_weighted_(out: Tensor, left: Tensor, right: Tensor, coefficients: Tensor, scale: float) -> None:
    """Adds `scale` x the sum over i of coefficients[i] left[i]^T right[i] to `out` (p, d) in place, in its dtype.

    Args:
        out: float32 or float64.
        left: (B, T, p).
        right: (B, T, d).
        coefficients: (B,).
        scale: of all.
    """
    weights = coefficients.to(out.dtype)[:, None, None]
    is_left = left.shape[2] <= right.shape[2]
    if out.dtype == torch.float32 and left.dtype == torch.bfloat16 and are_multiplied_as_they_are(left, right):
        small, other = (left, right) if is_left else (right, left)
        weighted = small * weights
        high = weighted.to(small.dtype)
        for part in (high, weighted.sub_(high).to(small.dtype)):
            rows = (_blocks(side.flatten(0, 1), BLOCK, 0) for side in (part, other))
            for one, two in zip(*rows, strict=True):
                _add_(out if is_left else out.T, one.T, two, scale)
        return
    first, second = left.to(out.dtype), right.to(out.dtype)
    first, second = (first * weights, second) if is_left else (first, second * weights)
    out.addmm_(first.flatten(0, 1).T, second.flatten(0, 1), alpha=scale)


def are_multiplied_as_they_are(left: Tensor, right: Tensor) -> bool:
    """Whether a product of these is made on tensor cores."""
    return left.dtype == right.dtype and left.dtype in _EXACT and _has_tensor_cores(left.device, left.dtype)


@functools.cache
def _has_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of `dtype` come out in float32 on `device`, without a cast and as after one."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    left, right = (torch.linspace(0.3, 1.7, 2048, device=device).view(shape).to(dtype) for shape in _SHAPES)
    with torch.no_grad(), full_precision(device):
        try:
            found = _to_float32(left, right)
        except (TypeError, RuntimeError, NotImplementedError):
            return False
        return torch.allclose(found, torch.bmm(left.float(), right.float()), rtol=1e-5, atol=0)


_SHAPES = ((1, 8, 256), (1, 256, 8))


def _to_float32(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left, right, out_dtype=torch.float32)


def _add_(out: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Adds `scale` x left (m, k) right (k, n) to `out` (m, n), float32; or of batches (B, m, k) and (B, k, n)."""
    if _adds_in_place(out.device, left.dtype, out.dim()):
        _add_in_place(out, left, right, scale)
    elif out.dim() == 3:
        out.add_(_to_float32(left, right), alpha=scale)
    else:
        out.add_(_to_float32(left[None], right[None])[0], alpha=scale)


@functools.cache
def _adds_in_place(device: torch.device, dtype: torch.dtype, dimensions: int) -> bool:
    """Whether a product is added to a float32 sum as it is made, and a matrix whichever way it lies in memory."""
    left, right = (torch.linspace(0.3, 1.7, 2048, device=device).view(shape[1:]).to(dtype) for shape in _SHAPES)
    expected = (left.float() @ right.float()).mul_(2).add_(1)
    sums = [torch.ones(8, 8, device=device), torch.ones(8, 8, device=device).T]
    if dimensions == 3:
        left, right = torch.stack([left, -left]), torch.stack([right, right])
        sums = [torch.ones(2, 8, 8, device=device)]
        expected = torch.stack([expected, 2 - expected])
    try:
        for out in sums:
            _add_in_place(out, left, right, 2.0)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return all(torch.allclose(out, expected, rtol=1e-5, atol=0) for out in sums)


def _add_in_place(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    add = torch.baddbmm if out.dim() == 3 else torch.addmm
    add(out, left, right, out_dtype=torch.float32, alpha=scale, out=out)
