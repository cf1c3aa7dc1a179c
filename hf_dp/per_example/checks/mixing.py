"""Modules that are known, by name, to compute an example's output from the others of its batch.

What a few rows show is found by the checks before the first step. Of these it is rare rows, or how many there are, that
decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_dp.errors import UnsupportedModelError


class _Mixing(NamedTuple):
    is_one: Callable[[nn.Module], bool]
    what: str
    why: str
    fix: str


def _named(name: str) -> Callable[[nn.Module], bool]:
    return lambda module: type(module).__name__ == name


def _scales_by_others(module: nn.Module) -> bool:
    return type(module).__name__.endswith("MeanScaler") and getattr(module, "default_scale", 0.0) is None


def _is_noisy(module: nn.Module) -> bool:
    hooks = (getattr(hook, "func", hook) for hook in module._forward_hooks.values())
    return any("neftune" in getattr(hook, "__name__", "").lower() for hook in hooks)


_KNOWN = (
    _Mixing(
        lambda module: isinstance(module, _BatchNorm) and module.training,
        "batch normalisation",
        "it computes each example's output from the whole batch, so no per-example gradient exists.",
        "call hf_dp.still_batch_norm(model) before the trainer is made, which keeps the statistics that the model was "
        "pretrained with (its weights train); or replace it by GroupNorm or LayerNorm.",
    ),
    _Mixing(
        _scales_by_others,
        "scaling by the mean of a series",
        "a series of which nothing was observed is scaled by what the others of its batch have.",
        "set config.default_scale (1.0, say) before the model is made, or config.scaling='std'.",
    ),
    _Mixing(
        _named("NllbMoeTop2Router"),
        "routing to experts of a limited capacity",
        "which tokens an expert takes depends on those of all examples that come before them.",
        "choose a mixture of experts without a capacity (Mixtral, Qwen2-MoE), or a model without experts.",
    ),
    _Mixing(
        _named("ZoeDepthMultipleMetricDepthEstimationHeads"),
        "a choice of heads by the whole batch",
        "all examples take the head that most of them vote for.",
        "load a model with one head (Intel/zoedepth-nyu or Intel/zoedepth-kitti).",
    ),
    _Mixing(
        _is_noisy,
        "NEFTune's noise",
        "its noise on the embeddings is scaled by the padded length, so one long example changes its neighbours.",
        "leave it out (activate_neftune(), or the hook that it registers); the noise of private training regularises "
        "as well.",
    ),
)


def refuse_mixing(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuses what is known to mix examples in the mode that it is in.

    Args:
        modules: of a model, by their names.

    Raises:
        UnsupportedModelError: with the module's name.
    """
    for name, module in modules:
        for known in _KNOWN:
            if known.is_one(module):
                raise UnsupportedModelError(
                    f"{name or 'the model'} is {known.what} ({type(module).__name__}).", why=known.why, fix=known.fix
                )
