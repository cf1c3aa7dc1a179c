"""Operations that hide the axis of the examples, written out in operations that do not.

Attention of `nn.MultiheadAttention`, products in other notations. Others hide nothing, and are few steps of what has a
rule: PReLU, bags of embeddings, distances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.followed.axes import is_mask, is_plainly_folded
from hf_dp.per_example.rules.attention import attention
from hf_dp.per_example.rules.contractions import CONTRACTIONS
from hf_dp.per_example.rules.recurrent import LAYERS
from hf_dp.per_example.sharding import hook_of_shards
from hf_dp.per_example.watched import WatchedParameter


def _sparse_product(first: Any, second: Any, *options: Any) -> Any:
    """Of a parameter, and of data whose columns are positions."""
    if options or not isinstance(first, WatchedParameter) or isinstance(second, WatchedParameter):
        return NotImplemented
    return F.linear(second.t(), first.to_dense()).t()


def _products(input: Tensor, mat2: Tensor) -> Any:
    """Of one parameter's matrices, each with rows of its own: of what each expert sees, all tokens."""
    if isinstance(input, WatchedParameter):
        return NotImplemented
    return torch.stack([rows @ matrix for rows, matrix in zip(input, mat2.unbind(), strict=True)])


def _added_products(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if (beta, alpha) != (1, 1) or input.dim() != 3 or len(input) != len(batch2) or input.shape[1] != 1:
        return NotImplemented
    each = _products(batch1, batch2)
    return each if each is NotImplemented else torch.stack([y + b for y, b in zip(each, input.unbind(), strict=True)])


def _prelu(input: Tensor, weight: Tensor) -> Any:
    slope = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, input * slope)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Of two tensors of data: linear in their products."""
    if isinstance(input1, WatchedParameter) or isinstance(input2, WatchedParameter):
        return NotImplemented
    return F.linear((input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2), weight.flatten(1), bias)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Of bags that all have as many entries: (B, entries)."""
    if offsets is not None or input.dim() != 2 or isinstance(per_sample_weights, WatchedParameter):
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.max(1).values if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)
    if mode == "max":
        return NotImplemented
    is_counted = input.ne(padding_idx % len(weight)).unsqueeze(-1)
    total = (rows * is_counted).sum(1)
    return total if mode == "sum" else total / is_counted.sum(1).clamp(min=1)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if isinstance(input, WatchedParameter) or (use_input_stats and running_mean is not None):
        return NotImplemented  # It would keep a mean over all examples.
    output = F.instance_norm(input, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _by_channel(output, weight, bias, input)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """In eval mode, by statistics that stay as they are."""
    if training:
        return NotImplemented
    output = F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    return _by_channel(output, weight, bias, input)


def _by_channel(values: Tensor, weight: Tensor | None, bias: Tensor | None, given: Tensor) -> Tensor:
    base, along = given._base, (-1, *[1] * (values.dim() - 2))
    is_folded = base is not None and 0 < len(base) < len(given) and is_plainly_folded(given, len(base))
    # Which axis leads through the examples is seen where they have theirs again.
    values = values.unflatten(0, (len(base), -1)) if base is not None and is_folded else values
    values = values if weight is None else values * weight.reshape(along)
    values = values if bias is None else values + bias.reshape(along)
    return values.flatten(0, 1) if is_folded else values


def _distances(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Any:
    """Of rows of data to rows of a parameter."""
    if isinstance(x1, WatchedParameter) or not isinstance(x2, WatchedParameter) or x2.dim() != 2:
        return NotImplemented
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2, p, -1)


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """With no length below `eps`, as torch takes them."""
    dimensions = max(x1.dim(), x2.dim())
    axis = dim - dimensions if dim >= 0 else dim  # of what both become together, so counted from the end
    if -axis > min(x1.dim(), x2.dim()) or x1.shape[axis] != x2.shape[axis]:
        return NotImplemented
    one, other = (x / torch.linalg.vector_norm(x, dim=axis, keepdim=True).clamp_min(eps) for x in (x1, x2))
    return (one * other).sum(axis)


def _rows(input: Tensor, dim: int, index: Tensor) -> Any:
    """Rows of a table, by their numbers."""
    if not isinstance(input, WatchedParameter) or index.dim() != 1:
        return NotImplemented
    return input[index] if dim % input.dim() == 0 else input.transpose(0, dim)[index].transpose(0, dim)


def _columns(input: Tensor, index: Any) -> Any:
    """What all of the first axes have at some numbers of the next: `table[:, numbers]`."""
    parts = index if isinstance(index, tuple) and index else (index,)
    is_known = isinstance(input, WatchedParameter) and any(isinstance(part, Tensor) for part in parts)
    if parts[0] is Ellipsis:
        whole = input.dim() - sum(part.dim() if is_mask(part) else 1 for part in parts[1:])
    else:
        whole = next((k for k, p in enumerate(parts) if not (isinstance(p, slice) and p == slice(None))), 0)
    picks = parts[1 if parts[0] is Ellipsis else whole :]
    if not is_known or whole < 1 or any(part is None or part is Ellipsis or isinstance(part, bool) for part in picks):
        return NotImplemented
    numbers = [k for k, part in enumerate(picks) if not isinstance(part, (slice, int))]
    if any(isinstance(part, slice) for part in picks[numbers[0] : numbers[-1]]):
        return NotImplemented  # What they pick then comes before all else.
    led = input.T if input.dim() == 2 else input.permute(*range(whole, input.dim()), *range(whole))
    return led[picks].movedim(tuple(range(-whole, 0)), tuple(range(whole)))


def _filled(input: Tensor, mask: Tensor, value: Any) -> Any:
    """With a number that is learnt, in places of data."""
    is_known = isinstance(value, WatchedParameter) and not isinstance(input, WatchedParameter)
    return torch.where(mask, value, input) if is_known and value.dtype == input.dtype else NotImplemented


def _gathered(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if index.dim() != input.dim() or isinstance(index, WatchedParameter):
        return NotImplemented
    return _at(input, dim, index, index.shape)


def _taken_along(input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    if isinstance(indices, WatchedParameter):
        return NotImplemented
    if dim is None:
        return input.reshape(-1)[indices.reshape(-1)]
    return _at(input, dim, indices, input.shape) if indices.dim() == input.dim() else NotImplemented


def _at(input: Tensor, dim: int, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """The numbers that an index tells along one axis, and those of their places along the others, so many."""
    places: list[Tensor] = []
    for axis, size in enumerate(sizes):
        own = torch.arange(size, device=index.device).view(-1, *[1] * (len(sizes) - axis - 1))
        places.append(index if axis == dim % len(sizes) else own)
    return input[tuple(places)]


def _taken(input: Tensor, index: Tensor) -> Any:
    return NotImplemented if isinstance(index, WatchedParameter) else input.reshape(-1)[index]


def _copies(input: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """Of what has one entry along the first axis."""
    if not isinstance(repeats, int) or dim is None or not input.dim() or dim % input.dim() or len(input) != 1:
        return NotImplemented
    return input.expand(repeats, *input.shape[1:])


def _written(target: Tensor, index: Any, value: Any) -> Any:
    """One parameter, such as a mask's token, into all places (..., k) of (..., k, *value.shape) that an index picks."""
    parts = index if isinstance(index, tuple) else (index,)
    is_known = isinstance(value, WatchedParameter) and not isinstance(target, WatchedParameter)
    if not is_known or any(part is None or part is Ellipsis or isinstance(part, WatchedParameter) for part in parts):
        return NotImplemented
    while value.dim() and len(value) == 1:
        value = value[0]
    if value.dim() > target.dim() or not target.requires_grad:  # what all examples share is written to elsewhere
        return NotImplemented
    places = torch.zeros(target.shape[: target.dim() - value.dim()], dtype=torch.bool, device=target.device)
    try:
        places[index] = True
    except (IndexError, TypeError):  # which leads into the parameter's own axes
        return NotImplemented
    target.copy_(torch.where(places.view(*places.shape, *[1] * value.dim()), value, target))
    return None


#: operation -> the same by other operations, or NotImplemented for arguments that it does not know.
COMPOSITES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.multi_head_attention_forward: attention,
        torch.sparse.mm: _sparse_product,
        **dict.fromkeys((torch.bmm, torch.Tensor.bmm), _products),
        **dict.fromkeys((torch.baddbmm, torch.Tensor.baddbmm), _added_products),
        F.prelu: _prelu,
        F.bilinear: _bilinear,
        F.embedding_bag: _embedding_bag,
        F.instance_norm: _instance_norm,
        F.batch_norm: _batch_norm,
        torch.cdist: _distances,
        F.cosine_similarity: _cosine_similarity,
        **dict.fromkeys((torch.index_select, torch.Tensor.index_select), _rows),
        torch.Tensor.__getitem__: _columns,
        **dict.fromkeys((torch.masked_fill, torch.Tensor.masked_fill), _filled),
        **dict.fromkeys((torch.gather, torch.Tensor.gather), _gathered),
        **dict.fromkeys((torch.take_along_dim, torch.Tensor.take_along_dim), _taken_along),
        **dict.fromkeys((torch.take, torch.Tensor.take), _taken),
        **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), _copies),
        torch.Tensor.__setitem__: _written,
        torch.Tensor.register_hook: hook_of_shards,
        **LAYERS,
        **CONTRACTIONS,
    }
)
