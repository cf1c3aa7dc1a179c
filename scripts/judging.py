"""Is one case exact? Its errors against a loop over single examples, and how far a neighbour moves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from hf_dp.errors import HfDpError
from hf_dp.losses import check_own_loss, per_example_losses
from hf_dp.per_example import Certificate, PerExampleGradients, loop, preflight, record
from hf_dp.per_example.batch import LossFunction, batch_size
from hf_dp.per_example.checks.switches import switch_off
from hf_dp.per_example.precision import computed_in

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
# Of norms in bf16, against a loop in float32.
LOW_PRECISION = 0.01
USUAL = ((3, 7), (7, 7), (6, 7), (1, 7))
Build = Callable[[torch.dtype], nn.Module]
Shapes = tuple[tuple[int, int], ...]


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN where any is: what max() drops."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference in one parameter, relative to the whole gradient."""
    whole = float(sum(v.double().square().sum() for v in theirs.values())) ** 0.5
    return worst(float((ours[n].double() - theirs[n].double()).norm()) / whole for n in theirs)


def norm_error(found: PerExampleGradients, truth: PerExampleGradients) -> float:
    """The largest relative error of a norm, but for gradients that are nothing beside the others, rounding apart."""
    squares, true = found.squared_norms(), truth.squared_norms()
    is_rounding = (squares - true).abs() <= 100 * torch.finfo(squares.dtype).eps * true.sum()
    norms, true_norms = squares.double().sqrt(), true.double().sqrt()
    is_nothing = is_rounding & (true_norms <= 1e-2 * true_norms.max())
    return float(((norms - true_norms).abs() / true_norms).where(~is_nothing, 0).max())


def error(found: PerExampleGradients, truth: PerExampleGradients) -> float:
    """The largest relative error of norms and weighted sums."""
    weights = torch.linspace(0.5, 1.5, found.batch_size, dtype=torch.float64, device=found.losses.device)
    return worst((relative(found.weighted_sum(weights), truth.weighted_sum(weights)), norm_error(found, truth)))


def moved_by_a_neighbour(
    model: nn.Module, loss_fn: LossFunction, batch: dict[str, Any], certificate: Certificate
) -> float:
    """How far replacing the last example by the first moves the gradients of the others, relative."""
    weights = torch.ones(batch_size(batch), dtype=torch.float64)
    weights[-1] = 0
    other = {k: torch.cat([v[:-1], v[:1]]) for k, v in batch.items()}
    one, two = (record(model, loss_fn, b, certificate=certificate).weighted_sum(weights) for b in (batch, other))
    return relative(two, one)


class _Widened(TorchFunctionMode):
    """Casts of parameters to float32 are casts to float64 (those of other tensors `computed_in` sees)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.double if func is Tensor.float else func)(*args, **(kwargs or {}))


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def widened(model: nn.Module, batch: dict[str, Any]) -> Iterator[None]:
    """All that `model` computes of `batch`, in float64."""
    with computed_in(model, batch, torch.float64), in_float64():
        yield


@contextmanager
def sorted_in_float64() -> Iterator[None]:
    """Inside, Transformers multiplies the rows of experts in float64 with what it has for where torch cannot."""

    def can(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
        return input.dtype != torch.float64 and bool(before(input, weight, offs))

    before, moe._can_use_grouped_mm = moe._can_use_grouped_mm, can
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


@sorted_in_float64()
def judge(
    build: Build,
    make_batch: Callable[[int, int, torch.dtype], dict[str, Any]],
    loss_fn: LossFunction = per_example_losses,
    shapes: Shapes = USUAL,
    is_widened: bool = False,
) -> str:
    """ "exact 3e-16", "refused: why" or "WRONG"; in float64 with and without a certificate, in float32 with one, in two
    of several shapes.

    A batch of one example is read by the certificate, as in training: it has no size to tell its axis by. A model that
    knows no float64 `is_widened`: what it makes or casts in float32 is in float64 too.
    """
    largest, model, doubles = 0.0, build(torch.float64), [make_batch(*shape, torch.float64) for shape in shapes]
    try:
        with widened(model, doubles[0]) if is_widened else nullcontext():
            certificate = preflight(model, loss_fn, doubles[0])
            if loss_fn is per_example_losses:
                check_own_loss(model, doubles[0])
        for batch in doubles:
            known = certificate if batch_size(batch) == 1 else None
            off = math.inf
            if not is_widened:
                off = error(record(model, loss_fn, batch, certificate=known), loop(model, loss_fn, batch))
            if not off <= TOLERANCE[torch.float64]:
                # Some families compute parts in float32 whatever they are in.
                with widened(model, batch):
                    off = error(record(model, loss_fn, batch, certificate=known), loop(model, loss_fn, batch))
            if batch_size(batch) > 1:
                with widened(model, batch) if is_widened else nullcontext():
                    off = worst((off, moved_by_a_neighbour(model, loss_fn, batch, certificate)))
            if not off <= TOLERANCE[torch.float64]:
                return f"WRONG by {off:.1g} with {batch_size(batch)} examples"
            largest = max(largest, off)
        model = build(torch.float32)
        switch_off(model)
        for batch in (make_batch(*shape, torch.float32) for shape in shapes[1:3]):
            off = error(record(model, loss_fn, batch, certificate=certificate), loop(model, loss_fn, batch))
            if not off <= TOLERANCE[torch.float32]:
                return f"WRONG by {off:.1g} with {batch_size(batch)} examples in float32"
    except HfDpError as refusal:
        return f"refused: {refusal.found}"
    return f"exact {largest:.0e}"


def judge_low_precision(
    model: nn.Module,
    oracle: nn.Module,
    batch: dict[str, Any],
    autocast: bool = False,
    tolerance: float = LOW_PRECISION,
) -> str:
    """ "within 0.3 %" of the norms by a loop, sums being those of an ordinary backward pass over the same batch."""
    device = next(iter(batch.values())).device

    def losses(model: Any, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return per_example_losses(model, batch)

    try:
        found = record(model, losses, batch, certificate=preflight(model, losses, batch))
    except HfDpError as refusal:
        return f"refused: {refusal.found}"
    sums = found.weighted_sum(torch.ones(batch_size(batch), device=device))
    if any(total.dtype != torch.float32 for total in sums.values()):
        return "WRONG: sums are not in float32"
    norms, off = (
        norm_error(found, loop(oracle, per_example_losses, batch)),
        relative(sums, ordinary(model, losses, batch)),
    )
    if not worst((norms, off)) <= tolerance:
        return f"WRONG by {norms:.1g} in norms, {off:.1g} in sums"
    return f"within {100 * norms:.1f} %"


def ordinary(model: nn.Module, loss_fn: LossFunction, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of an ordinary backward pass from the sum of the losses."""
    loss_fn(model, batch).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    named = {name: gradients[name] for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return named
