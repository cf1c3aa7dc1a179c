"""Poisson sampling: one logical batch per step, possibly empty, in time and memory of the batch, not of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.utils.data import Sampler

from hf_dp.accounting import ExampleUnit, PoissonSampling, UncountedExampleUnit, UnitTerms
from hf_dp.accounting.events import check_sampling_probability
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import Entropy, bernoulli


class PoissonBatchSampler(Sampler[list[int]]):
    """At every step each of n examples is drawn independently with probability q.

    q = expected batch size / n, and n is public: with another n everybody's q would be another, so that what follows
    from q is about one of n examples that is replaced by nothing. A q that is given is the same whatever n is, and so
    are the lengths of epochs: what follows from it is about one example more or less, and n is secret.

    Batches vary in size and may be empty; an empty batch is a step like any other. The draw of a step depends only on
    (entropy, step), so it is the same whoever asks, in whatever order and however far ahead. Indices ascend.

    Epoch e is the steps e * len(self) to (e + 1) * len(self) - 1. An "epoch" is only a number of steps here: within
    one, an example may be drawn several times or never. Iterating again without `set_epoch` goes on with the next
    epoch, since drawing the same batches twice would not be Poisson sampling.

    Args:
        dataset_size: n, the number of examples.
        expected_batch_size: the mean size of a batch, between 1 and n; where q is given, what sums are divided by.
        entropy: where the draws come from; on several ranks all need the same.
        steps_per_epoch: batches per epoch, at least 1. None: ceil(n / expected batch size), or ceil(1 / q).
        sampling_probability: q, in (0, 1]; None where it follows from n.

    Raises:
        ConfigurationError: no examples, fewer examples than the expected batch where q follows from them, or a size or
            a probability that is none.

    Source: see `hf_dp.randomness.bernoulli`.
    """

    def __init__(
        self,
        dataset_size: int,
        expected_batch_size: int,
        entropy: Entropy,
        steps_per_epoch: int | None = None,
        sampling_probability: float | None = None,
    ) -> None:
        check_sizes(dataset_size, expected_batch_size, steps_per_epoch, sampling_probability)
        self.dataset_size = dataset_size
        self.expected_batch_size = expected_batch_size
        self._given = sampling_probability
        by_itself = dataset_size / expected_batch_size if sampling_probability is None else 1 / sampling_probability
        self._steps = steps_per_epoch or math.ceil(by_itself)
        self._entropy = entropy
        self._epoch = 0

    @property
    def sampling_probability(self) -> float:
        """q, in (0, 1]: what is drawn with, and so what must be accounted for."""
        return self.expected_batch_size / self.dataset_size if self._given is None else self._given

    @property
    def public_size(self) -> float:
        """n, where it is public; else the number of examples of which q would draw the expected batch size. What is
        released may follow from this, and not from `dataset_size`."""
        return self.dataset_size if self._given is None else self.expected_batch_size / self._given

    @property
    def unit(self) -> UnitTerms:
        """Whose presence is hidden, and how many there are where q follows from that."""
        return ExampleUnit(number=self.dataset_size) if self._given is None else UncountedExampleUnit()

    @property
    def terms(self) -> PoissonSampling:
        """What is accounted for."""
        q, size = self.sampling_probability, self.expected_batch_size
        return PoissonSampling(probability=q, expected_batch_size=size)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration draws epoch `epoch`, counted from 0. An iteration already begun is not affected."""
        self._epoch = epoch

    def draw(self, step: int) -> list[int]:
        """The logical batch of `step`, counted from 0 over the whole training: indices, ascending, maybe none."""
        generator = self._entropy.generator("sampling", step)
        return bernoulli(generator, self.dataset_size, self.sampling_probability)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        # This runs at the first draw, not at iter(): a DataLoader with workers makes an iterator that it never uses.
        first = self._epoch * self._steps
        self._epoch += 1
        for step in range(first, first + self._steps):
            yield self.draw(step)


def check_sizes(
    dataset_size: int,
    expected_batch_size: int,
    steps_per_epoch: int | None = None,
    sampling_probability: float | None = None,
) -> None:
    """Refuses sizes without a sampling probability in (0, 1] (`ConfigurationError`); see `PoissonBatchSampler`."""
    if dataset_size < 1:
        raise ConfigurationError(
            f"a training dataset of {dataset_size} examples.",
            why="there is nothing to draw from, and no sampling probability.",
            fix="check the path and the filters of the training dataset.",
        )
    if expected_batch_size < 1:
        raise ConfigurationError(
            f"an expected batch size of {expected_batch_size!r}.",
            why="the sampling probability, expected batch size / n, must be positive.",
            fix="set per_device_train_batch_size and gradient_accumulation_steps to 1 or more.",
        )
    if sampling_probability is not None:
        check_sampling_probability(sampling_probability)
    elif dataset_size < expected_batch_size:
        raise ConfigurationError(
            f"an expected batch of {expected_batch_size} from a training dataset of {dataset_size} examples.",
            why="each example would be drawn with a probability above 1.",
            fix="lower per_device_train_batch_size x gradient_accumulation_steps x processes to at most "
            f"{dataset_size} (privacy is better the smaller it is beside the data), or use more data.",
        )
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ConfigurationError(
            f"steps_per_epoch={steps_per_epoch!r}.",
            why="an epoch has at least one step.",
            fix="leave it out for ceil(n / expected batch size), or ceil(1 / sampling probability).",
        )
