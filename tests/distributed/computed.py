"""What ranks do in shards of a model whose layers compute from parameters alone what meets their data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_dp.ranks as ranks
from hf_dp.per_example import RULES, Bound, Dense, Outer, Rule, preflight, record
from hf_dp.per_example.sharding import as_sums, like
from tests.distributed.tasks import device


class Keeps(torch.autograd.Function):
    """A product that keeps its factors where no hook of saved tensors sees them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.kept = first, second
        return first * second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ctx.kept
        return gradients[0] * second, gradients[0] * first


def _bind(x: Any, w: Any, dims: Any, out: Any = None) -> Bound:
    return Bound(x, {"weight": w}, {"dims": dims})


def _forward(x: Any, operands: Any) -> Any:
    return torch.tensordot(x, operands.parameters["weight"], dims=1), (x,)


def _backward(saved: Any, operands: Any, gradient: Any, axis: Any, needs_input_gradient: bool) -> Any:
    factors = Outer(Dense(axis.positions(saved[0])), Dense(axis.positions(gradient)))
    return gradient @ operands.parameters["weight"].T, {"weight": factors}


# That of docs/rules.md.
OWN = {**RULES, torch.tensordot: Rule("tensordot", _bind, _forward, _backward)}


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.first, self.second = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.register_buffer("table", torch.randn(1, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "function":
            return x + self.linear(x).tanh() @ Keeps.apply(self.first, self.second)
        return x + self.linear(x).tanh() * torch.tensordot(self.table, self.first, dims=1)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"])
    return found.square().sum((1, 2))


def batch_of(seed: int, size: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(size, 5, 4, generator=draw, dtype=torch.float64).to(device())}


def summed_of_computed(kind: str, in_shards: bool) -> dict[str, Tensor]:
    """The sum over the examples of two ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(kind), Layer(kind)).double().to(device())
    if in_shards:
        mesh = init_device_mesh(device().type, (ranks.world_size(),))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
    certificate = preflight(model, losses, batch_of(1, 3), rules=OWN)
    total: dict[str, Tensor] = {}
    for rank in [ranks.rank()] if in_shards else range(2):
        found = record(model, losses, batch_of(2 + rank, 3 + rank), certificate=certificate, rules=OWN)
        sums = found.zeros()
        found.add_weighted_sum_(as_sums(sums, found.parameters), torch.ones(3 + rank, dtype=torch.float64))
        for name, values in sums.items():
            whole: Any = like(values, found.parameters[name])
            total[name] = total.get(name, 0) + (whole.full_tensor() if in_shards else whole).cpu()
    return total
