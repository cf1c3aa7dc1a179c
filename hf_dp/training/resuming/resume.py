"""Continuing a private run: what a checkpoint must hold for the total epsilon to stay true."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.accounting.earlier import is_of_earlier
from hf_dp.config import PrivacyConfig
from hf_dp.data.fingerprint import (
    KEY_FILE,
    Fingerprint,
    compare,
    fingerprint,
    fingerprint_key,
    from_all,
    told_to_all,
)
from hf_dp.errors import LedgerError
from hf_dp.hub.checkpoint import refuse_disagreement, seal
from hf_dp.hub.record import DEEPEST, RECORD_FILE, PrivacyRecord, is_deep
from hf_dp.step.plan import Plan
from hf_dp.training.resuming.copies import few_of, has_moved
from hf_dp.training.resuming.origin import covers
from hf_dp.training.resuming.same_rows import OtherPeople

logger = logging.getLogger(__name__)

# Trainer saves the state of a callback under the name of its class.
STATE_KEY = "PrivacyCallback"
_PATH = ("stateful_callbacks", STATE_KEY, "attributes", "saved_ledger")
# Which trainers have begun with a parameter in this process, and their ledgers; of one left frozen, some numbers of it.
_TRAINED_BY: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint knows of the private run that wrote it.

    Attributes:
        ledger: everything released up to the checkpoint, perhaps more than its global step.
        data: the keyed fingerprint of the training data; None if there was none.
        key: the key of `data`, from the directory that the checkpoint lies in; None if it is gone.
        values: checksums of the weights and of the optimizer's state; see `hf_dp.training.resuming.loaded`.
        seal: that it was saved with.
        config: of the record beside it; None if there is none.
        checkpoint: the folder that it was read from, if it was.
    """

    ledger: Ledger
    data: Fingerprint | None
    key: bytes | None
    values: Mapping[str, str] | None = None
    seal: str | None = None
    config: PrivacyConfig | None = None
    checkpoint: Path | None = None

    def record(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What the callback saves, for `read` to find, beside the fields of Trainer's `state`."""
        sealed: dict[str, Any] = {"ledger": self.ledger.to_dict(), "data": self.data, "values": self.values}
        if self.key is None:
            return {**sealed, "seal": None}
        self.ledger.sealed.add(found := seal(self.key, **sealed, state=state))
        return {**sealed, "seal": found}

    @classmethod
    def read(cls, checkpoint: str | Path) -> SavedRun:
        """Reads `trainer_state.json` of a checkpoint.

        Raises:
            LedgerError: it is missing or damaged, has no ledger, counts steps that the ledger does not, or was changed.
        """
        path = Path(checkpoint) / "trainer_state.json"
        try:
            state: Any = json.loads(path.read_text(encoding="utf-8"))
            if is_deep(state):
                raise RecursionError(f"nested deeper than {DEEPEST}")
        except (OSError, ValueError, RecursionError) as error:
            raise _no_ledger(f"{str(path)!r} cannot be read ({error})") from error
        found = state
        step = found.get("global_step") if isinstance(found, dict) else None
        for name in _PATH:
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or "ledger" not in found or not isinstance(step, int):
            raise _no_ledger(f"{str(path)!r} has no privacy ledger")
        ledger = Ledger.from_dict(found["ledger"])
        if ledger.steps < step:
            raise LedgerError(
                f"the checkpoint's ledger counts {ledger.steps} private steps, its trainer state {step}.",
                why="steps that are not in the ledger would be missing from epsilon.",
                fix="use a checkpoint whose trainer_state.json is as it was saved.",
            )
        refuse_disagreement(checkpoint, state, ledger)
        key, data = fingerprint_key(Path(checkpoint).absolute().parent, create=False), found.get("data")
        values = found.get("values")
        if key is None:
            ranks.warn(logger, "The seal of %r was not checked: there is no whole key (%s).", str(path), KEY_FILE)
        elif found.get("seal") != seal(key, found["ledger"], data, state, values):
            raise LedgerError(
                f"{str(path)!r} does not fit the seal that it was saved with.",
                why="something in it was changed, or the checkpoint is of another output directory with another key.",
                fix="use a checkpoint whose trainer_state.json is as it was saved, in its own output directory.",
            )
        data, values = (each if isinstance(each, dict) else None for each in (data, values))
        beside, found = Path(checkpoint, RECORD_FILE), found.get("seal")
        config = PrivacyRecord.from_json(beside.read_bytes()).config if beside.is_file() else None
        return cls(ledger, data, key, values, found if isinstance(found, str) else None, config, Path(checkpoint))

    def check(self, promise: Mapping[str, Any], dataset: Any) -> str | None:
        """Refuses to continue under another promise or on other data; gives what could not be compared.

        Raises:
            LedgerError: with what differs.
        """
        self.ledger.check_same_promise(promise)
        if self.key is None or self.data is None:
            what = "The data could not be compared with the checkpoint's (no fingerprint or no key to it)"
            return f"{what}: see that it is the same, and copy _hf_dp_fingerprint_key beside the checkpoints."
        saved = from_all(self.data, self.key)
        differs, unknown = compare(saved, fingerprint(dataset, self.key, promise.get("unit")))
        if differs:
            raise LedgerError(
                "the training data is not the data that the checkpoint was trained on.",
                why="the ledger's epsilon is a statement about one dataset.",
                fix="resume with the same dataset in the same order, or start a new run in a new output_dir.",
            )
        if unknown:
            return (
                f"{unknown} of {len(saved)} columns of the data could not be compared with the checkpoint's: they "
                "change from one look to the next. That it is the same data is your word."
            )
        return None


class Fingerprints:
    """That of one training's data, which is computed once, for all checkpoints that the training writes."""

    def __init__(self) -> None:
        self._known: list[Fingerprint | None] = []

    def saved(
        self,
        ledger: Ledger,
        dataset: Any,
        output_dir: str | Path,
        values: Mapping[str, str] | None,
        unit: str | None,
    ) -> SavedRun:
        """What the next checkpoint in `output_dir` will know; see `SavedRun`. Every rank may ask, and one writes."""
        key = fingerprint_key(output_dir, create=True) if ranks.rank() == 0 else None
        if not self._known and dataset is not None:
            self._known.append(told_to_all(fingerprint(dataset, key, unit), key) if key else None)
        return SavedRun(ledger, self._known[0] if self._known else None, key, values)


def refuse_trained_by_another(
    model: nn.Module, trainer: object, saved: SavedRun | None, plan: Plan, others: OtherPeople
) -> None:
    """Refuses to go on from weights that another trainer in this process has trained privately, where the promise does
    not say on whose data.

    Args:
        model: with the weights to begin from.
        trainer: that will train it.
        saved: of the checkpoint that the trained weights were read from, which may be all that it has; or None.
        plan: of this training.
        others: trainings on data of other people.

    Raises:
        LedgerError: this trainer's ledger, and so its report and card, would not have those steps.
    """
    for p in model.parameters():
        if saved is not None and p.requires_grad:
            continue
        who, ledger, _ = _trained_by(p) or (None, None, None)
        if who is None or ledger is None or covers(plan.earlier, ledger):
            continue
        # A training that is gone is neither.
        if (by := who()) is not None and (by is trainer or by is saved):
            continue
        if ledger in others:
            continue
        steps = (
            f"{ledger.steps} private steps" if ledger.steps else f"it released {labels_of(ledger)}, and took no step,"
        )
        raise LedgerError(
            f"another private training has trained this model before: {steps} on {examples_of(ledger.promise)}.",
            why="the ledger of this one is without them, so its report and its card would leave out what those cost.",
            fix="on data of the same people let that one save now (save_model(), or save() of a PrivateRun), and give "
            "PrivacyConfig(after=...) with that folder: both then share one budget; where nobody is in both, "
            "PrivacyConfig(other_people=True). Or begin from a new model object (not from this one with weights put "
            "back), or without the adapter (delete_adapter). With noise_multiplier a trainer may train() again.",
        )


def note_trained_by(model: nn.Module, trainer: object, ledger: Ledger) -> None:
    """For `refuse_trained_by_another`; of frozen parameters what they are now: adapters may be merged into them.

    Whoever trained before is forgotten once `ledger` has spent something: its promise has said whose data that was.
    """
    for p in model.parameters():
        known = _trained_by(p)
        if p.requires_grad:
            _TRAINED_BY[p] = (*([] if known is None else [(*known[:2], None)]), (weakref.ref(trainer), ledger, None))
        elif known is None and (now := few_of(p)) is not None:
            _TRAINED_BY[p] = ((weakref.ref(trainer), ledger, now),)


def has_changed_since(p: Tensor, trainer: object) -> bool:
    """Whether another training than `trainer`, or a checkpoint that was read, made a parameter what it is now."""
    for who, ledger, _ in reversed(_TRAINED_BY.get(p, ())):
        if who() is trainer or ledger.steps or labels_of(ledger):
            return who() is not trainer
    return False


def _trained_by(p: Tensor) -> tuple[Any, Ledger, Tensor | None] | None:
    """The latest training that may have changed a parameter: one that spent something besides what came before it."""
    for who, ledger, frozen in reversed(_TRAINED_BY.get(p, ())):
        if (ledger.steps or labels_of(ledger)) and (frozen is None or has_moved(p, frozen)):
            return who, ledger, frozen
    return None


def labels_of(ledger: Ledger) -> str:
    """What a training released besides its steps."""
    return ", ".join(sorted({made.label for made in ledger.releases if not is_of_earlier(made.label)}))


def examples_of(promise: Mapping[str, Any]) -> str:
    """What was trained on, in words."""
    n, column = promise["dataset_size"], promise.get("unit")
    if column is not None:
        drawn = ", each drawn by itself" if promise.get("unit_sampling") == "examples" else ""
        most = f"(column {column}, at most {promise.get('max_examples_per_unit')} examples of each{drawn})"
        return f"units whose number is secret {most}" if n is None else f"{n} units {most}"
    return "examples whose number is secret" if n is None else f"{n} examples"


def steps_of(folder: Path, number: int) -> int:
    """How many private steps the ledger of checkpoint `number` in a folder has; of one that cannot be read its number.

    Nothing of it is checked: it is not gone on from.
    """
    try:
        found: Any = json.loads((folder / f"{PREFIX_CHECKPOINT_DIR}-{number}" / "trainer_state.json").read_bytes())
        for name in (*_PATH, "ledger"):
            found = found[name]
        return Ledger.from_dict(found).steps
    except (OSError, ValueError, LookupError, TypeError, RecursionError, LedgerError):
        return number


def _no_ledger(what: str) -> LedgerError:
    return LedgerError(
        f"{what}.",
        why="what was already spent on this data is unknown, so no total epsilon could be promised.",
        fix="resume from a checkpoint that DPTrainer saved, or start a new run from its weights on new data.",
    )
