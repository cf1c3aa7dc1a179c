"""Engine against oracle on this model, before the first step.

Shapes alone cannot tell which axis is the example axis (T5's relative positions are (T, T)), and no per-example
gradient exists where examples mix (batch norm, a loss normalised over the batch). Both are looked for here by running
a handful of examples and comparing rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError, HfDpError, PreflightError, UnseenUseError, UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.coins import drawn_norms, that_count, with_gradient, without_shared_coins
from hf_dp.per_example.checks.compared import compare
from hf_dp.per_example.checks.draws import Change
from hf_dp.per_example.checks.independence import (
    check_independence,
    check_shares,
    different_pair,
    forked_rng,
    in_mode,
    letting_go,
)
from hf_dp.per_example.checks.mixing import refuse_mixing
from hf_dp.per_example.checks.numbers import Numbers, under_numbers_alike
from hf_dp.per_example.checks.quantised import check_quantised, passing_gradients
from hf_dp.per_example.checks.state import refuse_compiled, refuse_unshaped, uncompiled
from hf_dp.per_example.checks.survey import surveyed
from hf_dp.per_example.checks.switches import Switches, switch_off, warn_of
from hf_dp.per_example.oracle import DIFFERENT, Truth
from hf_dp.per_example.precision import computed_in, with_memory_to_spare
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients, record
from hf_dp.per_example.rule import Certificate, Readings, Rule, most_differing, refuse_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import local, trainable
from hf_dp.per_example.watch import Watch

logger = logging.getLogger(__name__)

_Checked = TypeVar("_Checked")
# So many examples are asked for branches of their own.
_MOST = 12


@uncompiled()
def preflight(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
    switches: Switches | None = None,
) -> Certificate:
    """Certifies the uses of `model`'s parameters on a few examples of `batch`, before anything is released.

    Four checks: no random number moves two examples (what is known to draw one for all is switched off, with a
    warning); no example's loss or activations move when its neighbours change; no example's gradient moves when the
    loss of another is weighted differently (these in the mode that the model is in); and norms and weighted sums of the
    engine equal those of a loop over single examples (in eval mode, since dropout masks cannot be repeated there).
    Parameters that are all zero, as a fresh adapter's, are moved off zero meanwhile: behind them every gradient would
    be zero, and right. Random state, parameters and `.grad` are left as they were.

    Args:
        batch: at least two different examples.
        tables: parameters that are only looked up in; their gradients are compared by the rows that were.
        switches: notes what is switched off.

    Returns:
        The certificate for `record`.

    Raises:
        UnsupportedModelError: batch normalisation in training mode, or anything that `record` refuses.
        PreflightError: examples mix, or engine and oracle disagree.
        ConfigurationError: `batch` holds no two different examples.
    """
    check_modules(model)
    if different_pair(batch) is None:
        raise ConfigurationError(
            f"the {batch_size(batch)} example(s) for the check before the first step, from all over the training data, "
            "are the same: no two differ.",
            why="whether one example sees another can only be checked with two that differ.",
            fix="look whether the dataset or its collator made all rows alike (one by itself cannot be trained on); if "
            "many repeat, shuffle the dataset.",
        )
    switches = switches or Switches()
    if off := switch_off(model, switches):
        warn_of(off)
    with forked_rng(model), off_zero(model):
        seen, size = surveyed(model, loss_fn, batch, rules=rules)
        known: dict[str, Any] = {"rules": rules, "readings": seen.readings}

        counting = set[int]()

        def check(batch: Batch, dtype: torch.dtype | None) -> tuple[Watch, list[int]]:
            n, order = batch_size(batch), list(range(batch_size(batch)))
            few = counted = take(batch, [i % n for i in range(size)])
            # It says which examples have a gradient; where nothing is drawn it is also what the same losses with other
            # weights are held against.
            once, draws = drawn_norms(model, loss_fn, few, Change(), **known)
            if dtype == torch.float64 and not counting <= {*with_gradient(once)}:
                raise ArithmeticError  # Of what float64 has no number for it says nothing.
            counting.update(with_gradient(once))
            is_told = len(with_gradient(once)) == size and not any(draw.is_shared for draw in draws.seen)
            if not is_told:
                first = that_count(model, loss_fn, batch, **known)
                order = [*first, *(i for i in range(n) if i not in first)]
                batch = take(batch, order)
                few, counted = (take(batch, [i % among for i in range(size)]) for among in (n, len(first)))
            without_shared_coins(model, loss_fn, counted, **known, switches=switches)
            check_independence(model, loss_fn, batch, **known)
            check_shares(model, loss_fn, few, **known, once=once if is_told and draws.is_silent else None)
            return _check_gradients(model, loss_fn, few, tables, **known), order

        watch, order = _with_enough_bits(model, batch, check)
    certificate = Certificate(watch.uses, read=watch.read | seen | seen.read)

    def refuse_in_training(few: Batch) -> None:
        # What its mode alone does (dropout, checkpoints) must not be refused only after the start.
        with forked_rng(model), passing_gradients(model):
            refuse_differing(record(model, loss_fn, few, certificate=certificate, rules=rules, tables=tables).differing)

    for first in range(0, min(len(order), _MOST), size):
        lot = order[first : first + size]
        few = take(batch, [lot[i % len(lot)] for i in range(size)])
        with suppress(UnseenUseError):
            refuse_in_training(few)
            continue
        with forked_rng(model), off_zero(model):
            others = sorted({*lot} - {*order[:DIFFERENT]})
            for other in _of_others(model, loss_fn, batch, others, order[0], tables, size=size, **known):
                certificate = Certificate(certificate | other.uses, read=certificate.read | other.read)
        refuse_in_training(few)
    return certificate


def _with_enough_bits(
    model: nn.Module, batch: Batch, check: Callable[[Batch, torch.dtype | None], _Checked]
) -> _Checked:
    """`check` in float32 where the model has fewer bits; what is off by rounding alone is not off in float64."""

    def check_in(dtype: torch.dtype, sparing: bool) -> _Checked:
        with computed_in(model, batch, dtype, sparing=sparing) as lifted:
            return check(lifted, dtype)

    try:
        return with_memory_to_spare(functools.partial(check_in, torch.float32))
    except PreflightError as error:
        refusal = error.with_traceback(None)
    except HfDpError:
        raise
    except Exception as error:  # noqa: BLE001 - each library has errors of its own for what it does not compute in
        # A kernel for 16 bits only, or no memory for more; or the model's own error, which comes again.
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
            ranks.warn(
                logger,
                "Checked in the model's own precision, in which gradients pass that are off by up to a twentieth: the "
                "check in float32 failed (%s).",
                error,
            )
        refusal = None
    if refusal is None:
        return check(batch, None)
    try:
        return with_memory_to_spare(functools.partial(check_in, torch.float64))
    except HfDpError:
        raise
    except Exception:  # noqa: BLE001 - as above: what float64 would show is not known
        raise refusal from None


def _check_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    tables: Collection[str],
    *,
    rules: Mapping[Any, Rule],
    readings: Readings,
) -> Watch:
    """Engine against oracle in eval mode, where all examples have the same random numbers if any are drawn there.

    The watch knows the uses that were compared.
    """
    size = batch_size(batch)
    # As many examples as no other axis has, of which more than three different ones show no more.
    batch = take(batch, [i % DIFFERENT for i in range(size)])
    # Powers of two, which round nothing, and others for copies: what these take from one another would be their own.
    scales = torch.arange(size, dtype=torch.float64).remainder(7).sub(3).exp2()

    def weighted(model: Any, batch: Batch) -> Tensor:
        losses = loss_fn(model, batch)
        return losses * scales.to(losses)

    def checked(numbers: Numbers) -> Watch:
        numbers = letting_go(model, numbers)
        watch = Watch(Reader(size, readings=readings), rules, tables=frozenset(tables))
        with numbers(size):
            losses = watch.run(model, weighted, batch)
        refuse_differing(most_differing(watch.differing))
        parameters = trainable(model)
        found = PerExampleGradients(losses, watch.factors, parameters, frozenset(watch.uses), watch.versions)
        weights = torch.linspace(0.5, 1.5, len(losses), device=losses.device, dtype=torch.float64)
        truth = Truth.of(model, loss_fn, batch, weights, tables, numbers)
        # A frozen base in bf16 rounds what reaches an adapter in float32.
        dtypes = watch.dtypes | {p.dtype for p in model.parameters() if p.is_floating_point()}
        compare(found, truth, weights, scales, dtypes, parameters)
        return watch

    with in_mode(model, training=False):
        return under_numbers_alike(checked)


def _of_others(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    others: Sequence[int],
    first: int,
    tables: Collection[str],
    *,
    size: int,
    **known: Any,
) -> Iterator[Watch]:
    """The same of each of `others`, which may take what no first one does: beside a copy, which shows what it takes of
    others like it, and beside the first, which has a gradient."""

    def check(few: Batch, dtype: torch.dtype | None) -> tuple[Watch, list[int]]:
        return _check_gradients(model, loss_fn, few, tables, **known), []

    for i in others:
        few = take(batch, [(i, first, i)[k % DIFFERENT] for k in range(size)])
        yield _with_enough_bits(model, few, check)[0]


def check_modules(model: nn.Module) -> None:
    """Refuses what is known to mix examples in training mode, what is compiled, and a model with nothing to train.

    Raises:
        UnsupportedModelError: with the module's name.
    """
    refuse_unshaped(model)
    with in_mode(model, training=True):
        refuse_mixing(model.named_modules())
    check_quantised(model.named_modules())
    refuse_compiled(list(model.modules()))
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(
            "the model has no trainable parameter.",
            why="there is nothing to train, and epsilon would be spent for nothing.",
            fix="unfreeze some parameters (requires_grad_(True)), or add an adapter with PEFT.",
        )


@contextmanager
def off_zero(model: nn.Module) -> Iterator[None]:
    """Parameters that are all zero are moved off it: behind them every gradient would be zero, and right."""
    parameters = [p for p in trainable(model).values() if p.is_floating_point()]
    # A shard may be empty, or all zero by chance.
    found = [float(local(p).any()) for p in parameters]
    touched = ranks.gathered(found).sum(0) if any(isinstance(p, DTensor) for p in parameters) else found
    # Through `.data`, which torch does not count: in a step other writes are told by that count.
    zeros = [local(p.data) for p, elements in zip(parameters, touched, strict=True) if not elements]
    kept = [p.clone() for p in zeros]
    with torch.no_grad():
        for p in zeros:
            p.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(zeros, kept, strict=True):
                p.copy_(before)
