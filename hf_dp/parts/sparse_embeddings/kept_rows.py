"""The rows that are trained for many steps (DP-FEST): chosen, and paid for, or public; and kept over a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config import SparseEmbeddingConfig
from hf_dp.config.asked import EMBEDDING_ROWS
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.parts.sparse_embeddings.top_k import gumbel_scale, noisy_top_k
from hf_dp.per_example import PerExampleGradients, Pieces, Tables
from hf_dp.per_example.checks.memory import unchanged_buffers
from hf_dp.per_example.rule import refuse_differing
from hf_dp.randomness import secret_global_state
from hf_dp.step.plan import Plan

FILE = "sparse_embeddings.safetensors"
LABEL = EMBEDDING_ROWS
_ROWS, _CHOICE = "rows/", "choice"

Recorder = Callable[[Any], PerExampleGradients]
Pass = Callable[[Sequence[int]], Iterable[Any]]


class KeptRows:
    """Which rows of the tables are trained at all.

    Args:
        tables: the embedding tables.
        config: what the user chose.
        plan: of the run.

    Attributes:
        kept: (k,) ascending numbers; None for all, or where none were chosen yet.
        choices: what was chosen in this process, by the number of the choice.
    """

    def __init__(self, tables: Tables, config: SparseEmbeddingConfig, plan: Plan) -> None:
        self._tables, self._config, self._plan = tables, config, plan
        self.kept: Tensor | None = None
        self.choices: dict[int, Tensor] = {}

    def begin(self, checkpoint: Path | None, earlier: KeptRows | None) -> None:
        """Takes over what was chosen before, by a checkpoint or by an earlier training in this process.

        Raises:
            ConfigurationError: unreadable public rows, or a checkpoint without the rows of this run.
            LedgerError: a checkpoint that knows of fewer choices than this process has made.
        """
        if self._config.releases_rows:
            if earlier is not None:
                self.choices = dict(earlier.choices)
            if checkpoint is not None:
                self._resume(checkpoint)
        elif self._config.keeps_rows:
            self.kept = self._public()

    def before_step(self, step: int, ledger: Ledger, model: nn.Module, record: Recorder, examples: Pass) -> bool:
        """Takes the rows of this step's period, and chooses them where that was not done. A choice is charged.

        Args:
            step: which logical batch comes next.
            ledger: charged before the noisy choice exists.
            model: that computes the gradients.
            record: per-example gradients of a micro-batch.
            examples: the training examples of these indices, in micro-batches.

        Returns:
            Whether they are others than before.

        Raises:
            BudgetExceededError: more choices than the budget pays for.
            UnsupportedModelError: an example changed what is saved with the model; nothing was charged or released.
        """
        if not self._config.releases_rows:
            return False
        due = 0 if self._config.renew_every is None else step // self._config.renew_every
        if due not in self.choices:
            self.choices[due] = self._chosen(due, ledger, model, record, examples)
        was, self.kept = self.kept, self.choices[due]
        return was is not self.kept

    def _chosen(self, due: int, ledger: Ledger, model: nn.Module, record: Recorder, examples: Pass) -> Tensor:
        release, k = self._plan.release_to_make(LABEL, ledger), self._config.kept_rows
        assert k is not None
        counts, pieces = torch.zeros(self._tables.rows, dtype=torch.float64), Pieces(self._tables.sizes)
        # Each example is counted by one rank; the sum of whole numbers is exact. All are counted, also where nobody
        # may know how many.
        mine = range(ranks.rank(), self._plan.sampler.dataset_size, ranks.world_size())
        # Dropout that zeroes a whole row must not be known, nor shift when an example is added.
        randomness = nullcontext if self._plan.entropy.reproducible else secret_global_state
        with unchanged_buffers(model), randomness():
            prepared = iter(examples(mine))
            while True:
                with randomness():  # anew, as in a step
                    if (batch := next(prepared, None)) is None:
                        break
                    found = pieces.joined(record(batch))
                    refuse_differing(found.differing)
                    _, rows = self._tables.touched(found.factors)
                    counts += rows.cpu().bincount(minlength=self._tables.rows)
            pieces.refuse_rest()
        ranks.sum_(counts)
        ledger.charge(release.event, release.label)
        scale = gumbel_scale(release.noise_multiplier, k)
        return ranks.drawn_by_first(lambda: noisy_top_k(counts, k, scale, self._plan.noise, due))

    def save(self, directory: str | Path) -> None:
        """Writes the chosen rows beside the weights; they are a release that is in the ledger."""
        if self._config.releases_rows and self.kept is not None:
            kept = {f"{_ROWS}{name}": rows.clone() for name, rows in self._tables.split(self.kept).items()}
            latest = next(number for number, rows in self.choices.items() if rows is self.kept)
            save_file({**kept, _CHOICE: torch.tensor(latest)}, Path(directory) / FILE)

    def _resume(self, checkpoint: Path) -> None:
        path = checkpoint / FILE
        try:
            saved = load_file(path)
            choice = int(saved.pop(_CHOICE))
            kept = self._numbered({name.removeprefix(_ROWS): rows for name, rows in saved.items()})
            if len(kept) != self._config.kept_rows:
                raise ValueError(f"{len(kept)} rows")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(
                f"{str(path)!r} holds no chosen rows of this run ({error}).",
                why="the rows that were trained so far are not known, and another choice is not paid for.",
                fix="resume from a checkpoint as DPTrainer wrote it, with the same model and tables.",
            ) from error
        known = self.choices.get(choice)
        if known is not None and not torch.equal(kept, known):
            raise LedgerError(
                "the checkpoint holds other embedding rows than were chosen in this process.",
                why="its ledger does not count that choice.",
                fix="resume from a later checkpoint of this run, or in a new process if nothing of this one was seen.",
            )
        self.choices[choice] = self.kept = kept

    def _public(self) -> Tensor:
        path = Path(str(self._config.public_rows))
        try:
            given: Any = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(given, list):
                if len(self._tables.sizes) > 1:
                    raise ValueError("one list for several tables")
                given = {next(iter(self._tables.sizes)): given}
            kept = self._numbered({name: torch.tensor(rows, dtype=torch.int64) for name, rows in given.items()})
            if not len(kept):
                raise ValueError("no rows")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ConfigurationError(
                f"public_rows={str(path)!r} ({type(error).__name__}: {error}).",
                why="only these rows are trained.",
                fix="give a JSON file with a list of row numbers, or {name of a table: list} for "
                f"{', '.join(self._tables.sizes)}.",
            ) from error
        return kept

    def _numbered(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Rows of each table as ascending numbers over all of them; `KeyError`, `ValueError` for rows of none."""
        parts = []
        for name, numbers in rows.items():
            if numbers.dim() != 1 or bool(((numbers < 0) | (numbers >= self._tables.sizes[name])).any()):
                raise ValueError(f"rows of {name} outside 0 to {self._tables.sizes[name] - 1}")
            parts.append(numbers + self._tables.offsets[name])
        kept: Tensor = torch.cat(parts).unique()
        return kept
