"""Private steps by hand, on models that `fully_shard` splits: without Trainer, so that every part can be chosen."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger, sampling_terms
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import RankSampler, _OwnReads
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from hf_dp.randomness import Entropy
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.certified import remembering
from tests.distributed.tasks import MICRO, STEPS, built, collator_of, device, gathered, prepared, promise, rows_of


def shard(model: nn.Module, units: str = "blocks") -> nn.Module:
    """`fully_shard` on every block and on the whole; or on the whole alone; or with blocks in bfloat16."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    options: dict[str, Any] = {
        "mp_policy": bf16 if units == "bf16" else MixedPrecisionPolicy(),
        "mesh": init_device_mesh(device().type, (ranks.world_size(),)),
    }
    if units != "whole":
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        for name, blocks in lists.items():
            if not any(name.startswith(f"{other}.") for other in lists):
                for block in blocks:
                    fully_shard(block, **options)
    return fully_shard(model, **options)


def stepped(
    name: str,
    sharding: str | None = None,
    expected: int = 8,
    checkpointing: bool = False,
    optimizer: str = "SGD",
    privacy: dict[str, Any] | None = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """`steps` private steps; `sharding` is None for a model that every process holds whole."""
    model = built(name).to(device())
    if checkpointing:
        model.gradient_checkpointing_enable()
    if sharding:
        shard(model, sharding)
    config = promise(**(privacy or {}))
    data, own = rows_of(name), collator_of(name)

    def collate(examples: list[Any]) -> dict[str, Any]:
        return prepared(own(examples))

    entropy = Entropy.of_all_ranks(config.seed)
    sampler = sampler_of(sampling_terms(len(data), expected, config.to_dict()), len(data), entropy)
    plan, ledger = Plan.make(config, sampler, steps, entropy), Ledger()
    certificate = remembering(preflight)(model, per_example_losses, collate(data[:5]))
    share = RankSampler(sampler, ranks.rank(), ranks.world_size())
    collator, reads = LogicalBatchCollator(MICRO, collate, reproducible=True), _OwnReads(data, collate_nothing)
    # Where a gradient is zero but for rounding (a key's bias), Adam would take whole steps without such an epsilon.
    settings = {"lr": 0.1} if optimizer == "SGD" else {"lr": 1e-2, "eps": 1e-3}
    update = getattr(torch.optim, optimizer)(model.parameters(), **settings)
    sizes = []
    for step in range(steps):
        item = collator(reads.__getitems__(share.share(sampler.draw(step))))
        lacking = ranks.most(len(item["micro_batches"])) - len(item["micro_batches"])
        sizes.append(sum(len(next(iter(batch.values()))) for batch in item["micro_batches"]))
        total = private_gradient(
            model,
            functools.partial(record, model, per_example_losses, certificate=certificate),
            item["micro_batches"],
            plan,
            ledger,
            dummies=[collate(data[:1]) for _ in range(lacking)],
        )
        update.step()
        update.zero_grad()
    return {"parameters": gathered(model), "sizes": sizes, "loss": total.loss, "examples": total.examples}


def collate_nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
