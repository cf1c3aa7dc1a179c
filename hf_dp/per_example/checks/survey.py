"""Which axes lead through the examples: seen with numbers of examples that no other axis has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.independence import forked_rng
from hf_dp.per_example.leaves import refusing_others
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import Certificate, Rule, Use
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import is_sharded
from hf_dp.per_example.watch import Watch

# Numbers of examples, before what is refused with each of them is refused.
_TRIED = 4


def survey(model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule] = RULES) -> Certificate:
    """The uses that `surveyed` sees."""
    return surveyed(model, loss_fn, batch, rules=rules)[0]


def surveyed(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule] = RULES
) -> tuple[Certificate, int]:
    """The uses in two forward passes, over two numbers of examples for which no other axis could be taken; and in what
    the backward pass computes again.

    What all examples share has the same shape in both, so at least one of them shows that it is not theirs.

    Returns:
        Them, and the first of these numbers.

    Raises:
        UnsupportedModelError: of a use, also with other numbers: on its way to data a constant may have any shape.
    """
    uses: set[Use] = set()
    read: set[Use] = set()
    sizes, refused = list[int](), list[UnsupportedModelError]()
    for size in telling_sizes(model, batch)[:_TRIED]:
        few = take(batch, [i % batch_size(batch) for i in range(size)])
        watch = Watch(Reader(size), rules)
        try:
            with forked_rng(model), watch.attached(model), refusing_others([*model.parameters(), *few.values()]):
                losses = watch.forward(model, loss_fn, few)
                if watch.may_come_again and losses.requires_grad:
                    watch.backward(losses)
        except UnsupportedModelError as error:
            if is_sharded(model):  # FSDP2 begins no other forward pass before this one has ended.
                raise
            refused.append(error.with_traceback(None))
            continue
        uses |= watch.uses
        read |= watch.read
        sizes.append(size)
        if len(sizes) == 2:
            return Certificate(uses, read), sizes[0]
    raise refused[0]


def telling_sizes(model: nn.Module, batch: Batch) -> list[int]:
    """Two or more numbers of examples that divide no other axis of the batch, or of the model, if they are prime."""
    held = itertools.chain(model.parameters(), model.buffers())
    others = ambiguous_sizes(model, batch) | {n for tensor in held for n in tensor.shape} - {0, 1}
    return [k for k in (3, 5, 7, 11, 13, 17, 19) if all(n % k for n in others)] + [23, 29]


def ambiguous_sizes(model: nn.Module, batch: Batch) -> frozenset[int]:
    """The lengths of all axes, but for the first of the batch, that could be taken for the number of examples."""
    inner = {n for v in batch.values() if isinstance(v, Tensor) for n in v.shape[1:]}
    return frozenset(inner | {n for p in model.parameters() if p.requires_grad for n in p.shape}) - {0, 1}
