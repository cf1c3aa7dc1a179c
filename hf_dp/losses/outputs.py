"""What a model returns, by name: an output of Transformers, a dictionary, or a tuple, as Trainer reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses.kinds import BY_ITSELF, SAY_IT, base_model


def named(output: Any, name: str) -> Any:
    """What `output` has under `name`, or None. In a tuple a number is the loss, the first other the logits; alone, too,
    a number is the loss."""
    if isinstance(output, Tensor):
        return output if name == "loss" and not output.dim() else None
    if type(output) is tuple:
        of_kind = [value for value in output if isinstance(value, Tensor) and (value.dim() == 0) == (name == "loss")]
        return of_kind[0] if of_kind and name in ("loss", "logits") else None
    found = getattr(output, name, None)
    return output.get(name) if found is None and isinstance(output, Mapping) else found


def logits_of(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The logits (B, ...) that `model` gives for `inputs`, which have no labels.

    Raises:
        UnsupportedModelError: it returns none.
    """
    output = model(**inputs)
    logits = named(output, "logits")
    if isinstance(logits, Tensor):
        return logits
    given = ", ".join(sorted(map(str, output))) if isinstance(output, Mapping) else type(output).__name__
    raise UnsupportedModelError(
        f"{type(base_model(model)).__name__} returns no logits, but {given}.",
        why="the loss of each example is computed from them.",
        fix=f"let its forward return them, under 'logits' or, in a tuple, after the loss; or {SAY_IT} ({BY_ITSELF}).",
    )
