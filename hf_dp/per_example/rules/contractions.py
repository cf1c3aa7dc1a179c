"""Products that sum over axes, in whatever notation, written out in those that have rules.

Each is a sum in Einstein's notation, linear in every operand: it is made of two operands at a time, and of complex
numbers by their real and imaginary parts.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.watched import WatchedParameter


def _einsum(equation: Any, *operands: Any) -> Any:
    """Of data and parameters; data comes first, then the others in their order."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    read = _read(equation, given) if isinstance(equation, str) else None
    at = next((k for k, operand in enumerate(given) if not isinstance(operand, WatchedParameter)), None)
    if read is None or at is None:
        return NotImplemented
    terms, out = read
    others = [(given[k], terms[k]) for k in range(len(given)) if k != at]
    found, term = given[at], terms[at]
    for number, (operand, of_operand) in enumerate(others, 1):
        kept = out + "".join(later for _, later in others[number:])
        pair = _pair(found, term, operand, of_operand, kept)
        if pair is None:
            return NotImplemented
        found, term = pair
    return found if term == out else found.permute([term.index(axis) for axis in out])


def _read(equation: str, operands: Sequence[Any]) -> tuple[list[str], str] | None:
    """The axes of each operand, and of what is made of them, a letter each, if no diagonal is taken."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands) or not all(isinstance(operand, Tensor) for operand in operands):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    unnamed = [max(0, o.dim() - len(t.replace("...", ""))) for o, t in zip(operands, terms, strict=True)]
    names = "".join(itertools.islice(free, max(unnamed)))
    if not arrow:
        once = sorted(letter for letter in left if letter.isalpha() and left.count(letter) == 1)
        out = ("..." if names else "") + "".join(once)
    terms = [term.replace("...", names[len(names) - n :], 1) for term, n in zip(terms, unnamed, strict=True)]
    out = out.replace("...", names, 1)
    axes = [pair for o, t in zip(operands, terms, strict=True) for pair in zip(t, o.shape, strict=False)]
    is_known = all(len(set(t)) == len(t) == o.dim() for o, t in zip(operands, terms, strict=True))
    is_known &= len(set(axes)) == len(dict(axes)) and len(set(out)) == len(out) and {*out} <= {*dict(axes)}
    return (terms, out) if is_known and "." not in out else None


def _pair(x: Tensor, of_x: str, y: Any, of_y: str, kept: str) -> tuple[Tensor, str] | None:
    """Of data and another operand, and its axes: those of both that are `kept`, in some order."""
    if not isinstance(y, WatchedParameter):
        term = "".join(axis for axis in dict.fromkeys(of_x + of_y) if axis in kept)
        return torch.einsum(f"{of_x},{of_y}->{term}", x, y), term
    x, of_x = _summed(x, of_x, kept + of_y)
    y, of_y = _summed(y, of_y, kept + of_x)
    each = [axis for axis in of_y if axis in of_x and axis in kept]
    summed = [axis for axis in of_y if axis in of_x and axis not in kept]
    new = [axis for axis in of_y if axis not in of_x]
    rest = [axis for axis in of_x if axis not in of_y]
    if not rest:  # which could be the examples'
        return None
    sizes = dict([*zip(of_x, x.shape, strict=True), *zip(of_y, y.shape, strict=True)])

    def grouped(tensor: Any, term: str, *groups: Sequence[str]) -> Any:
        order = [term.index(axis) for group in groups for axis in group]
        ordered = tensor if order == sorted(order) else tensor.T if order == [1, 0] else tensor.permute(order)
        shape = [math.prod(sizes[axis] for axis in group) for group in groups]
        return ordered if list(ordered.shape) == shape else ordered.reshape(shape)

    def product(x: Any, y: Any) -> Any:
        if not summed:  # which is no product of matrices, for autocast either
            return grouped(x, of_x, *rest, *each, "") * grouped(y, of_y, *each, new)
        if not each:
            return F.linear(grouped(x, of_x, *rest, summed), grouped(y, of_y, new, summed))
        if not new:
            made = grouped(x, of_x, *rest, *each, summed) * grouped(y, of_y, *each, summed)
            return made.sum(-1)
        first, *others = rest
        return torch.matmul(grouped(x, of_x, first, each, others, summed), grouped(y, of_y, each, summed, new))

    is_matmul = each and new and summed
    order = [rest[0], *each, *rest[1:], *new] if is_matmul else [*rest, *each, *new]
    made = by_real_parts(product, x, y) if x.is_complex() or y.is_complex() else product(x, y)
    return made.reshape([sizes[axis] for axis in order]), "".join(order)


def _summed(tensor: Any, term: str, kept: str) -> tuple[Any, str]:
    """Over the axes that nothing else has."""
    alone = [k for k, axis in enumerate(term) if axis not in kept]
    return (tensor.sum(alone), "".join(a for a in term if a in kept)) if alone else (tensor, term)


def by_real_parts(product: Callable[[Any, Any], Any], x: Any, y: Any) -> Tensor:
    """What is linear in both operands, of complex ones, which autocast leaves as they are."""
    (a, b), (c, d) = ((z.real, z.imag) if z.is_complex() else (z, None) for z in (x, y))
    with torch.autocast(x.device.type, enabled=False):
        if b is None or d is None:
            return torch.complex(product(a, c), product(a, d) if b is None else product(b, c))
        return torch.complex(product(a, c) - product(b, d), product(a, d) + product(b, c))


def _is_of_data(first: Any, second: Any) -> bool:
    """Whether one is a parameter, and the other a tensor of something else."""
    are_watched = [isinstance(one, WatchedParameter) for one in (first, second)]
    return are_watched.count(True) == 1 and isinstance(first, Tensor) and isinstance(second, Tensor)


def _multiply(input: Any, other: Any) -> Any:
    """Of complex numbers."""
    if not _is_of_data(input, other) or not (input.is_complex() or other.is_complex()):
        return NotImplemented
    return by_real_parts(torch.mul, input, other)


def _matmul(input: Any, other: Any) -> Any:
    """Of complex numbers, or with the parameter on the left."""
    if not _is_of_data(input, other):
        return NotImplemented
    if input.is_complex() or other.is_complex():
        return by_real_parts(torch.matmul, input, other)
    if not isinstance(input, WatchedParameter) or input.dim() > 2:
        return NotImplemented
    if other.dim() == 1:
        return F.linear(other, input) if input.dim() == 2 else NotImplemented
    return F.linear(other.mT, input).mT if input.dim() == 2 else torch.matmul(other.mT, input)


def _mm(input: Any, mat2: Any) -> Any:
    return torch.matmul(input, mat2)


def _mv(input: Any, vec: Any) -> Any:
    return torch.matmul(input, vec)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product: Any = torch.matmul(mat1, mat2)
    product = product if alpha == 1 else product * alpha
    # What is left out may be infinite.
    return product if beta == 0 else product + (input if beta == 1 else input * beta)


def _addmv(input: Any, mat: Any, vec: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _addmm(input, mat, vec, beta=beta, alpha=alpha)


def _tensordot(a: Any, b: Any, dims: Any = 2, out: None = None) -> Any:
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    of_a, of_b = string.ascii_lowercase[: a.dim()], list(string.ascii_uppercase[: b.dim()])
    pairs = zip(range(-dims, 0), range(dims), strict=True) if isinstance(dims, int) else zip(*dims, strict=True)
    for one, other in pairs:
        of_b[other] = of_a[one]
    term = "".join(of_b)
    free = "".join(axis for axis in of_a + term if (axis in of_a) != (axis in term))
    return _einsum(f"{of_a},{term}->{free}", a, b)


def _inner(input: Any, other: Any) -> Any:
    return _tensordot(input, other, [[-1], [-1]]) if input.dim() and other.dim() else NotImplemented


def _outer(input: Any, vec2: Any) -> Any:
    return _einsum("i,j->ij", input, vec2)


def _dots(x: Any, y: Any, *, dim: int = -1) -> Any:
    return NotImplemented if x.is_complex() or y.is_complex() else (x * y).sum(dim)


#: operation -> the same by other operations, or NotImplemented for arguments that it does not know.
CONTRACTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.einsum: _einsum,
        **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _multiply),
        **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul),
        **dict.fromkeys((torch.mm, torch.Tensor.mm), _mm),
        **dict.fromkeys((torch.mv, torch.Tensor.mv), _mv),
        **dict.fromkeys((torch.addmm, torch.Tensor.addmm), _addmm),
        **dict.fromkeys((torch.addmv, torch.Tensor.addmv), _addmv),
        torch.tensordot: _tensordot,
        **dict.fromkeys((torch.inner, torch.Tensor.inner), _inner),
        **dict.fromkeys((torch.outer, torch.Tensor.outer, torch.ger, torch.Tensor.ger), _outer),
        torch.linalg.vecdot: _dots,
    }
)
