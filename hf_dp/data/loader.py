"""From a draw to a logical batch: each rank's share of it, read row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from hf_dp.data.collate import Dummy, LogicalBatchCollator, Randomness
from hf_dp.errors import ConfigurationError
from hf_dp.sampling.sampler import BatchSampler

# In place of an index: a micro-batch that is computed, so that all ranks compute as many, and weighted with zero.
DUMMY = -1


class RankSampler(Sampler[list[int]]):
    """One rank's share of each logical batch: every `world_size`-th example of the one draw that all ranks make.

    All ranks take the same number of micro-batches, ceil(ceil(n / ranks) / micro-batch size) for n examples drawn;
    where a share has fewer, `DUMMY` stands in its place, once for each that is missing. With one rank this is the draw.

    Args:
        sampler: draws the logical batches, from entropy that all ranks have.
        rank: of this process, from 0.
        world_size: how many there are.
        micro_batch_size: the most examples in one micro-batch.
    """

    def __init__(self, sampler: BatchSampler, rank: int, world_size: int, micro_batch_size: int) -> None:
        self.sampler = sampler
        self._rank, self._world_size, self._micro_batch_size = rank, world_size, micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        """As the whole sampler's."""
        self.sampler.set_epoch(epoch)

    def share(self, drawn: list[int]) -> list[int]:
        """This rank's part of a logical batch, and a `DUMMY` for each micro-batch that it is short of."""
        size = self._micro_batch_size
        most, mine = math.ceil(len(drawn) / self._world_size), drawn[self._rank :: self._world_size]
        return mine + [DUMMY] * (math.ceil(most / size) - math.ceil(len(mine) / size))

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.share, self.sampler)


class PoissonDataLoader(DataLoader[Any]):
    """A `DataLoader` whose every item is one logical batch, collated by `LogicalBatchCollator`.

    Args:
        dataset: a map-style dataset of the sampler's size. It is never asked for an empty batch.
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
        whole = batch_sampler.sampler if isinstance(batch_sampler, RankSampler) else batch_sampler
        if len(dataset) != whole.dataset_size:
            raise ConfigurationError(
                f"a dataset of {len(dataset)} examples with a sampler for {whole.dataset_size}.",
                why="the sampling probability that is accounted for would not be the one that examples are drawn with.",
                fix="make the sampler with dataset_size=len(dataset).",
            )
        super().__init__(
            _OwnReads(dataset, collate_fn.randomness), batch_sampler=batch_sampler, collate_fn=collate_fn, **options
        )

    def set_epoch(self, epoch: int) -> None:
        """Draws epoch `epoch` next. Trainer calls it before each epoch."""
        assert isinstance(self.batch_sampler, (BatchSampler, RankSampler))
        self.batch_sampler.set_epoch(epoch)


class _OwnReads(Dataset[Any]):
    """Reads no empty batches, which transforms are not written for, and reads each example by itself.

    A transform that is given several (`with_transform` of datasets) can pad or mix them, and nothing could check it.
    Only a Hugging Face dataset with a format that cannot is read in batches, which is faster.
    """

    def __init__(self, dataset: Any, randomness: Randomness) -> None:
        self.dataset = dataset
        self._randomness = randomness

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        dummies = indices.count(DUMMY)
        indices = [index for index in indices if index != DUMMY]
        with self._randomness():
            read = self._read(indices) if indices else []
            return read + [Dummy(row) for row in (self._read([0]) * dummies if dummies else [])]

    def _read(self, indices: list[int]) -> list[Any]:
        layout = getattr(self.dataset, "format", None)
        if isinstance(layout, Mapping) and layout.get("type") != "custom" and hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]
