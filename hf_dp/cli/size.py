"""`hf-dp size`: what a private training of a model takes on each rank, before it is loaded."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.cli.common import AsJson, count, print_json, refusals
from hf_dp.cli.costs import budgets_of_groups, positive

_FEW_BITS = ("int8", "nf4")
# What is added up: of activations nothing is known.
_TOGETHER = {"memory": "without activations", "sent in one step": "in all"}


def size(
    model: Annotated[str, typer.Option(help="A model's name or directory: its configuration is read, no weights.")],
    lora_rank: Annotated[int | None, typer.Option(min=1, help="LoRA on every matrix of the blocks.")] = None,
    length: Annotated[int, count(help="Positions of each example.")] = 512,
    micro_batch: Annotated[int, count(help="Examples at a time (per_device_train_batch_size).")] = 1,
    world_size: Annotated[int, count(help="Ranks.")] = 1,
    batch_size: Annotated[
        float | None, typer.Option(help="Expected logical batch; without it, a micro-batch on each rank.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GB of each rank's GPU: in how many passes a step fits.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, int8 or nf4: of frozen weights, and what is computed."),
    ] = None,
    group: Annotated[list[str] | None, typer.Option(help="Of clipping by groups, PATTERN=WEIGHT of one.")] = None,
    as_json: AsJson = False,
) -> None:
    """What memory each rank needs, what it sends, and how long a step takes beside an ordinary one, by arithmetic.

    Example: 8 ranks, each with 8 rows of 1,024 positions at a time:

        hf-dp size --model DIRECTORY --world-size 8 --length 1024 --micro-batch 8

    With --gpu-memory, whether a step fits there in one pass, and otherwise
    what does: smaller micro-batches, or PrivacyConfig(passes=2)
    (docs/scaling.md). What a budget costs is for `hf-dp plan`.

    Exit codes: 0, answered; 2, refused: there is no such model.
    """
    with refusals(), Console(stderr=True).status("Computing"):
        for option, value in {"--batch-size": batch_size, "--gpu-memory": gpu_memory}.items():
            if value is not None:
                positive(option, value)
        groups = budgets_of_groups(group or [], 1.0).get("clipping_groups", {})
        answer = sizes(model, lora_rank, world_size, length, micro_batch, batch_size, gpu_memory, dtype, groups)
    if as_json:
        print_json(answer)
        return
    console = Console()
    console.print(size_table(answer["per_rank"], world_size, answer["dtype"]))
    console.print(speed_in_words(answer["time_to_ordinary"], answer["busy_from_micro_batch"]), highlight=False)
    for line in [] if gpu_memory is None else fits_in_words(answer["fits"], gpu_memory):
        console.print(line, highlight=False)


def sizes(
    model: str,
    lora_rank: int | None,
    world_size: int,
    length: int,
    micro_batch: int,
    batch_size: float | None,
    gpu_memory: float | None = None,
    dtype: str | None = None,
    groups: Collection[str] = (),
) -> dict[str, Any]:
    """Bytes on each rank for both strategies; without a batch size, of a step of one micro-batch on each.

    Frozen weights, and what is computed, are counted in `dtype`, or in that of the model's configuration, or in
    float32; in "int8" and "nf4" the matrices of blocks alone, the rest in bfloat16, and under DDP alone. With a
    `gpu_memory` in GB also in which numbers of passes each fits, activations apart. `groups` are the patterns of
    clipping by groups, which is in one pass.

    Raises:
        ConfigurationError: no such model, patterns that are not of its parameters, or few bits without LoRA.
    """
    # torch and transformers take seconds to import.
    import torch

    from hf_dp.accounting import GroupClipping
    from hf_dp.clipping.groups import Groups
    from hf_dp.errors import ConfigurationError
    from hf_dp.planning import memory, sized, speed
    from hf_dp.planning.loaded import loaded_as

    size = sized.model_size(model, lora_rank)
    loaded = loaded_as(dtype, size.dtype or torch.float32)
    if loaded.bytes_of_matrices is not None and lora_rank is None:
        raise ConfigurationError(
            f"--dtype {dtype} without --lora-rank.",
            why="weights in so few bits stay frozen, and there would be nothing to train.",
            fix="give --lora-rank, or --dtype bfloat16.",
        )
    at_once = max(1, world_size) * max(1, micro_batch)
    parts = 1 if batch_size is None else max(1, math.ceil(batch_size / at_once))
    members: list[frozenset[str]] = []
    if groups:
        rule = Groups(GroupClipping(norm=1.0, groups=tuple((pattern, 1.0) for pattern in groups)))
        members = [one.names for one in rule.groups({p.names[0]: p.names for p in size.parameters if p.trained})]
    found: dict[str, dict[str, Any]] = {}
    fitting: dict[str, dict[str, Any]] = {}
    strategies: tuple[memory.Strategy, ...] = ("DDP", "FSDP2") if loaded.bytes_of_matrices is None else ("DDP",)
    for strategy in strategies:
        estimated = functools.partial(
            memory.estimate, size, strategy, world_size, length=length, micro_batches=parts,
            bytes_computed=loaded.dtype.itemsize, bytes_of_matrices=loaded.bytes_of_matrices, groups=members,
        )  # fmt: skip
        by_passes = {p: estimated(micro_batch=micro_batch, passes=p) for p in ((1,) if groups else (1, 2))}
        one = by_passes[1]
        found[strategy] = {
            "memory": {**one.memory, _TOGETHER["memory"]: one.total_memory},
            "sent in one step": {**one.sent, _TOGETHER["sent in one step"]: one.total_sent},
        }
        if gpu_memory is not None:
            taken = {passes: made.total_memory for passes, made in by_passes.items()}
            fits = [passes for passes, total in taken.items() if total <= gpu_memory * 1e9]
            smaller = (micro_batch >> halvings for halvings in range(1, max(1, micro_batch).bit_length()))
            fewer: dict[int, int | None] = dict.fromkeys(by_passes)
            for rows, passes in itertools.product(smaller, by_passes if 1 not in fits else ()):
                made = estimated(micro_batch=rows, micro_batches=-(-parts * micro_batch // rows), passes=passes)
                if made.total_memory <= gpu_memory * 1e9:
                    fewer[passes] = fewer[passes] or rows
            both = None if fits or fewer[1] else fewer.get(2)
            fitting[strategy] = {
                "passes": fits, _TOGETHER["memory"]: taken, "micro_batch": fewer[1], "micro_batch_in_two": both,
            }  # fmt: skip
    predicted = {
        name: speed.predicted_ratio(size, gpu, length=length, micro_batch=micro_batch, micro_batches=parts)
        for name, gpu in speed.GPUS.items()
    }
    answer = {
        "parameters": size.total,
        "trained": size.trained,
        "dtype": dtype or str(loaded.dtype).removeprefix("torch."),
    }
    busy = {name: speed.busy_from(size, gpu, length=length) for name, gpu in speed.GPUS.items()}
    answer |= {"per_rank": found, "time_to_ordinary": predicted, "busy_from_micro_batch": busy}
    return answer if gpu_memory is None else {**answer, "gpu_memory": gpu_memory, "fits": fitting}


def fits_in_words(fits: dict[str, dict[str, Any]], gpu_memory: float) -> list[str]:
    """For each strategy whether a step fits, activations apart, and what is proposed where it does not."""
    told = []
    for strategy, one in fits.items():
        gigabytes = {passes: f"{total / 1e9:.2f} GB" for passes, total in one[_TOGETHER["memory"]].items()}
        if 1 in one["passes"]:
            what = f"fits in one pass ({gigabytes[1]})"
        else:
            of_passes = " and ".join(f"{total} in {('one', 'two')[p - 1]}" for p, total in gigabytes.items())
            what = f"does not fit in one pass ({of_passes})"
            ways = [f"in micro-batches of {one['micro_batch']}"] if one["micro_batch"] else []
            ways += ["in two (slower): PrivacyConfig(passes=2)"] if 2 in one["passes"] else []
            both = one["micro_batch_in_two"]
            ways += [f"in micro-batches of {both} and two passes (slower): PrivacyConfig(passes=2)"] if both else []
            otherwise = f"but {', or '.join(ways)}" if ways else "nor otherwise (shorter rows and adapters take less)"
            what += f", {otherwise},"
        told.append(f"{strategy} {what} on a GPU of {gpu_memory:g} GB, before the activations.")
    return told


def speed_in_words(predicted: dict[str, float], busy: dict[str, int]) -> str:
    """What a private step is predicted to take, beside an ordinary one, and in how large micro-batches."""
    ratios = ", ".join(f"{ratio:.2f} x on one {name}" for name, ratio in predicted.items())
    told = f"A step is predicted to take {ratios} what an ordinary one takes, in bf16: by arithmetic, not measured."
    fewest = ", ".join(f"{rows} on one {name}" for name, rows in busy.items() if rows > 1)
    waits = f" In micro-batches of fewer than about {fewest} it takes longer: the GPU waits for Python there."
    return told + (waits if fewest else "")


def size_table(sizes: dict[str, Any], world_size: int, dtype: str) -> Table:
    table = Table(
        title="One rank, GB" if world_size == 1 else f"Each of {world_size} ranks, GB",
        caption="The activations of ordinary training come on top, and are often the most. Trained weights and sums "
        f"count in float32, frozen weights and factors in {dtype} (--dtype)"
        f"{', but for what is no matrix of a block, and what is computed: bfloat16' if dtype in _FEW_BITS else ''}.",
    )
    table.add_column("")
    for strategy in sizes:
        table.add_column(strategy, justify="right")
    for part in ("memory", "sent in one step"):
        together = _TOGETHER[part]
        rows = dict.fromkeys(row for one in sizes.values() for row in one[part] if row != together)
        for row, label in {**dict.fromkeys(rows), together: f"{part}, {together}"}.items():
            values = [one[part].get(row) for one in sizes.values()]
            table.add_row(label or row, *("-" if v is None else f"{v / 1e9:.2f}" for v in values))
        table.add_section()
    return table
