"""The kinds of clipping that can be promised, and what each lets one unit add. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_dp.config.plain import Terms, refuse_term
from hf_dp.config.ranges import check_clipping_norm, is_number, is_one_of, shown
from hf_dp.errors import ConfigurationError

ClippingName = Literal["flat", "automatic", "groups"]
# The pattern of the parameters that no other one matches.
EVERY_OTHER = "*"
# Patterns are printed, and stand on cards: nothing but names of parameters may be said there.
_PATTERN = re.compile(r"[\w.*?\[\]!-]{1,100}", re.ASCII)
_MOST_GROUPS = 256
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-6, 1e6


@dataclass(frozen=True, kw_only=True)
class Clipping(Terms):
    """What each unit may add to the sum.

    Attributes:
        norm: C > 0.
    """

    norm: float

    def _check(self) -> None:
        check_clipping_norm(self.norm)

    @property
    def sensitivity(self) -> float:
        """How far one unit moves the sum in l2 norm, at most."""
        return self.norm

    @property
    def budgets(self) -> dict[str, float]:
        """The part of the sensitivity that each group of parameters has, by its pattern; none without groups."""
        return {}


@dataclass(frozen=True, kw_only=True)
class FlatClipping(Clipping):
    """Each unit's gradient is scaled to l2 norm at most `norm`, over all parameters together.

    Attributes:
        norm: C > 0; infinite without clipping.
    """

    kind: str = "flat"


@dataclass(frozen=True, kw_only=True)
class AutomaticClipping(Clipping):
    """Each unit's gradient g is scaled by `norm` / (|g| + `gamma`), to l2 norm below `norm`, over all parameters.

    Sensitivity: C |g| / (|g| + gamma) < C.

    Attributes:
        norm: C > 0, finite.
        gamma: between 1e-4 and 1e4. Gradients much shorter than that stay short; it costs nothing.
    """

    gamma: float = 0.01
    kind: str = "automatic"

    def _check(self) -> None:
        super()._check()
        if self.norm == math.inf:
            refuse_term("norm", self.norm, "gradients that are brought near it need a finite one")
        # A larger coefficient could make infinities of finite gradients.
        if not (is_number(self.gamma) and 1e-4 <= self.gamma <= 1e4):
            refuse_term("gamma", self.gamma, "it is a number between 0.0001 and 10000")


@dataclass(frozen=True, kw_only=True)
class GroupClipping(Clipping):
    """Each unit's gradient in each group of parameters is scaled to l2 norm at most the budget of the group.

    Sensitivity: the squares of the budgets C_g = C sqrt(w_g / sum of w) add up to C^2.

    Attributes:
        norm: C > 0, finite.
        groups: pairs of a pattern (as of `fnmatch`, of names of parameters) and a weight w_g; see `as_groups`.
    """

    groups: tuple[tuple[str, float], ...]
    kind: str = "groups"

    def _check(self) -> None:
        super()._check()
        if self.norm == math.inf:
            refuse_term("norm", self.norm, "a part of it is the budget of each group")
        found = as_groups(self.groups)
        if found is None:
            refuse_term("groups", self.groups, GROUPS_ARE)
        object.__setattr__(self, "groups", found)

    @property
    def shares(self) -> dict[str, float]:
        """C_g / C by pattern; their squares add up to 1."""
        whole = math.fsum(weight for _, weight in self.groups)
        return {pattern: math.sqrt(weight / whole) for pattern, weight in self.groups}

    @property
    def budgets(self) -> dict[str, float]:
        """C_g by pattern."""
        return {pattern: self.norm * share for pattern, share in self.shares.items()}

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "groups": dict(self.groups)}


ClippingTerms = FlatClipping | AutomaticClipping | GroupClipping

# By their kind.
CLIPPINGS: dict[str, type[Any]] = {"flat": FlatClipping, "automatic": AutomaticClipping, "groups": GroupClipping}
GROUPS_ARE = (
    f"they are patterns of at most 100 letters, digits and ._-*?[]!, at most {_MOST_GROUPS}, with a weight between "
    f"{_LEAST_WEIGHT:g} and {_LARGEST_WEIGHT:g} each"
)


def as_groups(groups: Any) -> tuple[tuple[str, float], ...] | None:
    """Groups as pairs, in the order of their patterns; None for what are none."""
    try:
        pairs = [(pattern, weight) for pattern, weight in (groups.items() if isinstance(groups, Mapping) else groups)]
    except (TypeError, ValueError):
        return None
    if not 1 <= len(pairs) <= _MOST_GROUPS or not all(_is_pattern(pattern) for pattern, _ in pairs):
        return None
    if not all(is_number(weight) and _LEAST_WEIGHT <= weight <= _LARGEST_WEIGHT for _, weight in pairs):
        return None
    found = {pattern: float(weight) for pattern, weight in pairs}
    return tuple(sorted(found.items())) if len(found) == len(pairs) else None


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and _PATTERN.fullmatch(value) is not None


def are_budgets(kind: str, budgets: object) -> bool:
    """Whether these are budgets that a claim can have of groups, or none where there are none."""
    if not isinstance(budgets, dict) or bool(budgets) != (kind == "groups"):
        return False
    return all(_is_pattern(name) and is_number(budget) and 0 < budget < math.inf for name, budget in budgets.items())


def clipping_in_words(kind: str, norm: float, budgets: Mapping[str, float]) -> str:
    """The clipping norm, and what is done with gradients that are shorter, or in groups."""
    if kind == "flat":
        return f"{norm:g}"
    if kind == "automatic":
        return f"{norm:g} ({kind}: shorter gradients are brought near it too)"
    named = {**budgets}
    others = named.pop(EVERY_OTHER, None)
    said = [f"`{pattern}` {budget:.4g}" for pattern, budget in named.items()]
    said += [] if others is None else [f"every other parameter {others:.4g}"]
    return f"{norm:g} (in {kind} of parameters, of which each has a norm of its own: {', '.join(said)})"


def check_clipping(promise: Any) -> None:
    """Refuse a norm that is none, or that no noise hides, a kind of clipping that is none, or that has no such norm,
    and groups that are none (`ConfigurationError`); `promise` has the config's fields."""
    kind, norm = promise.clipping, promise.clipping_norm
    check_clipping_norm(norm)
    if norm == math.inf and promise.noise_multiplier != 0:
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
            why="it brings every gradient near the clipping norm, or gives each group a part of it, and of infinity "
            "there is neither.",
            fix="give a finite clipping_norm, or clipping='flat'.",
        )
    if (kind == "groups") != (promise.groups is not None):
        raise ConfigurationError(
            f"clipping={kind!r} with groups={shown(promise.groups)}.",
            why="the groups of parameters that are clipped each by itself go with clipping='groups', and with nothing "
            "else.",
            fix="give both, such as clipping='groups' and groups={'*attn*': 1, '*': 1}, or neither.",
        )
    if promise.groups is not None and as_groups(promise.groups) is None:
        raise ConfigurationError(
            f"groups={shown(promise.groups)}.",
            why=f"{GROUPS_ARE}.",
            fix="name parameters as model.named_parameters() does, such as groups={'*attn*': 2, '*': 1}; '*' is every "
            "parameter that no other pattern matches.",
        )
    if promise.groups is not None and promise.passes != 1:
        raise ConfigurationError(
            f"clipping='groups' with passes={promise.passes}.",
            why="each group is clipped and summed as the backward pass goes, which keeps no more factors than those of "
            "one group: a second pass would save nothing.",
            fix="leave passes at 1, or clip flat in two.",
        )
