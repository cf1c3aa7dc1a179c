"""Is the per-example loss of a model the loss that the model itself returns?"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.losses.heads import question_answering
from hf_dp.losses.kinds import BY_ITSELF, SAY_IT, SHIFTED, base_model, loss_kind
from hf_dp.losses.outputs import logits_of, named
from hf_dp.losses.per_example import left_out, per_example_losses
from hf_dp.losses.tokens import token_losses

# So many examples show which loss is computed: which one it is follows from no example.
COMPARED = 3
# How far the model's own loss may be off, relative to it, in 16 bits and in more; and what rounding leaves of none.
_SAME_IN_16_BITS, _SAME, _NOTHING = 1e-2, 1e-4, 1e-6
# So many batches are tried for the weights of classes.
_TRIED = 8
# What adapters call the weight of a term that they add.
_ADDED = re.compile("(reg|regulari[sz]ation|aux|auxiliary_loss)_(weight|coef|alpha)")


def known_loss_check(model: nn.Module) -> Callable[[nn.Module, Mapping[str, Any], Any], None]:
    """`check_own_loss`, of the second of three: a model, a few examples together, and the same each by itself.

    Raises:
        UnsupportedModelError: the model's kind of loss is not known, which is told before anything is computed.
    """
    loss_kind(model)
    return lambda model, few, alone: check_own_loss(model, few)


def check_own_loss(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Checks, on three examples of a small batch by themselves, that `per_example_losses` equals the loss the model
    returns.

    Some models shift labels where others of the same family do not, or add a loss for their router. An own loss that is
    not finite (an example without labels) is not compared, nor is one that is `left_out`.

    Raises:
        UnsupportedModelError: they differ, or the model's own cannot be computed, or is none.
    """
    batch = {k: v for k, v in batch.items() if k != "num_items_in_batch"}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})

    def losses(of: Callable[[nn.Module, Mapping[str, Any]], Any], batch: Mapping[str, Any]) -> Any:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            return of(model, batch)

    # The model's own is over padding as well.
    is_qa = loss_kind(model) == "question_answering"
    kinds = functools.partial(question_answering, over_padding=True) if is_qa else per_example_losses
    compared, is_left_out = 0, left_out(model, batch)
    is_same = _sameness(model)
    for i, ours in enumerate(losses(kinds, batch).tolist()):
        if compared == COMPARED:
            break
        if is_left_out is not None and bool(is_left_out[i]):
            continue
        one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}
        own = losses(_own_loss, one)
        if own is None:
            raise UnsupportedModelError(
                f"{type(base_model(model)).__name__} returns no loss of its own for labels.",
                why="what it was made to be trained for is unknown, and so whether the per-example loss is that.",
                fix=f"{SAY_IT}.",
            )
        if not bool(own.isfinite()):
            continue
        compared += 1
        if is_same(ours, float(own)):
            continue
        # With dropout, that of the example by itself has the same masks.
        ours = float(losses(kinds, one))
        if not is_same(ours, float(own)):
            probable, fix = losses(functools.partial(_probable, own=float(own), ours=ours), one)
            raise UnsupportedModelError(
                f"{type(base_model(model)).__name__} returns {float(own):.6g} as its loss of one example; "
                f"the per-example loss of its kind ({loss_kind(model)}) is {ours:.6g}. {probable}",
                why="it would be trained for something else than what it was made for.",
                fix=f"{fix}; or say what each example's loss is: {SAY_IT} (docs/extending.md has one; {BY_ITSELF}).",
            )
    kept = {k: v if is_left_out is None or not isinstance(v, Tensor) else v[~is_left_out] for k, v in batch.items()}
    _refuse_weights_of_classes(model, kept, lambda of, few: losses(kinds if of is None else of, few))


def _refuse_weights_of_classes(model: nn.Module, batch: Mapping[str, Any], losses: Callable[[Any, Any], Any]) -> None:
    """Refuses a loss that weighs classes: of one example with one label no weight is seen, since its mean is that.

    Tried are the first classes, in place of the labels of the batch, which may all be of one class.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 1 or len(labels) < 2 or labels.is_floating_point():
        return
    logits = losses(logits_of, {name: value for name, value in batch.items() if name != "labels"})
    classes, size = (logits.shape[-1] if logits.dim() == 2 else 1), len(labels)
    for begin in range(0, classes - 1, size - 1)[:_TRIED]:
        wanted = torch.arange(begin, begin + size, device=labels.device).remainder(classes).to(labels.dtype)
        few = {**batch, "labels": wanted}
        own, ours = losses(_own_loss, few), losses(None, few)
        mean, off = float(ours.double().mean()), 4 * torch.finfo(logits.dtype).eps
        if own is not None and bool(own.isfinite()) and abs(float(own) - mean) > max(_SAME, off) * max(1.0, abs(mean)):
            raise UnsupportedModelError(
                f"{type(base_model(model)).__name__} returns {float(own):.6g} as its loss of {size} examples of other "
                f"classes; the mean of their per-example losses ({loss_kind(model)}) is {mean:.6g}. Its forward "
                "probably weighs classes.",
                why="it would be trained without these weights.",
                fix=f"use a model whose forward computes that, or say what each example's loss is: {SAY_IT}: "
                "F.cross_entropy(logits, labels, weight=weight, reduction='none'), for example.",
            )


def _probable(model: nn.Module, one: Mapping[str, Any], own: float, ours: float) -> tuple[str, str]:
    """Why a model's own loss is probably another, by what is seen of both, and what to do about that."""
    base, is_same = base_model(model), _sameness(model)
    configs = [base.config, *(getattr(base.config, name, None) for name in getattr(base.config, "sub_configs", ()))]
    if any(getattr(config, "output_router_logits", False) for config in configs):
        return (
            "Its config has output_router_logits=True, which adds a loss of all tokens together.",
            "set output_router_logits=False in its config",
        )
    if base is not model and is_same(ours, float(_own_loss(base, one))):
        adapter: Any = getattr(model, "active_peft_config", None)
        weights = [f"{name}=0" for name, value in vars(adapter).items() if _ADDED.search(name) and value]
        return (
            f"{type(adapter).__name__} of PEFT adds {own - ours:.6g} to it.",
            f"give {', '.join(weights) or 'an adapter that adds nothing'}, and train without that term",
        )
    # Given labels some leave out their cache, with which they hide no token that is to come (FSMT).
    cached = [config for config in configs if getattr(config, "use_cache", False)]
    for config in cached:
        config.use_cache = False
    try:
        is_of_cache = bool(cached) and is_same(float(per_example_losses(model, one)), own)
    finally:
        for config in cached:
            config.use_cache = True
    if is_of_cache:
        return "Without its cache it computes that.", "set model.config.use_cache = False, as Trainer does"
    if loss_kind(model) == SHIFTED:
        labels = one["labels"]
        logits = logits_of(model, {k: v for k, v in one.items() if k != "labels"})
        if logits.shape[1] == labels.shape[1] and is_same(float(token_losses(logits, labels, 0.0)), own):
            return (
                "Its forward does not shift the labels: each position is to give its own token, not the next.",
                "set model.loss_type = 'ForMaskedLM' to train that, with labels that are moved where the next token is "
                "to be predicted; or use a model whose forward shifts them",
            )
    return "Its forward computes another loss than that.", "use a model whose forward computes that"


def _sameness(model: nn.Module) -> Callable[[float, float], bool]:
    """Whether two numbers are one loss, but for what rounding does in the model's precision."""
    has_few_bits = any(p.dtype.itemsize < 4 for p in model.parameters())
    part = _SAME_IN_16_BITS if has_few_bits else _SAME
    return lambda ours, own: abs(ours - own) <= part * max(abs(ours), abs(own)) + _NOTHING


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    try:
        return named(model(**batch), "loss")
    except (HfDpError, torch.OutOfMemoryError):
        raise
    except (ValueError, TypeError, LookupError, NameError, RuntimeError) as error:
        name, problem = type(base_model(model)).__name__, f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"{name} cannot compute its own loss of one example ({problem}).",
            why="what it was made to be trained for is unknown, and so whether the per-example loss is that.",
            fix="give it all inputs that its forward pass takes with labels (several labels of one example as floats); "
            f"or {SAY_IT}.",
        ) from error
