"""From a draw to a logical batch: each rank's share of it, read row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

import hf_dp.ranks as ranks
from hf_dp.data.collate import LogicalBatchCollator, Randomness
from hf_dp.errors import ConfigurationError
from hf_dp.sampling.sampler import BatchSampler


class RankSampler(Sampler[list[int]]):
    """One rank's share of each logical batch: every `world_size`-th example of the one draw that all ranks make.

    With one rank this is the draw.

    Args:
        sampler: draws the logical batches, from entropy that all ranks have.
        rank: of this process, from 0.
        world_size: how many there are.
    """

    def __init__(self, sampler: BatchSampler, rank: int, world_size: int) -> None:
        self.sampler = sampler
        self._rank, self._world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """As the whole sampler's."""
        self.sampler.set_epoch(epoch)

    def share(self, drawn: list[int]) -> list[int]:
        """This rank's part of a logical batch."""
        return drawn[self._rank :: self._world_size]

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

    def dummies(self, item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Micro-batches of the first row alone, as many as the rank that has most of this item has more than this one.

        To be weighted with zero: so all ranks compute as many. All call it together: one small all-gather.
        """
        dataset: Any = self.dataset
        collate: Any = self.collate_fn
        known = len(item["micro_batches"])
        return [collate.dummy(dataset.__getitems__([0])[0]) for _ in range(ranks.most(known) - known)]


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
        with self._randomness():
            return self._read(indices) if indices else []

    def _read(self, indices: list[int]) -> list[Any]:
        layout = getattr(self.dataset, "format", None)
        if isinstance(layout, Mapping) and layout.get("type") != "custom" and hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]
