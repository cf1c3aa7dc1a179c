"""What is sent in one private step, counted."""

from __future__ import annotations

import functools

from hf_dp.accounting import Ledger
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.certified import remembering
from tests.distributed.sharded import shard
from tests.distributed.tasks import MICRO, Collectives, built, collator_of, device, prepared, promise, rows_of


def sent_in_one_step(name: str, sharding: str | None, micro_batches: int) -> dict[str, list[int]]:
    """The elements of each collective of one private step, by the collective's name."""
    model = built(name).to(device())
    if sharding:
        shard(model, sharding)
    data, collate = rows_of(name), collator_of(name)
    entropy = Entropy(0)
    plan = Plan.make(promise(noise_multiplier=1.0), PoissonBatchSampler.of(len(data), 8, entropy), 9, entropy)
    certificate = remembering(preflight)(model, per_example_losses, prepared(collate(data[:5])))
    batches = [prepared(collate(data[i * MICRO : (i + 1) * MICRO])) for i in range(micro_batches)]
    engine = functools.partial(record, model, per_example_losses, certificate=certificate)
    with Collectives() as counted:
        private_gradient(model, engine, batches, plan, Ledger())
    found: dict[str, list[int]] = {}
    for kind, elements in counted.sent:
        found.setdefault(kind, []).append(elements)
    assert counted.dtypes.get("reduce_scatter_tensor", {"torch.float32"}) == {"torch.float32"}
    return found


def facts_of(name: str) -> dict[str, int]:
    """Numbers that a count is held against."""
    model = built(name)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    return {"parameters": len(trained), "elements": sum(trained), "largest": max(p.numel() for p in model.parameters())}
