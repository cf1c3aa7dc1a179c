"""The kinds of clipping that can be promised, and what each lets one unit add. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_dp.config.plain import Terms, refuse_term
from hf_dp.config.ranges import check_clipping_norm, is_number, is_one_of, shown
from hf_dp.errors import ConfigurationError

ClippingName = Literal["flat", "automatic"]


@dataclass(frozen=True, kw_only=True)
class FlatClipping(Terms):
    """Each unit's gradient is scaled to l2 norm at most `norm`, over all parameters together.

    Attributes:
        norm: C > 0; infinite without clipping.
    """

    norm: float
    kind: str = "flat"

    def _check(self) -> None:
        check_clipping_norm(self.norm)

    @property
    def sensitivity(self) -> float:
        """How far one unit moves the sum in l2 norm."""
        return self.norm


@dataclass(frozen=True, kw_only=True)
class AutomaticClipping(Terms):
    """Each unit's gradient g is scaled by `norm` / (|g| + `gamma`), to l2 norm below `norm`, over all parameters.

    Attributes:
        norm: C > 0, finite.
        gamma: between 1e-4 and 1e4. Gradients much shorter than that stay short; it costs nothing.
    """

    norm: float
    gamma: float = 0.01
    kind: str = "automatic"

    def _check(self) -> None:
        check_clipping_norm(self.norm)
        if self.norm == math.inf:
            refuse_term("norm", self.norm, "gradients that are brought near it need a finite one")
        # A larger coefficient could make infinities of finite gradients.
        if not (is_number(self.gamma) and 1e-4 <= self.gamma <= 1e4):
            refuse_term("gamma", self.gamma, "it is a number between 0.0001 and 10000")

    @property
    def sensitivity(self) -> float:
        """How far one unit moves the sum in l2 norm, at most: C |g| / (|g| + gamma) < C."""
        return self.norm


ClippingTerms = FlatClipping | AutomaticClipping

# By their kind.
CLIPPINGS: dict[str, type[Any]] = {"flat": FlatClipping, "automatic": AutomaticClipping}


def check_clipping(kind: object, norm: float, noise_multiplier: float | None) -> None:
    """Refuse a norm that is none, or that no noise hides, and a kind of clipping that is none, or that has no such norm
    (`ConfigurationError`)."""
    check_clipping_norm(norm)
    if norm == math.inf and noise_multiplier != 0:
        raise ConfigurationError(
            "clipping_norm=inf together with noise.",
            why="without clipping one example's influence is unbounded, and no finite noise hides it.",
            fix="give a finite clipping_norm, or noise_multiplier=0 for a run without privacy.",
        )
    if not is_one_of(kind, get_args(ClippingName)):
        raise ConfigurationError(
            f"clipping={shown(kind)}.",
            why="what one example may add follows from the rule, and of an unknown one nothing follows.",
            fix=f"use one of {', '.join(map(repr, get_args(ClippingName)))}; the first is the default.",
        )
    if kind != "flat" and norm == math.inf:
        raise ConfigurationError(
            f"clipping={kind!r} with clipping_norm=inf.",
            why="it brings every gradient near the clipping norm, and none can be brought near infinity.",
            fix="give a finite clipping_norm, or clipping='flat'.",
        )
