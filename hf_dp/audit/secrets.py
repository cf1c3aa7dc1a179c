"""How exposed a secret is: the rank of its loss among all secrets it could have been, in bits.

Source: Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer" (2019), arXiv:1802.08232, section 4.
"""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from scipy import stats

from hf_dp.audit.given import Scores, checked, refused

# Of a secret that the model knows nothing about: its rank is uniform, so its exposure is -log2 of a uniform number.
MEAN_EXPOSURE_BY_CHANCE = 1 / math.log(2)
_KINDS = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


@dataclass(frozen=True)
class Secret:
    """A random secret in a text, to see whether a model gives it away.

    Attributes:
        prefix: what an attacker is taken to know. It ends just before the secret.
        secret: what he is after.
    """

    prefix: str
    secret: str

    @property
    def text(self) -> str:
        """Both, as they were trained on."""
        return self.prefix + self.secret


def exposure(losses: Scores, secret: int) -> float:
    """log2 of the number of candidates minus log2 of the secret's rank, in bits.

    Args:
        losses: (N,), of every candidate.
        secret: which candidate is the true one.

    Returns:
        log2(N) if the secret has the smallest loss, 0 if it has the largest. Equal losses share their mean rank, so
        that a model which tells no candidate from another exposes nothing.

    Raises:
        ConfigurationError: none, or losses that are NaN.
    """
    found = checked(losses, "losses of candidates")
    smaller = int((found < found[secret]).sum())
    equal = int((found == found[secret]).sum())
    rank = 1 + smaller + (equal - 1) / 2
    return math.log2(len(found)) - math.log2(rank)


def most_by_chance(n: int) -> float:
    """Mean exposure of n secrets that a model which knows none of them exceeds in one case of a thousand.

    The rank of an unknown secret is uniform, so its exposure in nats is exponential and the sum of n has a gamma
    distribution.
    """
    return float(stats.gamma.isf(1e-3, n)) / n * MEAN_EXPOSURE_BY_CHANCE


def candidates(secret: str, most: int = 10_000) -> list[str]:
    """What it could have been, itself first: each digit another digit, each letter of a to z another of its case, and
    all else as it is.

    Args:
        most: where there are more, so many are drawn, itself among them and the same each time; its exposure is then
            log2(most) at most.

    Raises:
        ConfigurationError: it has no digit and no such letter, or `most` is below 2.

    Source: section 4.2 for the space, 4.3 for the sample.
    """
    alphabets = [next((kind for kind in _KINDS if letter in kind), letter) for letter in secret]
    number = math.prod(map(len, alphabets))
    if number == 1:
        raise refused(
            f"a secret {secret[:40]!r}, of which it alone could be true",
            "exposure is a rank among other secrets of the same shape.",
            "give a secret with digits or letters of a to z.",
        )
    if most < 2:
        raise refused(f"most={most}", "a rank among one says nothing.", "rank the secret among two or more.")
    own = _number(secret, alphabets)
    if number <= most:
        others = [other for other in range(number) if other != own]
    else:
        rng, drawn = random.Random(0), dict[int, None]()
        while len(drawn) < most - 1:
            if (other := rng.randrange(number)) != own:
                drawn[other] = None
        others = list(drawn)
    return [secret, *(_text(other, alphabets) for other in others)]


def _number(text: str, alphabets: list[str]) -> int:
    number = 0
    for letter, alphabet in zip(text, alphabets, strict=True):
        number = number * len(alphabet) + alphabet.index(letter)
    return number


def _text(number: int, alphabets: list[str]) -> str:
    letters = []
    for alphabet in reversed(alphabets):
        number, at = divmod(number, len(alphabet))
        letters.append(alphabet[at])
    return "".join(reversed(letters))
