"""What ranks do in shards whose examples come to experts that have modules of their own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_dp.ranks as ranks
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import preflight, record
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.per_example.sharding import as_sums, like
from tests.distributed.tasks import device

EXPERTS, COEFFICIENTS = 4, torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)


class Sorting(nn.Module):
    """Each token's expert is the remainder of its id; experts without a token are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * EXPERTS, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(EXPERTS))
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.embedding(ids).reshape(-1, 6)
        out, chosen = torch.zeros_like(rows), ids.reshape(-1) % EXPERTS
        for number, expert in enumerate(self.experts):
            own = torch.where(chosen == number)[0]
            if len(own):
                out.index_add_(0, own, expert(rows[own]))
        logits: Tensor = self.head((rows + out).view(*ids.shape, 6))
        return logits


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"]).transpose(1, 2)
    return F.cross_entropy(logits, batch["labels"], reduction="none").sum(1)


def batch_of(experts: list[int], seed: int, size: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([*experts, *(EXPERTS + one for one in experts)])
    chosen = ids[torch.randint(len(ids), (size, 7), generator=generator)]
    return {"ids": chosen, "labels": torch.randint(3, (size, 7), generator=generator)}


def summed(of_rank: list[list[int]], in_shards: bool, passes: int = 1) -> dict[str, Any]:
    """The weighted sum over the examples of all ranks, whose tokens come to these experts."""
    torch.manual_seed(0)
    model = Sorting().double().to(device())
    if in_shards:
        fully_shard(model, mesh=init_device_mesh(device().type, (ranks.world_size(),)))
    move = {name: value.to(device()) for name, value in batch_of([0, 1, 2, 3], 1, 5).items()}
    certificate = preflight(model, losses, move)
    total: dict[str, Tensor] = {}
    for experts in [of_rank[ranks.rank()]] if in_shards else of_rank:
        batch = {name: value.to(device()) for name, value in batch_of(experts, 5 + experts[0]).items()}
        found = (record if passes == 1 else record_in_two_passes)(model, losses, batch, certificate=certificate)
        sums = found.zeros()
        found.add_weighted_sum_(as_sums(sums, found.parameters), COEFFICIENTS.to(device()))
        for name, values in sums.items():
            whole: Any = like(values, found.parameters[name])
            whole = whole.full_tensor() if in_shards else whole
            total[name] = total.get(name, 0) + whole.cpu()
    return total


def refused_of_a_forgetful_model() -> str:
    """What is refused where each second pass gives the embedding, whose gradient comes last, no gradient."""
    model, passes = Sorting().double().to(device()), itertools.count(1)
    fully_shard(model, mesh=init_device_mesh(device().type, (ranks.world_size(),)))
    batch = {name: value.to(device()) for name, value in batch_of([0, 1], 1).items()}
    certificate = preflight(model, losses, batch)

    def forgetting(module: nn.Module, given: Any, rows: Tensor) -> Tensor:
        return rows.detach() if next(passes) % 2 == 0 else rows

    model.embedding.register_forward_hook(forgetting)
    found = record_in_two_passes(model, losses, batch, certificate=certificate)
    try:
        found.add_weighted_sum_(as_sums(found.zeros(), found.parameters), COEFFICIENTS.to(device()))
    except UnsupportedModelError as error:
        return str(error)
    return "nothing"
