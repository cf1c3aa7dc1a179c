"""Noise whose last digits are noise too: the sum is rounded to a grid, and what is added is a Gaussian's, exactly."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.noise.chacha20 import ChaCha20Noise
from hf_dp.noise.digits import DIGITS, floors

# Of the sensitivity: how much further apart the sums of neighbours may be than the real numbers they stand for.
ROUNDING = 2.0**-8
# The square root of how many numbers one release has at most, over the steps of the grid in a standard deviation.
_GRID = 2.0 ** (40 / 2 - DIGITS)
# Whole numbers to which noise can be added in 64 bits. Sums that large are 2^26 standard deviations.
_LARGEST = 2.0**62
_CHUNK = 1 << 14


class GridNoise(ChaCha20Noise):
    """Gaussian noise on a sum that is rounded to whole multiples of `standard_deviation` / 2^36, from ChaCha20.

    With K the rounded sum and X real Gaussian noise, both in units of the grid, what is released follows from K +
    floor(X), which is floor(K + X): the Gaussian mechanism on K, rounded afterwards. Which values can come out does
    not depend on the sum, and none of their digits tells more than that mechanism does (Mironov 2012,
    doi:10.1145/2382196.2382264; Haney et al. 2022, arXiv:2207.13793). K may be further apart between neighbours than
    the sum; `deviation` pays for it. On any device it is computed on the CPU, in float64 and whole numbers.

    Raises:
        ConfigurationError: as of ChaCha20.
    """

    comes_last = True

    def deviation(self, multiplier: float, sensitivity: float) -> float:
        """`multiplier` times the distance that rounded sums of neighbours may have.

        With s the sum in units of the grid, and d numbers, |K - K'| <= |s - s'| + sqrt(d), since rounding moves each
        number by at most 1/2; d is at most 2^40. |s - s'| is `sensitivity`, and `ROUNDING` of it for the sum's own.

        Raises:
            ConfigurationError: noise of 2^16 sensitivities and more, for which the grid is too coarse.
        """
        if multiplier * _GRID >= 1:
            raise ConfigurationError(
                f"noise='grid' with a noise multiplier of {multiplier:g}.",
                why=f"the grid is a fraction of the noise, and from {1 / _GRID:g} on coarser than what it hides.",
                fix="spend more (a larger target_epsilon, fewer steps), or use noise='chacha20'.",
            )
        return super().deviation(multiplier, sensitivity * (1 + ROUNDING) / (1 - multiplier * _GRID))

    def held(self, tensor: Tensor) -> Tensor:
        """Its numbers themselves."""
        return tensor.cpu().contiguous()

    def put_back(self, tensor: Tensor, held: Tensor) -> None:
        """In their place."""
        tensor.copy_(held)

    def add_to(self, values: np.ndarray, standard_deviation: float, generator: np.random.Generator) -> None:
        """Rounds them to the grid and adds what is drawn.

        Raises:
            HfDpError: numbers that are none.
        """
        steps = 2.0**DIGITS / standard_deviation
        for start in range(0, values.size, _CHUNK):
            part = values[start : start + _CHUNK]
            rounded = np.rint(np.multiply(part, steps, dtype=np.float64)).clip(-_LARGEST, _LARGEST)
            if np.isnan(rounded).any():
                raise HfDpError(
                    f"a sum that is not a number, for noise with standard deviation {standard_deviation:g}.",
                    why="it has no place on the grid, and what would be released is not what was accounted for.",
                    fix="choose a clipping_norm of ordinary size; 1.0 is the usual start.",
                )
            # In the middle of what was rounded down. From here on nothing depends on anything but these whole numbers.
            moved = rounded.astype(np.int64) + floors(generator, part.size)
            part[:] = (moved + 0.5) * 2.0**-DIGITS * standard_deviation
