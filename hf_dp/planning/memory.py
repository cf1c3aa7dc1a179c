"""How much memory a private step takes on each rank, and how much it sends: the arithmetic of docs/scaling.md."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.long_sums import FEW
from hf_dp.per_example.products import is_instantiated
from hf_dp.places import nowhere
from hf_dp.planning.named import config_of

Strategy = Literal["DDP", "FSDP2"]
# Bytes of a number of the sum, of Adam's two moments, and of a trained weight.
_SUM, _TRAINED = 4, 4


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        shape: of it.
        trained: whether it gets a gradient.
        unit: the block of FSDP2 that it belongs to; "" for the root.
        is_embedding: whether it is looked up in.
        uses: in how many operations it is used (a tied embedding: 2).
        names: all that it has, the first first.
    """

    shape: tuple[int, ...]
    trained: bool
    unit: str
    is_embedding: bool = False
    uses: int = 1
    names: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return int(torch.Size(self.shape).numel())

    def factor_numbers(self, length: int, on_cores: bool = False) -> tuple[int, int]:
        """What is kept of one example's gradient until its norm is known: float32 numbers, and computed ones.

        A weight (p, d) used at L positions keeps L (p + d) numbers, or its p d in float32: see `is_instantiated`.
        """
        if not self.trained:
            return 0, 0
        if len(self.shape) < 2:
            return self.numel, 0
        p, d = self.shape[0], self.numel // self.shape[0]
        lookup = length * d if self.is_embedding else 0
        if self.is_embedding and self.uses == 1:
            return 0, lookup
        is_whole = is_instantiated(p * d, p + d, length, on_cores)
        return (p * d, lookup) if is_whole else (0, length * (p + d) + lookup)


@dataclass(frozen=True)
class ModelSize:
    """All parameters of a model, and the type that its configuration says its weights are in, if it does."""

    parameters: tuple[Parameter, ...]
    dtype: torch.dtype | None = None

    @property
    def total(self) -> int:
        """N, how many numbers."""
        return sum(p.numel for p in self.parameters)

    @property
    def trained(self) -> int:
        """T, how many of them are trained."""
        return sum(p.numel for p in self.parameters if p.trained)

    @property
    def largest(self) -> int:
        """P, the largest parameter."""
        return max(p.numel for p in self.parameters)

    @property
    def largest_trained(self) -> int:
        """The largest parameter that is trained."""
        return max(p.numel for p in self.parameters if p.trained)

    @property
    def units(self) -> dict[str, int]:
        """How many numbers each unit of FSDP2 has; "" is the root."""
        sizes: dict[str, int] = {"": 0}
        for p in self.parameters:
            sizes[p.unit] = sizes.get(p.unit, 0) + p.numel
        return sizes

    @classmethod
    def of(cls, model: nn.Module, lora_rank: int | None = None) -> ModelSize:
        """Of a model, which may lie on the meta device.

        Args:
            model: a Transformers model; its `_no_split_modules` are the units, as accelerate chooses them.
            lora_rank: None to train what `requires_grad` says; or LoRA of that rank on every matrix in the units.
        """
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        unit_of = {
            name: name for name, module in model.named_modules() if type(module).__name__.removeprefix("FSDP") in blocks
        }
        tables = {name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Embedding)}
        looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        names: dict[int, tuple[str, ...]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            names[id(p)] = (*names.get(id(p), ()), name)
        found = []
        for name, p in model.named_parameters():
            unit = next((u for u in unit_of if name.startswith(f"{u}.")), "")
            trained = p.requires_grad if lora_rank is None else False
            own, is_table = names[id(p)], id(p) in looked_up
            # Encoder and decoder look up in one table by a name each, and by a third that neither uses.
            uses = is_table + sum(not is_table or name.rpartition(".")[0] not in tables for name in own)
            found.append(Parameter(tuple(p.shape), trained, unit, is_table, uses, own))
            if lora_rank is not None and unit and p.dim() == 2:
                for side, shape in (("A", (lora_rank, p.shape[1])), ("B", (p.shape[0], lora_rank))):
                    adapter = f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.default.weight"
                    found.append(Parameter(shape, True, unit, names=(adapter,)))
        return cls(tuple(found))


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


def model_size(name_or_directory: str, lora_rank: int | None = None) -> ModelSize:
    """Of a model by its configuration alone: no weights are read or made.

    Raises:
        ConfigurationError: no configuration there, or nothing that would be trained.
    """
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
        logging,
    )

    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()  # of an encoder it would say that it must be made a decoder
        config: Any = config_of(name_or_directory)
        with torch.device("meta"):
            # Of an encoder and a decoder the others would be the decoder alone, or lack the head.
            are_both = getattr(config, "is_encoder_decoder", False)
            both = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq) if are_both else ()
            model = next(kind.from_config(config) for kind in _kinds(config, *both, AutoModelForCausalLM, AutoModel))
        empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if empty or getattr(config, "num_hidden_layers", 1) < 1:
            raise ValueError(f"{empty[0]} has no numbers" if empty else "it has no layers")
    except (
        OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, AssertionError,
        StopIteration, StrictDataclassError,
    ) as error:  # fmt: skip
        said = (str(error) or repr(error)).splitlines()[0]
        found = f"no configuration of a model at {name_or_directory!r} ({said})"
        if not os.path.exists(name_or_directory):
            found = nowhere(name_or_directory, f"no configuration of a model of that name can be read ({said})")
        raise ConfigurationError(
            f"{found}.",
            why="the sizes of its parameters are read from it.",
            fix="give the name of a model on the hub, or a directory with its config.json.",
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    dtype = getattr(config, "dtype", None)
    size = replace(ModelSize.of(model, lora_rank), dtype=dtype if isinstance(dtype, torch.dtype) else None)
    if not size.trained:
        raise ConfigurationError(
            f"--lora-rank {lora_rank}, and {type(model).__name__} names no blocks with matrices.",
            why="there would be no adapters, and nothing to train.",
            fix="leave --lora-rank out.",
        )
    return size


def _kinds(config: Any, *kinds: Any) -> Iterator[Any]:
    """Those that have a model for `config`."""
    return (kind for kind in kinds if type(config) in kind._model_mapping)


def _ring(numbers_in_bytes: int, world_size: int) -> int:
    """What each rank sends of a tensor of so many bytes when it is gathered or scattered on a ring."""
    return numbers_in_bytes * (world_size - 1) // world_size
