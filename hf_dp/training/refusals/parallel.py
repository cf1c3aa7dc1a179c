"""What spreads a model or a batch in another way than DDP and FSDP2."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError

# Sizes in accelerate's ParallelismConfig.
_PARALLELISMS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "sp": "sequence parallelism",
    "dp_replicate": "HSDP (replicas of sharded models)",
}
_KNOWN_TYPES = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP"}


def refuse_parallel_model(trainer: Any, model: nn.Module) -> None:
    """Refuses what spreads a model or a batch in another way than DDP and FSDP2.

    Raises:
        ConfigurationError: with its name.
    """
    name = _unknown_parallelism(trainer, model)
    if name is not None:
        raise ConfigurationError(
            f"the model is under {name}.",
            why="where it splits examples or reduces gradients, nothing is known to clip each example's and to add "
            "the noise once.",
            fix="pass the plain model; start it with torchrun or accelerate launch, which use DDP, or choose FSDP2 "
            "(fsdp_version: 2 in accelerate's config).",
        )


def refuse_sharded_parts(trainer: Any, privacy: PrivacyConfig) -> None:
    """Refuses Re-Attention and sparse embeddings with FSDP2.

    Raises:
        ConfigurationError: with which of them.
    """
    if trainer.is_fsdp_enabled and privacy.re_attention is not None:
        raise ConfigurationError(
            "Re-Attention with FSDP2.",
            why="the noise of each row of a parameter is followed through the whole parameter, which is in shards.",
            fix="train under DDP, or without re_attention.",
        )
    if trainer.is_fsdp_enabled and privacy.sparse_embeddings is not None:
        raise ConfigurationError(
            "sparse embeddings with FSDP2.",
            why="a table would be in shards, and rows are looked up, chosen and moved in whole tables.",
            fix="train under DDP, or without sparse_embeddings.",
        )


def _unknown_parallelism(trainer: Any, model: nn.Module) -> str | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return type(model).__name__
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "Transformers' own sharding (from_pretrained with a distributed_config)"
    accelerator = trainer.accelerator
    config = getattr(accelerator, "parallelism_config", None)
    for kind, words in _PARALLELISMS.items():
        if (getattr(config, f"{kind}_size", None) or 1) > 1:
            return words
    if (trainer.args.fsdp or trainer.is_fsdp_enabled) and not getattr(accelerator, "is_fsdp2", False):
        version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None)
        return "FSDP1" if version == 1 else f"{accelerator.distributed_type}, where FSDP was asked for"
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    return None if kind in _KNOWN_TYPES or accelerator.num_processes == 1 else kind
