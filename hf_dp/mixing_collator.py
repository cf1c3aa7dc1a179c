"""For the check before the first step: does a collator make an example's row of other examples, or with their coin?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from hf_dp.errors import ConfigurationError
from hf_dp.randomness import global_state, seed_global_state, unchanged_global_state
from hf_dp.sampling import LogicalBatchCollator

# With the first example in its place, each other place holds either example once; all are padded to one length.
_ARRANGEMENTS = ((0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1))
_ALIKE = (1, 1, 1, 1)
_STATES = 16

Collated = dict[str, Tensor]


def check_collator(collate: LogicalBatchCollator, examples: list[Any]) -> None:
    """Refuses a collator whose row of one example depends on others, or whose random choice is one for all.

    The first and the last of `examples` are collated in several arrangements, each under the same sixteen random
    states; the first row must stay as it is. And four rows of one example must not be the same under every state, where
    they are other ones under others. A choice for all behind choices for each row (how many tokens to mask, say) is not
    seen.

    Raises:
        ConfigurationError: with the collator's name.
    """
    first, last = examples[0], examples[-1]

    draws = False

    def collated(arrangement: tuple[int, ...], state: int) -> Collated:
        nonlocal draws
        rows = [copy.deepcopy((first, last)[i]) for i in arrangement]
        with unchanged_global_state():
            seed_global_state(state)
            before = global_state()
            batch = collate.collated(rows)
            draws |= global_state() != before
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    alike = [collated(_ALIKE, 0)]
    if not _same(alike[0], collated(_ALIKE, 0)):
        raise _refusal(
            collate,
            "draws other numbers under the same global random state",
            "it keeps a generator of its own; under a seed that is known an example more or less would change what is "
            "drawn for all others, in a way that can be known.",
            "let it draw from the global generators of torch, numpy or Python (leave its seed out): hf_dp seeds them.",
        )
    states = range(_STATES if draws else 1)
    alike += [collated(_ALIKE, state) for state in states[1:]]
    if any(not _same(alike[0], other) for other in alike) and all(
        _row(batch, i, alike=batch) for batch in alike for i in range(1, len(_ALIKE))
    ):
        raise _refusal(
            collate,
            "makes one random choice for all rows of a batch",
            "an example more or less moves others into another micro-batch, where the choice is another one, and then "
            "the clipped sum moves by more than one example's bound.",
            "choose for each row by itself, in the dataset's transform (set_transform), say.",
        )
    for state in states:
        usual, *others = (collated(arrangement, state) for arrangement in _ARRANGEMENTS)
        if not all(_row(batch, 0, alike=usual) for batch in others):
            raise _refusal(
                collate,
                "gives an example another row when other examples are beside it",
                "where rows are mixed (Mixup, CutMix, statistics of the batch), clipping a row does not bound what one "
                "example adds.",
                "augment each example by itself, in the dataset's transform (set_transform), say; and draw for one row "
                "after the other.",
            )


def _row(batch: Collated, i: int, *, alike: Collated) -> bool:
    """Whether row i of `batch` is the first of `alike`."""
    return batch.keys() == alike.keys() and all(_equal(batch[name][i], alike[name][0]) for name in batch)


def _same(one: Collated, two: Collated) -> bool:
    return one.keys() == two.keys() and all(_equal(one[name], two[name]) for name in one)


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-6, atol=0, equal_nan=True)


def _refusal(collate: LogicalBatchCollator, found: str, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"the data collator {collate.name} {found}.", why=why, fix=fix)
