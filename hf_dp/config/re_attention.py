"""What the user chooses of Re-Attention. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hf_dp.config.part import PartConfig, as_path
from hf_dp.config.ranges import LARGEST_SIZE, is_number, is_one_of, shown
from hf_dp.errors import ConfigurationError


@dataclass(frozen=True)
class ReAttentionConfig(PartConfig):
    """Attention corrected for the noise in keys (Ding et al. 2024, arXiv:2405.18194).

    Attributes:
        error: "paper", the noise of one step on the mean gradient, which has helped from scratch and harms where
            pretrained embeddings are trained at small rates; or "accumulated", that of all steps so far with learning
            rate and Adam's preconditioner.
        fidelity: "isotropic", one variance for each token, or "per_feature", one for each feature of it: slower.
        token_frequencies: how often rows of the token embedding are touched: "released" from the private data with
            noise, paid for with `budget_share` of the target epsilon; "public", read from `public_frequencies`;
            "uniform", the same for all.
        budget_share: of the target epsilon, for the release; in (0, 1).
        public_frequencies: a JSON file (.json) with one number in [0, 1] for each token id, the share of examples that
            have it; or a text file with one public example in each line, which the trainer's processing_class reads.
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
            if not is_one_of(getattr(self, name), known):
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={shown(getattr(self, name))}.",
                    why="the correction follows from it.",
                    fix=f"use one of {', '.join(map(repr, known))}.",
                )
        for name, limit in (("budget_share", 1.0), ("presence_clipping_norm", LARGEST_SIZE), ("scale", LARGEST_SIZE)):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < limit):
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={shown(value)}.",
                    why=f"it must be a number above 0 and below {limit:g}.",
                    fix="leave it out for the default.",
                )
        object.__setattr__(self, "public_frequencies", as_path(self.public_frequencies))
        is_path = isinstance(self.public_frequencies, str)
        if is_path != (self.token_frequencies == "public") or not (is_path or self.public_frequencies is None):
            raise ConfigurationError(
                f"ReAttentionConfig got token_frequencies={self.token_frequencies!r} and public_frequencies="
                f"{shown(self.public_frequencies)}.",
                why="public frequencies are read from that file, and others are not.",
                fix="give both token_frequencies='public' and the file, or neither.",
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `ReAttentionConfig(**config.to_dict()) == config`."""
        return dataclasses.asdict(self)
