"""For the check before the first step: does a collator make an example's row of other examples, or with their coin?"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator, Prepared
from hf_dp.data.kinds import kind_of
from hf_dp.data.lacking_rows import follows_from_others
from hf_dp.data.seeding_collator import seeds_between_rows
from hf_dp.data.strange_rows import LABELS, strange_rows
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import global_state, seed_global_state, unchanged_global_state

# With one example in its place, each other place holds either example once; all are padded to one length.
_ARRANGEMENTS = ((0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1))
_ALONE, _BESIDE = (0, 0, 0, 0), (0, 1, 1, 1)
_STATES = 16
# Two samples of 64 from one distribution, whatever it is, have distribution functions that are further apart than 0.6
# with probability e * exp(-64 * 0.6^2) = 3e-10 at most (Wei and Dudley 2012, theorem 1).
_SAMPLES, _APART = 64, 0.6

Collated = dict[str, Tensor]


@unchanged_global_state()
def check_collator(collate: LogicalBatchCollator | Prepared, examples: list[Any], extreme: Sequence[Any] = ()) -> None:
    """Refuses a collator whose row of one example depends on others, or whose random choice is one for all.

    Pairs of `examples` are collated in several arrangements, each under the same sixteen random states; the first row
    must stay as it is. Where the other example is longer, so that the row is padded and numbers are drawn for more
    elements, how many of its elements are changed, and their sum, must be distributed alike. And four rows of one
    example must not be the same under every state, where they are other ones under others; where no state changes
    them, they must be the same; nor may as many of the four be changed under every state. A choice for all behind
    choices for each row (how many tokens to mask, say) is not seen.

    Args:
        collate: with what prepares its batches, where that is the user's.
        examples: a few.
        extreme: further ones, of which those of another kind than the first of `examples` are put beside it.

    Raises:
        ConfigurationError: with the collator's name.
    """
    for row in extreme:
        if kind_of(row) != kind_of(examples[0]):
            for rows in ([examples[0], row], [row, examples[0]]):
                with unchanged_global_state():
                    collate.collated(copy.deepcopy(rows))
    draws, seeded = False, dict[int, Any]()

    def as_it_comes(rows: list[Any]) -> Collated:
        seed_global_state(0)
        return {name: value for name, value in collate.collated(rows).items() if isinstance(value, Tensor)}

    def collated(pair: tuple[Any, Any], arrangement: tuple[int, ...], state: int) -> Collated:
        nonlocal draws
        rows = [copy.deepcopy(pair[i]) for i in arrangement]
        seed_global_state(state)
        if state not in seeded:  # To look takes longer than most collators.
            seeded[state] = global_state()
        batch = collate.collated(rows)
        draws = draws or global_state() != seeded[state]
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    pairs = _pairs(examples, [collated((one, one), _ALONE, 0) for one in examples])
    alike = [collated(pairs[0], _ALONE, 0)]
    if not _same(alike[0], collated(pairs[0], _ALONE, 0)):
        raise _refusal(
            collate,
            "draws other numbers under the same global random state",
            "it keeps a generator of its own; under a seed that is known an example more or less would change what is "
            "drawn for all others, in a way that can be known.",
            "let it draw from the global generators of torch, numpy or Python (leave its seed out): hf_dp seeds them.",
        )
    states = range(_STATES if draws else 1)
    alike += [collated(pairs[0], _ALONE, state) for state in states[1:]]
    changes = any(not _same(alike[0], other) for other in alike)
    is_alike = all(_row(batch, i, alike=batch) for batch in alike for i in range(1, len(_ALONE)))
    if not changes and not is_alike:
        raise _refusal(
            collate,
            "makes another row of an example at another place in the batch",
            "one example more or less moves others to other places, and where no secret random number decides (a seed "
            "that is set in each call, say) this is known to all.",
            "make each row of its example alone; draw from torch's, numpy's or Python's global generator, unseeded.",
        )
    if changes and is_alike:
        raise _refusal(
            collate,
            "makes one random choice for all rows of a batch",
            "an example more or less moves others into another micro-batch, where the choice is another one, and then "
            "the clipped sum moves by more than one example's bound.",
            "choose for each row by itself, in the dataset's transform (set_transform), say.",
        )
    told, row = list(map(_told, alike)), pairs[0][0]
    if draws and seeds_between_rows(told, lambda: _told(collate.collated([copy.deepcopy(row) for _ in _ALONE]))):
        raise _refusal(
            collate,
            "seeds a global generator, and draws for later rows from it",
            "their random choices are known then, and are others where an example before them is missing.",
            "leave the seeds out; or draw what is to be the same each time from a generator with a seed "
            "of its own (torch.Generator).",
        )
    if draws and _changes_as_many(told):
        raise _refusal(
            collate,
            "changes the same number of rows in each batch",
            "which rows they are is drawn for all together, so an example more or less decides what becomes of others.",
            "choose for each row by itself, with a probability, in the dataset's transform (set_transform), say.",
        )
    for pair, state in itertools.product(pairs, states):
        usual, *others = (collated(pair, arrangement, state) for arrangement in _ARRANGEMENTS)
        alone = collated(pair, _ALONE, state)
        if _shapes(alone) == _shapes(usual):
            others.append(alone)
        if not all(_row(batch, 0, alike=usual) for batch in others):
            raise _mixes(collate)
    _refuse_told_by_others(collate, examples, lambda pair: collated(pair, _BESIDE, 0), draws=draws)
    if len(examples) > 1:
        tried = [*examples, *extreme, *strange_rows(examples[0])]
        if any(follows_from_others(row, examples, as_it_comes, draws=draws) for row in tried):
            raise _mixes(collate)
    for pair in pairs if draws else ():
        alone, beside = (collated(pair, arrangement, 0) for arrangement in (_ALONE, _BESIDE))
        if _shapes(alone) == _shapes(beside):
            continue
        # Other states, so that the two samples are independent.
        narrow = [collated(pair, _ALONE, state) for state in range(_SAMPLES)]
        wide = [collated(pair, _BESIDE, _SAMPLES + state) for state in range(_SAMPLES)]
        if (name := _another(narrow, wide)) is not None:
            raise _refusal(
                collate,
                f"chooses otherwise for an example when a longer one is beside it ({name})",
                "how much of a row is masked or changed depends on how far it is padded, so one long example would "
                "change what all its neighbours add.",
                "choose by the row's own length (where its attention mask is 1), or pad all rows to one length.",
            )


def _refuse_told_by_others(
    collate: LogicalBatchCollator | Prepared,
    examples: list[Any],
    beside: Callable[[tuple[Any, Any]], Collated],
    *,
    draws: bool,
) -> None:
    """Refuses a row that follows from what others hold, which few may: a positive label, a large number, NaN."""
    if draws or len(examples) < 2:  # what is drawn for others may follow from what they hold
        return
    first, second = examples[:2]
    usual = beside((first, second))
    for strange in strange_rows(second):
        batch = usual
        with suppress(Exception):  # a collator may refuse such a row in any way
            batch = beside((first, strange))
        if _shapes(batch) == _shapes(usual) and not _row(batch, 0, alike=usual):
            raise _mixes(collate)


def _mixes(collate: LogicalBatchCollator | Prepared) -> ConfigurationError:
    return _refusal(
        collate,
        "gives an example another row when other examples are beside it",
        "where rows are mixed (Mixup, CutMix, statistics of the batch, or what a row lacks filled with them), clipping "
        "a row does not bound what one example adds.",
        "augment each example by itself, in the dataset's transform (set_transform), say, and fill what it lacks with "
        "a constant; draw for one row after the other.",
    )


def _told(batch: Mapping[str, Any]) -> list[tuple[bytes, ...]]:
    """What tells each row of a batch from others."""
    names = sorted(name for name, value in batch.items() if isinstance(value, Tensor))
    return [tuple(_bytes(batch[name][i]) for name in names) for i in range(len(_ALONE))]


def _changes_as_many(told: list[list[tuple[bytes, ...]]]) -> bool:
    """Whether of the copies of one row some, as many under all states, are not as most are.

    Of choices for each row by itself that is so with a probability of 10^-6 at most: of four copies one, or three, with
    27/64 at most, in 16 batches.
    """
    usual, _ = Counter(row for rows in told for row in rows).most_common(1)[0]
    changed = {sum(row != usual for row in rows) for rows in told}
    return len(changed) == 1 and not changed & {0, len(_ALONE)}


def _bytes(row: Tensor) -> bytes:
    return row.detach().cpu().double().numpy().tobytes()


def _pairs(examples: list[Any], alone: list[Collated]) -> list[tuple[Any, Any]]:
    """The first example and, for each tensor that is made of it `alone`, the last that has another; and one beside
    another of its label; each as the first of the pair. Between two that are alike no mixing is seen."""
    last = len(examples) - 1
    unlike = {
        next((i for i in range(last, 0, -1) if name not in alone[i] or not _equal(alone[i][name], values)), last)
        for name, values in alone[0].items()
    }
    unlike = unlike or {last}
    found = [(examples[0], examples[i]) for i in sorted(unlike)]
    labels = [_label(example) for example in examples]
    indices = itertools.combinations(range(len(examples)), 2)
    same = next(((i, j) for i, j in indices if labels[i] is not None and labels[i] == labels[j]), None)
    if same is not None and not (same[0] == 0 and same[1] in unlike):
        found.append((examples[same[0]], examples[same[1]]))
    return [ordered for one, two in found for ordered in ((one, two), (two, one))]


def _label(example: Any) -> Any:
    """What number or name its class has; None where there is none."""
    named = example if isinstance(example, Mapping) else {}
    value: Any = next((named[name] for name in LABELS if name in named), None)
    if hasattr(value, "item") and math.prod(np.shape(value)) == 1:
        value = value.item()
    return value if isinstance(value, (int, float, str)) else None


def _another(narrow: list[Collated], wide: list[Collated]) -> str | None:
    """The tensor of which the first row is distributed otherwise when it is padded; None where this is not seen."""
    for name in narrow[0].keys() & wide[0].keys():
        rows = [[batch[name][0] for batch in batches] for batches in (narrow, wide)]
        if any(row.shape != some[0].shape for some in rows for row in some) or not rows[0][0].numel():
            continue
        own, padded = (torch.stack(some).double().cpu() for some in rows)
        cut = _without_padding(padded, own.shape)
        if cut is None:
            continue
        usual = own.mode(0).values
        if any(
            _distance(*pair) > _APART for pair in zip(_statistics(own, usual), _statistics(cut, usual), strict=True)
        ):
            return name
    return None


def _statistics(samples: Tensor, usual: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of (S, ...): how many elements are not as usual, and what all sum up to, (S,)."""
    return samples.ne(usual).view(len(samples), -1).sum(1), samples.abs().view(len(samples), -1).sum(1)


def _without_padding(padded: Tensor, shape: torch.Size) -> Tensor | None:
    """Samples (S, ...) cut to `shape`, on the side where what is cut off is always the same; None where neither is."""
    for side in ("right", "left"):
        cut, is_padding = padded, True
        for axis, kept in enumerate(shape):
            extra = cut.shape[axis] - kept
            if extra > 0:
                off = cut.narrow(axis, kept if side == "right" else 0, extra)
                is_padding &= bool(off.eq(off.flatten()[0]).all())
                cut = cut.narrow(axis, 0 if side == "right" else extra, kept)
        if is_padding and cut.shape == shape:
            return cut
    return None


def _distance(one: Tensor, two: Tensor) -> float:
    """The largest distance of two empirical distribution functions (Kolmogorov and Smirnov), but for rounding."""
    at = torch.cat([one, two]).double()
    rounding = 1e-5 * at.abs().max()

    def below(samples: Tensor, by: Tensor | float) -> Tensor:
        return samples.double().le(at[:, None] + by).double().mean(1)

    further = [below(x, 0) - below(y, rounding) for x, y in ((one, two), (two, one))]
    return float(torch.cat(further).max())


def _row(batch: Collated, i: int, *, alike: Collated) -> bool:
    """Whether row i of `batch` is the first of `alike`."""
    return batch.keys() == alike.keys() and all(_equal(batch[name][i], alike[name][0]) for name in batch)


def _shapes(batch: Collated) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in batch.items()}


def _same(one: Collated, two: Collated) -> bool:
    return one.keys() == two.keys() and all(_equal(one[name], two[name]) for name in one)


def _equal(one: Tensor, two: Tensor) -> bool:
    # Most are the same to the bit, which is found out sooner.
    same_numbers = one.dtype == two.dtype and torch.equal(one, two)
    return same_numbers or (one.shape == two.shape and torch.allclose(one, two, rtol=1e-6, atol=0, equal_nan=True))


def _refusal(collate: LogicalBatchCollator | Prepared, found: str, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"the data collator {collate.name} {found}.", why=why, fix=fix)
