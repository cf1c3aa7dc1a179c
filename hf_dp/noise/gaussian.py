"""Gaussian noise on a sum of clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.randomness import Entropy

# Each block, of one large tensor or of many small ones, has its own stream, so that the result does not depend on the
# number of threads.
_BLOCK = 1 << 20
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 24


class GaussianNoise:
    """Independent Gaussian noise, different at every call unless the entropy is seeded.

    Tensors on the CPU get ziggurat normals (numpy) from SFC64 streams with 192-bit seeds. `torch`'s own CPU generator
    is not used: it keeps only 32 bits of its seed, so anyone could try all its streams. Tensors on a CUDA device get
    `torch`'s Philox stream there, with a 64-bit seed drawn for this call. Tensors on other devices get noise made on
    the CPU.

    The noise is floating-point noise: the attack on its low-order bits (Mironov 2012, doi:10.1145/2382196.2382264) is
    not defended against.

    Args:
        entropy: where the randomness comes from. Without a seed each call draws anew from the operating system.
        purpose: under a seed, noise for different purposes is independent.
    """

    def __init__(self, entropy: Entropy, purpose: str = "noise") -> None:
        self._entropy, self._purpose = entropy, purpose

    def add_(
        self, tensors: Iterable[torch.Tensor], standard_deviation: float, step: int, stream: str | None = None
    ) -> None:
        """Adds N(0, `standard_deviation` ** 2) in place to every element, independently. A refusal changes nothing.

        Args:
            tensors: of any shapes, float32 or float64, each only once; not expanded views.
            standard_deviation: in the tensors' units; for a sum, noise multiplier x sensitivity. 0 adds nothing.
            step: which logical batch this is. With seeded entropy the same step gets the same noise.
            stream: which part of the noise of that step this is; with seeded entropy each needs a name of its own.

        Raises:
            ConfigurationError: a standard deviation that is negative, not finite, or not representable in the
                tensors' dtype.
            HfDpError: a tensor that is not float32 or float64, or that comes twice.
        """
        targets = [tensor.detach() for tensor in tensors]
        _check(targets, standard_deviation)
        if standard_deviation == 0:
            return
        on_cuda = [tensor for tensor in targets if tensor.device.type == "cuda"]
        elsewhere = [tensor for tensor in targets if tensor.device.type != "cuda"]
        cpu, *devices = self._entropy.fresh(stream or self._purpose, step).spawn(1 + len(on_cuda))
        _add_by_numpy(elsewhere, standard_deviation, cpu)
        for tensor, seed in zip(on_cuda, devices, strict=True):
            _add_by_torch(tensor, standard_deviation, seed)


def _add_by_numpy(tensors: list[torch.Tensor], standard_deviation: float, seed: np.random.SeedSequence) -> None:
    blocks: list[list[np.ndarray[Any, Any]]] = []
    room = -1
    detours: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in tensors:
        plain = tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            plain = torch.zeros(tensor.shape, dtype=tensor.dtype)
            detours.append((tensor, plain))
        for part in plain.view(-1).split(_BLOCK):
            if part.numel() > room:
                blocks.append([])
                room = _BLOCK
            blocks[-1].append(part.numpy())
            room -= part.numel()

    def add(block: list[np.ndarray[Any, Any]], seed: np.random.SeedSequence) -> None:
        generator = np.random.Generator(np.random.SFC64(seed))
        for values in block:
            buffer = np.empty(min(_CHUNK, values.size), values.dtype)
            for start in range(0, values.size, _CHUNK):
                part = values[start : start + _CHUNK]
                noise = buffer[: part.size]
                generator.standard_normal(dtype=values.dtype, out=noise)
                noise *= standard_deviation
                part += noise

    with ThreadPoolExecutor(min(4, torch.get_num_threads())) as threads:
        for _ in threads.map(add, blocks, seed.spawn(len(blocks))):
            pass
    for tensor, noise in detours:
        tensor.add_(noise.to(tensor.device))


def _add_by_torch(tensor: torch.Tensor, standard_deviation: float, seed: np.random.SeedSequence) -> None:
    generator = torch.Generator(tensor.device).manual_seed(int(seed.generate_state(1, np.uint64)[0]))
    parts = tensor.view(-1).split(_DEVICE_CHUNK) if tensor.is_contiguous() else [tensor]
    for part in parts:
        part.add_(torch.empty_like(part).normal_(0, standard_deviation, generator=generator))


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
        raise HfDpError(
            "noise asked for the same tensor twice in one call.",
            why="it would get twice the variance that was promised and accounted for.",
            fix="pass each tensor once; a tied parameter has one gradient.",
        )
