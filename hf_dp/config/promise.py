"""What the user promises: `PrivacyConfig`, frozen and serialisable. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, Self

from hf_dp.config.ranges import (
    check_clipping_norm,
    check_noise_multiplier,
    check_target_delta,
    check_target_epsilon,
    is_count,
    is_number,
    shown,
)
from hf_dp.errors import ConfigurationError
from hf_dp.launched import is_first, say_once

# Beyond any size that means something, and far from what float32 cannot square.
_LARGE = 1e15
AccountantName = Literal["pld", "rdp"]


class _Part:
    """A part of the promise with a dataclass of its own."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ConfigurationError: an unknown field, or a value out of range.
        """
        known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not set(values) <= known:
            raise ConfigurationError(
                f"{cls.__name__} got {', '.join(sorted(shown(name) for name in set(values) - known))}.",
                why="an unknown field would change what is trained without notice.",
                fix=f"use only these: {', '.join(sorted(known))}.",
            )
        return cls(**values)


@dataclass(frozen=True)
class ReAttentionConfig(_Part):
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
            if not _is_one_of(getattr(self, name), known):
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={shown(getattr(self, name))}.",
                    why="the correction follows from it.",
                    fix=f"use one of {', '.join(map(repr, known))}.",
                )
        for name, limit in (("budget_share", 1.0), ("presence_clipping_norm", _LARGE), ("scale", _LARGE)):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < limit):
                raise ConfigurationError(
                    f"ReAttentionConfig got {name}={shown(value)}.",
                    why=f"it must be a number above 0 and below {limit:g}.",
                    fix="leave it out for the default.",
                )
        object.__setattr__(self, "public_frequencies", _as_path(self.public_frequencies))
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


@dataclass(frozen=True)
class SparseEmbeddingConfig(_Part):
    """Embedding tables whose private gradient is a few rows (Ghazi et al. 2023, arXiv:2311.08357).

    Attributes:
        method: "adafest", rows chosen anew in each step by how many examples of the batch touch them; "fest", the
            `kept_rows` most frequent rows for the whole run; "adafest+", the first inside the second.
        tables: names of the embedding parameters; None for the model's input embeddings, or, where the model is not
            Transformers', all tables of at least 1000 rows that are only looked up.
        contribution_norm: C1, the l2 norm to which each example's 0/1 vector of touched rows is clipped. AdaFEST.
        threshold: tau, in (clipped) examples: a row survives a step if its noisy count is at least that. None: so high
            that a row that no example touched survives with probability 1e-4. AdaFEST.
        noise_ratio: sigma1 / sigma2, the noise on the counts over that on the gradient, each in units of its clipping
            norm; between 0.001 and 1000. AdaFEST.
        kept_rows: k, how many rows FEST keeps, over all tables together.
        row_choice: how FEST chooses: "released", a DP top-k of how many training examples touch each row, paid for
            with `budget_share` of the target epsilon; "public", read from `public_rows`.
        public_rows: a JSON file with a list of row numbers, or, for several tables, one for each by its name.
        budget_share: of the target epsilon, for all of FEST's choices together; in (0, 1).
        renew_every: steps after which FEST chooses again, and pays again; None for one choice.
        optimizer: of the tables' rows; all move only rows that have a gradient. "row_wise_adam" keeps two numbers for
            each row, "sparse_adam" is torch's, with two tables of state, "sgd" keeps nothing.
        learning_rate: of the tables' rows; None for that of the other parameters.

    Raises:
        ConfigurationError: a value outside these, or one that the method does not use.
    """

    method: Literal["adafest", "fest", "adafest+"] = "adafest"
    tables: tuple[str, ...] | None = None
    contribution_norm: float = 1.0
    threshold: float | None = None
    noise_ratio: float = 2.0
    kept_rows: int | None = None
    row_choice: Literal["released", "public"] = "released"
    public_rows: str | None = None
    budget_share: float = 0.05
    renew_every: int | None = None
    optimizer: Literal["row_wise_adam", "sparse_adam", "sgd"] = "row_wise_adam"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tables, (list, tuple)):
            object.__setattr__(self, "tables", tuple(self.tables))
        object.__setattr__(self, "public_rows", _as_path(self.public_rows))
        choices = {
            "method": ("adafest", "fest", "adafest+"),
            "row_choice": ("released", "public"),
            "optimizer": ("row_wise_adam", "sparse_adam", "sgd"),
        }
        for name, known in choices.items():
            if not _is_one_of(getattr(self, name), known):
                self._refuse(name, f"it is one of {', '.join(map(repr, known))}")
        ranges = {
            "contribution_norm": (0.0, _LARGE),
            "threshold": (0.0, _LARGE),
            "noise_ratio": (0.001, 1000.0),
            "budget_share": (0.0, 1.0),
            "learning_rate": (0.0, _LARGE),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            may_be_none = type(self).__dataclass_fields__[name].default is None
            if not (value is None and may_be_none) and not (is_number(value) and low < value < high):
                self._refuse(name, f"it is a number above {low:g} and below {high:g}")
        for name in ("kept_rows", "renew_every"):
            value = getattr(self, name)
            if value is not None and not is_count(value, at_least=1):
                self._refuse(name, "it is a whole number of at least 1")
        if not (self.public_rows is None or isinstance(self.public_rows, str)):
            self._refuse("public_rows", "it is the path of a file")
        names = self.tables
        if names is not None and not (isinstance(names, tuple) and names and all(isinstance(n, str) for n in names)):
            self._refuse("tables", "it is one or more names of parameters, or None")
        self._check_use()

    def _check_use(self) -> None:
        if not self.adapts:
            unused = [name for name in ("contribution_norm", "threshold", "noise_ratio") if self._is_set(name)]
        elif not self.keeps_rows:
            names = ("kept_rows", "row_choice", "public_rows", "budget_share", "renew_every")
            unused = [name for name in names if self._is_set(name)]
        else:
            unused = []
        if unused:
            self._refuse(unused[0], f"method={self.method!r} does not use it")
        if not self.keeps_rows:
            return
        if (self.public_rows is None) == (self.row_choice == "public"):
            self._refuse("public_rows", "the file goes with row_choice='public', and with nothing else")
        if (self.kept_rows is None) == self.releases_rows:
            self._refuse("kept_rows", "the DP top-k needs to know how many, and public rows are counted in their file")
        if self.renew_every is not None and not self.releases_rows:
            self._refuse("renew_every", "public rows do not change")

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def _refuse(self, name: str, rule: str) -> None:
        raise ConfigurationError(
            f"SparseEmbeddingConfig got {name}={shown(getattr(self, name))} with method={shown(self.method)}.",
            why=f"{rule}.",
            fix=f"correct it, or leave {name} out for the default.",
        )

    @property
    def adapts(self) -> bool:
        """Rows are chosen in each step."""
        return self.method in ("adafest", "adafest+")

    @property
    def keeps_rows(self) -> bool:
        """Rows are chosen for many steps."""
        return self.method in ("fest", "adafest+")

    @property
    def releases_rows(self) -> bool:
        """Rows are chosen from the private data, by a release of its own."""
        return self.keeps_rows and self.row_choice == "released"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        return {**dataclasses.asdict(self), "tables": None if self.tables is None else list(self.tables)}


@dataclass(frozen=True, init=False)
class PrivacyConfig:
    """The promise of a private training run.

    Exactly one of `target_epsilon` and `noise_multiplier` is given. In neighbouring datasets one of n training examples
    is replaced by nothing (zero-out), and n is public; batches are Poisson-sampled, and noise is Gaussian (DP-SGD;
    Abadi et al. 2016, arXiv:1607.00133, algorithm 1).

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
        sparse_embeddings: None for dense noise on all rows, or a `SparseEmbeddingConfig`. With AdaFEST
            `noise_multiplier` is that of both releases of a step together.

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
    sparse_embeddings: SparseEmbeddingConfig | None = field(default=None, init=False)

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
        sparse_embeddings: SparseEmbeddingConfig | None = None,
    ) -> None:
        values = dict(locals())
        # Every private run makes one of these before anything can be refused.
        say_once()
        if isinstance(re_attention, dict):
            values["re_attention"] = ReAttentionConfig.from_dict(re_attention)
        if isinstance(sparse_embeddings, dict):
            values["sparse_embeddings"] = SparseEmbeddingConfig.from_dict(sparse_embeddings)
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, values[item.name])
        self._check()

    def _check(self) -> None:
        budget, noise = self.target_epsilon, self.noise_multiplier
        if (budget is None) == (noise is None):
            raise ConfigurationError(
                f"PrivacyConfig got target_epsilon={shown(budget)} and noise_multiplier={shown(noise)}.",
                why="one of them determines the other; with both or neither the promise is ambiguous.",
                fix="give exactly one, for example PrivacyConfig(target_epsilon=8.0).",
            )
        if budget is not None:
            check_target_epsilon(budget)
        if noise is not None:
            check_noise_multiplier(noise)
        check_clipping_norm(self.clipping_norm)
        if self.clipping_norm == math.inf and noise != 0:
            raise ConfigurationError(
                "clipping_norm=inf together with noise.",
                why="without clipping one example's influence is unbounded, and no finite noise hides it.",
                fix="give a finite clipping_norm, or noise_multiplier=0 for a run without privacy.",
            )
        if self.target_delta is not None:
            check_target_delta(self.target_delta)
        if not _is_one_of(self.accountant, ("pld", "rdp")):
            raise ConfigurationError(
                f"accountant={shown(self.accountant)}.",
                why="only 'pld' and 'rdp' are known, and an unknown accountant promises nothing.",
                fix="use 'pld' (tight, the default) or 'rdp'.",
            )
        if not isinstance(self.withhold_non_private_logs, bool):
            raise ConfigurationError(
                f"withhold_non_private_logs={shown(self.withhold_non_private_logs)}.",
                why="it is True or False; anything else could be read as either.",
                fix="give True to keep training loss and clipping statistics out of the logs.",
            )
        if self.seed is not None and not is_count(self.seed):
            raise ConfigurationError(
                f"seed={shown(self.seed)}.",
                why="it must be None (secret randomness) or a non-negative integer (reproducible, not private).",
                fix="leave it out for a private run.",
            )
        if self.re_attention is not None and not isinstance(self.re_attention, ReAttentionConfig):
            raise ConfigurationError(
                f"re_attention={shown(self.re_attention)}.",
                why="the correction needs its settings.",
                fix="give re_attention=ReAttentionConfig().",
            )
        if budget is None and self.re_attention is not None and self.re_attention.token_frequencies == "released":
            raise ConfigurationError(
                "re_attention with released token frequencies, and noise_multiplier in place of target_epsilon.",
                why="the release is paid for with a share of the target epsilon.",
                fix="give target_epsilon, or ReAttentionConfig(token_frequencies='uniform' or 'public').",
            )
        self._check_sparse_embeddings()
        if noise == 0 and is_first():
            warnings.warn(
                "noise_multiplier=0: this run adds no noise and is not private; its epsilon is infinite.",
                stacklevel=3,
            )

    def _check_sparse_embeddings(self) -> None:
        sparse = self.sparse_embeddings
        if sparse is None:
            return
        if not isinstance(sparse, SparseEmbeddingConfig):
            raise ConfigurationError(
                f"sparse_embeddings={shown(sparse)}.",
                why="which rows get a gradient follows from its settings.",
                fix="give sparse_embeddings=SparseEmbeddingConfig().",
            )
        if self.re_attention is not None:
            raise ConfigurationError(
                "re_attention together with sparse_embeddings.",
                why="Re-Attention corrects for noise in all rows of the embedding, and here only a few have any.",
                fix="use one of the two.",
            )
        if self.target_epsilon is None and sparse.releases_rows:
            raise ConfigurationError(
                "sparse_embeddings with a DP top-k of rows, and noise_multiplier in place of target_epsilon.",
                why="the choice is paid for with a share of the target epsilon.",
                fix="give target_epsilon, or SparseEmbeddingConfig(row_choice='public', ...), or method='adafest'.",
            )

    def replace(self, **changes: Any) -> PrivacyConfig:
        """A copy with some values changed (`dataclasses.replace` would drop `seed`)."""
        return PrivacyConfig(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `PrivacyConfig(**config.to_dict()) == config`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        parts = ("re_attention", "sparse_embeddings")
        return {**values, **{name: values[name] and values[name].to_dict() for name in parts}}

    def published(self) -> dict[str, Any]:
        """`to_dict` for others: without the seed, and of files their names, not where they lie on this machine."""
        values = {name: value for name, value in self.to_dict().items() if name != "seed"}
        for part, name in (("re_attention", "public_frequencies"), ("sparse_embeddings", "public_rows")):
            if values[part] is not None and values[part][name] is not None:
                values[part][name] = PurePath(values[part][name]).name
        return values

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


def _is_one_of(value: object, known: Iterable[str]) -> bool:
    # Arrays and tensors compare in ways of their own.
    return isinstance(value, str) and value in known


def _as_path(value: object) -> object:
    return os.fspath(value) if isinstance(value, PurePath) else value
