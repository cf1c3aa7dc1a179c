"""One explicit table of the events that are known here: how each is named in JSON and in words, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import dp_accounting as dp

from hf_dp.accounting.composition import StepLoss
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.accounting.group import EVENT as SEVERAL_ROWS
from hf_dp.accounting.group import Group
from hf_dp.accounting.truncated import EVENT, Truncated
from hf_dp.figures import lower


class Primitive(Protocol):
    """A mechanism that events are compositions of. Hashable; those of one class have an order."""

    def __hash__(self) -> int: ...

    @staticmethod
    def merged(counts: Mapping[Any, int]) -> dict[Any, int]:
        """How often which mechanisms of this class cost the same as these together, or fewer are exactly."""

    @property
    def event(self) -> dp.DpEvent:
        """For the Renyi accountant of `dp_accounting`, where it `has_renyi`."""

    @property
    def has_renyi(self) -> bool:
        """The Renyi accountant of `dp_accounting` knows it."""

    @property
    def is_free(self) -> bool:
        """It releases nothing of anybody."""

    @property
    def is_finite(self) -> bool:
        """It has a finite epsilon at some delta that can be computed with."""

    @property
    def is_a_sum(self) -> bool:
        """Its Renyi divergence is computed as a sum, which rounds."""

    @property
    def advantage(self) -> float:
        """No more than some attack finds of members in one use, less what it takes wrongly, where it `has_renyi`."""

    def of_group(self, rows: int) -> Any:
        """The mechanism that a person with so many rows sees; None where it is not known. For one row, itself."""

    def losses(self, cell: float) -> tuple[StepLoss, StepLoss]:
        """The privacy loss of one use on a grid of this width in nats, of one unit less and of one more."""

    def scale(self) -> tuple[float, float]:
        """Standard deviation and width in nats of one use's loss, the larger of one unit less and one more."""


@dataclass(frozen=True)
class Kind:
    """How events of one type are read, written and told.

    Attributes:
        name: in JSON, where the type's own fields stand beside it.
        event: the type.
        primitive: of an event; None if its numbers are none. Compositions have none, and are taken apart in `events`.
        in_words: of an event, given the words of those inside it.
    """

    name: str
    event: type[dp.DpEvent]
    in_words: Callable[[Any, Callable[[Any], str]], str]
    primitive: Callable[[Any], Primitive | None] | None = None


KINDS: tuple[Kind, ...] = (
    Kind("no_op", dp.NoOpDpEvent, lambda event, told: "nothing"),
    Kind("non_private", dp.NonPrivateDpEvent, lambda event, told: "no noise"),
    Kind("self_composed", dp.SelfComposedDpEvent, lambda event, told: f"{event.count} times: {told(event.event)}"),
    Kind("composed", dp.ComposedDpEvent, lambda event, told: " and ".join(map(told, event.events))),
    Kind(
        "gaussian",
        dp.GaussianDpEvent,
        lambda event, told: f"Gaussian noise, {lower(event.noise_multiplier, 4)} times the sensitivity",
        Gaussian.of,
    ),
    Kind(
        "poisson_sampled",
        dp.PoissonSampledDpEvent,
        lambda event, told: (
            f"{told(event.event)}, on a Poisson sample with probability {event.sampling_probability:.4g}"
        ),
        Gaussian.of,
    ),
    Kind("mixture_of_gaussians", SEVERAL_ROWS, lambda event, told: _several_rows(event), Group.of),
)
if EVENT is not None:
    KINDS += (
        Kind(
            "truncated_subsampled_gaussian",
            EVENT,
            lambda event, told: (
                f"Gaussian noise, {lower(event.noise_multiplier, 4)} times the sensitivity, on a Poisson sample with "
                f"probability {event.sampling_probability:.4g}, truncated to {event.truncated_batch_size} of "
                f"{event.dataset_size}"
            ),
            Truncated.of,
        ),
    )


def _several_rows(event: Any) -> str:
    one = Group.of(event)
    assert one is not None
    return (
        f"Gaussian noise, {lower(one.noise, 4)} times the sensitivity to one example, on a Poisson sample with "
        f"probability {one.probability:.4g}, of at most {one.rows} examples of one unit (a mixture of Gaussians)"
    )
