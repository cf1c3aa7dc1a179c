"""What to start from, and why: what `hf-dp plan` says beside a proposal, and docs/choosing.md quotes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# So many steps a pretrained model was measured to need at least; one from scratch needs more.
MIN_STEPS = 10
# Of Adam on adapters, in so many steps: falling to 0, or constant beside an average of the weights.
_RATE, _RATE_OF_AVERAGE = 7e-3, 1e-2


def usual_rate(steps: int) -> float:
    """What Adam is proposed to begin with on adapters."""
    return _RATE * math.sqrt(MIN_STEPS / steps)


@dataclass(frozen=True)
class Rule:
    """One choice.

    Attributes:
        setting: what is chosen.
        start: what to start from, in any plan.
        why: in one line, as it was measured (docs/choosing.md) or follows from the noise.
        here: (batch size, steps, noise per coordinate of a step) -> the same for one plan, in numbers.
    """

    setting: str
    start: str
    why: str
    here: Callable[[float, int, float], str]


RULES: tuple[Rule, ...] = (
    Rule(
        "logical batch",
        f"the smallest whose noise over the run is within 10 % of the largest one's, in at least {MIN_STEPS} steps",
        "at equal compute few large steps add less noise, and a pretrained model needs few",
        lambda batch_size, steps, _: f"{batch_size:g} expected, {steps} steps",
    ),
    Rule(
        "clipping norm",
        "1, with `--clipping automatic` unless public data, or a run that you charge for (`after`), shows that a part "
        "of the examples is clipped",
        "noise grows with the norm; from 0.1 to 10 came out alike, with 37 to 88 % clipped",
        lambda _, __, noise: (
            f"1 (automatic, unless public data shows clipping): noise of {noise:.2g} per coordinate of a step"
        ),
    ),
    Rule(
        "learning rate",
        f"Adam on adapters: {_RATE:g} x sqrt({MIN_STEPS} / steps), falling linearly to 0, or {_RATE_OF_AVERAGE:g} x "
        f"sqrt({MIN_STEPS} / steps), constant, with an average of the weights (decay 0.8), whatever epsilon is",
        "Adam divides by the noise, which moves each weight by about the rate x sqrt(steps)",
        lambda _, steps, __: (
            f"{usual_rate(steps):.2g}, falling linearly to 0; or constant "
            f"{_RATE_OF_AVERAGE * math.sqrt(MIN_STEPS / steps):.2g} with an average of the weights (decay 0.8)"
        ),
    ),
)


def start(batch_size: float, steps: int, noise: float) -> list[dict[str, str]]:
    """Each rule with its numbers for one plan, whose noise per coordinate of a step is of clipping norm 1."""
    return [{"setting": rule.setting, "start": rule.here(batch_size, steps, noise), "why": rule.why} for rule in RULES]
