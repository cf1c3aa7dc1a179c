"""Optimizers that would spend budget for nothing, see what has no noise, or have seen it."""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.sharding import local
from hf_dp.per_example.watched import tensors_in
from hf_dp.step.written import plain_optimizer

logger = logging.getLogger(__name__)
# Those whose state came from private steps alone, or was none, when a private training began with them.
_OF_PRIVATE_STEPS = weakref.WeakSet[torch.optim.Optimizer]()


def _never_steps(optimizer: Any, by_rows: Iterable[nn.Parameter]) -> str | None:
    """As it was made, where no step of it can succeed here."""
    held, sparse = (p for group in optimizer.param_groups for p in group["params"]), {id(p) for p in by_rows}
    if isinstance(optimizer, torch.optim.SparseAdam) and any(id(p) not in sparse for p in held):
        return ", which takes sparse gradients alone, and those of most parameters are dense"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "(differentiable=True), which steps on no leaf of a graph"
        if group.get("capturable") and any(p.device.type == "cpu" for p in group["params"]):
            return "(capturable=True) on a CPU, which is for CUDA graphs"
    return None


def _asks_for_a_closure(optimizer: Any) -> bool:
    """Whether it evaluates the gradient itself: its step says so, or fails for want of that."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return True
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    # A copy that holds nothing moves nothing, and remembers nothing. Neither do its hooks run, nor the step that a
    # scheduler has put into the original, which is the original's.
    trial = copy.copy(optimizer)
    try:
        # Counters may be tensors that a step adds to in place.
        nothing = [copy.deepcopy({**group, "params": []}) for group in optimizer.param_groups]
        trial.state, trial.param_groups = defaultdict(dict), nothing
        inspect.unwrap(type(optimizer).step)(trial)
    except AttributeError:  # one that is made of others, which stay with the original
        return False
    except Exception as error:  # noqa: BLE001 - what a step without parameters says besides is not of any other
        return "closure" in str(error).lower()
    return False


def _refuse_state_from_elsewhere(optimizer: Any, is_restored: bool) -> None:
    """Refuses an optimizer that remembers gradients of another training: its next step releases them, without noise.

    What a constructor makes (Adagrad's sums, copies of the weights) is one number, or the parameter itself.
    """
    if not is_restored and optimizer not in _OF_PRIVATE_STEPS:
        for p, states in list(optimizer.state.items()):
            for name, value in states.items() if isinstance(states, dict) else [("state", states)]:
                if any(_may_remember(one, p) for one in tensors_in(value)):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} with a state ({name}) before the first step.",
                        why="it was computed from the gradients of another training, which have no noise: the first "
                        "private step would put them into the weights, and no ledger counts that.",
                        fix="make the optimizer anew; or go on from a checkpoint (resume_from_checkpoint), whose state "
                        "follows from private steps.",
                    )
    _OF_PRIVATE_STEPS.add(optimizer)
    if hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        optimizer.register_load_state_dict_post_hook(_OF_PRIVATE_STEPS.discard)


def _may_remember(state: Tensor, p: Any) -> bool:
    values = local(state.detach())
    if values.numel() < 2 or bool(values.eq(values.reshape(-1)[0]).all()):
        return False
    same = isinstance(p, Tensor) and values.shape == local(p.detach()).shape
    return not (same and torch.equal(values.to(p.dtype), local(p.detach())))


def refuse_optimizer(
    optimizer: Any, model: nn.Module, *, is_complete: bool = False, is_restored: bool = False,
    by_rows: Iterable[nn.Parameter] = (),
) -> None:  # fmt: skip
    """Refuses optimizers that ask for the gradient again, or that would train nothing. None is in order.

    Args:
        is_complete: whether it is as it will step: where it would move some trainable parameters alone, that is said.
        is_restored: whether its state is that of a checkpoint of this training, which was held against its checksums.
        by_rows: parameters whose gradients will be sparse.

    Raises:
        ConfigurationError: with its name.
    """
    if optimizer is None:
        return
    optimizer = plain_optimizer(optimizer)
    if _asks_for_a_closure(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the gradient several times in one step.",
            why="each evaluation would be one more release, and none of them would have noise.",
            fix="use an optimizer that takes one gradient for each step, such as AdamW.",
        )
    if is_complete and (what := _never_steps(optimizer, by_rows)) is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__}{what}.",
            why="it would fail in its first step, which is paid for by then.",
            fix="leave that out, or use another optimizer, such as AdamW.",
        )
    if is_complete:
        _refuse_state_from_elsewhere(optimizer, is_restored)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if not any(id(p) in trained for p in model.parameters() if p.requires_grad):
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds none of the model's trainable parameters.",
            why="nothing would be trained, and epsilon would be spent for nothing.",
            fix="make the optimizer when the model is complete (after adding adapters, say), or leave it out.",
        )
    if is_complete and missing:
        ranks.warn(
            logger,
            "%s holds none of %s trainable parameters, %s the first: each example's gradient of them takes up room in "
            "the clipping norm, and nothing moves them. Freeze them before (requires_grad_(False)), "
            "or give it all, those with a rate of their own as a group.",
            *(type(optimizer).__name__, len(missing), missing[0]),
        )
