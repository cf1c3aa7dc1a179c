"""Noise from fast statistical generators: the default."""

from __future__ import annotations

import numpy as np
import torch

from hf_dp.noise.source import NoiseSource
from hf_dp.randomness import seed_sequence


class GaussianNoise(NoiseSource):
    """SFC64 streams with 192-bit seeds; on a CUDA device `torch`'s Philox there, with a 64-bit seed for each call.

    `torch`'s own CPU generator is not used: it keeps only 32 bits of its seed, so anyone could try all its streams.
    """

    def bits(self, key: bytes, path: tuple[int, ...]) -> np.random.BitGenerator:
        """SFC64."""
        return np.random.SFC64(seed_sequence(key, path))

    def on_device(self, device: torch.device, key: bytes, path: tuple[int, ...]) -> torch.Generator | None:
        """Philox, on CUDA devices."""
        if device.type != "cuda":
            return None
        return torch.Generator(device).manual_seed(int(seed_sequence(key, path).generate_state(1, np.uint64)[0]))
