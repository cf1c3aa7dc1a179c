"""What a release costs, said in `dp_accounting`'s language of events: Gaussian noise, Poisson-sampled or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import dp_accounting as dp

from hf_dp.config.ranges import check_noise_multiplier, is_count, is_delta, is_noise, is_number, shown
from hf_dp.errors import ConfigurationError, LedgerError

# Poisson sampling probability, and noise standard deviation in units of the sensitivity.
Mechanism = tuple[float, float]


def step_event(noise_multiplier: float, sampling_probability: float) -> dp.DpEvent:
    """The event of one private step: a Poisson-sampled sum with Gaussian noise (Abadi et al. 2016, arXiv:1607.00133).

    Args:
        noise_multiplier: standard deviation of the noise, in units of the sensitivity of the sum. 0 gives an event
            with infinite epsilon.
        sampling_probability: probability in (0, 1] with which each unit enters the batch, independently.

    Raises:
        ConfigurationError: a noise multiplier or a probability out of range.
    """
    check_noise_multiplier(noise_multiplier)
    check_sampling_probability(sampling_probability)
    if noise_multiplier == 0:
        return dp.NonPrivateDpEvent()
    return dp.PoissonSampledDpEvent(float(sampling_probability), dp.GaussianDpEvent(float(noise_multiplier)))


def mechanisms(event: dp.DpEvent) -> dict[Mechanism, int] | None:
    """How often each mechanism is used by an event, whatever its nesting; None if any part has infinite epsilon.

    Raises:
        LedgerError: a part that is no composition of (Poisson-sampled) Gaussians.
    """
    counts: dict[Mechanism, int] = {}
    return counts if _count(event, 1, counts) else None


def _count(event: dp.DpEvent, times: int, counts: dict[Mechanism, int]) -> bool:
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
        case dp.GaussianDpEvent(noise_multiplier=noise) if is_noise(noise):
            key = (1.0, float(noise))
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=noise)) if (
            is_noise(noise) and is_number(q) and 0 <= q <= 1
        ):
            key = (float(q), float(noise))
        case _:
            raise LedgerError(
                f"the accounting event {event!r} is not known here.",
                why="an event that no accountant here interprets could cost any amount of privacy.",
                fix="express the release as Gaussian noise, Poisson-sampled or not, or as a composition of these.",
            )
    if times and key[0] > 0:
        counts[key] = counts.get(key, 0) + times
    return key[0] == 0 or key[1] > 0 or times == 0


def event_to_dict(event: dp.DpEvent) -> dict[str, Any]:
    """An event as plain values for strict JSON; `event_from_dict` is the inverse.

    Raises:
        LedgerError: an event that is no composition of (Poisson-sampled) Gaussians.
    """
    mechanisms(event)
    match event:
        case dp.SelfComposedDpEvent():
            return {"type": "self_composed", "count": event.count, "event": event_to_dict(event.event)}
        case dp.ComposedDpEvent():
            return {"type": "composed", "events": [event_to_dict(part) for part in event.events]}
        case dp.PoissonSampledDpEvent():
            inner = event_to_dict(event.event)
            return {"type": "poisson_sampled", "sampling_probability": event.sampling_probability, "event": inner}
        case dp.GaussianDpEvent():
            return {"type": "gaussian", "noise_multiplier": event.noise_multiplier}
        case dp.NonPrivateDpEvent():
            return {"type": "non_private"}
    return {"type": "no_op"}


def event_from_dict(values: object) -> dp.DpEvent:
    """The event that `event_to_dict` wrote.

    Raises:
        LedgerError: anything else, for example an unknown type, a missing field or a negative count.
    """
    try:
        event = _read_event(values)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LedgerError(
            f"{str(values)[:200]} is not an accounting event ({type(error).__name__}: {error}).",
            why="what it cost cannot be known.",
            fix="restore the file from a backup or an earlier checkpoint; do not edit it by hand.",
        ) from error
    mechanisms(event)
    return event


def _read_event(values: Any) -> dp.DpEvent:
    kind, fields = values["type"], {key: value for key, value in values.items() if key != "type"}
    match kind:
        case "self_composed":
            return dp.SelfComposedDpEvent(event=_read_event(fields.pop("event")), **fields)
        case "composed":
            return dp.ComposedDpEvent([_read_event(part) for part in fields["events"]])
        case "poisson_sampled":
            return dp.PoissonSampledDpEvent(event=_read_event(fields.pop("event")), **fields)
        case "gaussian":
            return dp.GaussianDpEvent(**fields)
        case "non_private":
            return dp.NonPrivateDpEvent(**fields)
        case "no_op":
            return dp.NoOpDpEvent(**fields)
    raise KeyError(f"unknown event type {kind!r}")


def default_delta(n: int) -> float:
    """n ** -1.1 for a dataset of n units: comfortably below 1/n, and no larger than any default may be.

    Raises:
        ConfigurationError: n below 2.
    """
    _check_dataset_size(n)
    return math.pow(n, -1.1)


def check_delta(delta: float, n: int) -> float:
    """delta itself, if it is a meaningful promise for a dataset of n units.

    Raises:
        ConfigurationError: delta not strictly between 0 and 1/n, or n below 2.
    """
    _check_dataset_size(n)
    if not (is_delta(delta) and delta < 1 / n):
        raise ConfigurationError(
            f"delta={shown(delta)} for a dataset of {n} training examples (1/n is {1 / n:.3g}).",
            why="with delta of 1/n or more, publishing one whole example at random would count as private; "
            "with delta 0 no amount of Gaussian noise is enough.",
            fix=f"leave delta out for n ** -1.1 = {default_delta(n):.3g}, or give a number well below 1/n.",
        )
    return float(delta)


def _check_dataset_size(n: int) -> None:
    if not is_count(n, at_least=2):
        raise ConfigurationError(
            f"a dataset of n={shown(n)} training examples.",
            why="privacy hides one example among the others; a whole number of at least 2 is needed for any other.",
            fix="give the number of rows of the training dataset, and train on more of them.",
        )


def check_sampling_probability(sampling_probability: float) -> None:
    """Refuse a sampling probability outside (0, 1] (`ConfigurationError`)."""
    if not (is_number(sampling_probability) and 0 < sampling_probability <= 1):
        raise ConfigurationError(
            f"sampling_probability={sampling_probability!r}.",
            why="it is the expected batch size divided by the dataset's size: above 0, and at most 1.",
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


def from_counts(counts: Mapping[Mechanism, int]) -> dp.DpEvent:
    """The event of using each mechanism that often."""
    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(step_event(s, q), n) for (q, s), n in counts.items()])
