"""Does what one example holds change the gradients of others? Asked with rows that no data need hold.

What a model, a loss or a tensor's hook decides for a whole micro-batch may follow from content that few rows have (a
positive label, a number beyond a bound, NaN), which rows that are looked at need not show. Nor need they lack what such
a row is given of others (their mean in place of NaN).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.enough_bits import computed, in_enough_bits
from hf_dp.per_example.checks.moved import has_other_rows, moved_by
from hf_dp.per_example.checks.numbers import Numbers
from hf_dp.per_example.checks.padding import tolerance_of
from hf_dp.per_example.ieee import beneath_modes
from hf_dp.per_example.record import PerExampleGradients, record
from hf_dp.per_example.rule import Certificate, Rule, refuse_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import is_sharded
from hf_dp.per_example.waiting import answers_at_once

# What is far from what inputs are, scaled as they mostly are.
_FAR = 1000.0
# So many other rows of a column of whole numbers stand in for its values.
_OTHERS = 2
_CLASSES = 16
# So many strangers are recorded at once, with two copies of a row: rows may be long.
_AT_ONCE = 6
_NO_LABEL = -100
_ZEROS, _NAN, _TRUE, _FALSE, _UNLABELLED = "zeros", "NaN", "True", "False", "no label"
_LACKING = {_ZEROS, _NAN, _TRUE, _FALSE, _UNLABELLED}
# Of whole numbers 0 is no more than a class or a token, and what masks of texts hide is asked for with their widths.
_NOTHING, _OF_TEXTS = "0", ("input_ids", "attention_mask", "token_type_ids", "position_ids", "label")


class _Stranger(NamedTuple):
    """A row, beside which others are to be what they are.

    Attributes:
        what: is in it, in words.
        apart: with which others it may stand in one batch: a maximum with NaN says nothing of what is far.
        row: (1, ...) each.
        lacks: whether this is how a row says that it has nothing there, and is to be what it is beside others too.
    """

    what: str
    apart: str
    row: dict[str, Any]
    lacks: bool


def check_strangers(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
) -> None:
    """Checks that an example's gradient and loss stay what they are, whatever is beside it, or it lacks.

    Of each column what is beside it holds in turn numbers far from its own, zeros, ones, NaN and infinities, or other
    whole numbers: those of the other rows, and on a CPU, where an index out of range is told at once, also 0, 1 and the
    next after the largest, or of few classes each, and no label (not of shards). Those with zeros (of whole numbers
    that are no text's, nor labels), NaN, a flag or no label must themselves be what they are alone. With what cannot be
    computed nothing is checked. In float32 (before a refusal, in float64 as well) with dropout off, in the mode that
    the model is in; a model that draws other random numbers, in eval mode, where all examples have the same ones.

    Args:
        batch: two examples or more, short ones.

    Raises:
        PreflightError: a gradient moves.
    """
    tolerance = tolerance_of(model)
    # What fails must fail at once, and leave no shards (FSDP2) half gathered.
    guesses = not is_sharded(model) and all(answers_at_once(p.device) for p in model.parameters())
    # Which examples have a gradient in float32, and beside what it moved there.
    adding, blamed = set[int](), list[str]()

    def refuse_moved(batch: Batch, dtype: torch.dtype, numbers: Numbers) -> None:
        def gradients(batch: Batch) -> PerExampleGradients:
            with numbers(batch_size(batch)):
                found = record(model, loss_fn, batch, certificate=certificate, rules=rules, tables=tables)
            refuse_differing(found.differing)
            return found

        norms = gradients(batch).squared_norms().sqrt()
        adds = [i for i, norm in enumerate(norms.tolist()) if 0 < norm < math.inf]
        if dtype == torch.float64 and not adding <= {*adds}:
            raise ArithmeticError  # Of what float64 has no number for it says nothing.
        adding.update(adds)
        if not adds or len(norms) < 2:
            return  # nothing can be seen
        first = take(batch, adds[:1])
        alone, strangers = gradients(first), list(_strangers(batch, 1 if adds[0] == 0 else 0, guesses))

        def moved(beside: list[_Stranger]) -> bool:
            """Whether either of two that are alike is another, before and after these."""
            together = gradients(_together(first, beside))
            with beneath_modes():
                return any(
                    not moved_by(model, together, i, alone, tables, norms) <= tolerance
                    or has_other_rows(together, i, alone, tables)
                    for i in (0, len(beside) + 1)
                )

        def follows(one: _Stranger) -> bool:
            """Whether it is another beside others than alone."""
            own, together = gradients(one.row), gradients(_beside(batch, one))
            with beneath_modes():
                return not moved_by(model, together, batch_size(batch), own, tables, norms) <= tolerance

        for beside in _parts(strangers):
            if (found := computed(functools.partial(moved, beside))) is False:
                continue
            what = [one.what for one in beside]
            if dtype == torch.float64 and found is None and what == blamed:
                raise ArithmeticError
            if dtype == torch.float32:
                blamed[:] = what
            for one in beside:
                if computed(functools.partial(moved, [one])):
                    raise _moves(one.what)
            if found:
                raise _moves(" and ".join((beside[0].what, "others")))
        for one in filter(lambda one: one.lacks, strangers):
            found = computed(functools.partial(follows, one))
            if dtype == torch.float64 and found is None and [one.what] == blamed:
                raise ArithmeticError
            if found:
                blamed[:] = [one.what]
                raise _follows(one.what)

    in_enough_bits(model, loss_fn, batch, refuse_moved)


def _parts(strangers: list[_Stranger]) -> Iterator[list[_Stranger]]:
    """Those that may stand together, as many as are recorded at once."""
    for apart in dict.fromkeys(stranger.apart for stranger in strangers):
        alike = [stranger for stranger in strangers if stranger.apart == apart]
        yield from (alike[start : start + _AT_ONCE] for start in range(0, len(alike), _AT_ONCE))


def _strangers(batch: Batch, i: int, guesses: bool) -> Iterator[_Stranger]:
    """Row i with one column after the other that holds something else; whole numbers that no row holds if `guesses`."""
    row = take(batch, [i])
    for name, values in batch.items():
        if isinstance(values, Tensor):
            is_label = "label" in name.lower() and values.ndim == 1
            for what, apart, strange in _strange(values, values[i : i + 1], guesses, is_label):
                lacks = what in _LACKING or (what == _NOTHING and not any(text in name for text in _OF_TEXTS))
                yield _Stranger(f"{what} in {name!r}", apart, {**row, name: strange}, lacks)


def _strange(values: Tensor, own: Tensor, guesses: bool, is_label: bool) -> Iterator[tuple[str, str, Tensor]]:
    """What a row of `values` (B, ...) may hold in place of its `own` (1, ...)."""
    if values.is_floating_point():
        far = own * _FAR + 1
        yield from (("large numbers", "", far), ("large negative numbers", "", -far))
        yield from (("ones", "", torch.ones_like(own)), (_ZEROS, "", torch.zeros_like(own)))
        yield _NAN, _NAN, torch.full_like(own, torch.nan)
        yield "infinities", "infinities", torch.full_like(own, torch.inf)
    elif values.dtype == torch.bool:
        yield from ((_TRUE, "", torch.ones_like(own)), (_FALSE, "", torch.zeros_like(own)))
    elif not values.is_complex():
        others = [row for row in values.split(1) if not torch.equal(row, own)]
        yield from (("the numbers of another row", "", other) for other in others[:_OTHERS])
        if guesses:
            # Below 0 is what has no label.
            most = int(values.max()) if values.numel() else -1
            # A label each, of few: all of them.
            are_few = own.ndim == 1 and most < _CLASSES
            for number in range(most + 2) if are_few else (0, 1, most + 1):
                yield (
                    f"{number}",
                    "" if number in {0, 1, *range(most + 1)} else "next",
                    own.masked_fill(own.ge(0), number),
                )
            if is_label:
                yield _UNLABELLED, _UNLABELLED, own.masked_fill(own.ge(0), _NO_LABEL)


def _together(first: Batch, beside: list[_Stranger]) -> Batch:
    """A row, those beside it, and the same row."""
    rows = [first, *(stranger.row for stranger in beside), first]
    return {
        name: torch.cat([row[name] for row in rows]) if isinstance(value, Tensor) else value
        for name, value in first.items()
    }


def _beside(batch: Batch, one: _Stranger) -> Batch:
    """All rows of a batch, and a further one."""
    return {
        name: torch.cat([value, one.row[name]]) if isinstance(value, Tensor) else value for name, value in batch.items()
    }


def _moves(what: str) -> PreflightError:
    return PreflightError(
        f"an example's gradient is another with {what} in another example of its micro-batch.",
        why="something is decided for the whole micro-batch by what one example holds (weights of classes counted "
        "there, a scale by its largest number, a skip where one is not finite), beyond what clipping bounds.",
        fix="decide it for each example by itself, or by a constant: of public data, or of a private release.",
    )


def _follows(what: str) -> PreflightError:
    return PreflightError(
        f"the gradient of an example with {what} is another where other examples are beside it.",
        why="what it lacks is taken from its micro-batch (a mean, the most frequent value), so that each of the others "
        "changes what it adds, beyond what clipping bounds.",
        fix="fill it with a constant: of public data, or of a private release; or leave such examples out by a public "
        "rule.",
    )
