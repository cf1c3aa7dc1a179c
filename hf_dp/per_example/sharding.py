"""Parameters that FSDP2 keeps in shards: watched while they are whole, summed and noised where they lie.

`fully_shard` leaves a DTensor in a module's table of parameters and puts the whole parameter in its place while the
module runs, forward and backward. Whatever puts it there, it goes through the table: so for a recording the table
itself watches. Norms need no parameter, and of the sums no more than one is whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as Sharded
from torch.nn.utils import get_total_norm

import hf_dp.ranks as ranks
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.modules import named_modules, names_in, parameters_of, plain_name, trained_in


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, those that FSDP2 shards as shards; tied names collapse to the first."""
    reshard(model)
    return trained_in(named_modules(model))


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` this rank holds: its shard, or all of it; the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is in shards, so that all ranks must run the model at the same time."""
    # After a forward pass without a backward pass all of them may be whole.
    return any(_fsdp_modules(model)) or any(isinstance(p, DTensor) for p in parameters_of(model))


def dtypes_of_shards(model: nn.Module) -> set[torch.dtype]:
    """What FSDP2 keeps, or computes with."""
    kept = {p.dtype for p in (*model.parameters(), *model.buffers()) if isinstance(p, DTensor)}
    policies = (getattr(m._get_fsdp_state(), "_mp_policy", None) for m in model.modules() if isinstance(m, FSDPModule))
    return kept | {dtype for policy in policies if (dtype := getattr(policy, "param_dtype", None)) is not None}


def refuse_unknown_shards(modules: Sequence[nn.Module]) -> None:
    """Refuses shards that are not FSDP2's over all ranks.

    Args:
        modules: all of a model, which comes first.

    Raises:
        UnsupportedModelError: with the parameter's name and how it is laid out.
    """
    if not any(isinstance(p, DTensor) for module in modules for p in module._parameters.values()):
        return
    shards = {name: p for name, p in modules[0].named_parameters() if isinstance(p, DTensor)}
    managed = {id(p) for module in modules if isinstance(module, FSDPModule) for p in module.parameters()}
    for name, p in shards.items():
        mesh, placements = p.device_mesh, p.placements
        is_known = mesh.ndim == 1 and mesh.size() == ranks.world_size() and isinstance(placements[0], Sharded)
        if not is_known or id(p) not in managed:
            kind = "HSDP" if mesh.ndim == 2 and id(p) in managed else "tensor parallelism or another DTensor layout"
            raise UnsupportedModelError(
                f"{name} is laid out as {placements} over {mesh} ({kind}).",
                why="its gradient is known to be summed, and its noise to be added once, only where fully_shard splits "
                "it over all ranks.",
                fix="use FSDP2 (fully_shard) over one mesh of all ranks, without replicas.",
            )


def tied(model: nn.Module) -> set[frozenset[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(plain_name(name))
    return {frozenset(group) for group in names.values() if len(group) > 1}


def all_names(model: nn.Module) -> dict[str, frozenset[str]]:
    """Of each trainable parameter, by its first name, all that it has."""
    reshard(model)
    return names_in(named_modules(model, by_each_name=True))


def refuse_broken_ties(before: set[frozenset[str]], model: nn.Module) -> None:
    """Refuses a model in which sharding made several parameters of one.

    Args:
        before: what was `tied` before it.

    Raises:
        UnsupportedModelError: with the names of the parameter.
    """
    broken = before - tied(model)
    if broken:
        raise UnsupportedModelError(
            f"{', '.join(sorted(next(iter(broken))))} were one parameter, and are several since FSDP2 split the model.",
            why="each would be trained by itself, and the saved model would hold one of them.",
            fix="train under DDP, or freeze the parameter and train with LoRA under DDP.",
        )


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a sum.

    Attributes:
        values: of the shape of the parameter's local part.
        parameter: of which it is the gradient.
    """

    values: Tensor
    parameter: DTensor

    def add_(self, whole: Tensor) -> None:
        """Adds this rank's part of the sum of `whole` over all ranks: one reduce-scatter, in the dtype of `whole`."""
        self.values.add_(scattered(whole, self.parameter).to(self.values.device))


def as_sums(values: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor | Shard]:
    """What this rank holds of each sum, so that whole gradients can be added to it."""
    return {
        name: Shard(held, p) if isinstance(p := parameters[name], DTensor) else held for name, held in values.items()
    }


def scattered(whole: Tensor, parameter: DTensor) -> Tensor:
    """The sum of `whole` over all ranks, of which each gets the shard that it has of `parameter`."""
    partial = DTensor.from_local(whole, parameter.device_mesh, [Partial()], run_check=False)
    return local(partial.redistribute(placements=parameter.placements))


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """A gradient for `parameter` made of what this rank holds of it."""
    if not isinstance(parameter, DTensor):
        return values
    made: Tensor = DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


class _Table(dict[str, Any]):
    """A module's parameters, of which some are replaced as soon as they are whole."""

    def __init__(self, parameters: Mapping[str, Any], replacements: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(parameters)
        self._replacements = replacements

    def __setitem__(self, key: str, value: Any) -> None:
        replacement = self._replacements.get(key)
        is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        super().__setitem__(key, replacement(value) if replacement is not None and is_whole else value)


@contextmanager
def watched_when_whole(
    model: nn.Module, names: Mapping[int, str], make: Callable[[str, Tensor], Tensor]
) -> Iterator[None]:
    """Inside, each sharded parameter is replaced by `make(name, whole parameter)` wherever FSDP2 puts it whole.

    Args:
        model: with shards or without.
        names: of the parameters to replace, by id of the sharded parameter.
        make: called once for each whole parameter.
    """
    made: dict[str, tuple[Tensor, Tensor]] = {}

    def replacement(name: str) -> Callable[[Tensor], Tensor]:
        def replace(whole: Tensor) -> Tensor:
            # The same object from pass to pass and in every module that it is tied in.
            if name not in made or made[name][0] is not whole:
                made[name] = whole, make(name, whole)
            return made[name][1]

        return replace

    tables = []
    for module in model.modules() if names else ():
        chosen = {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        if chosen:
            tables.append((module, module._parameters))
            module._parameters = _Table(module._parameters, {key: replacement(name) for key, name in chosen.items()})
    try:
        yield
    finally:
        reshard(model)
        for module, table in tables:
            module._parameters = table
        made.clear()


def reshard(model: nn.Module) -> None:
    """Leaves every module of FSDP2 with its shards."""
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    # Without a process group there are none, and a model may have thousands of modules.
    return (m for m in model.modules() if isinstance(m, FSDPModule)) if ranks.in_group() else iter(())


def passes_on(function: Any) -> bool:
    """Whether it is the Function of FSDP2 that gives what it is given, and tells when all gradients of it have come."""
    return _is_of_fsdp(function) and function.__name__ == "RegisterPostBackwardFunction"


def hook_of_shards(tensor: Tensor, hook: Any) -> Any:
    """Nothing, for a hook of FSDP2 on what is computed from parameters alone; NotImplemented for any other.

    No gradient comes by there in the backward pass, and what is handed on after it needs no parameter.
    """
    return None if _is_of_fsdp(getattr(hook, "__self__", hook)) else NotImplemented


def _is_of_fsdp(found: Any) -> bool:
    return str(getattr(found, "__module__", "")).startswith("torch.distributed.fsdp.")


def summed_over_shards(values: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
    """The sum of numbers, of which those found from shards are added up over all ranks too.

    Args:
        values: pairs of a parameter and a tensor of numbers found from what this rank holds of it, all of one shape.
        device: of the sum.

    Returns:
        float64, of that shape.
    """
    pairs = [(isinstance(parameter, DTensor), found.to(device, torch.float64)) for parameter, found in values]
    of_shards, of_wholes = ([found for is_shard, found in pairs if is_shard is kind] for kind in (True, False))
    total = torch.zeros_like(pairs[0][1])
    for found in of_shards:
        total += found
    if of_shards:
        ranks.sum_(total)
    for found in of_wholes:
        total += found
    return total


def total_norm(values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The l2 norm of all numbers together; all ranks call it, each with what it holds.

    Args:
        values: pairs of a parameter and the numbers of it, or of its gradient, that this rank holds.

    Returns:
        (), float64.
    """
    pairs = list(values)
    kinds = [[pair for pair in pairs if isinstance(pair[0], DTensor) is kind] for kind in (True, False)]
    norms = [(kind[0][0], get_total_norm([numbers for _, numbers in kind])) for kind in kinds if kind]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    squares = [(parameter, norm.double().square()) for parameter, norm in norms]
    return summed_over_shards(squares, squares[0][1].device).sqrt()
