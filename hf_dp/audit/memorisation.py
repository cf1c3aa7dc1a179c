"""What one language model gives away of texts it was trained on: membership, second halves, and secrets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dp.audit.given import refused
from hf_dp.audit.guessed import Guesses, exposures
from hf_dp.audit.intervals import Interval, interval
from hf_dp.audit.members import Membership, membership
from hf_dp.audit.secrets import Secret, most_by_chance
from hf_dp.audit.texts import Completion, Losses, Read, completions, read

DRAWS = 100
LONGEST = 256


@dataclass(frozen=True, kw_only=True)
class Written:
    """How many of some texts a model completes to the letter.

    Attributes:
        found: that it writes by taking the likeliest token each time.
        of: how many there are.
        interval: in which the share of such texts lies.
        drawn: the share that it is expected to write in `DRAWS` draws of each, at temperature 1.
    """

    found: int
    of: int
    interval: Interval
    drawn: float

    @classmethod
    def of_completions(cls, made: Sequence[Completion], confidence: float) -> Written:
        """Of these."""
        found = sum(one.greedy for one in made)
        drawn = float(np.mean([one.within(DRAWS) for one in made]))
        return cls(found=found, of=len(made), interval=interval(found, len(made), confidence), drawn=drawn)


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """What a model gives away of secrets.

    Attributes:
        exposures: of each secret, in bits.
        candidates: among how many each was ranked; its exposure is log2 of that at most.
        written: how many secrets it says after their prefixes.
    """

    exposures: list[float]
    candidates: list[int]
    written: Written

    @property
    def mean(self) -> float:
        """Of all secrets, in bits."""
        return float(np.mean(self.exposures))

    @property
    def by_chance(self) -> bool:
        """Whether a model that knows none of them exposes as much more often than once in 1000 times."""
        return self.mean <= most_by_chance(len(self.exposures))


@dataclass(frozen=True, kw_only=True)
class Memorisation:
    """What attacks find in one model. That they find nothing is no proof that there is nothing: epsilon is the claim.

    Attributes:
        by_loss: membership, by each text's loss (Yeom et al. 2018, arXiv:1709.01604).
        by_reference: by how much lower it is than a reference model's (Carlini et al. 2021, arXiv:2012.07805); None
            without one.
        members, others: of texts that were in, and of texts that were not, how many the model completes from the first
            half of their tokens.
        secrets: None where none were given.
        cut: of how many texts, of either side, only the beginning was read.
    """

    by_loss: Membership
    by_reference: Membership | None
    members: Written
    others: Written
    secrets: Exposed | None
    cut: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        reference = None if self.by_reference is None else self.by_reference.to_dict()
        return {**dataclasses.asdict(self), "by_loss": self.by_loss.to_dict(), "by_reference": reference}


class Reader:
    """The same texts and secrets, for one model after another.

    Args:
        members: texts that were in the training, as it saw them.
        others: texts that were not; of the same kind, or they are told apart by what they are.
        secrets: random secrets that were in the training, and what stood before each.
        longest: of each text so many tokens are read.
        confidence: of each interval.

    Raises:
        ConfigurationError: no members or no others, a text that is in both, or a secret that is there twice.
    """

    def __init__(
        self,
        members: Sequence[str],
        others: Sequence[str],
        secrets: Sequence[Secret] = (),
        *,
        longest: int = LONGEST,
        confidence: float = 0.95,
    ) -> None:
        if both := set(members) & set(others):
            raise refused(
                f"{len(both)} texts that were in and were not, such as {min(both)[:40]!r}",
                "who finds a text that was in is right, and would be counted as wrong.",
                "take them out of the texts that were not.",
            )
        counts = Counter(one.secret for one in secrets)
        if twice := sorted(secret for secret, count in counts.items() if count > 1):
            raise refused(
                f"{len(twice)} secrets that are there twice, such as {twice[0][:40]!r}",
                "what chance would expose is computed for secrets that were drawn each for itself.",
                "give each secret once, whatever stands before it.",
            )
        self._members, self._others, self._secrets = list(members), list(others), list(secrets)
        self._longest, self._confidence = longest, confidence

    def losses(self, model: Any, tokenizer: Any) -> tuple[Losses, Losses]:
        """Of members and others, by a reference model."""
        members, others = self._read(model, tokenizer)
        return members.losses, others.losses

    def of_losses(self, members: Losses, others: Losses) -> Membership:
        """What they tell of membership: of a reference, trained on neither, nothing if both are of one kind."""
        return membership(-members, -others, confidence=self._confidence)

    def memorisation(self, model: Any, tokenizer: Any, reference: tuple[Losses, Losses] | None = None) -> Memorisation:
        """What a causal language model gives away.

        Args:
            tokenizer: its own.
            reference: what `losses` gives of another model, trained on neither.

        Raises:
            ConfigurationError: texts from which nothing could follow, or losses that are NaN.
        """
        members, others = self._read(model, tokenizer)
        lower = None
        if reference is not None:
            lower = membership(reference[0] - members.losses, reference[1] - others.losses, confidence=self._confidence)
        return Memorisation(
            by_loss=self.of_losses(members.losses, others.losses), by_reference=lower,
            members=Written.of_completions(members.second_halves, self._confidence),
            others=Written.of_completions(others.second_halves, self._confidence),
            secrets=self._exposed(model, tokenizer) if self._secrets else None, cut=members.cut + others.cut,
        )  # fmt: skip

    def _read(self, model: Any, tokenizer: Any) -> tuple[Read, Read]:
        members, others = (read(model, tokenizer, texts, self._longest) for texts in (self._members, self._others))
        return members, others

    def _exposed(self, model: Any, tokenizer: Any) -> Exposed:
        # First: it takes one pass, and refuses what is too long.
        written = Written.of_completions(completions(model, tokenizer, self._secrets, self._longest), self._confidence)
        guesses = [Guesses.of(tokenizer, one) for one in self._secrets]
        candidates = [len(one.rest) for one in guesses]
        return Exposed(exposures=exposures(model, guesses), candidates=candidates, written=written)
