"""Does padding leak? One long example must not change the gradients of those that are padded to its length."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hf_dp.errors import PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.independence import NoDropout, draws_numbers, forked_rng, in_mode
from hf_dp.per_example.checks.moved import has_other_rows, moved_by
from hf_dp.per_example.checks.numbers import Numbers, under_numbers_alike
from hf_dp.per_example.checks.preflight import off_zero
from hf_dp.per_example.checks.values import equal
from hf_dp.per_example.precision import FEW, checkpoints, computed_in, noting_16_bits, with_memory_to_spare
from hf_dp.per_example.record import PerExampleGradients, record
from hf_dp.per_example.rule import Certificate, Rule, refuse_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import dtypes_of_shards
from hf_dp.randomness import global_state

# Of the norm of the example's gradient. In float32 what is right differs by 1.3e-5 at most, what leaks by 2.6e-4 at
# least; where 16 bits or whole numbers are computed with all the same (quantised weights, FSDP2), only more is seen.
_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-4, 1e-1
_Found = TypeVar("_Found")
_NO_NUMBER = "an example's gradient, alone and beside longer or shorter examples, is in one of both no number."


def check_padding(
    model: nn.Module,
    loss_fn: LossFunction,
    examples: Sequence[Any],
    collate: Callable[[list[Any]], Batch],
    prepare: Callable[[Batch], Batch] = dict,
    *,
    number: int | None = None,
    certificate: Certificate | None = None,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
    note: Callable[[float], None] = lambda by: None,
    unread: Collection[str] = (),
) -> list[float]:
    """Checks that an example's gradient and loss are the same alone and beside the others, longer and shorter.

    Everything is computed in float32 (before it is refused, in float64 as well) with dropout off, in the mode that
    the model is in; a model that draws other random numbers, in eval mode, where all examples have the same ones. With
    16-bit weights, or under autocast, less is finite: there it is computed as it is trained too, and seen whether it is
    finite. What a collator draws at random (masked language modelling), or what prepares its batches, cannot be drawn
    again for the example alone; there its row of the batch is cut to the length that it has alone, on one side or the
    other.

    Args:
        examples: two or more, of different lengths where possible, the shortest first: what a short one leaves behind
            in the model is seen by the longer ones after it.
        collate: list of examples -> batch.
        prepare: such a batch on its way to the model; in float32 as well, if it computes anything.
        number: how many of them, from the first, are looked at; all by default.
        certificate: of `preflight`, so that no more is computed than the gradients.
        rules: the table of operations.
        tables: parameters that are only looked up in; their gradients are compared by the rows that were, and the same
            rows must have one.
        note: is told by how much of its norm the gradient of each moves where the model is trained in 16 bits, as it is
            computed then.
        unread: buffers that need not be what they were: no loss follows from them.

    Returns:
        The norm of each one's gradient: of one that adds nothing, whether others move it is not seen.

    Raises:
        PreflightError: a gradient moves, so one long example would change all its neighbours.
    """

    numbers: Numbers = nullcontext
    has_gradient: dict[int, bool] = {}  # in float32

    def collated(examples: Sequence[Any]) -> Batch:
        # The same rows are collated again and again, and a collator may change them.
        return collate(copy.deepcopy(list(examples)))

    def drawn(prepare: Callable[[Batch], Batch]) -> tuple[Batch, Iterator[list[Batch]]]:
        """All together; and each one alone, in the versions that it may have of what cannot be drawn again."""
        before = global_state()
        together, again = collated(examples), collated(examples)
        is_random = any(isinstance(v, Tensor) and not torch.equal(v, again[k]) for k, v in together.items())
        together = prepare(together)
        # Of few tokens two choices may be the same.
        is_random |= global_state() != before
        singles = (prepare(collated([example])) for example in examples[:number])
        return together, (
            [_cut(together, i, single, side) for side in (False, True)] if is_random else [single]
            for i, single in enumerate(singles)
        )

    def held(dtype: torch.dtype) -> list[float]:
        return with_memory_to_spare(
            lambda sparing: held_in(functools.partial(computed_in, model, dtype=dtype, sparing=sparing), dtype)
        )

    def held_in(computed: Callable[..., AbstractContextManager[Batch]], dtype: torch.dtype) -> list[float]:
        def prepared(batch: Batch) -> Batch:
            with computed(batch) as exact:
                return prepare(exact)

        def gradients(batch: Batch) -> tuple[PerExampleGradients, dict[str, Tensor]]:
            with computed(batch, checkpointed=True) as exact:
                with numbers(batch_size(exact)):
                    found = record(model, loss_fn, exact, certificate=certificate, rules=rules, tables=tables)
                refuse_differing(found.differing)
                return found, {name: values.detach().clone() for name, values in model.named_buffers()}

        together, apart = drawn(prepared)
        in_batch, left, norms = gradients(together)[0], None, []
        for i, versions in enumerate(apart):
            alone = [gradients(version) for version in versions]
            left = left or alone[0][1]
            is_there = all(_are_finite(found)[0] for found, _ in alone)
            if dtype == torch.float64 and not is_there and has_gradient.get(i, True):
                raise ArithmeticError  # Of what float64 has no number for it says nothing.
            has_gradient[i] = is_there
            both = [(name, now, left[name]) for name, now in alone[0][1].items() if name in left]
            # A buffer that has grown is a cache.
            held = [
                (name, now, before) for name, now, before in both if now.shape == before.shape and name not in unread
            ]
            changed = [name for name, now, before in held if not equal(now, before)]
            if changed:
                raise _leak(f"{changed[0]} is another after an example of another length.")
            by = min(moved_by(model, in_batch, i, found, tables) for found, _ in alone)
            if by == math.inf:
                raise _leak(_NO_NUMBER)
            # Quantised weights may be computed with in float32, which does not reach the tolerance.
            if is_coarse and (by > _TOLERANCE or dtypes_of_shards(model) & FEW):
                note(by)
            if not by <= tolerance:
                # The batch again: a model that remembers gives it another gradient by now, padded as far or not.
                again, padded = gradients(together)[0], gradients(take(together, [i]))[0]
                if not moved_by(model, again, i, padded, tables) <= tolerance:
                    raise _mixed()
                raise _leak(
                    f"an example's gradient moves by {100 * by:.2g} % of its norm "
                    "when longer or shorter examples are beside it in a batch."
                )
            if all(has_other_rows(in_batch, i, found, tables) for found, _ in alone):
                raise _counts()
            norms.append(float(alone[0][0].squared_norms()[0].sqrt()))
        return norms

    def refuse_moved() -> list[float]:
        try:
            return held(torch.float32)
        except PreflightError as leak:
            if leak.found == _NO_NUMBER:  # which is no rounding: what adds nothing beside others is left out of the sum
                raise
            try:
                norms = held(torch.float64)
            except Exception as error:  # noqa: BLE001 - not every model can compute in float64
                raise (error if isinstance(error, PreflightError) else leak) from None
            # A gradient that is a small difference of large numbers is rounded by more than the tolerance, as often as
            # it is computed. What is gone the second time was in what the first one has left in the model.
            try:
                held(torch.float32)
            except PreflightError:
                return norms
            raise leak

    def refuse_lost() -> None:
        def computed_as_trained(batch: Batch) -> PerExampleGradients:
            with checkpoints(model, are_kept=True), numbers(batch_size(batch)):
                found = record(model, loss_fn, batch, certificate=certificate, rules=rules, tables=tables)
            refuse_differing(found.differing)
            return found

        together, apart = drawn(prepare)
        in_batch = computed_as_trained(together)
        for i, (is_there, versions) in enumerate(zip(_are_finite(in_batch), apart, strict=False)):
            alone = [computed_as_trained(version) for version in versions]
            if not is_there and all(_are_finite(found)[0] for found in alone):
                raise _leak(_NO_NUMBER)
            note(min(moved_by(model, in_batch, i, found, tables) for found in alone))

    def refuse_any(drawn_within: Numbers) -> list[float]:
        nonlocal numbers
        numbers = drawn_within
        has_gradient.clear()
        norms = refuse_moved()
        if is_rounded():
            refuse_lost()
        return norms

    tolerance, is_coarse = tolerance_of(model), _is_coarse(model)
    with forked_rng(model), off_zero(model), NoDropout(), noting_16_bits(model) as is_rounded:
        return in_either_mode(model, refuse_any, lambda: draws_numbers(model, loss_fn, prepare(collated(examples[:1]))))


def in_either_mode(model: nn.Module, check: Callable[[Numbers], _Found], draws: Callable[[], bool]) -> _Found:
    """What `check` finds, with dropout off, in the mode that the model is in; in eval mode where it `draws` numbers all
    the same, and there with the same ones for all examples, within what `check` is given.

    Raises:
        PreflightError: of `check`.
    """
    try:
        return check(nullcontext)
    except CheckpointError:
        pass  # Computed again by a wrapper of torch's, where dropout is not left out any more.
    except PreflightError:
        if not draws():
            raise
    with in_mode(model, training=False):
        return under_numbers_alike(check)


def _are_finite(found: PerExampleGradients) -> list[bool]:
    return list((found.losses.isfinite() & found.squared_norms().isfinite()).tolist())


def _leak(found: str) -> PreflightError:
    return PreflightError(
        found,
        why="what is computed for it depends on how far the collator padded it, or on what others left behind in the "
        "model, so one example would change the gradients of its neighbours, beyond what clipping bounds.",
        fix="pad on the right with an attention mask (tokenizer.padding_side = 'right'); or give all micro-batches "
        "one width that no example can change: tokenizer(..., padding='max_length', truncation=True, max_length=N) "
        "for the dataset or in the collator, and of recordings what makes their features with the same arguments.",
    )


def _counts() -> PreflightError:
    return PreflightError(
        "an example has a gradient, however small, in a row of an embedding table when longer or shorter examples are "
        "beside it, and none there alone.",
        why="rows are chosen by how many examples have a gradient there: one long example would change the counts of "
        "all its neighbours, beyond what their clipping bounds.",
        fix="hide padding wholly (before a softmax -inf, or torch.finfo(dtype).min; elsewhere a product with the "
        "mask); or give all micro-batches one width that no example can change (padding='max_length'); or give the "
        "table a dense gradient.",
    )


def _mixed() -> PreflightError:
    return PreflightError(
        "an example's gradient follows from what is beside it in a batch, also where it is padded as far.",
        why="examples mix (a loss divided by the tokens or the rows of the batch, a mean over the batch, packed "
        "sequences), so clipping one example does not bound its influence.",
        fix="make the loss and each operation act on each example alone: divide an example's loss by its own tokens.",
    )


def _cut(batch: Batch, i: int, single: Batch, left: bool) -> dict[str, Any]:
    """Row i of `batch`, each tensor as long as it is in `single`; padding goes from the left or from the right."""
    row = {}
    for name, values in take(batch, [i]).items():
        if isinstance(values, Tensor) and values.dim() > 1:
            extra = values.shape[1] - single[name].shape[1]
            values = values.narrow(1, extra if left else 0, values.shape[1] - extra)
        row[name] = values
    return row


def tolerance_of(model: nn.Module) -> float:
    """Up to which part of its norm a gradient is the same one."""
    return _LOW_PRECISION_TOLERANCE if _is_coarse(model) else _TOLERANCE


def _is_coarse(model: nn.Module) -> bool:
    """Whether the model computes in few bits, and `computed_in` cannot change that."""
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
    is_quantised = any(not p.is_floating_point() or p.element_size() == 1 for p in model.parameters())
    return is_quantised or "flash" in attention or bool(dtypes_of_shards(model) & FEW)
