"""What of `hf-dp plan` is about a model: memory and communication of each rank."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table


def sizes(
    model: str, lora_rank: int | None, world_size: int, length: int, micro_batch: int, batch_size: float | None
) -> dict[str, Any]:
    """Bytes on each rank for both strategies; without a batch size, of a step of one micro-batch on each."""
    # torch and transformers take seconds to import.
    from hf_dp.planning import memory, speed

    size = memory.model_size(model, lora_rank)
    at_once = max(1, world_size) * max(1, micro_batch)
    parts = 1 if batch_size is None else max(1, math.ceil(batch_size / at_once))
    found = {}
    for strategy in ("DDP", "FSDP2"):
        one = memory.estimate(size, strategy, world_size, length=length, micro_batch=micro_batch, micro_batches=parts)
        found[strategy] = {
            "memory": {**one.memory, "in all": one.total_memory},
            "sent in one step": {**one.sent, "in all": one.total_sent},
        }
    predicted = {
        name: speed.predicted_ratio(size, gpu, length=length, micro_batch=micro_batch, micro_batches=parts)
        for name, gpu in speed.GPUS.items()
    }
    return {"parameters": size.total, "trained": size.trained, "per_rank": found, "time_to_ordinary": predicted}


def speed_in_words(predicted: dict[str, float]) -> str:
    """What a private step is predicted to take, beside an ordinary one."""
    ratios = ", ".join(f"{ratio:.2f} x on one {name}" for name, ratio in predicted.items())
    return f"A step is predicted to take {ratios} what an ordinary one takes, in bf16: by arithmetic, not measured."


def size_table(sizes: dict[str, Any], world_size: int) -> Table:
    table = Table(
        title=f"Each of {world_size} ranks, GB",
        caption="Weights, gradients and factors; the activations of ordinary training come on top.",
    )
    table.add_column("")
    for strategy in sizes:
        table.add_column(strategy, justify="right")
    for part in ("memory", "sent in one step"):
        rows = dict.fromkeys(row for one in sizes.values() for row in one[part] if row != "in all")
        for row, label in {**dict.fromkeys(rows), "in all": f"{part}, in all"}.items():
            values = [one[part].get(row) for one in sizes.values()]
            table.add_row(label or row, *("-" if v is None else f"{v / 1e9:.2f}" for v in values))
        table.add_section()
    return table
