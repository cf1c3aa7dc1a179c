"""What the user promises: `PrivacyConfig`, frozen and serialisable. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_dp.errors import ConfigurationError

AccountantName = Literal["pld", "rdp"]


@dataclass(frozen=True)
class ReAttentionConfig:
    """Attention corrected for the noise in keys (Ding et al. 2024, arXiv:2405.18194).

    Attributes:
        error: "paper", the noise of one step on the mean gradient, or "accumulated", that of all steps so far with
            learning rate and Adam's preconditioner.
        fidelity: "isotropic", one variance for each token, or "per_feature", one for each feature of it: slower.
        token_frequencies: how often rows of the token embedding are touched: "released" from the private data with
            noise, paid for with `budget_share` of the target epsilon; "public", read from `public_frequencies`;
            "uniform", the same for all.
        budget_share: of the target epsilon, for the release; in (0, 1).
        public_frequencies: a JSON file with one number in [0, 1] for each token id: the share of examples that have it.
        presence_clipping_norm: l2 norm to which each example's 0/1 vector of tokens is clipped for the release; the
            square root of the number of different tokens that an example may count in full.
        scale: of the standard deviations, above 0.

    Raises:
        ConfigurationError: a value outside these.
    """

    error: Literal["paper", "accumulated"] = "paper"
    fidelity: Literal["isotropic", "per_feature"] = "isotropic"
    token_frequencies: Literal["released", "public", "uniform"] = "released"
    budget_share: float = 0.2
    public_frequencies: str | None = None
    presence_clipping_norm: float = 8.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        choices = {
            "error": ("paper", "accumulated"),
            "fidelity": ("isotropic", "per_feature"),
            "token_frequencies": ("released", "public", "uniform"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={getattr(self, name)!r}.",
                    why="the correction follows from it.",
                    fix=f"use one of {', '.join(map(repr, known))}.",
                )
        for name, limit in (("budget_share", 1.0), ("presence_clipping_norm", math.inf), ("scale", math.inf)):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value < limit):
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={value!r}.",
                    why="it must be above 0 and finite" + (" and below 1." if limit == 1 else "."),
                    fix="leave it out for the default.",
                )
        if (self.public_frequencies is None) == (self.token_frequencies == "public"):
            raise ConfigurationError(
                f"ReAttentionConfig got token_frequencies={self.token_frequencies!r} and public_frequencies="
                f"{self.public_frequencies!r}.",
                why="public frequencies are read from that file, and others are not.",
                fix="give both token_frequencies='public' and the file, or neither.",
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `ReAttentionConfig(**config.to_dict()) == config`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReAttentionConfig:
        """The inverse of `to_dict`.

        Raises:
            ConfigurationError: an unknown field, or a value out of range.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        if not set(values) <= known:
            raise ConfigurationError(
                f"ReAttentionConfig got {', '.join(sorted(set(values) - known))}.",
                why="an unknown field would change the correction without notice.",
                fix=f"use only these: {', '.join(sorted(known))}.",
            )
        return cls(**values)


@dataclass(frozen=True, init=False)
class PrivacyConfig:
    """The promise of a private training run.

    Exactly one of `target_epsilon` and `noise_multiplier` is given. The neighbouring relation is add-or-remove-one
    training example, batches are Poisson-sampled, and noise is Gaussian (DP-SGD; Abadi et al. 2016,
    arXiv:1607.00133, algorithm 1).

    Attributes:
        target_epsilon: the budget epsilon > 0; the noise multiplier is calibrated to it.
        noise_multiplier: standard deviation of the noise on the sum, in units of the clipping norm. 0 adds no noise:
            it is allowed for debugging, warns, and reports an infinite epsilon.
        target_delta: delta, strictly between 0 and 1/n. None: n ** -1.1 for n training examples.
        clipping_norm: l2 norm C > 0 to which each example's gradient is clipped. `math.inf` (no clipping) is
            allowed only with `noise_multiplier=0`.
        accountant: "pld" (privacy loss distributions, tight) or "rdp" (Renyi, an upper bound).
        withhold_non_private_logs: keep training loss and clipping statistics, which are functions of the
            private data with no noise, out of the logs and the trainer state.
        seed: None draws sampling and noise from the operating system's entropy. An integer makes both
            reproducible, for tests, and marks the report as not private. It is not a command-line argument:
            beside `TrainingArguments`, whose `seed` is public, one flag would set both.
        re_attention: None for plain attention, or a `ReAttentionConfig`.

    Raises:
        ConfigurationError: a value outside the ranges above, or both or neither of epsilon and noise.
    """

    target_epsilon: float | None = field(
        default=None, metadata={"help": "The privacy budget epsilon. Give this or noise_multiplier."}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "Noise standard deviation in units of the clipping norm."}
    )
    target_delta: float | None = field(default=None, metadata={"help": "Delta; by default n ** -1.1 for n examples."})
    clipping_norm: float = field(default=1.0, metadata={"help": "The l2 norm each example's gradient is clipped to."})
    accountant: AccountantName = field(default="pld", metadata={"help": "Accountant: pld (tight) or rdp."})
    withhold_non_private_logs: bool = field(
        default=False, metadata={"help": "Keep training loss and clipping statistics out of the logs."}
    )
    seed: int | None = field(default=None, init=False)
    re_attention: ReAttentionConfig | None = field(default=None, init=False)

    def __init__(
        self,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        clipping_norm: float = 1.0,
        accountant: AccountantName = "pld",
        withhold_non_private_logs: bool = False,
        seed: int | None = None,
        re_attention: ReAttentionConfig | None = None,
    ) -> None:
        values = dict(locals())
        if isinstance(re_attention, dict):
            values["re_attention"] = ReAttentionConfig.from_dict(re_attention)
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, values[item.name])
        self._check()

    def _check(self) -> None:
        budget, noise = self.target_epsilon, self.noise_multiplier
        if (budget is None) == (noise is None):
            raise ConfigurationError(
                f"PrivacyConfig got target_epsilon={budget!r} and noise_multiplier={noise!r}.",
                why="one of them determines the other; with both or neither the promise is ambiguous.",
                fix="give exactly one, for example PrivacyConfig(target_epsilon=8.0).",
            )
        if budget is not None and not (_is_number(budget) and 0 < budget < math.inf):
            raise ConfigurationError(
                f"target_epsilon={budget!r}.",
                why="a budget is a finite number above 0; epsilon 0 would allow no use of the data at all.",
                fix="give a positive epsilon (8 is weak, 1 is strong), or noise_multiplier=0 for no privacy.",
            )
        if noise is not None and not (_is_number(noise) and 0 <= noise < math.inf):
            raise ConfigurationError(
                f"noise_multiplier={noise!r}.",
                why="it is a standard deviation in units of the clipping norm: finite, and not negative.",
                fix="give a number such as 1.0, or use target_epsilon and let it be calibrated.",
            )
        if not (_is_number(self.clipping_norm) and self.clipping_norm > 0):
            raise ConfigurationError(
                f"clipping_norm={self.clipping_norm!r}.",
                why="it bounds the l2 norm of each example's gradient and must be above 0.",
                fix="give a positive number; 1.0 is the usual start, 0.1 is common for large batches.",
            )
        if self.clipping_norm == math.inf and noise != 0:
            raise ConfigurationError(
                "clipping_norm=inf together with noise.",
                why="without clipping one example's influence is unbounded, and no finite noise hides it.",
                fix="give a finite clipping_norm, or noise_multiplier=0 for a run without privacy.",
            )
        if self.target_delta is not None and not (_is_number(self.target_delta) and 0 < self.target_delta < 1):
            raise ConfigurationError(
                f"target_delta={self.target_delta!r}.",
                why="delta is a probability strictly between 0 and 1 (and below 1/n, which is checked with the data).",
                fix="leave it out for n ** -1.1, or give a small number such as 1e-6.",
            )
        if self.accountant not in ("pld", "rdp"):
            raise ConfigurationError(
                f"accountant={self.accountant!r}.",
                why="only 'pld' and 'rdp' are known, and an unknown accountant promises nothing.",
                fix="use 'pld' (tight, the default) or 'rdp'.",
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0):
            raise ConfigurationError(
                f"seed={self.seed!r}.",
                why="it must be None (secret randomness) or a non-negative integer (reproducible, not private).",
                fix="leave it out for a private run.",
            )
        if self.re_attention is not None and not isinstance(self.re_attention, ReAttentionConfig):
            raise ConfigurationError(
                f"re_attention={self.re_attention!r}.",
                why="the correction needs its settings.",
                fix="give re_attention=ReAttentionConfig().",
            )
        if budget is None and self.re_attention is not None and self.re_attention.token_frequencies == "released":
            raise ConfigurationError(
                "re_attention with released token frequencies, and noise_multiplier in place of target_epsilon.",
                why="the release is paid for with a share of the target epsilon.",
                fix="give target_epsilon, or ReAttentionConfig(token_frequencies='uniform' or 'public').",
            )
        if noise == 0:
            warnings.warn(
                "noise_multiplier=0: this run adds no noise and is not private; its epsilon is infinite.",
                stacklevel=3,
            )

    def replace(self, **changes: Any) -> PrivacyConfig:
        """A copy with some values changed (`dataclasses.replace` would drop `seed`)."""
        return PrivacyConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `PrivacyConfig(**config.to_dict()) == config`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**values, "re_attention": self.re_attention and self.re_attention.to_dict()}

    def to_json(self) -> str:
        """The config as strict JSON; an infinite clipping norm is written as the string "inf"."""
        values = {k: "inf" if v == math.inf else v for k, v in self.to_dict().items()}
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyConfig:
        """The inverse of `to_json`.

        Raises:
            ConfigurationError: text that is not a JSON object, an unknown field, or a value out of range.
        """
        try:
            values: Any = json.loads(text)
        except json.JSONDecodeError as error:
            values = error
        known = {item.name for item in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not set(values) <= known:
            raise ConfigurationError(
                f"this is not a PrivacyConfig in JSON: {str(values)[:200]}",
                why="an unreadable or unknown field would change the promise without notice.",
                fix=f"use only these fields: {', '.join(sorted(known))}.",
            )
        arguments: dict[str, Any] = {k: math.inf if v == "inf" else v for k, v in values.items()}
        return cls(**arguments)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
