"""What a promise means for one person: how well attacks can tell membership at most, and what several rows cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dp_accounting as dp
import numpy as np

from hf_dp.accounting.accountants import deltas, group_epsilon
from hf_dp.config.ranges import is_number, shown
from hf_dp.errors import ConfigurationError
from hf_dp.figures import at_most, percent, upper

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
# Of one person.
ROWS = (2, 4, 8, 16)
# Any epsilon gives a true bound; between these the best is missed by less than 1 %.
_EPSILONS = np.concatenate([np.linspace(0, 2, 401), np.geomspace(2.005, 60, 600)])


@dataclass(frozen=True)
class Risk:
    """Upper bounds for everyone who sees all that was released, and knows everything but one unit.

    Attributes:
        true_positive_rates: of any attack that tells members from others, by its false positive rate.
        advantage: the largest true positive rate less the false positive rate.
        posterior: how sure such an attacker may be on average, who held it for as likely as not, that he is right.
    """

    true_positive_rates: dict[float, float]
    advantage: float
    posterior: float

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, one: str = "example") -> str:
        """As one sentence about `one` unit."""
        rate, found = min(self.true_positive_rates.items(), key=lambda pair: abs(pair[0] - 0.01))
        return (
            "Someone who sees everything that was released, and already knows all of the training data but one "
            f"{one}, may ask whether that one was used: if they wrongly say yes of {percent(rate)} of the {one}s "
            f"that were not, they rightly say yes of at most {at_most(found, 2)} of those that were; and if they held "
            f"both for as likely before, they are right in at most {at_most(self.posterior, 2)} of all cases after."
        )

    def rows(self, one: str = "example") -> dict[str, str]:
        """The same as a table: what an attack does, and how far it gets at most."""
        finds = f"finds of the used {one}s, while it takes {{}} of the others for used"
        shares = self.true_positive_rates.items()
        return {
            **{finds.format(percent(rate)): at_most(most, 2) for rate, most in shares},
            "finds of them more than it takes wrongly (the advantage)": at_most(self.advantage, 2),
            "is right, if both were held for as likely before": at_most(self.posterior, 2),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        rates = {f"{rate:g}": found for rate, found in self.true_positive_rates.items()}
        return {"true_positive_rates": rates, "advantage": self.advantage, "posterior": self.posterior}


def rates(target_tpr: float | None, at_fpr: float) -> tuple[float, ...]:
    """The false positive rates that are told of a run, with that of its budget, if it is one of attacks."""
    own = set() if target_tpr is None else {at_fpr}
    return tuple(sorted({*FALSE_POSITIVE_RATES, *own}))


def risk(event: dp.DpEvent, false_positive_rates: tuple[float, ...] = FALSE_POSITIVE_RATES) -> Risk:
    """What can be told of one unit from everything in `event`.

    Args:
        event: mechanisms of `kinds`, in any composition.
        false_positive_rates: each strictly between 0 and 1.

    Raises:
        ConfigurationError: a rate out of range.
        LedgerError: an event that is not known here.

    Source: the region of privacy of each (epsilon, delta) (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, theorem
    2.1), of which all that hold together leave the trade-off of hypothesis testing (Dong, Roth and Su 2019,
    arXiv:1905.02383, proposition 2.12).
    """
    for rate in false_positive_rates:
        if not (is_number(rate) and 0 < rate < 1):
            raise ConfigurationError(
                f"a false positive rate of {shown(rate)}.",
                why="it is the share of outsiders that an attack takes for members: strictly between 0 and 1.",
                fix="give rates such as 0.001, 0.01 and 0.1.",
            )
    with_it, without = deltas(event, _EPSILONS)
    growth = np.exp(_EPSILONS)

    def most(rate: float) -> float:
        above = (growth * rate + with_it).min()
        below = (1 - (1 - rate - without) / growth).min()
        return float(min(1.0, above, below))

    advantage = float(min(with_it[0], without[0]))
    return Risk({rate: most(rate) for rate in false_positive_rates}, advantage, (1 + advantage) / 2)


def group_epsilons(event: dp.DpEvent, delta: float, of_one: float) -> dict[int, float | None]:
    """Epsilon at `delta` for a person with so many rows, in nats; see `group_epsilon`.

    Args:
        of_one: what is claimed of one row. That may be another bound, and larger; more rows are not told to cost less.
    """
    found: dict[int, float | None] = {}
    most = of_one
    for rows in ROWS:
        epsilon = group_epsilon(event, delta, rows)
        found[rows] = None if epsilon is None else (most := max(most, epsilon))
    return found


def groups_in_words(found: dict[int, float | None], units: str = "training examples") -> str:
    """What `group_epsilons` found, as a sentence; of nothing, only that there is such a thing."""
    less = f"A person behind several {units} is protected less (group privacy)"
    if not found or set(found.values()) == {None}:
        return f"{less}{': how much is not computed for these batches' if found else ''}."
    said = [f"{upper(epsilon, 3)} for {rows}" for rows, epsilon in found.items() if epsilon is not None]
    listed = " and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)
    more = "; of more it is not computed" if None in found.values() else ""
    return f"{less}: at the same delta epsilon is {listed} of them{more}."
