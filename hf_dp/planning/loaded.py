"""In how many bytes a plan counts the numbers of weights that are not trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_dp.errors import ConfigurationError


@dataclass(frozen=True)
class Loaded:
    """How the frozen weights of a model are loaded.

    Attributes:
        dtype: of what is computed, and of all frozen weights but the matrices of blocks.
        bytes_of_matrices: of each number of a frozen matrix in a block; None for that of `dtype`.
    """

    dtype: torch.dtype
    bytes_of_matrices: float | None = None


# Of bitsandbytes: four bits, and a float32 number for each 64; eight, and one for each row.
_LOADED = {
    "float32": Loaded(torch.float32),
    "bfloat16": Loaded(torch.bfloat16),
    "int8": Loaded(torch.bfloat16, 1),
    "nf4": Loaded(torch.bfloat16, 1 / 2 + 4 / 64),
}


def loaded_as(name: str | None, otherwise: torch.dtype) -> Loaded:
    """How weights are loaded; None is in `otherwise`.

    Raises:
        ConfigurationError: another name.
    """
    if name is not None and name not in _LOADED:
        raise ConfigurationError(
            f"--dtype {name}.", why="it says how many bytes a number takes.", fix=f"give one of {', '.join(_LOADED)}."
        )
    return Loaded(otherwise) if name is None else _LOADED[name]
