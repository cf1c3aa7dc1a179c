"""How a step is computed: what makes its noise, in how many passes, and what beside what. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from hf_dp.config.ranges import is_one_of, shown
from hf_dp.errors import ConfigurationError

NoiseName = Literal["gaussian", "chacha20", "grid"]


def check_noise(noise: Any) -> None:
    """Refuses a source of noise that is not known (`ConfigurationError`)."""
    if not is_one_of(noise, get_args(NoiseName)):
        raise ConfigurationError(
            f"noise={shown(noise)}.",
            why="it names what makes the noise, and an unknown one makes none.",
            fix="use 'gaussian' (the default), 'chacha20' or 'grid'; how much there is says noise_multiplier.",
        )


def check_passes(passes: Any) -> None:
    """Refuses a number of passes that is not known (`ConfigurationError`)."""
    if type(passes) is not int or passes not in (1, 2):
        raise ConfigurationError(
            f"passes={shown(passes)}.",
            why="norms and sums are made of one backward pass, or of one each.",
            fix="leave it at 1, or give 2 where the factors of one pass do not fit into memory.",
        )


def check_equal_widths(equal_widths: Any) -> None:
    """Refuses what is neither True nor False (`ConfigurationError`)."""
    if not isinstance(equal_widths, bool):
        raise ConfigurationError(
            f"equal_widths={shown(equal_widths)}.",
            why="micro-batches hold examples of one width, or of any.",
            fix="give True where many examples may be alike and the model computes in 16 bits, or leave it out.",
        )
