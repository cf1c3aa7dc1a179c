"""One config made concrete for one dataset: sampler, clipping, noise and event, so that they cannot disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dp_accounting

import hf_dp.accounting as accounting
from hf_dp.clipping import Clipping
from hf_dp.config import PrivacyConfig
from hf_dp.noise import GaussianNoise
from hf_dp.randomness import Entropy
from hf_dp.sampling import PoissonBatchSampler


@dataclass(frozen=True, eq=False)
class Plan:
    """What a private run does at each step, and what it costs.

    Attributes:
        config: the promise.
        sampler: draws each logical batch; the event's sampling probability is its own.
        steps: how many steps are planned, and, under a target epsilon, the most that the budget pays for.
        delta: the promised delta.
        noise_multiplier: given, or calibrated so that `steps` steps, and the release of token frequencies if there is
            one, cost at most the target epsilon.
        clipping: each example's contribution to the sum.
        noise: what is added to the sum, once for each logical batch.
        entropy: where sampling and noise get their randomness.
        frequency_noise_multiplier: of the release of token frequencies; None if nothing is released.
    """

    config: PrivacyConfig
    sampler: PoissonBatchSampler
    steps: int
    delta: float
    noise_multiplier: float
    clipping: Clipping
    noise: GaussianNoise
    entropy: Entropy
    frequency_noise_multiplier: float | None = None

    @classmethod
    def make(cls, config: PrivacyConfig, sampler: PoissonBatchSampler, steps: int, entropy: Entropy) -> Plan:
        """Calibrates the noise to the config's budget, for `steps` steps of `sampler`.

        Raises:
            ConfigurationError: delta at or above 1/n, or a budget that no noise can meet.
        """
        n = sampler.dataset_size
        wanted = config.target_delta
        delta = accounting.check_delta(accounting.default_delta(n) if wanted is None else wanted, n)
        noise_multiplier, frequency_noise = config.noise_multiplier, None
        attention = config.re_attention
        if attention is not None and attention.token_frequencies == "released":
            assert config.target_epsilon is not None
            frequency_noise = accounting.calibrate_noise_multiplier(
                target_epsilon=attention.budget_share * config.target_epsilon,
                target_delta=delta,
                sampling_probability=1.0,
                steps=1,
                accountant=config.accountant,
            )
        if noise_multiplier is None:
            assert config.target_epsilon is not None
            noise_multiplier = accounting.calibrate_noise_multiplier(
                target_epsilon=config.target_epsilon,
                target_delta=delta,
                sampling_probability=sampler.sampling_probability,
                steps=steps,
                accountant=config.accountant,
                spent=None if frequency_noise is None else accounting.step_event(frequency_noise, 1.0),
            )
        clipping, noise = Clipping(config.clipping_norm), GaussianNoise(entropy)
        return cls(config, sampler, steps, delta, noise_multiplier, clipping, noise, entropy, frequency_noise)

    @property
    def frequency_event(self) -> dp_accounting.DpEvent | None:
        """What the release of token frequencies costs; None if nothing is released."""
        noise = self.frequency_noise_multiplier
        return None if noise is None else accounting.step_event(noise, 1.0)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What one step costs; derived from the sampler and the noise that run."""
        return accounting.step_event(self.noise_multiplier, self.sampler.sampling_probability)

    @property
    def noise_standard_deviation(self) -> float:
        """Of the noise on the clipped sum: sigma x C. 0 without noise, whatever C."""
        return self.noise_multiplier * self.clipping.sensitivity if self.noise_multiplier else 0.0

    @property
    def budgeted_steps(self) -> float:
        """After how many steps training must stop; infinite if no target epsilon was promised."""
        return math.inf if self.config.target_epsilon is None else self.steps

    @property
    def promise(self) -> dict[str, Any]:
        """What a ledger must share to be continued under this plan."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("seed", "withhold_non_private_logs")}
        if config["re_attention"] is None:
            del config["re_attention"]
        return {
            **{k: "inf" if v == math.inf else v for k, v in config.items()},
            "dataset_size": self.sampler.dataset_size,
            "expected_batch_size": self.sampler.expected_batch_size,
            "calibrated_noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "planned_steps": self.steps,
            # Steps whose noise anyone can repeat stay steps that are not private.
            "reproducible": self.config.seed is not None,
        }

    def report(self, ledger: accounting.Ledger) -> accounting.PrivacyReport:
        """What is promised, and what `ledger` says was spent so far."""
        config, caveats = self.config, accounting.STANDARD_CAVEATS
        if config.withhold_non_private_logs:
            caveats = tuple(caveat for caveat in caveats if caveat != accounting.LOGGED_METRICS)
        released = any(event == self.frequency_event for event, _, _ in ledger.entries)
        return accounting.PrivacyReport(
            epsilon=ledger.epsilon(self.delta, config.accountant),
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            clipping_norm=self.clipping.norm,
            sampling_probability=self.sampler.sampling_probability,
            steps=ledger.steps,
            accountant=config.accountant,
            dataset_size=self.sampler.dataset_size,
            expected_batch_size=self.sampler.expected_batch_size,
            target_epsilon=config.target_epsilon,
            epsilon_rdp=ledger.epsilon(self.delta, "rdp"),
            frequency_noise_multiplier=self.frequency_noise_multiplier if released else None,
            reproducible=config.seed is not None,
            caveats=caveats,
        )

    def __str__(self) -> str:
        return (
            f"delta {self.delta:.3g}, noise multiplier {self.noise_multiplier:.4g}, clipping norm "
            f"{self.clipping.norm:g}, sampling probability {self.sampler.sampling_probability:.4g}, {self.steps} steps "
            f"of expected batch size {self.sampler.expected_batch_size}"
        )
