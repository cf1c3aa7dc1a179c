"""Which tensors a backward pass gives their gradient: none that outlives the pass and is no parameter of the model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.errors import UnsupportedModelError

_PASSES = itertools.count()
# In which pass a leaf was reached first. What is made anew in each one (the output of a frozen embedding that asks for
# gradients, say) is gone by the next.
_FIRST_REACHED = WeakIdKeyDictionary()


@contextmanager
def refusing_others(own: Iterable[object]) -> Iterator[None]:
    """Refuses a backward pass inside that reaches leaves which are kept: parameters other than `own`, and tensors that
    an earlier pass has reached too. Also in what reentrant checkpoints compute again.

    Raises:
        UnsupportedModelError: with the shape.
    """
    known, number, backward = {id(tensor) for tensor in own}, next(_PASSES), torch.autograd.backward

    @functools.wraps(backward)
    def looking(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for leaf in _leaves([tensors] if isinstance(tensors, Tensor) else tensors):
            is_kept = isinstance(leaf, nn.Parameter) or _FIRST_REACHED.setdefault(leaf, number) != number
            if is_kept and id(leaf) not in known:
                raise _refused(leaf)
        backward(tensors, *args, **kwargs)

    # Reentrant checkpoints begin passes of their own, of graphs that nobody else has seen.
    torch.autograd.backward = looking
    try:
        yield
    finally:
        torch.autograd.backward = backward


def _leaves(roots: Collection[Tensor]) -> Iterator[Tensor]:
    """The leaves of the graph behind `roots`."""
    nodes: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = {None, *nodes}
    for node in nodes:  # It grows on the way: thousands, for each micro-batch.
        following = node.next_functions
        for behind, _ in following:
            if behind not in seen:
                seen.add(behind)
                nodes.append(behind)
        if not following and type(node).__name__ == "AccumulateGrad":
            yield node.variable


def _refused(leaf: Tensor) -> UnsupportedModelError:
    kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
    return UnsupportedModelError(
        f"the gradient of the losses reaches a {kind} of shape {tuple(leaf.shape)} outside of the model.",
        why="only parameters of the model are clipped and get noise: what learns from this gradient is not private, "
        "and neither are the losses that follow from it.",
        fix="make it a parameter of the model before the training (model.name = torch.nn.Parameter(...)), or let it "
        "have no gradient (.detach(), requires_grad_(False), torch.no_grad() around a teacher).",
    )
