"""What a sampler is: terms, a number of units, and a draw for each step that depends on (entropy, step) alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch.utils.data import Sampler

from hf_dp.accounting import ExampleUnit, SamplingTerms, UncountedExampleUnit, UnitTerms
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import Entropy


class BatchSampler(Sampler[list[int]], ABC):
    """Draws one logical batch, over all ranks, for each step: examples, or, where these are not the units, units.

    A sampler says one thing, `draw`. It draws with the numbers of its terms, which are what is accounted for. The draw
    knows nothing of the data: an example that is replaced by nothing is drawn as it was.

    Where q follows from n, n is public: with another n everybody's q would be another, so that what follows from q is
    about one of n examples that is replaced by nothing. Where n is secret, q and the lengths of epochs are the same
    whatever n is, and what follows from q is about one example more or less.

    Epoch e is the steps e * len(self) to (e + 1) * len(self) - 1. An "epoch" is only a number of steps here: within
    one, an example may be drawn several times or never. Iterating again without `set_epoch` goes on with the next
    epoch, since drawing the same batches twice would not be what is accounted for.

    Args:
        terms: what the mechanism says of sampling.
        dataset_size: of what is drawn: n, the number of examples, or of units; of units whose examples are drawn each
            by itself, how many these are.
        entropy: where the draws come from; on several ranks all need the same.
        steps_per_epoch: batches per epoch, at least 1. None: ceil(n / expected batch size), or ceil(1 / q).
        is_secret: whether n is.
        unit: whose presence is hidden, where that is no example.

    Raises:
        ConfigurationError: no examples, fewer examples than the expected batch where q follows from n, or a size that
            is not positive.
    """

    def __init__(
        self,
        terms: SamplingTerms,
        dataset_size: int,
        entropy: Entropy,
        steps_per_epoch: int | None = None,
        *,
        is_secret: bool = False,
        unit: UnitTerms | None = None,
    ) -> None:
        check_sizes(dataset_size, terms.expected_batch_size, steps_per_epoch, is_secret=is_secret)
        self.terms = terms
        self.dataset_size = dataset_size
        self._is_secret, self._unit = is_secret, unit
        if unit is not None and unit.drawn != (None if is_secret else dataset_size):
            raise ConfigurationError(
                f"a sampler for {dataset_size} of {unit}.",
                why="what is accounted for would not be what is drawn.",
                fix="make it with dataset_size=unit.drawn, or with a unit of no number where that is secret.",
            )
        # Of a q that follows from two whole numbers, 1 / q is rounded.
        by_itself = 1 / terms.probability * (1 - 1e-12) if is_secret else dataset_size / terms.expected_batch_size
        self._steps = steps_per_epoch or math.ceil(by_itself)
        self._entropy = entropy
        self._epoch = 0

    @property
    def sampling_probability(self) -> float:
        """q, in (0, 1]: what is drawn with, and so what must be accounted for."""
        return self.terms.probability

    @property
    def expected_batch_size(self) -> float:
        """What sums are divided by."""
        return self.terms.expected_batch_size

    @property
    def public_size(self) -> float:
        """n, where it is public; else the number of examples of which q would draw the expected batch size. What is
        released may follow from this, and not from `dataset_size`."""
        return self.expected_batch_size / self.sampling_probability if self._is_secret else self.dataset_size

    @property
    def unit(self) -> UnitTerms:
        """Whose presence is hidden, and how many there are where q follows from that."""
        if self._unit is not None:
            return self._unit
        return UncountedExampleUnit() if self._is_secret else ExampleUnit(number=self.dataset_size)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration draws epoch `epoch`, counted from 0. An iteration already begun is not affected."""
        self._epoch = epoch

    @abstractmethod
    def draw(self, step: int) -> list[int]:
        """The logical batch of `step`, counted from 0 over the whole training: indices, ascending, maybe none.

        It depends only on (entropy, step), so it is the same whoever asks, in whatever order and however far ahead.
        """

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        return (drawn for _, drawn in self.numbered())

    def numbered(self) -> Iterator[tuple[int, list[int]]]:
        """The draws of the next epoch, each with its step."""
        # This runs at the first draw, not at iter(): a DataLoader with workers makes an iterator that it never uses.
        first = self._epoch * self._steps
        self._epoch += 1
        for step in range(first, first + self._steps):
            yield step, self.draw(step)


def check_sizes(
    dataset_size: int,
    expected_batch_size: float,
    steps_per_epoch: int | None = None,
    *,
    is_secret: bool = False,
    of: str = "examples",
) -> None:
    """Refuses sizes without a sampling probability in (0, 1] (`ConfigurationError`); see `BatchSampler`. `of` is what
    is drawn."""
    if dataset_size < 1:
        raise ConfigurationError(
            f"a training dataset of {dataset_size} {of}.",
            why="there is nothing to draw from, and no sampling probability.",
            fix="check the path and the filters of the training dataset.",
        )
    if expected_batch_size < 1:
        raise ConfigurationError(
            f"an expected batch size of {expected_batch_size!r}.",
            why="the sampling probability, expected batch size / n, must be positive.",
            fix="set per_device_train_batch_size and gradient_accumulation_steps to 1 or more.",
        )
    if not is_secret and dataset_size < expected_batch_size:
        raise ConfigurationError(
            f"an expected batch of {expected_batch_size} from a training dataset of {dataset_size} {of}.",
            why=f"each of the {of} would be drawn with a probability above 1.",
            fix="lower per_device_train_batch_size x gradient_accumulation_steps x processes (of a PrivateRun "
            f"expected_batch_size) to at most {dataset_size} (privacy is better the smaller it is beside the "
            "data), or use more data.",
        )
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ConfigurationError(
            f"steps_per_epoch={steps_per_epoch!r}.",
            why="an epoch has at least one step.",
            fix="leave it out for ceil(n / expected batch size), or ceil(1 / sampling probability).",
        )
