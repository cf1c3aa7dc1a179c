"""What a source of noise is: a bit generator for each stream. How tensors get noise from it is the same for all."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import torch

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.randomness import Entropy

# Each block, of one large tensor or of many small ones, has its own stream, so that the result does not depend on the
# number of threads.
_BLOCK = 1 << 20
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 23
# Noise for other devices that waits in the memory of this one: as much as that many blocks.
_BLOCKS_AT_ONCE = 32


class NoiseSource(ABC):
    """Independent Gaussian noise, different at every call unless the entropy is seeded.

    A source says one thing, `bits`. What privacy rests on besides is here, once for all sources: each call has a key of
    its own, each block of it a stream, and what cannot be noise is refused. Normals are numpy's (ziggurat), of float32
    or float64, made on the CPU and moved where a tensor lies elsewhere, unless the source has a generator there.

    They are floating-point noise: the attack on its low-order bits (Mironov 2012, doi:10.1145/2382196.2382264) is not
    defended against, unless by a source that adds in another way.

    Args:
        entropy: where the keys come from. Without a seed each call draws anew from the operating system.

    Attributes:
        comes_last: nothing may be added to what has its noise; several ranks add up their sums before.
    """

    comes_last: ClassVar[bool] = False

    def __init__(self, entropy: Entropy) -> None:
        self._entropy = entropy

    @abstractmethod
    def bits(self, key: bytes, path: tuple[int, ...]) -> np.random.BitGenerator:
        """A stream that nothing but `key` and `path` decide, independent of that of any other key or path.

        Args:
            key: at least 32 bytes, secret unless the entropy is seeded.
            path: of any length; () where a key has one stream alone.
        """

    def on_device(self, device: torch.device, key: bytes, path: tuple[int, ...]) -> torch.Generator | None:
        """The same for tensors that lie on `device`; None where their noise is made on the CPU."""
        return None

    def deviation(self, multiplier: float, sensitivity: float) -> float:
        """The standard deviation that is charged as `multiplier` times the sensitivity of a sum of real numbers."""
        return multiplier * sensitivity

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """What gets the noise in place of a tensor that lies elsewhere or not in one piece: as large, on the CPU."""
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def put_back(self, tensor: torch.Tensor, held: torch.Tensor) -> None:
        """Brings it there."""
        _add_moved(tensor, held)

    def add_to(self, values: np.ndarray, standard_deviation: float, generator: np.random.Generator) -> None:
        """Adds noise in place to numbers (n,) on the CPU."""
        _add_normals(values, standard_deviation, generator)

    def generator(self, stream: str, step: int) -> np.random.Generator:
        """For noise that is not normal, or is not added: a stream that nobody can ask for again, unless seeded.

        Args:
            stream: what it is for; with seeded entropy each use needs a name of its own.
            step: which logical batch, or release, it is for.
        """
        return np.random.Generator(self.bits(self._entropy.fresh(stream, step), ()))

    def add_(
        self, tensors: Iterable[torch.Tensor], standard_deviation: float, step: int, stream: str = "noise"
    ) -> None:
        """Adds N(0, `standard_deviation` ** 2) in place to every element, independently. A refusal changes nothing.

        Args:
            tensors: of any shapes, float32 or float64, each only once; not expanded views.
            standard_deviation: in the tensors' units; for a sum, that of `deviation`. 0 adds nothing.
            step: which logical batch this is. With seeded entropy the same step gets the same noise.
            stream: which part of the noise of that step this is; with seeded entropy each needs a name of its own.

        Raises:
            ConfigurationError: a standard deviation that is negative, not finite, or not representable in the
                tensors' dtype.
            HfDpError: a tensor that is not float32 or float64, or numbers that come twice.
        """
        targets = [tensor.detach() for tensor in tensors]
        _check(targets, standard_deviation)
        if standard_deviation == 0:
            return
        key = self._entropy.fresh(stream, step)
        here: list[torch.Tensor] = []
        there: list[tuple[torch.Tensor, torch.Generator]] = []
        # One for all tensors of a device: beginning another takes as long as a large tensor's noise.
        generators: dict[torch.device, torch.Generator | None] = {}
        for tensor in targets:
            if tensor.device not in generators:
                generators[tensor.device] = self.on_device(tensor.device, key, (1 + len(generators),))
            generator = generators[tensor.device]
            if generator is None:
                here.append(tensor)
            else:
                there.append((tensor, generator))
        self._add_by_numpy(here, standard_deviation, key)
        for tensor, generator in there:
            _add_by_torch(tensor, standard_deviation, generator)

    def _add_by_numpy(self, tensors: list[torch.Tensor], standard_deviation: float, key: bytes) -> None:
        detours: list[tuple[torch.Tensor, torch.Tensor]] = []
        plain = []
        for tensor in tensors:
            if not tensor.is_contiguous():
                detours.append((tensor, self.held(tensor)))
            plain.append(tensor if tensor.is_contiguous() else detours[-1][1])
        blocks = list(enumerate(_blocks(plain)))

        def add(number: int, block: list[torch.Tensor]) -> None:
            generator = np.random.Generator(self.bits(key, (0, number)))
            for values in block:
                self.add_to(values.numpy(), standard_deviation, generator)

        with ThreadPoolExecutor(min(4, torch.get_num_threads())) as threads:
            for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
                # Not in the threads, which know nothing of this one's current stream.
                here = [
                    (number, [part if part.device.type == "cpu" else self.held(part) for part in block])
                    for number, block in blocks[start : start + _BLOCKS_AT_ONCE]
                ]
                made = threads.map(add, *zip(*here, strict=True))
                for (_, block), (_, filled), _ in zip(blocks[start:], here, made, strict=False):
                    for part, values in zip(block, filled, strict=True):
                        if values is not part:
                            self.put_back(part, values)
        for tensor, values in detours:
            self.put_back(tensor, values)


def _blocks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views that together are all of these contiguous tensors, in blocks of at most `_BLOCK` numbers."""
    blocks: list[list[torch.Tensor]] = []
    room = -1
    for tensor in tensors:
        for part in tensor.view(-1).split(_BLOCK):
            if part.numel() > room:
                blocks.append([])
                room = _BLOCK
            blocks[-1].append(part)
            room -= part.numel()
    return blocks


def _add_normals(values: np.ndarray, standard_deviation: float, generator: np.random.Generator) -> None:
    buffer = np.empty(min(_CHUNK, values.size), values.dtype)
    for start in range(0, values.size, _CHUNK):
        part = values[start : start + _CHUNK]
        noise = buffer[: part.size]
        generator.standard_normal(dtype=values.dtype, out=noise)
        noise *= standard_deviation
        part += noise


def _add_moved(target: torch.Tensor, noise: torch.Tensor) -> None:
    target.add_(noise.to(target.device))


def _add_by_torch(tensor: torch.Tensor, standard_deviation: float, generator: torch.Generator) -> None:
    parts = tensor.view(-1).split(_DEVICE_CHUNK) if tensor.is_contiguous() else [tensor]
    for part in parts:
        # Of float32 cuRAND draws none beyond 6.77 deviations, and among a billion numbers that is not never.
        noise = torch.empty_like(part, dtype=torch.float64)
        part.add_(noise.normal_(0, standard_deviation, generator=generator))


def _check(tensors: list[torch.Tensor], standard_deviation: float) -> None:
    if not (math.isfinite(standard_deviation) and standard_deviation >= 0):
        raise ConfigurationError(
            f"noise with standard deviation {standard_deviation!r}.",
            why="it must be a finite number, not negative; anything else is not noise or destroys the sum.",
            fix="check noise_multiplier and clipping_norm: the standard deviation is their product.",
        )
    for position, tensor in enumerate(tensors):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise HfDpError(
                f"noise asked for tensor {position} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}.",
                why="in so few bits small contributions vanish and the noise is rounded to values that reveal the sum.",
                fix="sum clipped gradients and add the noise in torch.float32, and cast afterwards.",
            )
        limits = torch.finfo(tensor.dtype)
        if standard_deviation != 0 and not limits.tiny <= standard_deviation <= limits.max:
            raise ConfigurationError(
                f"noise with standard deviation {standard_deviation!r} on a tensor of dtype {tensor.dtype}.",
                why=f"that dtype holds {limits.tiny} to {limits.max}; the noise would become nothing or infinite.",
                fix="choose a clipping_norm of ordinary size; 1.0 is the usual start.",
            )
    places = [(tensor.device, tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    if len(set(places)) < len(places):
        raise _twice("the same tensor")
    together: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            together.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(tensor)
    if any(map(_share_numbers, together.values())):
        raise _twice("the same numbers")


def _twice(what: str) -> HfDpError:
    return HfDpError(
        f"noise asked for {what} twice in one call.",
        why="it would get twice the variance that was promised and accounted for.",
        fix="pass each tensor once; a tied parameter has one gradient.",
    )


def _share_numbers(tensors: list[torch.Tensor]) -> bool:
    """Of tensors in one storage, whether a number belongs to several of them, or to one of them several times."""
    if len({tensor.itemsize for tensor in tensors}) > 1:
        return True
    reach = [1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) for t in tensors]
    spans = sorted((t.storage_offset(), t.storage_offset() + length) for t, length in zip(tensors, reach, strict=True))
    are_apart = all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    if are_apart and all(tensor.is_contiguous() for tensor in tensors):
        return False
    first, last = spans[0][0], max(end for _, end in spans)
    seen, numbers = torch.zeros(last - first, dtype=torch.uint8), 0
    for tensor in tensors:
        if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            return True
        seen.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - first).fill_(1)
        numbers += tensor.numel()
    return int(seen.count_nonzero()) < numbers
