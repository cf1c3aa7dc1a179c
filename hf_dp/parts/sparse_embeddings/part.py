"""Sparse embeddings in a private training: their tables, the choice of rows and what it costs, at each step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.agreement import agree
from hf_dp.config import SparseEmbeddingConfig
from hf_dp.config.asked import EMBEDDING_ROWS, ROW_COUNTS
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows, gumbel_scale, noisy_top_k
from hf_dp.per_example import PerExampleGradients, Tables
from hf_dp.per_example.batch import Batch
from hf_dp.randomness import secret_global_state
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)

FILE = "sparse_embeddings.safetensors"
LABEL = EMBEDDING_ROWS
_ROWS, _CHOICE = "rows/", "choice"
# What DistributedDataParallel reads off a model that it is to wrap.
_IGNORED = "_ddp_params_and_buffers_to_ignore"

Recorder = Callable[[Batch], PerExampleGradients]
Pass = Callable[[Sequence[int]], Iterable[Batch]]


@contextmanager
def frozen(tables: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, the tables are not trained."""
    for table in tables:
        table.requires_grad_(False)
    try:
        yield
    finally:
        for table in tables:
            table.requires_grad_(True)


def hide_from_wrapper(model: nn.Module, tables: Mapping[str, nn.Parameter]) -> None:
    """Keeps DDP's wrapper, which is not run, from making a dense gradient of each table.

    What it does besides is done here: every rank gets rank 0's values. A model that trains nothing else is not hidden,
    since DDP wraps no model that has nothing to train.
    """
    hidden = {id(table) for table in tables.values()}
    if ranks.world_size() == 1 or not any(p.requires_grad and id(p) not in hidden for p in model.parameters()):
        return
    for table in tables.values():
        ranks.from_first_(table.detach())
    vars(model)[_IGNORED] = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in hidden}


def show_to_wrapper(model: nn.Module) -> None:
    """Undoes `hide_from_wrapper`, so that a later training without this one gets all gradients reduced."""
    vars(model).pop(_IGNORED, None)


class SparseTraining:
    """Keeps the sparse embeddings of one model in step with its private training.

    Args:
        tables: the embedding tables, by the names of their parameters.
        config: what the user chose.
        plan: of the run.

    Attributes:
        rows: what chooses rows in the next step; None before `begin`.
        kept: (k,) the rows that DP-FEST trains; None without it.
    """

    def __init__(self, tables: Mapping[str, nn.Parameter], config: SparseEmbeddingConfig, plan: Plan) -> None:
        self.tables, self._config, self._plan = Tables.of(tables), config, plan
        self.rows: TableRows | None = None
        self.kept: Tensor | None = None
        self._choices: dict[int, Tensor] = {}
        self._seen: dict[str, list[float]] = {}
        if not tables:
            raise ConfigurationError(
                "sparse embeddings, and an optimizer that was made without looking for their tables.",
                why="create_optimizer was overridden, so all gradients would be dense.",
                fix="call super().create_optimizer() in yours, or pass optimizers=(...) to the trainer.",
            )
        if config.kept_rows is not None and config.kept_rows >= self.tables.rows:
            raise ConfigurationError(
                f"kept_rows={config.kept_rows} of {self.tables.rows} rows in {', '.join(self.tables.sizes)}.",
                why="all rows would get noise, and the choice of them would be paid for.",
                fix="keep fewer, or leave sparse_embeddings out.",
            )

    # --- which rows are kept (DP-FEST) -----------------------------------------------------------------------------

    def begin(self, checkpoint: Path | None, earlier: SparseTraining | None) -> None:
        """Takes over what was chosen before, by a checkpoint or by an earlier training in this process.

        Raises:
            ConfigurationError: unreadable public rows, a checkpoint without the rows of this run, or ranks that differ
                in either.
            LedgerError: a checkpoint that knows of fewer choices than this process has made.
        """
        if self._config.releases_rows:
            if earlier is not None:
                self._choices = dict(earlier._choices)
            if checkpoint is not None:
                self._resume(checkpoint)
        elif self._config.keeps_rows:
            self.kept = self._public()
        agree(
            {
                "the embedding tables": dict(self.tables.sizes),
                "the embedding rows that are trained": None if self.kept is None else self.kept.tolist(),
                "the embedding rows chosen before": [
                    (due, rows.tolist()) for due, rows in sorted(self._choices.items())
                ],
            }
        )
        self._set_rows()

    def before_step(self, step: int, ledger: Ledger, record: Recorder, examples: Pass) -> None:
        """Takes the rows of this step's period, and chooses them where that was not done. A choice is charged.

        Args:
            step: which logical batch comes next.
            ledger: charged before the noisy choice exists.
            record: per-example gradients of a micro-batch.
            examples: the training examples of these indices, in micro-batches.

        Raises:
            BudgetExceededError: more choices than the budget pays for.
        """
        if not self._config.releases_rows:
            return
        due = 0 if self._config.renew_every is None else step // self._config.renew_every
        if due not in self._choices:
            self._choices[due] = self._chosen(due, ledger, record, examples)
        if self.kept is not self._choices[due]:
            self.kept = self._choices[due]
            self._set_rows()

    def _chosen(self, due: int, ledger: Ledger, record: Recorder, examples: Pass) -> Tensor:
        release, k = self._plan.release(LABEL), self._config.kept_rows
        assert k is not None
        if sum(count for _, count, label in ledger.entries if label == LABEL) >= release.times:
            raise BudgetExceededError(
                f"rows of the embedding were chosen {release.times} times, as often as was planned.",
                why="one more choice would spend more than was promised.",
                fix="resume from the latest checkpoint, which holds the latest choice.",
            )
        counts = torch.zeros(self.tables.rows, dtype=torch.float64)
        # Each example is counted by one rank; the sum of whole numbers is exact.
        mine = range(ranks.rank(), self._plan.sampler.dataset_size, ranks.world_size())
        # Dropout that zeroes a whole row must not be known, nor shift when an example is added.
        with nullcontext() if self._plan.entropy.reproducible else secret_global_state():
            for batch in examples(mine):
                _, rows = self.tables.touched(record(batch).factors)
                counts += rows.cpu().bincount(minlength=self.tables.rows)
        ranks.sum_(counts)
        ledger.charge(release.event, release.label)
        scale = gumbel_scale(release.noise_multiplier, k)
        return ranks.drawn_by_first(lambda: noisy_top_k(counts, k, scale, self._plan.entropy, due))

    def _set_rows(self) -> None:
        config = self._config
        if config.keeps_rows and self.kept is None:
            return
        selection = None
        if config.adapts:
            deviation = self._plan.noise_multiplier_of(ROW_COUNTS)
            selection = AdaptiveSelection(
                self.tables.rows,
                deviation * config.contribution_norm,
                config.threshold,
                self._plan.entropy,
                self.kept,
            )
            if self.rows is None:
                expected = selection.false_positive_rate * selection.candidates
                ranks.warn(
                    logger,
                    "DP-AdaFEST on %s: threshold %.4g examples, noise on the counts %.4g; of %d rows about %.3g "
                    "survive a step by chance.",
                    *(", ".join(self.tables.sizes), selection.threshold, deviation * config.contribution_norm),
                    *(selection.candidates, expected),
                )
        self.rows = TableRows(self.tables, self.kept, selection, config.contribution_norm)

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
        known = self._choices.get(choice)
        if known is not None and not torch.equal(kept, known):
            raise LedgerError(
                "the checkpoint holds other embedding rows than were chosen in this process.",
                why="its ledger does not count that choice.",
                fix="resume from a later checkpoint of this run, or in a new process if nothing of this one was seen.",
            )
        self._choices[choice] = self.kept = kept

    def _public(self) -> Tensor:
        path = Path(str(self._config.public_rows))
        try:
            given: Any = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(given, list):
                if len(self.tables.sizes) > 1:
                    raise ValueError("one list for several tables")
                given = {next(iter(self.tables.sizes)): given}
            kept = self._numbered({name: torch.tensor(rows, dtype=torch.int64) for name, rows in given.items()})
            if not len(kept):
                raise ValueError("no rows")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ConfigurationError(
                f"public_rows={str(path)!r} ({type(error).__name__}: {error}).",
                why="only these rows are trained.",
                fix="give a JSON file with a list of row numbers, or {name of a table: list} for "
                f"{', '.join(self.tables.sizes)}.",
            ) from error
        return kept

    def _numbered(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Rows of each table as ascending numbers over all of them; `KeyError`, `ValueError` for rows of none."""
        parts = []
        for name, numbers in rows.items():
            if numbers.dim() != 1 or bool(((numbers < 0) | (numbers >= self.tables.sizes[name])).any()):
                raise ValueError(f"rows of {name} outside 0 to {self.tables.sizes[name] - 1}")
            parts.append(numbers + self.tables.offsets[name])
        kept: Tensor = torch.cat(parts).unique()
        return kept

    # --- what is told ----------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Remembers the latest step for the logs."""
        assert self.rows is not None
        assert self.rows.last is not None
        last = self.rows.last
        parts = self.tables.split(last.rows)
        coordinates = sum(len(rows) * self.tables.widths[name] for name, rows in parts.items())
        seen = {
            "surviving_rows": len(last.rows),
            "false_positives": last.false_positives,
            "gradient_density": coordinates / self.tables.coordinates,
            "reduction_factor": self.tables.coordinates / max(1, coordinates),
        }
        for name, value in seen.items():
            self._seen.setdefault(name, []).append(float(value))

    def take_logs(self) -> dict[str, float]:
        """The means over the steps since the last call. All but the false positives follow from what is released."""
        means = {name: sum(values) / len(values) for name, values in self._seen.items()}
        self._seen = {}
        return means

    def save(self, directory: str | Path) -> None:
        """Writes the chosen rows beside the weights; they are a release that is in the ledger."""
        if self._config.releases_rows and self.kept is not None:
            kept = {f"{_ROWS}{name}": rows.clone() for name, rows in self.tables.split(self.kept).items()}
            latest = next(number for number, rows in self._choices.items() if rows is self.kept)
            save_file({**kept, _CHOICE: torch.tensor(latest)}, Path(directory) / FILE)
