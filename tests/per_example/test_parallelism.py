"""Ways to spread a model that are refused by name, and the two that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType
from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.training.refusals import refuse_parallel_model


def trainer(kind: DistributedType, is_fsdp2: bool = False, version: int | None = None, **changes: Any) -> Any:
    config = SimpleNamespace(**{f"{k}_size": changes.pop(k, 1) for k in ("tp", "cp", "sp", "dp_replicate")})
    plugin = None if version is None else SimpleNamespace(fsdp_version=version)
    accelerator = SimpleNamespace(
        distributed_type=kind, num_processes=2, is_fsdp2=is_fsdp2, parallelism_config=config,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    values = {"is_deepspeed_enabled": False, "is_fsdp_enabled": version is not None, **changes}
    return SimpleNamespace(accelerator=accelerator, args=SimpleNamespace(fsdp=version is not None), **values)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (trainer(DistributedType.MULTI_GPU, tp=2), "tensor parallelism"),
        (trainer(DistributedType.MULTI_GPU, cp=2), "context parallelism"),
        (trainer(DistributedType.MULTI_GPU, sp=2), "sequence parallelism"),
        (trainer(DistributedType.FSDP, True, 2, dp_replicate=2), "HSDP"),
        (trainer(DistributedType.FSDP, False, 1), "FSDP1"),
        (trainer(DistributedType.MULTI_CPU, False, 2), "MULTI_CPU, where FSDP was asked for"),
        (trainer(DistributedType.DEEPSPEED, is_deepspeed_enabled=True), "DeepSpeed"),
        (trainer(DistributedType.MEGATRON_LM), "MEGATRON_LM"),
        (trainer(DistributedType.XLA), "XLA"),
        (trainer(DistributedType.MULTI_GPU, is_distributed_loading_by_transformers=True), "Transformers' own sharding"),
    ],
)
def test_refused(found: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        refuse_parallel_model(found, nn.Linear(1, 1))
    assert "FSDP2" in caught.value.fix


@pytest.mark.parametrize(
    "known",
    [trainer(DistributedType.MULTI_GPU), trainer(DistributedType.MULTI_CPU), trainer(DistributedType.FSDP, True, 2)],
)
def test_known(known: Any) -> None:
    refuse_parallel_model(known, nn.Linear(1, 1))
