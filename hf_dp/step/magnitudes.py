"""Are noise, sums and weights of sizes that mean something? What follows from neither what is public nor what is
released is refused or warned of here alone, and written nowhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.accounting.events import large_delta_in_words
from hf_dp.config.units import drawn_are
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.modules import parameters_of
from hf_dp.per_example.sharding import local, total_norm
from hf_dp.planning.proposal import propose
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)

# Of a step's noise over the longest that its gradient can be. Recipes that learn have 0.1 to 5, published ones up to
# 13 (full fine-tuning with 10^8 parameters in batches of 512); Trainer's own batch of 8 gives 25 with LoRA and 200 to
# 400 without.
_HOPELESS = 20.0
# A batch that is proposed has so much of that noise at most.
_LESS = 0.7
# Optimizers square gradients in float32.
_LARGEST, _SMALLEST = math.sqrt(torch.finfo(torch.float32).max), math.sqrt(torch.finfo(torch.float32).tiny)
# No element of the noise is this many standard deviations out.
_FAR_OUT = 15.0
# A mistake is likelier than a guess of n that is so far off.
_FAR = 1.5
# Root mean square of weights. Those of neural networks are below 10.
_LOST = 1e6
# After so many steps a share of the numbers is another, or nothing is learnt. In 16 bits many are what they were.
_AFTER, _MOVED, _LOOKED_AT = 4, 0.01, 1024


class Magnitudes:
    """Looks at what a run will do to a model before it begins, and at the weights after each step.

    Warns once of noise that drowns any gradient, of batches that are far from what their sums are divided by, of a
    delta that leaves little of the promise, and of steps that leave the weights as they were.

    Attributes:
        known: for the logs, from public numbers alone: the norm of the noise in what the optimizer takes (its root mean
            square), and the most that the mean of the clipped gradients has in a batch as large as is expected. Nothing
            where most of the trained numbers get no noise.

    Args:
        plan: of the run.
        model: whose trainable parameters get the noise.
        by_rows: the names of those that get it in a few rows only.

    Raises:
        ConfigurationError: noise or sums that the numbers of the parameters cannot hold.
    """

    def __init__(self, plan: Plan, model: nn.Module, by_rows: Collection[str] = ()) -> None:
        trained = [p for p in parameters_of(model) if p.requires_grad]
        self._count = sum(p.numel() for p in trained)
        self._limit = _LOST * max(1.0, self._root_mean_square(model))
        self._steps, self._planned = 0, plan.steps
        self._before = (
            [] if by_rows or not plan.noise_standard_deviation else [(p, _few_of(p).clone()) for p in trained]
        )
        deviation, clipping = plan.noise_standard_deviation, plan.clipping.sensitivity
        expected = plan.sampler.expected_batch_size
        self._warn_of_other_batches(plan)
        _warn_of_float16(trained)
        norm = deviation * math.sqrt(self._count)
        self.known = {} if by_rows else {"noise_norm": norm / expected, "signal_bound": clipping}
        if not deviation:
            return
        if (said := large_delta_in_words(plan.delta)) is not None and not plan.mechanism.reproducible:
            ranks.warn(logger, "%s", said)
        narrowest = min(torch.finfo(p.dtype).max for p in trained)
        holds = _FAR_OUT * deviation / expected < narrowest and clipping < narrowest
        if not (holds and deviation > _SMALLEST and norm + plan.sampler.dataset_size * clipping < _LARGEST):
            raise ConfigurationError(
                f"noise with standard deviation {deviation:.3g} on each of {self._count} trained numbers "
                f"(noise_multiplier {plan.gradient_noise_multiplier:.3g} x clipping_norm {clipping:.3g}).",
                why="squares of the noisy sum, which optimizers compute in float32, or the gradient in the parameters' "
                "own precision would be nothing or infinite.",
                fix="choose a noise_multiplier and a clipping_norm of ordinary size; 1.0 is the usual start for both.",
            )
        # Where there are some by rows, most of these numbers get none.
        if norm / expected > _HOPELESS * clipping and not by_rows:
            self._warn(plan, norm / expected, clipping)

    def _warn(self, plan: Plan, noise: float, signal: float) -> None:
        ranks.warn(
            logger,
            "The noise drowns the gradient: in each step it has a norm of about %.3g, and the mean of the clipped "
            "gradients one of at most about %.3g. %s",
            *(noise, signal, _asked(plan)),
        )

    def _warn_of_other_batches(self, plan: Plan) -> None:
        # Without a probability that was given the two are the same.
        n, q, expected = plan.sampler.dataset_size, plan.sampler.sampling_probability, plan.sampler.expected_batch_size
        if not expected / _FAR <= n * q <= expected * _FAR:
            ranks.warn(
                logger,
                "sampling_probability=%g draws %.4g of the %d %s in a step, on average, and their sum is divided by "
                "%d, the expected batch size of the arguments: gradients are %.3g times as long as a mean. That is as "
                "private, if it was chosen without a look at the data. This line tells n, which is secret.",
                *(q, n * q, n, drawn_are(plan.config), expected, n * q / expected),
            )

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the weights after a step. All ranks call it together.

        Raises:
            ConfigurationError: they are no numbers, or larger than those of any model.
        """
        self._refuse_lost_weights(model, _rate_of(optimizer))
        self._warn_of_still_weights(optimizer)

    def _refuse_lost_weights(self, model: nn.Module, rate: str) -> None:
        size = self._root_mean_square(model)
        if not size <= self._limit:
            raise ConfigurationError(
                f"after this step with {rate} the trained weights are of size {size:.3g}.",
                why="they are no model any more, and every further step would spend budget on nothing.",
                fix="begin again with a smaller learning rate. The steps that were made stay in the ledger.",
            )

    def _warn_of_still_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks, a few steps after the first, whether they have moved anything: all of them have noise.

        In a warm-up they need not yet. What no gradient moves, whatever it is, was not released from the data.
        """
        rates = [
            (now, group.get("initial_lr")) for group in optimizer.param_groups if (now := _rate(group)) is not None
        ]
        self._steps += 1
        is_warm = all(2 * now >= float(now if top is None else top) for now, top in rates)
        is_late = self._steps >= self._planned or (self._steps >= _AFTER and is_warm)
        if not self._before or not is_late:
            return
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = [(before, _few_of(p)) for p, before in self._before if id(p) in moved]
        alike = [(now == before).sum() for before, now in pairs if now.shape == before.shape]
        count, self._before = sum(len(before) for before, _ in pairs), []
        if count and len(alike) == len(pairs) and count - sum(map(float, alike)) < _MOVED * count:
            ranks.warn(
                logger,
                "After %d steps with noise hardly any trained weight is another than before (%s): "
                "what a step would add is less than their numbers hold, so budget is spent on nothing. Choose a larger "
                "learning rate, or keep weights in float32.",
                *(self._steps, _rate_of(optimizer)),
            )

    def _root_mean_square(self, model: nn.Module) -> float:
        held = [(p, local(p.detach())) for p in parameters_of(model) if p.requires_grad]
        return float(total_norm(held)) / math.sqrt(max(1, self._count))


def _rate(group: Mapping[str, Any]) -> float | None:
    """Of some optimizers it is none that they are given: of Adafactor by relative steps, say."""
    found = group.get("lr")
    return None if found is None else float(found)


def _rate_of(optimizer: torch.optim.Optimizer) -> str:
    rates = [rate for group in optimizer.param_groups if (rate := _rate(group)) is not None]
    return f"learning_rate={max(rates):.3g}" if rates else "the rate that the optimizer chose"


def _few_of(p: nn.Parameter) -> torch.Tensor:
    """Some of what this rank holds of it, from all over it."""
    numbers = local(p.detach()).flatten()
    return numbers[:: max(1, len(numbers) // _LOOKED_AT)]


def _warn_of_float16(trained: Sequence[nn.Parameter]) -> None:
    if any(p.dtype == torch.float16 for p in trained):
        ranks.warn(
            logger,
            "Trained weights are in float16, which holds nothing below 6e-8 and nothing above 65,504, and gradients of "
            "single examples leave that range: those that vanish, or are no numbers, teach nothing. It is as private. "
            "bfloat16 has the range of float32; TrainingArguments(bf16=True) keeps weights in float32.",
        )


def _asked(plan: Plan) -> str:
    """What has less noise, and what to ask for a larger batch, where one has for the same promise and compute."""
    ways = "Larger batches, more data or fewer trained parameters (LoRA) have less of it"
    config = plan.config
    if config.unit is not None or config.after or config.hides_n or config.target_epsilon is None:
        return f"{ways}, and hf-dp plan says which batch has the least for the same compute."
    n = round(plan.sampler.public_size)
    epochs = max(1.0, plan.steps * plan.sampler.expected_batch_size / n)
    try:
        proposed = propose(
            dataset_size=n, examples=epochs * n, target_epsilon=config.target_epsilon, target_delta=plan.delta
        )
    except ConfigurationError:
        return f"{ways}."
    least = proposed.noise_of_a_step(plan.clipping.sensitivity)
    if least > _LESS * plan.noise_standard_deviation / plan.sampler.expected_batch_size:
        ways = "More data or fewer trained parameters (LoRA) have less of it."
        if plan.steps == 1 or plan.sampler.expected_batch_size >= n:  # no batch is larger in as many epochs
            return ways
        return (
            f"{ways} Larger batches have less in each step too, but not much less in all steps together, for the same "
            "promise in as many epochs."
        )
    command = f"hf-dp plan --n {n} --epochs {epochs:.3g} --epsilon {config.target_epsilon:g} --delta {plan.delta:g}"
    of_less = f"{proposed.batch_size} at once, {proposed.steps} times, have less of it for the same promise"
    return f"{ways}. {of_less}: {command}"
