"""What a number of rows tells: whether so many on average can only be the same number of each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_dp.per_example.pictures import not_blank


@dataclass(eq=False)
class Counts:
    """How many rows the examples of one micro-batch have.

    Attributes:
        batch_size: B.
        length: positions of each row in the ids of the batch, or in its series.
        rows: how many rows of ids each example has: two of a pair of texts.
        images: how many each example has, where it may have several.
        room: for how many images there is room in the batch, where an example may have several.
        has_positions: whether it has ids.
        has_pictures: whether it has pictures.
    """

    batch_size: int
    length: int = 0
    rows: int = 1
    images: list[int] = field(default_factory=list)
    room: int = 0
    has_positions: bool = True
    has_pictures: bool = False
    # Rows of each example in plain views, and beside these the other axes.
    _folded_lengths: set[int] = field(default_factory=set)
    _windows: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def of(cls, given: Sequence[Tensor], batch_size: int) -> Counts:
        """Those of a batch of these tensors."""
        ids, rows = [v for v in given if v.dim() == 2 and not v.is_floating_point()], 1
        others = [v for v in given if v.dim() > 2]
        if not ids and all(v.dim() == 3 and not v.is_floating_point() for v in others):
            ids, rows = others, max((v.shape[1] for v in others), default=1)
        # The second axis of a picture is its colours.
        series = [v.shape[1] for v in others if v.dim() != 4 and v.is_floating_point()]
        length = max([*(v.shape[-1] for v in ids), *series], default=0)
        # (B, N, C, H, W): models drop the images that are all zero, which fill up an example with fewer than others.
        several = [v for v in given if v.dim() == 5]
        images = not_blank(several[0]).tolist() if several else []
        room = several[0].shape[:2].numel() if several else 0
        has_pictures = any(v.dim() == 4 and v.is_floating_point() for v in given)
        return cls(batch_size, length, rows, images, room, bool(ids), has_pictures)

    @property
    def are_uneven_images(self) -> bool:
        """Whether some examples have more images than others."""
        return len(set(self.images)) > 1

    def add_plain(self, each: int, sizes: Sequence[int]) -> None:
        """That a plain view has so many rows of each example, and other axes of these `sizes` between."""
        self._folded_lengths.add(each)
        self._windows.update((each, size) for size in sizes)

    def is_even(self, each: int, sizes: Sequence[int] = ()) -> bool:
        """Whether so many rows on average can only be the same number of each example, as far as numbers tell.

        Args:
            sizes: of the other axes. Beside a text a picture has windows where a plain view had as many, as large.
        """
        # All rows, or windows of an image, where there is no mask by which some could have been chosen.
        is_window = self.has_pictures and any((each, size) in self._windows for size in sizes)
        if each == self.rows > 1 or (each in self._folded_lengths and (is_window or not self.has_positions)):
            return True
        # A choice among n positions of each example gives n for each only where it takes them all.
        whole = [n for n in (self.length, max(self._folded_lengths, default=0)) if n and n >= self.length]
        # Or the images of each example, none of them dropped. By one position all numbers are divided.
        if self.batch_size == 1 or self.images == [each] * self.batch_size:
            return True
        return any(each % n == 0 for n in whole if n > 1 or each == 1)
