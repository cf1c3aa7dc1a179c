"""Weights that were copied from what was trained privately in this process: known by some of their numbers."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.step.plan import Plan
from hf_dp.training.origin import covers

_FEW = 64
# Of fewer numbers two parameters may have the same by chance.
_TELLING = 16
_Known = tuple[torch.Size, bytes]


class _Left(NamedTuple):
    """By whom a parameter was left as it is, and after how many steps of that ledger."""

    who: weakref.ref[Any]
    ledger: Ledger
    steps: int


# What trainings have left, also of models that are gone.
_LEFT: dict[_Known, _Left] = {}


def few_of(p: Tensor) -> Tensor | None:
    """Some numbers from all over a parameter; None of one in shards, or in few bits."""
    if type(p.data) is not Tensor or not p.is_floating_point():
        return None
    every = max(1, p.numel() // _FEW)
    return p.detach().flatten()[::every].clone()


def has_moved(p: Tensor, before: Tensor) -> bool:
    """Whether numbers of `few_of` are others now, which a change of precision alone does not say."""
    now = few_of(p)
    return now is not None and now.dtype == before.dtype and not torch.equal(now.cpu(), before.cpu())


def begun_with(model: nn.Module) -> frozenset[_Known]:
    """What a training begins with: for `note_left`."""
    return frozenset(known for p in model.parameters() if (known := _known(p)) is not None)


def note_left(model: nn.Module, before: frozenset[_Known], who: weakref.ref[Any], ledger: Ledger) -> None:
    """For `refuse_copies`, where a training has come to an end: trained parameters that are others than any before."""
    left = {_known(p) for p in model.parameters() if p.requires_grad} - before if ledger.steps else set()
    _LEFT.update({known: _Left(who, ledger, ledger.steps) for known in left if known is not None})


def refuse_copies(model: nn.Module, trainer: object, saved: object | None, plan: Plan) -> None:
    """Refuses weights that another training of this process has left, in whatever model they are now, where the
    promise does not say on whose data.

    Args:
        model: with the weights to begin from.
        trainer: that will train it.
        saved: of the checkpoint that the trained weights were read from, if any: of these its training was asked.
        plan: of this training.

    Raises:
        LedgerError: this trainer's ledger, and so its report and card, would not have those steps.
    """
    for p in model.parameters() if _LEFT and not plan.config.other_people else ():
        left = None if saved is not None and p.requires_grad else _LEFT.get(_known(p))  # type: ignore[arg-type]
        if left is None or left.who() is trainer or covers(plan.earlier, left.ledger, left.steps):
            continue
        raise LedgerError(
            f"the model has weights that another private training in this process has left, after {left.steps} steps.",
            why="the ledger of this one is without them, so its report and its card would leave out what those cost.",
            fix="on data of the same people call save_model() of that trainer, and give PrivacyConfig(after=...) with "
            "its folder: both then share one budget; where nobody is in both, PrivacyConfig(other_people=True). Or "
            "begin from weights of before.",
        )


def _known(p: Tensor) -> _Known | None:
    few = few_of(p)
    if few is None or len(few) < _TELLING or few.is_meta:
        return None
    return p.shape, few.float().cpu().numpy().tobytes()
