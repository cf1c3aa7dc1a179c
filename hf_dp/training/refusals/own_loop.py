"""What a loop of one's own brings with it, and a private run cannot use: wrappers, processes and optimizers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.config import PrivacyConfig
from hf_dp.config.ranges import is_count, shown
from hf_dp.errors import ConfigurationError
from hf_dp.launched import is_one_of_many
from hf_dp.per_example.sharding import is_sharded
from hf_dp.step.written import plain_optimizer
from hf_dp.training.refusals.choices import BY_METRICS

# Wrappers that compute gradients in a way of their own; by name, since some are of libraries that are not there.
_WRAPPERS = {
    "DataParallel": "it splits batches and sums gradients behind the clipping",
    "DeepSpeedEngine": "its engine applies gradients inside backward, so there is no place for clipping and noise",
    "FullyShardedDataParallel": "FSDP1 reduces gradients behind the clipping",
    "OptimizedModule": "compiled graphs use parameters where no rule sees them",
}

# Of torch's DataLoader: how rows are read, not which.
_OPTIONS = {
    *("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"),
    *("pin_memory", "pin_memory_device"),
}


def refuse_own_settings(
    sizes: Mapping[str, Any], options: Mapping[str, Any], output_dir: Any, loss: Any
) -> Path | None:
    """Refuses settings of a loop of one's own (`ConfigurationError`).

    Args:
        sizes: numbers of examples and steps.
        options: of `DataLoader`, of which none may draw or order batches otherwise.
        output_dir: for checkpoints.
        loss: a function, of which nothing else is known yet.

    Returns:
        The folder for these, if there shall be any.
    """
    _refuse_sizes(sizes)
    _refuse_options(options)
    _refuse_processes()
    if not callable(loss):
        raise ConfigurationError(
            f"loss={shown(loss)}.",
            why="it is called for each micro-batch, and clipping needs each example's own loss.",
            fix="give a function loss(model, batch) that returns one loss for each example, or leave it out for that "
            "of the model's own kind.",
        )
    if output_dir is None or (isinstance(output_dir, (str, os.PathLike)) and str(output_dir)):
        return None if output_dir is None else Path(output_dir)
    raise ConfigurationError(
        f"output_dir={shown(output_dir)}.",
        why="checkpoints, with the ledger of what was spent, would be written there.",
        fix="give a folder, such as output_dir='out', or leave it out where there shall be no checkpoints.",
    )


def _refuse_sizes(sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        if not is_count(value, at_least=1):
            raise ConfigurationError(
                f"{name}={shown(value)}.",
                why="the sampling probability and the number of steps, which are accounted for, follow from these.",
                fix="give a whole number of at least 1.",
            )


def _refuse_options(options: Mapping[str, Any]) -> None:
    if others := sorted({*options} - _OPTIONS):
        raise ConfigurationError(
            f"PrivateRun with {', '.join(others)}.",
            why="batches are drawn, ordered and collated as epsilon accounts for them, and in no other way.",
            fix=f"leave it out; of DataLoader's options there are {', '.join(sorted(_OPTIONS))}.",
        )


def refuse_no_output_dir(output_dir: Path | None, what: str) -> Path:
    """The directory; refuses `what` reads or writes checkpoints, where there is none (`ConfigurationError`)."""
    if output_dir is None:
        raise ConfigurationError(
            f"{what} without output_dir.",
            why="the checkpoints of a run lie beside the key with which they are sealed.",
            fix="make the run with PrivateRun(..., output_dir=...).",
        )
    return output_dir


def unwrapped(model: Any) -> nn.Module:
    """The module in DistributedDataParallel, or the plain one.

    Raises:
        ConfigurationError: anything else, with its name.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    kind = type(model).__name__
    if (base := next((base.__name__ for base in type(model).__mro__ if base.__name__ in _WRAPPERS), None)) is not None:
        raise ConfigurationError(
            f"PrivateRun with a model in {kind}.",
            why=f"{_WRAPPERS[base]}.",
            fix="pass the plain model, or one in DistributedDataParallel.",
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"PrivateRun with {kind} for a model.",
            why="per-example gradients are those of a torch module's parameters.",
            fix="pass a torch.nn.Module.",
        )
    _refuse_shards(model)
    return model


def _refuse_processes() -> None:
    if is_one_of_many() and ranks.world_size() == 1:
        raise ConfigurationError(
            "PrivateRun in one of several processes, and no process group.",
            why="each would train alone, with a budget of its own, on the same data.",
            fix="make the group first: accelerate.Accelerator(), or torch.distributed.init_process_group().",
        )


def refuse_own_optimizer(optimizer: Any, model: nn.Module, scheduler: Any, privacy: PrivacyConfig) -> None:
    """Refuses what is no optimizer, those that move weights otherwise than by the gradient as it is, and rates that
    could follow from the losses of the steps.

    Raises:
        ConfigurationError: with its name.
    """
    _refuse_shards(model)
    inner = plain_optimizer(optimizer)
    kind = type(inner).__name__
    if not hasattr(inner, "param_groups") or not hasattr(inner, "step"):
        raise ConfigurationError(
            f"begin() with {kind} for an optimizer.",
            why="one optimizer moves all parameters by the gradient of a private step, and this is none.",
            fix="pass the optimizer itself, such as torch.optim.AdamW(model.parameters()); for several rates one with "
            'groups of parameters: AdamW([{"params": head, "lr": 1e-3}, {"params": body, "lr": 1e-4}]).',
        )
    if getattr(optimizer, "scaler", None) is not None:
        raise ConfigurationError(
            f"{kind} with a scaler of losses (mixed_precision='fp16').",
            why="it divides the noise by the scale and skips steps depending on the data.",
            fix="use mixed_precision='bf16', or float32.",
        )
    if any("train_mode" in group for group in inner.param_groups):  # schedule-free ones
        raise ConfigurationError(
            f"{kind}, which exchanges weights between training and evaluation, in a loop of one's own.",
            why="that cannot be told from weights that something else has moved between two steps.",
            fix="use DPTrainer, which switches it, or another optimizer.",
        )
    of_rates = getattr(scheduler, "scheduler", scheduler)
    if of_rates is not None and not all(hasattr(of_rates, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigurationError(
            f"begin() with {type(of_rates).__name__} for a scheduler.",
            why="what it knows of the rates is saved in checkpoints, and this has no state_dict().",
            fix="pass the scheduler itself; several as one torch.optim.lr_scheduler.SequentialLR or ChainedScheduler.",
        )
    if isinstance(scheduler, AcceleratedScheduler):
        _refuse_a_step_for_each_process(scheduler)
    kinds = [type(one) for one in (of_rates, *getattr(of_rates, "_schedulers", ()))]
    by_metric = {base.__name__ for kind in kinds for base in kind.__mro__} & {*BY_METRICS.values()}
    if by_metric and not privacy.withhold_non_private_logs:
        raise ConfigurationError(
            f"begin() with {by_metric.pop()} for a scheduler.",
            why="it chooses rates by a number that it is given, and the mean loss that step() returns is of private "
            "data without noise: weights would follow from it, and epsilon would not say so.",
            fix="take PrivacyConfig(withhold_non_private_logs=True), with which step() returns 0, and a metric of "
            "data whose owners agreed; or a scheduler that goes by steps.",
        )


def _refuse_a_step_for_each_process(scheduler: AcceleratedScheduler) -> None:
    several = ranks.world_size()
    if several > 1 and scheduler.step_with_optimizer and not scheduler.split_batches:
        raise ConfigurationError(
            f"begin() with a scheduler that accelerate has prepared, in {several} processes.",
            why=f"accelerate lets it go {several} times as fast, since its own loaders have fewer batches; here "
            "a step is one whatever the number of processes is, and rates would be at their end too soon.",
            fix="leave the scheduler out of accelerator.prepare(), or make "
            "Accelerator(step_scheduler_with_optimizer=False).",
        )


def _refuse_shards(model: nn.Module) -> None:
    if is_sharded(model):
        raise ConfigurationError(
            "PrivateRun with a model in shards (FSDP2, or tensor parallelism).",
            why="what a loop of one's own saves and resumes is whole on every rank.",
            fix="use DPTrainer, which trains under FSDP2, or PrivateRun under DDP.",
        )
