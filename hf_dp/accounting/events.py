"""What was released, in `dp_accounting`'s language of events: taken apart, to JSON and back, and in words."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp

from hf_dp.accounting.kinds import KINDS, Primitive
from hf_dp.config import PrivacyConfig
from hf_dp.config.ranges import is_count, is_delta, is_probability, shown
from hf_dp.config.units import drawn_are
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.figures import upper

_KINDS_BY_TYPE = {kind.event: kind for kind in KINDS}
_KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
_EXAMPLES = "training examples"
# Of a hundred such trainings one may publish what somebody gave: below 1/n that is where there are few.
_LARGE_DELTA = 0.01
# Each takes about 0.1 s; a training has one, and one for each kind of release besides its steps.
MOST_MECHANISMS = 16


def primitives(event: dp.DpEvent) -> dict[Primitive, int] | None:
    """How often each mechanism is used by an event, whatever its nesting; None if any part has infinite epsilon.

    Raises:
        LedgerError: a part that is no composition of known mechanisms.
    """
    counts: dict[Primitive, int] = {}
    return counts if _count(event, 1, counts) else None


def _count(event: dp.DpEvent, times: int, counts: dict[Primitive, int]) -> bool:
    match event:
        case dp.NoOpDpEvent():
            return True
        case dp.NonPrivateDpEvent():
            return times == 0
        case dp.SelfComposedDpEvent(event=inner, count=count) if is_count(count):
            return _count(inner, times * count, counts)
        case dp.ComposedDpEvent(events=parts):
            # Every part is looked at, so that an unknown one is refused wherever it stands.
            finite = [_count(part, times, counts) for part in parts]
            return all(finite)
    kind = _KINDS_BY_TYPE.get(type(event))
    primitive = None if kind is None or kind.primitive is None else kind.primitive(event)
    if primitive is None:
        raise LedgerError(
            f"the accounting event {event!r} is not known here.",
            why="an event that no accountant here interprets could cost any amount of privacy.",
            fix="express the release as Gaussian noise, Poisson-sampled or not, or as a composition of these.",
        )
    if times and not primitive.is_free:
        counts[primitive] = counts.get(primitive, 0) + times
    return primitive.is_free or primitive.is_finite or times == 0


def check_mechanisms(among: str, *events: dp.DpEvent) -> None:
    """Refuse more different mechanisms together than a record is verified with (`ConfigurationError`).

    Args:
        among: which others are among them, for the refusal.

    Raises:
        LedgerError: an event that is not known here.
    """
    different = len(primitives(dp.ComposedDpEvent(list(events))) or ())
    if different > MOST_MECHANISMS:
        raise ConfigurationError(
            f"{different} different mechanisms, {among} among them.",
            why=f"records of more than {MOST_MECHANISMS} are not verified: adding them up takes long.",
            fix="plan fewer and longer trainings, or several with the same noise and sampling probability.",
        )


def event_to_dict(event: dp.DpEvent) -> dict[str, Any]:
    """An event as plain values for strict JSON; `event_from_dict` is the inverse.

    Raises:
        LedgerError: an event that is no composition of known mechanisms.
    """
    primitives(event)
    return _written(event)


def _written(event: dp.DpEvent) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return _written(value) if isinstance(value, dp.DpEvent) else value

    fields = {name: plain(getattr(event, name)) for name in type(event).__match_args__}
    return {"type": _KINDS_BY_TYPE[type(event)].name, **fields}


def event_from_dict(values: object) -> dp.DpEvent:
    """The event that `event_to_dict` wrote.

    Raises:
        LedgerError: anything else, for example an unknown type, a missing field or a negative count.
    """
    try:
        event = _read(values)
        primitives(event)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LedgerError(
            f"{str(values)[:200]} is not an accounting event ({type(error).__name__}: {error}).",
            why="what it cost cannot be known.",
            fix="restore the file from a backup or an earlier checkpoint; do not edit it by hand.",
        ) from error
    return event


def _read(values: Any) -> dp.DpEvent:
    if values["type"] not in _KINDS_BY_NAME:
        raise KeyError(f"unknown event type {values['type']!r}, which a newer hf_dp or dp-accounting may know")
    fields = {name: _inner(value) for name, value in values.items() if name != "type"}
    return _KINDS_BY_NAME[values["type"]].event(**fields)


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(item) for item in value]
    return _read(value) if isinstance(value, dict) else value


def in_words(event: dp.DpEvent) -> str:
    """One release, for a reader of a card."""
    return _KINDS_BY_TYPE[type(event)].in_words(event, in_words)


def default_delta(n: int, of: str = _EXAMPLES) -> float:
    """n ** -1.1 for a dataset of n units: comfortably below 1/n, and no larger than any default may be.

    Raises:
        ConfigurationError: no n, or of a single unit, of which that is 1; `of` is what the units are called in it.
    """
    _check_dataset_size(n, of)
    if n == 1:
        raise ConfigurationError(
            f"a dataset of n=1 {of}, and no delta.",
            why="the default, n ** -1.1, is 1, which promises nothing.",
            fix="give target_delta, such as 1e-5: then all that is released is nearly what it is without any data.",
        )
    return math.pow(n, -1.1)


def large_delta_in_words(delta: float) -> str | None:
    """That a delta, though it is below 1/n, is too large for epsilon to mean much; None of one that is not."""
    if delta <= _LARGE_DELTA:
        return None
    return (
        f"delta is {upper(delta, 3)}: with up to that probability nothing of what epsilon says need hold. The default, "
        f"n ** -1.1, is as large as {_LARGE_DELTA:g} where n is below {math.ceil(_LARGE_DELTA ** (-1 / 1.1))}. Give "
        "target_delta (hf-dp plan: --delta), such as 1e-5, which takes more noise; or train on more data."
    )


def promised_delta(config: PrivacyConfig, n: int) -> float:
    """The delta of a config for n units, or for the number that stands for n; below 1 over both.

    Raises:
        ConfigurationError: as `check_delta`.
    """
    of = _EXAMPLES if config.unit is None else "units"
    size, sized = (n, of) if config.dataset_size is None else (config.dataset_size, drawn_are(config))
    delta = default_delta(size, sized) if config.target_delta is None else config.target_delta
    # Where n is secret, a refusal is seen by nobody else.
    return check_delta(check_delta(delta, size, sized), n, of)


def check_delta(delta: float, n: int, of: str = _EXAMPLES) -> float:
    """delta itself, if it is a meaningful promise for a dataset of n units.

    Raises:
        ConfigurationError: no n, or a delta not strictly between 0 and 1/n, of a single unit 1/2; `of` is what the
            units are called in it.
    """
    _check_dataset_size(n, of)
    if n == 1 and not (is_delta(delta) and delta < 1 / 2):
        raise ConfigurationError(
            f"delta={shown(delta)} for a dataset of n=1 {of}.",
            why="with delta of 1/2 or more, publishing all of it at the toss of a coin would count as private; "
            "with delta 0 no amount of Gaussian noise is enough.",
            fix="give a number well below 1/2, such as 1e-5.",
        )
    if not (is_delta(delta) and delta < 1 / n):
        raise ConfigurationError(
            f"delta={shown(delta)} for a dataset of {n} {of} (1/n is {1 / n:.3g}).",
            why="with delta of 1/n or more, publishing all of one of them at random would count as private; "
            "with delta 0 no amount of Gaussian noise is enough.",
            fix=f"give a number well below 1/n, such as the default, n ** -1.1 = {upper(default_delta(n), 3)}.",
        )
    return float(delta)


def _check_dataset_size(n: int, of: str) -> None:
    if not is_count(n, at_least=1):
        raise ConfigurationError(
            f"a dataset of n={shown(n)} {of}.",
            why="it is how many there are of those that are protected: a whole number of at least 1.",
            fix="give the number of rows of the training dataset, or of its units.",
        )


def check_sampling_probability(sampling_probability: float) -> None:
    """Refuse a sampling probability outside (0, 1] (`ConfigurationError`)."""
    if not is_probability(sampling_probability):
        raise ConfigurationError(
            f"sampling_probability={shown(sampling_probability)}.",
            why="it is the expected batch size divided by the dataset's size, or given: above 0, and at most 1.",
            fix="use an expected batch size between 1 and the number of training examples.",
        )


def check_steps(steps: int) -> None:
    """Refuse a number of steps that is not a whole number of at least 1 (`ConfigurationError`)."""
    if not is_count(steps, at_least=1):
        raise ConfigurationError(
            f"steps={shown(steps)}.",
            why="the cost of a run is the cost of its steps, so it needs a whole number of at least 1.",
            fix="give the number of optimizer steps of the whole run.",
        )
