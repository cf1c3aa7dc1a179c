"""Weights that were copied from what was trained privately in this process: known by some of their numbers."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.per_example.bits import bits_of
from hf_dp.per_example.checks.state import is_saved as is_saved_buffer
from hf_dp.step.plan import Plan
from hf_dp.training.adapters import states_of_adapters
from hf_dp.training.resuming.origin import covers
from hf_dp.training.resuming.same_rows import OtherPeople

_FEW = 64
# Of fewer numbers two parameters may have the same by chance.
_TELLING = 16
# Parameters that are looked at after each step: one alone may be one that it did not move (rows that are looked up).
_AT_EACH_STEP = 4
_Known = bytes


class _Left(NamedTuple):
    """By whom a parameter was left as it is, and after how many steps of that ledger."""

    who: weakref.ref[Any]
    ledger: Ledger
    steps: int


class _AsLeft(NamedTuple):
    """As `_Left`; its shape, type and sum of bits then, and which beginning of a training that was the end of."""

    who: weakref.ref[Any]
    steps: int
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    beginning: frozenset[_Known]

    def has_moved(self, value: Tensor) -> bool:
        """Whether its numbers are others now, which a change of precision, or rows for new tokens, do not say."""
        is_like = (value.shape, value.dtype) == (self.shape, self.dtype)
        return is_like and _bits(value) != self.bits


# What trainings have left, also of models that are gone.
_LEFT: dict[_Known, tuple[_Left, ...]] = {}
_AS_LEFT: Any = WeakTensorKeyDictionary()
# By trainer all that its model keeps, by name, frozen or not: also for a model that was put in the place of that one.
_BY_NAME: weakref.WeakKeyDictionary[Any, tuple[type, dict[str, _AsLeft | None]]] = weakref.WeakKeyDictionary()
# By trainer the model of a training that has not come to its end.
_AT_WORK: weakref.WeakKeyDictionary[Any, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def few_of(p: Tensor) -> Tensor | None:
    """Some numbers from all over a parameter; None of one in shards, in few bits or sparse."""
    if type(p.data) is not Tensor or not p.is_floating_point() or p.layout is not torch.strided:
        return None
    every = max(1, p.numel() // _FEW)
    return p.detach().flatten()[::every].clone()


def has_moved(p: Tensor, before: Tensor) -> bool:
    """Whether numbers of `few_of` are others now, which a change of precision alone does not say."""
    now = few_of(p)
    return now is not None and now.dtype == before.dtype and not torch.equal(now.cpu(), before.cpu())


class Saved(Protocol):
    """A checkpoint, as far as is asked here; see `hf_dp.training.resuming.resume`."""

    @property
    def seal(self) -> str | None: ...

    @property
    def ledger(self) -> Ledger: ...


class Leaving:
    """Notes what a training leaves, for `refuse_copies` and `refuse_moved`.

    Args:
        model, optimizer: that are trained.
        owner: of the training.
        ledger: of it.
    """

    def __init__(self, model: nn.Module, optimizer: Any, owner: object, ledger: Ledger) -> None:
        self._model, self._optimizer, self._who, self._ledger = model, optimizer, weakref.ref(owner), ledger
        self._before = frozenset(known for p in model.parameters() if (known := _known(p)) is not None)
        # While it is at work it is no end of another one: a checkpoint may have been read since.
        _BY_NAME.pop(owner, None)
        _AT_WORK[owner] = weakref.ref(model)
        for p in model.parameters():
            if (left := _AS_LEFT.get(p)) is not None and left.who() is owner:
                del _AS_LEFT[p]
        trained = [p for p in model.parameters() if p.requires_grad and few_of(p) is not None]
        self._largest = sorted(trained, key=lambda p: -p.numel())[:_AT_EACH_STEP]

    def after_step(self) -> None:
        """A copy may be taken after any: some parameters are enough to tell it."""
        self._note(self._largest)

    def at_end(self) -> None:
        """Which trained parameters are others than any before, and what all that is saved with them is."""
        kept = _kept(self._model) if self._ledger.charges else {}
        trained = [value for value in kept.values() if value.requires_grad]
        self._note(trained)
        # Schedule-free optimizers exchange weights between training and evaluation.
        changes_itself = any("train_mode" in group for group in self._optimizer.param_groups)
        noted: dict[str, _AsLeft | None] = {}
        for name, value in kept.items():
            is_told = few_of(value) is not None and not value.is_meta
            noted[name] = self._as_left(value) if is_told and not (changes_itself and value.requires_grad) else None
            if value.requires_grad and (left := noted[name]) is not None:
                _AS_LEFT[value] = left
        if (trainer := self._who()) is not None:
            _BY_NAME[trainer] = type(self._model), noted
            _AT_WORK.pop(trainer, None)

    def _as_left(self, value: Tensor) -> _AsLeft:
        known, steps = _AS_LEFT.get(value), self._ledger.steps
        if known is not None and known.beginning is self._before and known.steps == steps:
            return known  # type: ignore[no-any-return]
        return _AsLeft(self._who, steps, value.shape, value.dtype, _bits(value), self._before)

    def _note(self, parameters: Iterable[Tensor]) -> None:
        left = {known for p in parameters if (known := _known(p)) is not None} - self._before
        now = _Left(self._who, self._ledger, self._ledger.steps)
        # Two trainings with one seed leave the same: who knows one of them knows the other.
        for known in left:
            others = (one for one in _LEFT.get(known, ()) if one.who is not self._who)
            _LEFT[known] = (*others, now)


def refuse_moved(model: nn.Module, trainer: Any, what: str, *, is_saved: bool = False) -> None:
    """Refuses `what` follows, where something else has changed what `trainer` has left at the end of its training.

    Args:
        is_saved: whether the model is what `trainer` saves, so that one in the place of what it has trained is held
            against that, by the names of parameters. What an adapter is merged into has others, and what a model is
            made into for others to load is of another class.

    Raises:
        LedgerError: with the name of a parameter.
    """
    if is_saved:
        _refuse_another(model, trainer, what)
    kind, by_name = _BY_NAME.get(trainer, (None, {}))
    by_name = by_name if is_saved and type(model) is kind else {}
    states = states_of_adapters(model) if by_name else None
    goes_along = None if states is None else {value.data_ptr() for state in states for value in state.values()}
    for name, value in _kept(model).items():
        left: Any = _AS_LEFT.get(value) if value.requires_grad else None
        if left is None and by_name and (goes_along is None or value.data_ptr() in goes_along):
            _refuse_new(name, by_name, what)
            left = by_name[name]
        if left is None or left.who() is not trainer or left.steps != trainer.ledger.steps or not left.has_moved(value):
            continue
        raise LedgerError(
            f"{what}, after something else than this training has changed {name} since it came to its end.",
            why="what changed it may have seen private data (a training without privacy, say), of which the ledger has "
            "nothing, and the record beside the weights would be untrue.",
            fix="save right after training (save_model(), or save() of a PrivateRun), and change a copy of the model, "
            "or what was saved; weights that are changed already can be saved without a record, by save_pretrained() "
            "of the model.",
        )


def _refuse_another(model: nn.Module, trainer: Any, what: str) -> None:
    at_work = _AT_WORK.get(trainer)
    if at_work is None or (own := at_work()) is None:
        return
    known = {id(p) for p in own.parameters()}  # also of what an adapter was merged into, or is a part
    if (name := next((name for name, p in model.named_parameters() if id(p) not in known), None)) is not None:
        raise LedgerError(
            f"{what} in the middle of a training, of a model that is not the one that is trained ({name} is not its).",
            why="it would be saved beside the record of a training that has not made it, and what has made it may have "
            "seen private data.",
            fix="put the trained model back in the place of that one (trainer.model, or model of a PrivateRun); save "
            "another one without a record, by its save_pretrained().",
        )


def _refuse_new(name: str, known: Mapping[str, Any], what: str) -> None:
    if name not in known:
        raise LedgerError(
            f"{what}, of a model that has got {name} since this training came to its end.",
            why="it would be saved beside the record of a training that has not made it, and what has made it may have "
            "seen private data.",
            fix="call save_model() right after train(); take out what came since (of adapters, delete_adapter()), or "
            "save it without a record, by save_pretrained() of the model.",
        )


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved."""
    saved = (
        (f"{path}.{last}".lstrip("."), value)
        for path, owner in model.named_modules()
        for last, value in owner._buffers.items()
        if value is not None and is_saved_buffer(owner, last)
    )
    return {**dict(model.named_parameters()), **dict(saved)}


def _bits(value: Tensor) -> int:
    return int(bits_of(value.detach().reshape(1, -1)))


def refuse_copies(model: nn.Module, trainer: object, saved: Saved | None, plan: Plan, others: OtherPeople) -> None:
    """Refuses weights that another training of this process has left, in whatever model they are now, where the
    promise does not say on whose data.

    Args:
        model: with the weights to begin from.
        trainer: that will train it.
        saved: of the checkpoint that the trained weights were read from, if any: of these its training was asked.
        plan: of this training.
        others: trainings on data of other people.

    Raises:
        LedgerError: this trainer's ledger, and so its report and card, would not have those steps.
    """
    if saved is None:
        refuse_moved(model, trainer, "another training")
    for p in model.parameters() if _LEFT else ():
        all_left = () if saved is not None and p.requires_grad else _LEFT.get(_known(p), ())  # type: ignore[arg-type]
        if (
            not all_left
            or any(
                left.who() is trainer
                or covers(plan.earlier, left.ledger, left.steps)
                # Rank 0 writes, and knows what it wrote.
                or (saved is not None and _is_of(saved, left.ledger) and left.steps <= saved.ledger.steps)
                for left in all_left
            )
            or all(left.ledger in others for left in all_left)
        ):
            continue
        left = all_left[-1]
        raise LedgerError(
            f"the model has weights that another private training in this process has left, after {left.steps} steps.",
            why="the ledger of this one is without them, so its report and its card would leave out what those cost.",
            fix="on data of the same people let that one save (save_model(), or save() of a PrivateRun), and give "
            "PrivacyConfig(after=...) with that folder: both then share one budget; where nobody is in both, "
            "PrivacyConfig(other_people=True). Or begin from weights of before.",
        )


def were_left(model: nn.Module) -> bool:
    """Whether a private training of this process has left some of these weights, in whatever model they were then."""
    return bool(_LEFT) and any(_LEFT.get(_known(p)) for p in model.parameters())  # type: ignore[arg-type]


def _is_of(saved: Saved, ledger: Ledger) -> bool:
    return saved.seal in ledger.sealed or ranks.rank() != 0


def _known(p: Tensor) -> _Known | None:
    few = few_of(p)
    if few is None or len(few) < _TELLING or few.is_meta:
        return None
    numbers = few.float().cpu().numpy().tobytes()
    return hashlib.blake2b(str(tuple(p.shape)).encode() + numbers, digest_size=16).digest()
