"""One config made concrete for one dataset: sampler, clipping, noise and event, so that they cannot disagree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dp_accounting

import hf_dp.accounting as accounting
from hf_dp.clipping.flat import Clipping
from hf_dp.config import PrivacyConfig
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler


@dataclass(frozen=True, eq=False)
class Plan:
    """What a private run does at each step, and what it costs.

    Attributes:
        config: the promise.
        sampler: draws each logical batch; the event's sampling probability is its own.
        steps: how many steps are planned, and, under a target epsilon, the most that the budget pays for.
        delta: the promised delta.
        noise_multiplier: given, or calibrated so that `steps` steps, and the release of token frequencies or the
            choices of rows if there are any, cost at most the target epsilon. Of all that a step releases, together.
        clipping: each example's contribution to the sum.
        noise: what is added to the sum, once for each logical batch.
        entropy: where sampling and noise get their randomness.
        frequency_noise_multiplier: of the release of token frequencies; None if nothing is released.
        row_choice_noise_multiplier: of each DP top-k of embedding rows, as the Gaussian mechanism that dominates it;
            None if there is none.
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
    row_choice_noise_multiplier: float | None = None

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
        sparse, choices, row_noise, spent = config.sparse_embeddings, _row_choices(config, steps), None, None
        if attention is not None and attention.token_frequencies == "released":
            frequency_noise = _release_noise(config, attention.budget_share, 1, delta)
            spent = accounting.step_event(frequency_noise, 1.0)
        if sparse is not None and choices:
            row_noise = _release_noise(config, sparse.budget_share, choices, delta)
            spent = dp_accounting.SelfComposedDpEvent(accounting.step_event(row_noise, 1.0), choices)
        if noise_multiplier is None:
            assert config.target_epsilon is not None
            noise_multiplier = accounting.calibrate_noise_multiplier(
                target_epsilon=config.target_epsilon,
                target_delta=delta,
                sampling_probability=sampler.sampling_probability,
                steps=steps,
                accountant=config.accountant,
                spent=spent,
            )
        clipping, noise = Clipping(config.clipping_norm), GaussianNoise(entropy)
        return cls(
            config, sampler, steps, delta, noise_multiplier, clipping, noise, entropy, frequency_noise, row_noise
        )

    @property
    def frequency_event(self) -> dp_accounting.DpEvent | None:
        """What the release of token frequencies costs; None if nothing is released."""
        noise = self.frequency_noise_multiplier
        return None if noise is None else accounting.step_event(noise, 1.0)

    @property
    def row_choice_event(self) -> dp_accounting.DpEvent | None:
        """What one DP top-k of embedding rows costs; None if there is none."""
        noise = self.row_choice_noise_multiplier
        return None if noise is None else accounting.step_event(noise, 1.0)

    @property
    def row_choices(self) -> int:
        """How many DP top-k of embedding rows the budget pays for."""
        return _row_choices(self.config, self.steps)

    @property
    def contribution_noise_multiplier(self) -> float | None:
        """sigma1, on DP-AdaFEST's counts, in units of their clipping norm; None where rows are not counted."""
        sparse = self.config.sparse_embeddings
        if sparse is None or not sparse.adapts:
            return None
        return self.noise_multiplier * math.hypot(1.0, sparse.noise_ratio)

    @property
    def gradient_noise_multiplier(self) -> float:
        """sigma2, on the clipped sum, in units of the clipping norm.

        The two releases of a DP-AdaFEST step are of one Poisson batch: one Gaussian mechanism with noise multiplier
        (sigma1^-2 + sigma2^-2)^(-1/2) (Ghazi et al. 2023, arXiv:2311.08357). Without counts it is all.
        """
        counts = self.contribution_noise_multiplier
        if counts is None or self.config.sparse_embeddings is None:
            return self.noise_multiplier
        return counts / self.config.sparse_embeddings.noise_ratio

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What one step costs; derived from the sampler and the noise that run."""
        return accounting.step_event(self.noise_multiplier, self.sampler.sampling_probability)

    @property
    def noise_standard_deviation(self) -> float:
        """Of the noise on the clipped sum: sigma x C. 0 without noise, whatever C."""
        return self.gradient_noise_multiplier * self.clipping.sensitivity if self.noise_multiplier else 0.0

    @property
    def budgeted_steps(self) -> float:
        """After how many steps training must stop; infinite if no target epsilon was promised."""
        return math.inf if self.config.target_epsilon is None else self.steps

    @property
    def promise(self) -> dict[str, Any]:
        """What a ledger must share to be continued under this plan."""
        config = {k: v for k, v in self.config.published().items() if k != "withhold_non_private_logs"}
        for part in ("re_attention", "sparse_embeddings"):
            if config[part] is None:
                del config[part]
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
        config = self.config
        released = any(event == self.frequency_event for event, _, _ in ledger.entries)
        choices = sum(count for event, count, _ in ledger.entries if event == self.row_choice_event)
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
            row_choice_noise_multiplier=self.row_choice_noise_multiplier if choices else None,
            row_choices=choices,
            contribution_noise_multiplier=self.contribution_noise_multiplier,
            reproducible=config.seed is not None,
            caveats=accounting.standard_caveats(withholds_logs=config.withhold_non_private_logs),
        )

    def __str__(self) -> str:
        return (
            f"delta {self.delta:.3g}, noise multiplier {self.noise_multiplier:.4g}, clipping norm "
            f"{self.clipping.norm:g}, sampling probability {self.sampler.sampling_probability:.4g}, {self.steps} steps "
            f"of expected batch size {self.sampler.expected_batch_size}"
        )


def _row_choices(config: PrivacyConfig, steps: int) -> int:
    sparse = config.sparse_embeddings
    if sparse is None or not sparse.releases_rows:
        return 0
    return 1 if sparse.renew_every is None else math.ceil(steps / sparse.renew_every)


def _release_noise(config: PrivacyConfig, share: float, releases: int, delta: float) -> float:
    """The noise multiplier with which so many releases from all units cost that share of the target epsilon."""
    assert config.target_epsilon is not None
    return accounting.calibrate_noise_multiplier(
        target_epsilon=share * config.target_epsilon,
        target_delta=delta,
        sampling_probability=1.0,
        steps=releases,
        accountant=config.accountant,
    )
