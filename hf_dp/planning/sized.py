"""The parameters of a model and how each is used, by its configuration alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.per_example.products import is_instantiated
from hf_dp.places import nowhere
from hf_dp.planning.named import config_of


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
        routes: of matrices of experts (E, p, d), how many of these each position is given; 0 of others.
    """

    shape: tuple[int, ...]
    trained: bool
    unit: str
    is_embedding: bool = False
    uses: int = 1
    names: tuple[str, ...] = ()
    routes: int = 0

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return int(torch.Size(self.shape).numel())

    def factor_numbers(self, length: int, on_cores: bool = False) -> tuple[int, int]:
        """What is kept of one example's gradient until its norm is known: float32 numbers, and computed ones.

        A weight (p, d) used at L positions keeps L (p + d) numbers, or its p d in float32: see `is_instantiated`. Of
        matrices of experts those are never kept.
        """
        if not self.trained:
            return 0, 0
        if len(self.shape) < 2:
            return self.numel, 0
        if self.routes:
            return 0, self.routes * length * sum(self.shape[1:])
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
        config: Any = getattr(model, "config", None)
        routes = getattr(config and config.get_text_config(), "num_experts_per_tok", None) or 0
        # Transformers' own dispatch says of itself how experts lie. In others, as Llama 4's, gradients are kept whole.
        experts = [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "has_gate")]
        routed = {id(p) for m in experts for p in m.parameters(recurse=False) if p.dim() == 3}
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
            own_routes = routes if id(p) in routed else 0
            found.append(Parameter(tuple(p.shape), trained, unit, is_table, uses, own, own_routes))
            if lora_rank is not None and unit and p.dim() == 2:
                for side, shape in (("A", (lora_rank, p.shape[1])), ("B", (p.shape[0], lora_rank))):
                    adapter = f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.default.weight"
                    found.append(Parameter(shape, True, unit, names=(adapter,)))
        return cls(tuple(found))


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
