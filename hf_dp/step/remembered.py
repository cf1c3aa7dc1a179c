"""What an optimizer remembers of the steps before: its own steps write it, and nothing else does."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.sharding import local
from hf_dp.per_example.watched import tensors_in

_FIX = (
    "load a state before the training begins, and that of a private training alone (resume_from_checkpoint); make the "
    "optimizer anew where it shall remember nothing. A PrivateRun whose loop was left has its end() called first."
)


class Remembered:
    """The state of an optimizer as its latest step left it, or as the training began with it.

    As of gradients, what torch does not count is not seen: changes through `.data`, NumPy or DLPack.

    Args:
        optimizer: plain.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._marks: list[tuple[weakref.ref[Tensor], tuple[int, int]]] = []
        self.note()

    def note(self) -> None:
        """It is as it should be."""
        # What a step puts in its place must not stay in memory for that.
        self._marks = [(weakref.ref(value), _told(value)) for value in self._held()]

    def refuse_other(self) -> None:
        """Refuses a step with another state.

        Raises:
            ConfigurationError: something else than a step has changed it.
        """
        held = self._held()
        pairs = zip(held, self._marks, strict=False)
        same = all(ref() is value and _told(value) == told for value, (ref, told) in pairs)
        if len(held) != len(self._marks) or not same:
            raise ConfigurationError(
                f"{type(self._optimizer).__name__}.step() after something else has changed the state of the optimizer.",
                why="what it remembers goes into the weights, and may be of gradients that have no noise, of another "
                "training say. This step moved nothing.",
                fix=_FIX,
            )

    def _held(self) -> list[Tensor]:
        return tensors_in(list(self._optimizer.state.values()))


def _told(value: Tensor) -> tuple[int, int]:
    held = local(value)
    try:
        place = held.data_ptr()
    except RuntimeError:  # of a class of tensors that holds others
        place = 0
    return 0 if held.is_inference() else held._version, place


def refuse_loading(optimizer: Any, state: Any) -> NoReturn:
    """Before an optimizer loads a state in the middle of a training (`ConfigurationError`): nothing is loaded."""
    raise ConfigurationError(
        f"load_state_dict() of {type(optimizer).__name__}, the state of the optimizer of a private training that has "
        "begun.",
        why="what it remembers goes into the weights with the next step, and may be of gradients that have no noise.",
        fix=_FIX,
    )
