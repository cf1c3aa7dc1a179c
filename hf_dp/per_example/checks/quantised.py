"""Frozen layers in few bits, below adapters: what engine and oracle do alike, and is wrong all the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError

# Of bitsandbytes, by name, since it need not be there.
_OUTLIERS = "Linear8bitLt"
# Where it is on, the first pass without gradients stores a layer's weights in another way, rounded once more, in which
# no later pass has a gradient: after an evaluation, adapters below would be trained without what is above them.
_REPACKS = "support_avx512bf16_for_cpu"


def check_quantised(named: Iterable[tuple[str, Any]]) -> None:
    """Refuses by name what computes with the outliers of a whole batch; what repacks weights no longer does.

    Args:
        named: modules of a model, or of one beside it that its losses follow from (a reference, a teacher).

    Raises:
        UnsupportedModelError: with the layer's name.
    """
    for name, module in named:
        if vars(module).get(_REPACKS):
            setattr(module, _REPACKS, False)
        threshold = getattr(vars(module).get("state"), "threshold", 0.0)
        if type(module).__name__ == _OUTLIERS and threshold:
            raise UnsupportedModelError(
                f"{name} computes in 8 bits, but for outliers (llm_int8_threshold={threshold:g}).",
                why="a column in which one example has an outlier is computed in 16 bits for all of the batch, so that "
                "one example changes what the others add.",
                fix="load the model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits.",
            )


@contextmanager
def passing_gradients(model: nn.Module) -> Iterator[None]:
    """Refuses, when it has run, a layer in few bits, or below an adapter, that gave its input no gradient.

    Raises:
        UnsupportedModelError: with the layer's name and class.
    """
    cut: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            needed = any(isinstance(value, Tensor) and value.requires_grad for value in given)
            needed &= torch.is_grad_enabled()  # a reentrant checkpoint computes without gradients first
            if needed and isinstance(output, Tensor) and not output.requires_grad:
                cut.append(f"{name} ({type(module).__name__})")

        return hook

    named = model.named_modules()
    layers = [(name, module) for name, module in named if name.endswith("base_layer") or _is_quantised(module)]
    handles = [module.register_forward_hook(look(name)) for name, module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if cut:
        raise UnsupportedModelError(
            f"{cut[0]} gives its input no gradient.",
            why="adapters below it would be trained as if it were not there, and nothing would show it.",
            fix="quantise weights alone, not activations; a model that has been evaluated in 4 bits on a CPU must be "
            "loaded anew.",
        )


def _is_quantised(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and (not weight.is_floating_point() or type(weight.data) is not Tensor)
