"""Generated support messages, public and private, and the secrets planted among the private ones."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from hf_dp.audit.secrets import Secret
from hf_dp.demo.grammars import BANK, FIRST_NAMES, LAST_NAMES, PUBLISHED, SHOP, Grammar

PIN_DIGITS = 4
CANDIDATES = 10**PIN_DIGITS
MOST_EXPOSURE = math.log2(CANDIDATES)
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Messages:
    """All text of the demo.

    Attributes:
        public: to train the tokenizer and to pretrain on. No secret is in it.
        private: to fine-tune on: distinct messages, among them each of `planted` exactly once.
        evaluation: of the private kind, none of them in `private`, without secrets.
        planted: the secrets in `private`: each `PIN_DIGITS` decimal digits, uniformly random, no two alike.
        unplanted: secrets of the same kind that are nowhere. No model can know them: the measure's own control.
    """

    public: list[str]
    private: list[str]
    evaluation: list[str]
    planted: list[Secret]
    unplanted: list[Secret]


def generate(*, public: int, private: int, evaluation: int, canaries: int, seed: int) -> Messages:
    """Messages of each kind, as many as asked for.

    Args:
        public: number of public messages.
        private: number of private training messages, canaries included.
        evaluation: number of evaluation messages.
        canaries: number of secrets planted, and again of secrets not planted.
        seed: everything follows from it.
    """
    rng = random.Random(seed)
    secrets = _canaries(2 * canaries, rng)
    planted, unplanted = secrets[:canaries], secrets[canaries:]
    ordinary = _distinct(BANK, private - canaries + evaluation, rng)
    training = ordinary[evaluation:] + [canary.text for canary in planted]
    rng.shuffle(training)
    published = [_expand(rng.choice((SHOP, PUBLISHED)), "start", rng) for _ in range(public)]
    return Messages(published, training, ordinary[:evaluation], planted, unplanted)


def _canaries(n: int, rng: random.Random) -> list[Secret]:
    people = rng.sample([f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES], n)
    # No two alike: of a code that two people have, exposure means nothing.
    codes: dict[int, None] = {}
    while len(codes) < n:
        codes[rng.randrange(CANDIDATES)] = None
    return [
        Secret(f"Hello, this is {person}, the secret code of my card is ", f"{code:0{PIN_DIGITS}d}")
        for person, code in zip(people, codes, strict=True)
    ]


def _distinct(grammar: Grammar, n: int, rng: random.Random) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < n:
        found[_expand(grammar, "start", rng)] = None
    return list(found)


def _expand(grammar: Grammar, name: str, rng: random.Random) -> str:
    return _SLOT.sub(lambda slot: _expand(grammar, slot[1], rng), rng.choice(grammar[name]))
