"""Whose rows are, as numbers: (n,) the example of each row, or () that of all there is in a tensor.

What is computed of one example alone is that example's, whatever the operation; so sums of its rows are, and stacked
they are rows again. Of what is computed of no rows nobody knows whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.followed.axes import is_mask
from hf_dp.per_example.followed.picking import JOINING, STACKING, Operation
from hf_dp.per_example.followed.picks import is_write, keeps_first
from hf_dp.per_example.watched import tensors_in

# Of tensors by their identity: what is known of them.
Known = dict[int, Tensor | None]


def are_same(first: Tensor, second: Tensor | None) -> bool:
    """Whether these are the same owners of as many rows."""
    return first is second or (second is not None and torch.equal(first, second))


def of_rows(owners: Tensor | None, tensor: Tensor) -> Tensor | None:
    """(n,) those of the rows of a tensor."""
    if owners is None or owners.dim():
        return owners
    return owners.expand(len(tensor)) if tensor.dim() else None


def below(op: Operation, size: int) -> list[Tensor]:
    """What an operation lays below one another, if that is not all of so many examples each."""
    args = op.args
    if is_write(op.name):
        place: Any = args[1] if len(args) > 1 else None
        is_set = op.name == "__setitem__"
        if keeps_first(place, args[0].dim()) if is_set else isinstance(place, int) and place % args[0].dim():
            return []
        if is_mask(place) and place.dim() > 1:  # into positions of each, which stay where they are
            return []
        values = [one for one in tensors_in(args[2:], op.kwargs) if one.numel()]
        is_whole = is_set and isinstance(place, int)
        return [] if is_whole and any(_is_of_all(one, size) for one in values) else values
    if not is_join(op) or op.join[0] != 0:
        return []
    pieces = op.picked_of
    return [] if any(_is_of_all(one, size) for one in pieces) else pieces


def of_all(several: Iterable[Tensor | None]) -> Tensor | None:
    """() the one owner of all rows of several tensors; None if there are more, none, or one is not known."""
    found = None
    for owners in several:
        if owners is None:
            return None
        if owners is found or (owners.dim() and not len(owners)):
            continue
        if not bool((owners == (owners.flatten()[0] if found is None else found)).all()):
            return None
        found = owners.flatten()[0] if owners.dim() and found is None else found if owners.dim() else owners
    return found


def beside(several: Iterable[Tensor], known: Known, is_data: Callable[[Tensor], bool]) -> Tensor | None:
    """Those that the rows of several tensors have in common; what has no gradient changes nothing."""
    parts = [(of_rows(known.get(id(one)), one), one) for one in several]
    found = [owners for owners, one in parts if owners is not None or (one.requires_grad and is_data(one))]
    first = found[0] if found else None
    return first if first is not None and all(are_same(first, one) for one in found) else None


def is_join(op: Operation) -> bool:
    """Whether an operation lays rows below or beside one another."""
    return op.name in JOINING or op.name in STACKING


def joined(op: Operation, known: Known, is_data: Callable[[Tensor], bool]) -> Tensor | None:
    """Of rows one below another, or of what becomes a row each; or of rows `beside` one another."""
    pieces, (axis, is_stacked) = op.picked_of, op.join
    # What is joined may begin with nothing (an empty cache), which has one axis.
    if not is_stacked and (filled := [one for one in pieces if one.numel() or one.dim() > 1]):
        pieces = filled
    if not pieces or not isinstance(axis, int):
        return None
    if axis % max(pieces[0].dim() + is_stacked, 1):
        return beside(pieces, known, is_data)
    owners = [known.get(id(one)) for one in pieces]
    if is_stacked:
        owners = [of_all([one]) for one in owners]
        found = [one for one in owners if one is not None]
        return torch.stack(found) if len(found) == len(owners) else None
    found = [one for piece in pieces if (one := of_rows(known.get(id(piece)), piece)) is not None]
    return torch.cat(found) if len(found) == len(owners) else None


def _is_of_all(tensor: Tensor, size: int) -> bool:
    """Whether it may have a row for each of so many examples, and is no row itself."""
    return tensor.dim() > 1 and len(tensor) == size
