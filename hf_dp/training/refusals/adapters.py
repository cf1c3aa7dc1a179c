"""Names of adapters by which PEFT would not find again what it has saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dp.errors import ConfigurationError
from hf_dp.training.adapters import has_adapters

_WHOLE = "modules_to_save"


def refuse_clashing_names(model: Any) -> None:
    """Refuses adapters of PEFT with names that stand in the names of parameters for something else too.

    Raises:
        ConfigurationError: what is saved would lack weights, or could not be read.
    """
    if not has_adapters(model):
        return
    for name, clashing in _clashes(model):
        raise ConfigurationError(
            f"the parameter {name} has the name of an adapter where another name stands: {', '.join(clashing)}.",
            why="PEFT knows by these names what to save of each adapter: saved adapters, checkpoints too, would lack "
            "weights, or could not be loaded.",
            fix="give the adapter another name (adapter_name=...), or take it out (model.delete_adapter(...)).",
        )


def _clashes(model: Any) -> Iterator[tuple[str, list[str]]]:
    for name, _ in model.named_parameters():
        parts = name.split(".")
        found = [adapter for adapter in model.peft_config if adapter in parts]
        # Of a whole module the names are those of the model, from which PEFT takes the adapter's once more.
        is_twice = _WHOLE in parts and any(parts[parts.index(_WHOLE) :].count(adapter) > 1 for adapter in found)
        if len(found) > 1 or is_twice:
            yield name, found
