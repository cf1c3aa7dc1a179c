"""Which batch and how many steps, when privacy and compute are given? Answered from the noise alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import dp_accounting as dp

from hf_dp.accounting.accountants import epsilon
from hf_dp.accounting.calibration import SMALLEST_NOISE, calibrate_noise_multiplier
from hf_dp.accounting.terms import step_event
from hf_dp.config import AccountantName
from hf_dp.errors import ConfigurationError
from hf_dp.planning.start import MIN_STEPS

# More steps than those with the least noise, as long as they cost no more of it than this.
_TOLERATED = 1.1
# The search looks at batches down to this part of the largest, and stops when it knows the answer to 5 %.
_FINEST = 1000
_RESOLUTION = 1.05
# Calibrated noise is at most 0.1 % too large, and never too small.
_SURELY = 0.998


@dataclass(frozen=True)
class Candidate:
    """One way to spend a compute budget.

    Attributes:
        batch_size: expected number of examples in a step, B.
        steps: T; B x T is the compute.
        noise_multiplier: sigma, calibrated to the privacy budget.
    """

    batch_size: int
    steps: int
    noise_multiplier: float

    def noise_of_a_step(self, clipping_norm: float = 1.0) -> float:
        """Standard deviation of the noise on each coordinate of one step's mean gradient: sigma C / B."""
        return self.noise_multiplier * clipping_norm / self.batch_size

    def noise_of_the_run(self, clipping_norm: float = 1.0) -> float:
        """Of the mean gradient averaged over all steps: sigma C / (B sqrt(T))."""
        return self.noise_of_a_step(clipping_norm) / math.sqrt(self.steps)


def candidate(
    batch_size: int,
    *,
    dataset_size: int,
    examples: float,
    target_epsilon: float,
    target_delta: float,
    accountant: AccountantName = "rdp",
) -> Candidate:
    """As many steps as the compute allows with this batch, and the noise that keeps them within the privacy budget.

    Args:
        batch_size: expected number of examples in a step, at most n.
        dataset_size: n.
        examples: the compute budget: how many examples the run may process, B x T.
        target_epsilon, target_delta: the privacy budget.
        accountant: "rdp", which is quick and a few per cent above "pld".

    Raises:
        ConfigurationError: a value out of range.
    """
    steps = _steps(examples, batch_size)
    noise = calibrate_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sampling_probability=batch_size / dataset_size,
        steps=steps,
        accountant=accountant,
    )
    return Candidate(batch_size, steps, noise)


def propose(
    *,
    dataset_size: int,
    examples: float,
    target_epsilon: float,
    target_delta: float,
    min_steps: int = MIN_STEPS,
) -> Candidate:
    """The most steps whose noise over the whole run is within 10 % of that of the largest batch.

    With B T fixed, sigma C / (B sqrt(T)), the noise on the gradient averaged over the run, falls as batches grow: at
    first steeply, since a calibrated sigma falls slower than B; then it is nearly flat, and larger batches only take
    steps away (Li et al. 2022, arXiv:2110.05679; De et al. 2022, arXiv:2204.13650). How few steps can still learn is
    not a question of privacy: `min_steps` answers it, and with it the largest batch.

    Args:
        dataset_size, examples, target_epsilon, target_delta: as for `candidate`.
        min_steps: the fewest steps to consider.

    Raises:
        ConfigurationError: a value out of range, or a compute budget of less than `min_steps` examples.
    """
    high = min(dataset_size, int(examples / min_steps)) if math.isfinite(examples) and min_steps >= 1 else 0
    if high < 1:
        raise ConfigurationError(
            f"a compute budget of {examples:g} examples for at least {min_steps} steps.",
            why="each step needs an example on average.",
            fix="allow more examples (or epochs), or fewer steps.",
        )

    def at(batch: int) -> Candidate:
        return candidate(
            batch,
            dataset_size=dataset_size,
            examples=examples,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
        )

    largest = at(high)
    most = _TOLERATED * largest.noise_of_the_run()

    def keeps_to(batch: int) -> bool:
        # Calibrating takes many times as long as to see on which side of this noise it would end.
        steps = _steps(examples, batch)
        limit = most * batch * math.sqrt(steps)

        def cost(noise: float) -> float:
            run = dp.SelfComposedDpEvent(step_event(noise, batch / dataset_size), steps)
            return epsilon(run, target_delta, "rdp")

        if _SURELY * limit > SMALLEST_NOISE:
            if cost(limit) > target_epsilon:
                return False
            if cost(_SURELY * limit) <= target_epsilon:
                return True
        return at(batch).noise_of_the_run() <= most

    low = max(1, high // _FINEST)
    while high > max(low + 1, _RESOLUTION * low):
        middle = round(math.sqrt(low * high))
        if keeps_to(middle):
            high = middle
        else:
            low = middle
    return largest if high == largest.batch_size else at(high)


def _steps(examples: float, batch_size: int) -> int:
    return max(1, int(examples / batch_size))
