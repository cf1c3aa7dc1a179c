"""Cross-entropy of each example's own labelled positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses.kinds import BY_ITSELF, SAY_IT

# The label of a position that is not counted.
IGNORED = -100
_DOES_NOT_KEEP_ITS_OUTPUT = (
    "_RecordedUseBackward", "ToCopyBackward0", "UnsafeViewBackward0", "AddmmBackward0", "MmBackward0", "MulBackward0",
    "DivBackward0", "AddBackward0",
)  # fmt: skip
# How many logits are worked on at a time: on a CPU a few MiB, which stay in the cache; elsewhere so many that what is
# started is little, in a few hundred MiB.
_CHUNK, _CHUNK_ELSEWHERE = 1 << 19, 1 << 26
# How often numbers are held that nobody else holds: by their tensor, and by what is made here to count with.
_HERE = 2


def accurate(logits: Tensor) -> Tensor:
    """In at least float32."""
    return logits.to(_accurate(logits.dtype))


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_losses(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """(B,): the mean over each example's own labelled positions, of logits (B, T, V) and labels (B, T)."""
    return token_sums(logits, labels, label_smoothing) / labels.ne(IGNORED).sum(1).clamp_min(1)


def token_sums(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """(B,): the sum over each example's own labelled positions, of logits (B, T, V) and labels (B, T)."""
    if logits.shape[:-1] != labels.shape:
        raise UnsupportedModelError(
            f"logits {tuple(logits.shape)} for labels {tuple(labels.shape)}.",
            why="one label for each position is needed.",
            fix="give each position a label, -100 where it has none (classes of texts ask for a model for sequence "
            f"classification); or {SAY_IT} ({BY_ITSELF}); or train LoRA in place of an adapter that adds positions.",
        )
    may_overwrite = type(logits.grad_fn).__name__ in _DOES_NOT_KEEP_ITS_OUTPUT and not _is_kept(logits)
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), label_smoothing, may_overwrite)  # type: ignore[no-untyped-call]
    return losses.view_as(labels).sum(1)


def _is_kept(logits: Tensor) -> bool:
    """Whether another operation has kept the logits for its backward pass (a penalty on them, say)."""
    uses, of_numbers = getattr(logits, "_use_count", None), getattr(torch._C, "_storage_Use_Count", None)
    # Hooks that pack what is saved may hold another tensor with the same numbers, of which no version is checked.
    return uses is None or of_numbers is None or uses() > 1 or of_numbers(logits.untyped_storage()._cdata) > _HERE


class _CrossEntropy(torch.autograd.Function):
    """F.cross_entropy without reduction, on logits (N, V) that are large: no probabilities (N, V) are kept.

    Of logits in 16 bits there is no copy in float32, though all is computed in it. But in bfloat16 probabilities are
    rounded before they are weighted as well as after, since a GPU takes most of its time here to read and write. From
    that of the label 1 is taken in float32, so nothing cancels.

    Args:
        may_overwrite: the gradient takes the place of the logits, which nobody else has kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, label_smoothing: float, may_overwrite: bool) -> Tensor:
        rows = max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_ELSEWHERE) // logits.shape[1])
        counted = labels.ne(IGNORED)
        labels = labels.masked_fill(~counted, 0)[:, None]
        losses, gains = list[Tensor](), list[Tensor]()
        for part, right in zip(logits.split(rows), labels.split(rows), strict=True):
            logarithms = torch.log_softmax(part, 1, dtype=_accurate(part.dtype))
            gain = logarithms.gather(1, right).squeeze(1)
            gains.append(gain)
            if label_smoothing:
                gain = (1 - label_smoothing) * gain + label_smoothing * logarithms.mean(1)
            losses.append(-gain)
        ctx.save_for_backward(logits, labels, counted, torch.cat(gains))
        ctx.rows, ctx.label_smoothing, ctx.may_overwrite = rows, label_smoothing, may_overwrite
        return torch.cat(losses).masked_fill(~counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, counted, gains = ctx.saved_tensors
        logits, weights = logits.detach(), weights.masked_fill(~counted, 0.0)[:, None]
        gradient = logits if ctx.may_overwrite else torch.empty_like(logits)
        spread = ctx.label_smoothing / logits.shape[1]
        # float16 does not hold what is small before it is weighted, and what smoothing leaves may be little of it.
        is_rounded = logits.dtype == torch.bfloat16 and not spread
        dtype = torch.bfloat16 if is_rounded else _accurate(logits.dtype)
        of_labels = (gains.expm1() + (ctx.label_smoothing - spread))[:, None].to(dtype)
        parts = (values.split(ctx.rows) for values in (logits, labels, weights, of_labels, gradient))
        for part, right, weight, of_label, out in zip(*parts, strict=True):
            here = torch.softmax(part, 1, dtype=dtype)
            if spread:
                here.sub_(spread)
            here.scatter_(1, right, of_label)
            torch.mul(here, weight, out=out)
        return gradient, None, None, None
