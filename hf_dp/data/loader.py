"""From a draw to a logical batch: each rank's share of it, read row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, Sampler

import hf_dp.ranks as ranks
from hf_dp.data.collate import LogicalBatchCollator, Randomness, Unit
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words
from hf_dp.randomness import Entropy, secret_global_state, seed_secretly
from hf_dp.sampling.sampler import BatchSampler
from hf_dp.units.rows import UnitRows

_NO_STEP = -1
# A row, or the rows of a unit.
Index = int | tuple[int, ...]


class DrawnUnits(NamedTuple):
    """Units that are drawn in place of examples: their rows, and where the rows of each step come from."""

    rows: UnitRows
    entropy: Entropy


class Drawn(list[Any]):
    """What was drawn for a step, or the rows that were read of it.

    Attributes:
        step: which one, counted from 0 over the training.
    """

    step: int | None = None

    @classmethod
    def of(cls, items: Iterable[Any], step: int | None) -> Drawn:
        """These items, for `step`."""
        made = cls(items)
        made.step = step
        return made


class RankSampler(Sampler[list[Index]]):
    """One rank's share of each logical batch: every `world_size`-th example of the one draw that all ranks make; or
    every `world_size`-th unit, as a tuple of its rows in this step. With one rank this is the draw.

    Args:
        sampler: draws the logical batches, from entropy that all ranks have.
        rank: of this process, from 0.
        world_size: how many there are.
        units: what the sampler draws, where that is no example.
    """

    def __init__(self, sampler: BatchSampler, rank: int, world_size: int, units: DrawnUnits | None = None) -> None:
        self.sampler, self.units = sampler, units
        self._rank, self._world_size = rank, world_size

    @property
    def place(self) -> tuple[int, int]:
        """Which rank it is the share of, and of how many."""
        return self._rank, self._world_size

    @property
    def rows(self) -> int:
        """Of the dataset that is drawn from."""
        return self.sampler.dataset_size if self.units is None else self.units.rows.rows

    def set_epoch(self, epoch: int) -> None:
        """As the whole sampler's."""
        self.sampler.set_epoch(epoch)

    def share(self, drawn: list[int], step: int = 0) -> list[Index]:
        """This rank's part of a logical batch."""
        return list(self.examples(drawn[self._rank :: self._world_size], step))

    def examples(self, drawn: Iterable[int], step: int = _NO_STEP) -> Iterator[Index]:
        """Of what was drawn, the rows that `step` uses, or what is released beside the steps."""
        if self.units is None:
            return iter(drawn)
        units, entropy = self.units
        return (tuple(units.drawn(unit, step, entropy)) for unit in drawn)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[Index]]:
        return (Drawn.of(self.share(drawn, step), step) for step, drawn in self.sampler.numbered())


class PoissonDataLoader(DataLoader[Any]):
    """A `DataLoader` whose every item is one logical batch, collated by `LogicalBatchCollator`.

    Args:
        dataset: a map-style dataset with as many rows as are drawn from. It is never asked for an empty batch.
        batch_sampler: what draws this rank's part of the batches.
        collate_fn: what splits and collates them.
        options: further options of `DataLoader`, such as `num_workers` and `pin_memory`.

    Raises:
        ConfigurationError: the dataset's size is not the sampler's.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: BatchSampler | RankSampler,
        collate_fn: LogicalBatchCollator,
        **options: Any,
    ) -> None:
        whole = batch_sampler if isinstance(batch_sampler, RankSampler) else RankSampler(batch_sampler, 0, 1)
        if len(dataset) != whole.rows:
            raise ConfigurationError(
                f"a dataset of {len(dataset)} examples with a sampler for {whole.rows}.",
                why="the sampling probability that is accounted for would not be the one that examples are drawn with.",
                fix="make the sampler with dataset_size=len(dataset).",
            )
        super().__init__(
            _OwnReads(dataset, collate_fn.randomness), batch_sampler=batch_sampler, collate_fn=collate_fn, **options
        )
        self._whole = whole

    @property
    def draws_units(self) -> bool:
        """Whether an item says whose each of its rows is."""
        return self._whole.units is not None

    @property
    def public_size(self) -> float:
        """How many there are to be drawn, or what stands for that number where it is secret."""
        return self._whole.sampler.public_size

    def examples(self, drawn: Iterable[int] | None = None) -> Iterator[Index]:
        """What can be drawn (None: all of it), as the dataset is indexed: for what is released beside the steps."""
        return self._whole.examples(range(self._whole.sampler.dataset_size) if drawn is None else drawn)

    def set_epoch(self, epoch: int) -> None:
        """Draws epoch `epoch` next. Trainer calls it before each epoch."""
        assert isinstance(self.batch_sampler, (BatchSampler, RankSampler))
        self.batch_sampler.set_epoch(epoch)

    def refuse_other_ranks(self) -> None:
        """Refuses to draw the share of another rank than this process is now (`ConfigurationError`)."""
        made, now = self._whole.place, (ranks.rank(), ranks.world_size())
        if made != now:
            raise ConfigurationError(
                f"a training that was made as one of {made[1]} process{'es' * (made[1] > 1)}, of rank {made[0]}, and "
                f"is now rank {now[0]} of {now[1]}.",
                why="each process would draw batches of its own, so that one example could be in a step several times, "
                "under noise that covers one.",
                fix="make the process group (accelerate.Accelerator(), or torch.distributed.init_process_group()) "
                "before the run, and keep it until its end.",
            )

    def dummies(self, item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Micro-batches of the first row alone, as many as the rank that has most of this item has more than this one.

        To be weighted with zero: so all ranks compute as many. All call it together: one small all-gather.

        Raises:
            ConfigurationError: as `refuse_other_ranks`.
        """
        self.refuse_other_ranks()
        dataset: Any = self.dataset
        collate: Any = self.collate_fn
        known = len(item["micro_batches"])
        return [collate.dummy(dataset.__getitems__([0])[0]) for _ in range(ranks.most(known) - known)]


class _OwnReads(Dataset[Any]):
    """Reads no empty batches, which transforms are not written for, and reads each example by itself.

    A transform that is given several (`with_transform` of datasets) can pad or mix them, and nothing could check it.
    Only a Hugging Face dataset without a format is read in batches, which is faster.
    """

    def __init__(self, dataset: Any, randomness: Randomness) -> None:
        self.dataset = dataset
        self._n, self._randomness = len(dataset), randomness

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[Index]) -> list[Any]:
        if (n := len(self.dataset)) != self._n:
            raise ConfigurationError(
                f"the training dataset had {self._n} rows when its sampling was planned, and has {n} now.",
                why="rows are drawn by their number, with a probability that follows from how many there are: others "
                "would be read in their place, or none.",
                fix="leave the dataset as it is while it is trained on. What was spent is in the ledger, and in the "
                "checkpoints: with the rows of before, resume_from_checkpoint=True goes on from the last.",
            )
        flat = [row for index in indices for row in (index if isinstance(index, tuple) else (index,))]
        with self._randomness():
            read = iter(self._read(flat) if flat else [])
            # In the order in which they were read.
            found = [Unit([next(read) for _ in index]) if isinstance(index, tuple) else next(read) for index in indices]
            return Drawn.of(found, getattr(indices, "step", None))

    def _read(self, indices: list[int]) -> list[Any]:
        layout = getattr(self.dataset, "format", None)
        # Any format makes a column of what it reads at once: a type of its own, of numbers of which one is missing.
        if isinstance(layout, Mapping) and layout.get("type") is None and hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> Any:
        # Whatever the row before has seeded: who knows that knows what is drawn next, and without it others are.
        if self._randomness is secret_global_state and not isinstance(self.dataset, list):
            seed_secretly()
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"It came of {row_in_words(index)} of the training data.")
            raise
