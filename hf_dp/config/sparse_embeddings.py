"""What the user chooses of sparse embeddings. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hf_dp.config.part import PartConfig, as_path
from hf_dp.config.ranges import LARGEST_SIZE, is_count, is_number, is_one_of, shown
from hf_dp.errors import ConfigurationError


@dataclass(frozen=True)
class SparseEmbeddingConfig(PartConfig):
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
        object.__setattr__(self, "public_rows", as_path(self.public_rows))
        choices = {
            "method": ("adafest", "fest", "adafest+"),
            "row_choice": ("released", "public"),
            "optimizer": ("row_wise_adam", "sparse_adam", "sgd"),
        }
        for name, known in choices.items():
            if not is_one_of(getattr(self, name), known):
                self._refuse(name, f"it is one of {', '.join(map(repr, known))}")
        ranges = {
            "contribution_norm": (0.0, LARGEST_SIZE),
            "threshold": (0.0, LARGEST_SIZE),
            "noise_ratio": (0.001, 1000.0),
            "budget_share": (0.0, 1.0),
            "learning_rate": (0.0, LARGEST_SIZE),
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
