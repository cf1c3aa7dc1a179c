"""What the processes of a gang do together; each function also runs in one process by itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from hf_dp import PrivacyConfig
from tests.e2e.workbench import make, pad, pad_for_language, parameters, rows
from tests.zoo import adapted, tiny

STEPS, EXPECTED, MICRO = 5, 8, 2
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
        "parameters": parameters(run.model),
        "steps": run.ledger.steps,
        "report": run.privacy_report().to_dict() if hasattr(run.privacy_report(), "to_dict") else None,
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "wrapped": type(run.model_wrapped).__name__,
    }


def fresh_accelerator() -> None:
    """As at the start of a process; the process group stays."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def farthest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)
