"""What a promise asks of a run besides its steps: releases of their own, further queries in each step, words for cards.

It follows from the config alone, so that whoever verifies a record can hold it against what was done. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_dp.config.promise import PLAIN, PrivacyConfig
from hf_dp.config.ranges import is_count, is_number, shown
from hf_dp.config.secret import GIVEN_SIZE
from hf_dp.errors import ConfigurationError

# In ledgers, and so in records that are read for ever.
TOKEN_PRESENCE, EMBEDDING_ROWS, ROW_COUNTS = "token presence", "embedding rows", "counts of rows"
LABEL_PRESENCE = "label presence"
# Of trainings before a promise has the digests, wherever they lie now.
_NOT_PROMISED = ("withhold_non_private_logs", "after", "passes")
_RE_ATTENTION = (
    "**Re-Attention.** The model was trained with its attention corrected for the noise in keys. Loaded without hf_dp "
    'it is the plain model; `hf_dp.load_re_attention(model, "OWNER/NAME")` puts the correction back on it.'
)
_OTHER_PEOPLE = (
    "**The model before.** It was trained with differential privacy too, on data in which nobody is whose data is in "
    "this one: so says whoever published it. What is said here is of this data alone."
)
_PEOPLE_BESIDES = (
    "**The model before.** Besides those trainings it was trained with differential privacy on data in which nobody is "
    "whose data is in this one: so says whoever published it. What is said here is of this data and of theirs alone."
)


@dataclass(frozen=True)
class Share:
    """A release from all units that is paid for with a share of the target epsilon, before the steps are.

    Attributes:
        label: the ledger's key, by which the release is known everywhere.
        budget_share: of the target epsilon, for all `times` together; in (0, 1).
        times: how often it is made, at least 1.
        every: steps from one to the next; None where all are made before the first step.
    """

    label: str
    budget_share: float
    times: int
    every: int | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.budget_share) and 0 < self.budget_share < 1):
            _refuse(self.label, "budget_share", self.budget_share, "it is a number above 0 and below 1")
        check_times(self.label, self.times, self.every)


@dataclass(frozen=True)
class Query:
    """What each step releases beside the gradient, with Gaussian noise, of the same sampled units.

    Attributes:
        label: by which it is known everywhere.
        ratio: its noise over the gradient's, each in units of its own sensitivity; between 0.001 and 1000.
    """

    label: str
    ratio: float

    def __post_init__(self) -> None:
        if not (is_number(self.ratio) and 1e-3 <= self.ratio <= 1e3):
            _refuse(self.label, "ratio", self.ratio, "it is a number between 0.001 and 1000")


def check_times(label: str, times: object, every: object) -> None:
    """Refuse numbers of releases that are none (`ConfigurationError`)."""
    if not is_count(times, at_least=1):
        _refuse(label, "times", times, "it is a whole number of at least 1")
    if every is not None and not is_count(every, at_least=1):
        _refuse(label, "every", every, "it is a whole number of steps, at least 1, or None")


def asked(config: PrivacyConfig, steps: int) -> tuple[tuple[Share, ...], tuple[Query, ...]]:
    """The releases that the target epsilon pays for besides `steps` steps, and the further queries of each step."""
    shares, queries = [], []
    attention, sparse = config.re_attention, config.sparse_embeddings
    if attention is not None and attention.token_frequencies == "released":
        shares.append(Share(TOKEN_PRESENCE, attention.budget_share, 1))
    if sparse is not None and sparse.releases_rows:
        every = sparse.renew_every
        times = 1 if every is None else math.ceil(steps / every)
        shares.append(Share(EMBEDDING_ROWS, sparse.budget_share, times, every))
    if config.output_bias is not None:
        shares.append(Share(LABEL_PRESENCE, config.output_bias.budget_share, 1))
    if sparse is not None and sparse.adapts:
        queries.append(Query(ROW_COUNTS, sparse.noise_ratio))
    return tuple(shares), tuple(queries)


def notes(config: PrivacyConfig) -> tuple[str, ...]:
    """Paragraphs that the card of a model trained so has besides, in Markdown."""
    others = _OTHER_PEOPLE if config.after is None else _PEOPLE_BESIDES
    kept = {others: config.other_people, _RE_ATTENTION: config.re_attention is not None}
    return tuple(note for note, holds in kept.items() if holds)


def promised(config: PrivacyConfig) -> dict[str, Any]:
    """What of the config a ledger must share to be continued: what is published, but for what is left out."""
    values = config.published().items()
    kept = {k: v for k, v in values if k not in _NOT_PROMISED and not (k in PLAIN and v == PLAIN[k])}
    return {GIVEN_SIZE if name == "dataset_size" else name: value for name, value in kept.items()}


def _refuse(label: str, name: str, value: object, rule: str) -> None:
    raise ConfigurationError(
        f"{shown(label)} was asked for with {name}={shown(value)}.",
        why=f"{rule}.",
        fix="correct what asks for it.",
    )
