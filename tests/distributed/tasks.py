"""What the processes of a gang do together; each function also runs in one process by itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp import PrivacyConfig
from tests.e2e.workbench import make, pad, pad_for_language, rows
from tests.zoo import adapted, tiny

STEPS, EXPECTED, MICRO = 5, 8, 2
SHARDS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
MODELS = {
    "tied gpt2": ("gpt2", "causal_lm"),
    "llama": ("llama", "causal_lm"),
    "llama lora": ("LoRA", "causal_lm"),
    "bert": ("bert", "sequence"),
}


def built(name: str, seed: int = 0) -> nn.Module:
    """One of `MODELS`, in float32; the same everywhere."""
    torch.manual_seed(seed)
    kind, head = MODELS[name]
    return adapted(kind, torch.float32) if kind == "LoRA" else tiny(kind, head, torch.float32)


def promise(**changes: Any) -> PrivacyConfig:
    """Clipped, reproducible draws; no noise unless `changes` say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PrivacyConfig(**{"noise_multiplier": 0, "clipping_norm": 0.5, "seed": 3, **changes})


def trainer(
    path: str, name: str, world: int, privacy: dict[str, Any] | None = None, data: Any = None, **changes: Any
) -> Any:
    """A trainer whose expected batch is `EXPECTED` on any number of processes."""
    fresh_accelerator()
    accumulation = EXPECTED // (MICRO * world)
    values = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": accumulation, "max_steps": STEPS,
        **({"ddp_backend": "gloo"} if world > 1 else {}), **changes,
    }  # fmt: skip
    collator = pad if MODELS[name][1] == "sequence" else pad_for_language
    parts = {"train_dataset": rows() if data is None else data, "data_collator": collator}
    return make(Path(path), built(name), promise(**(privacy or {})), parts=parts, **values)


def trained(path: str, name: str, world: int, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The parameters after `STEPS` steps through Trainer, the ledger's entries and what was logged."""
    run = trainer(path, name, world, privacy, logging_steps=1, **changes)
    run.train()
    return {
        "parameters": gathered(run.model),
        "steps": run.ledger.steps,
        "report": run.privacy_report().to_dict() if hasattr(run.privacy_report(), "to_dict") else None,
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "wrapped": type(run.model_wrapped).__name__,
    }


def trained_in_shards(path: str, name: str, world: int, *rest: Any, **changes: Any) -> dict[str, Any]:
    """As `trained`, under FSDP2 as accelerate sets it up."""
    # accelerate splits BERT's embeddings and then what is in them, which torch refuses; so only the layers are named.
    layers = {"transformer_layer_cls_to_wrap": ["BertLayer"]} if name == "bert" else {}
    with fsdp2_on_cpu():
        config = {"version": 2, **SHARDS, **layers}
        return trained(path, name, world, *rest, fsdp=True, fsdp_config=config, **changes)


@contextmanager
def fsdp2_on_cpu() -> Iterator[None]:
    """accelerate takes no plugin for FSDP on a CPU, and would use DDP without a word; here it takes it."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


def fresh_accelerator() -> None:
    """As at the start of a process; the process group stays."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    wholes = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name: whole.detach().clone() for name, whole in wholes.items()}


def farthest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)
