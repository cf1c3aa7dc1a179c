"""How much memory a private step takes on each rank, and how much it sends: the arithmetic of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.long_sums import FEW
from hf_dp.planning.sized import ModelSize

Strategy = Literal["DDP", "FSDP2"]
# Bytes of a number of the sum, of Adam's two moments, and of a trained weight.
_SUM, _TRAINED = 4, 4


@dataclass(frozen=True)
class Estimate:
    """What one private step needs on each rank.

    Attributes:
        strategy: "DDP" or "FSDP2".
        memory: bytes by what they are for, without the activations that ordinary training would keep too.
        sent: bytes that each rank sends in one step, by collective, on a ring.
    """

    strategy: Strategy
    memory: dict[str, int]
    sent: dict[str, int]

    @property
    def total_memory(self) -> int:
        """Bytes on each rank."""
        return sum(self.memory.values())

    @property
    def total_sent(self) -> int:
        """Bytes sent by each rank in one step."""
        return sum(self.sent.values())


def estimate(
    model: ModelSize,
    strategy: Strategy,
    world_size: int,
    *,
    length: int,
    micro_batch: int,
    micro_batches: int = 1,
    bytes_computed: int = 2,
    bytes_of_matrices: float | None = None,
    passes: int = 1,
    groups: Sequence[Collection[str]] = (),
) -> Estimate:
    """The bytes of one private step with AdamW, where trained weights and sums are float32.

    Args:
        model: what is trained.
        strategy: "DDP" or "FSDP2".
        world_size: W, the number of ranks.
        length: L, positions of each example.
        micro_batch: examples in one micro-batch.
        micro_batches: of each rank in one logical batch.
        bytes_computed: of each number of the frozen weights, and of what is computed with (bfloat16: 2, on tensor
            cores).
        bytes_of_matrices: of each number of a frozen matrix in a block, where it is loaded in fewer bits (DDP); one at
            a time is made whole to be computed with.
        passes: in which a step is made; in two, factors are kept of one parameter at a time.
        groups: with clipping="groups" the first names of the parameters of each, which under DDP are kept until it is
            summed.

    Raises:
        ConfigurationError: a number below 1.
    """
    for name, value in {"--world-size": world_size, "--length": length, "--micro-batch": micro_batch}.items():
        if value < 1:
            raise ConfigurationError(f"{name} {value}.", why="there is nothing to estimate.", fix="give 1 or more.")
    n, t, w = model.total, model.trained, world_size
    matrices = [p.numel for p in model.parameters if p.unit and len(p.shape) == 2 and not p.trained]
    in_fewer_bits = 0 if bytes_of_matrices is None else sum(matrices)
    weights = _TRAINED * t + bytes_computed * (n - t - in_fewer_bits) + int((bytes_of_matrices or 0) * in_fewer_bits)
    kept = [p.factor_numbers(length, on_cores=bytes_computed == 2) for p in model.parameters]
    of_each = [_SUM * whole + bytes_computed * computed for whole, computed in kept]
    kept_at_once = _of_groups(model, of_each, groups) if groups and strategy == "DDP" else sum(of_each)
    factors = micro_batch * (kept_at_once if passes == 1 else max(of_each))
    is_little = t <= model.largest
    # A draw may be larger than is expected.
    totals = _SUM * t if micro_batch * micro_batches > FEW * 3 // 4 else 0
    if strategy == "DDP":
        # A cast weight lives for one operation only.
        memory = {
            "weights": weights,
            "sum of gradients": _SUM * t,
            **({"totals of many examples": totals} if totals else {}),
            "Adam": 2 * _SUM * t,
            "DDP's buckets": _TRAINED * t if w > 1 else 0,
        }
        if in_fewer_bits:
            memory["whole weights"] = bytes_computed * max(matrices)
        sent = {"all-reduce of the sum": _ring(2 * _SUM * t, w)}
    else:
        largest = max((size for unit, size in model.units.items() if unit), default=0)
        memory = {
            "weights": weights // w,
            "sum of gradients": _SUM * t // w,
            **({"totals of many examples": totals // w + (totals if is_little else 0)} if totals else {}),
            "Adam": 2 * _SUM * t // w,
            # The root stays whole; and a block, with the buffer that the next is gathered in.
            "whole weights": bytes_computed * (model.units[""] + 2 * largest),
            # Before it is scattered, and as it is laid out for that.
            "whole gradients": 2 * _SUM * model.largest_trained + (_SUM * t if is_little else 0),
        }
        gathered = bytes_computed * (2 * n - model.units[""])
        sent = {
            "all-gather of the weights": micro_batches * _ring(gathered, w),
            "reduce-scatter of the sum": (1 if is_little else micro_batches) * _ring(_SUM * t, w),
        }
    return Estimate(strategy, {**memory, "factors": factors}, sent)


def _of_groups(model: ModelSize, of_each: list[int], groups: Sequence[Collection[str]]) -> int:
    """Of one example the largest group, and all that are used far apart: in several blocks, or at both ends."""
    largest = apart = 0
    for names in groups:
        members = [(p, size) for p, size in zip(model.parameters, of_each, strict=True) if p.names[0] in names]
        size = sum(size for _, size in members)
        if len({p.unit or p.names for p, _ in members}) > 1 or any(p.uses > 1 for p, _ in members):
            apart += size
        else:
            largest = max(largest, size)
    return largest + apart


def _ring(numbers_in_bytes: int, world_size: int) -> int:
    """What each rank sends of a tensor of so many bytes when it is gathered or scattered on a ring."""
    return numbers_in_bytes * (world_size - 1) // world_size
