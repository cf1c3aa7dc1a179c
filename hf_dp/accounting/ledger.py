"""The record of every private release of a run: charged before the release, saved with every checkpoint."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting as dp

from hf_dp.accounting.accountants import epsilon, has_renyi
from hf_dp.accounting.events import event_from_dict, event_to_dict, primitives
from hf_dp.accounting.release import TRAINING_STEP, Release, check_label
from hf_dp.config import AccountantName
from hf_dp.config.ranges import is_count
from hf_dp.errors import LedgerError, damaged

VERSION = 1
_damaged = functools.partial(
    damaged,
    "not a readable privacy ledger",
    why="a ledger that is not whole could hide privacy that was already spent.",
    fix="resume from an earlier checkpoint whose ledger is whole, or start anew without resuming.",
)


class Ledger:
    """What has been released, as one composed accounting event. Charge it before each release, never after.

    Attributes:
        promise: what the ledger belongs to, as plain JSON values: config without the seed, dataset size, expected
            batch size, sampling probability, noise multiplier, planned steps, delta. `check_same_promise` compares
            it when a run is resumed.
        written: SHA-256 of each record that this process wrote of it.
        sealed: the seal of each checkpoint that it wrote.
        own_steps: how many training steps this process charged.
        own_labels: what else it charged.
    """

    def __init__(self, promise: Mapping[str, Any] | None = None) -> None:
        self.promise: dict[str, Any] = _jsonable(dict(promise or {}))
        self._entries: list[tuple[dp.DpEvent, int, str]] = []
        self.written: set[str] = set()
        self.sealed: set[str] = set()
        self.own_steps = 0
        self.own_labels: set[str] = set()
        # By how much was charged: whoever asks in the middle of a charge (a signal's handler) is told of before it.
        self._epsilons: dict[tuple[int, float, AccountantName], float] = {}

    def charge(self, event: dp.DpEvent, label: str = TRAINING_STEP, count: int = 1) -> None:
        """Record that `event` is about to be released `count` times.

        Raises:
            LedgerError: an event that no accountant here interprets, a count below 1, or a label that is no short name.
        """
        check_label(label)
        if not is_count(count, at_least=1):
            raise LedgerError(
                f"a charge of {count!r} times {label!r}.",
                why="a ledger only grows: what was released cannot be taken back.",
                fix="charge a whole number of at least 1 before each release.",
            )
        primitives(event)
        if label == TRAINING_STEP:
            self.own_steps += count
        else:
            self.own_labels.add(label)
        # An interrupt may come at any instruction, and the ledger be saved then: at none is less in it than before.
        if self._entries and (self._entries[-1][0], self._entries[-1][2]) == (event, label):
            self._entries[-1] = event, self._entries[-1][1] + count, label
        else:
            self._entries.append((event, count, label))

    @property
    def steps(self) -> int:
        """How many training steps were charged."""
        return sum(count for _, count, label in self._entries if label == TRAINING_STEP)

    @property
    def releases(self) -> tuple[Release, ...]:
        """All that was charged beside the training steps, equal ones together, in the order of the first of each."""
        made: dict[tuple[str, str], Release] = {}
        for event, count, label in self._entries:
            if label == TRAINING_STEP:
                continue
            key = label, repr(event)
            made[key] = Release(label, event, count + (made[key].times if key in made else 0))
        return tuple(made.values())

    @property
    def charges(self) -> int:
        """How many releases of any kind were charged."""
        return sum(count for _, count, _ in self._entries)

    @property
    def entries(self) -> tuple[tuple[dp.DpEvent, int, str], ...]:
        """Each charge as (event, count, label), in order, equal neighbours joined."""
        return tuple(self._entries)

    @property
    def event(self) -> dp.DpEvent:
        """Everything charged, as one event; `NoOpDpEvent` if nothing was."""
        if not self._entries:
            return dp.NoOpDpEvent()
        return dp.ComposedDpEvent([dp.SelfComposedDpEvent(event, count) for event, count, _ in self._entries])

    def epsilon(self, delta: float, accountant: AccountantName = "pld") -> float:
        """Epsilon at `delta` of everything charged, in nats; see `hf_dp.accounting.epsilon`. Remembered."""
        key = (self.charges, delta, accountant)
        if key not in self._epsilons:
            self._epsilons[key] = epsilon(self.event, delta, accountant)
        return self._epsilons[key]

    def epsilons(self, delta: float) -> dict[AccountantName, float]:
        """Epsilon of everything charged by each accountant that has one, in nats."""
        names: tuple[AccountantName, ...] = ("pld", "rdp") if has_renyi(self.event) else ("pld",)
        return {name: self.epsilon(delta, name) for name in names}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and (self.promise, self._entries) == (other.promise, other._entries)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger(steps={self.steps}, entries={len(self._entries)})"

    def check_same_promise(self, other_promise: Mapping[str, Any]) -> None:
        """Refuse to continue this ledger under another promise.

        Raises:
            LedgerError: naming each field that differs, with its value here and there.
        """
        other = _jsonable(dict(other_promise))
        differing = [
            f"{name}: {self.promise.get(name, 'absent')!r} in the ledger, {other.get(name, 'absent')!r} now"
            for name in sorted({*self.promise, *other})
            if name not in self.promise or name not in other or self.promise[name] != other[name]
        ]
        if differing:
            raise LedgerError(
                "the ledger belongs to another run: " + "; ".join(differing) + ".",
                why="steps already taken were accounted for other data or other settings; continuing would make the "
                "final epsilon untrue.",
                fix="resume with the settings and the dataset of the first run; or begin another training elsewhere, "
                "with PrivacyConfig(after=...) where it is on the same people (more steps, say): both have one budget."
                + _on_other_processes(self.promise.get("expected_batch_size"), other.get("expected_batch_size"))
                + _in_another_order(self.promise.get("earlier"), other.get("earlier")),
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; `from_dict` is the inverse."""
        entries = [{"event": event_to_dict(event), "count": n, "label": label} for event, n, label in self._entries]
        return {"version": VERSION, "promise": self.promise, "entries": entries}

    @classmethod
    def from_dict(cls, values: object) -> Ledger:
        """The ledger that `to_dict` wrote.

        Raises:
            LedgerError: anything else: another version, a missing field, a count below 1, an unknown event.
        """
        if not isinstance(values, dict) or set(values) != {"version", "promise", "entries"}:
            raise _damaged(f"expected the fields version, promise and entries, found {str(values)[:100]}")
        if values["version"] != VERSION or isinstance(values["version"], bool):
            raise _damaged(f"version {values['version']!r} was written by another release; this one reads {VERSION}")
        if not isinstance(values["promise"], dict) or not isinstance(values["entries"], list):
            raise _damaged("promise is not an object, or entries is not a list")
        ledger = cls(values["promise"])
        for entry in values["entries"]:
            if not isinstance(entry, dict) or set(entry) != {"event", "count", "label"}:
                raise _damaged(f"entry {str(entry)[:100]} has not the fields event, count and label")
            ledger.charge(event_from_dict(entry["event"]), entry["label"], entry["count"])
        ledger.own_steps, ledger.own_labels = 0, set()  # another process charged them
        return ledger


def _jsonable(promise: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back, so that a saved promise equals the one it was saved from."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(_finite(promise), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(
            f"the promise of {', '.join(map(str, promise))} cannot be written as JSON ({error}).",
            why="a ledger that cannot be saved cannot be resumed or published.",
            fix="use only numbers, text, booleans, None, lists and dictionaries.",
        ) from error
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return "inf" if isinstance(value, float) and value == math.inf else value


def _in_another_order(saved: Any, now: Any) -> str:
    if saved == now or not (isinstance(saved, list) and isinstance(now, list)):
        return ""
    same = sorted(map(str, saved)) == sorted(map(str, now))
    return " The trainings of after are the same: name them in the order of the first run." if same else ""


def _on_other_processes(saved: Any, now: Any) -> str:
    if saved == now or not (isinstance(saved, (int, float)) and isinstance(now, (int, float)) and now > 0):
        return ""
    return (
        " The expected batch size is per_device_train_batch_size x gradient_accumulation_steps x processes: on another "
        f"number of processes change gradient_accumulation_steps (from here, times {saved / now:.4g})."
    )
