"""Training arguments and parts of a Trainer that a private run cannot honour, each refused by name."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from hf_dp.config.ranges import is_count, is_number, shown
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import unchanged_global_state
from hf_dp.training.sft import is_sft_trainer

_DEFAULT_MAX_GRAD_NORM = 1.0
# Sizes in accelerate's ParallelismConfig.
_PARALLELISMS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "sp": "sequence parallelism",
    "dp_replicate": "HSDP (replicas of sharded models)",
}
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
_RATES = {
    "learning_rate": (1e30, "weights would become no numbers, or learn backwards"),
    "weight_decay": (1e6, "weights would become no numbers, or grow without end"),
    "adam_epsilon": (1e6, "no step would move anything"),
    "label_smoothing_factor": (1.0, "at 1 nothing is left of the labels, and outside of 0 to 1 they are no shares"),
    "num_train_epochs": (math.inf, "the number of steps follows from it"),
}
_KNOWN_TYPES = {"NO", "MULTI_CPU", "MULTI_GPU", "FSDP"}


def private_arguments(args: Any) -> Any:
    """A copy of the user's `TrainingArguments` in which one dataloader item is one step and nothing clips twice.

    Raises:
        ConfigurationError: an argument that would break the guarantee.
    """
    for found, why, fix in _conflicts(args):
        raise ConfigurationError(found, why=why, fix=fix)
    private = copy.copy(args)
    private.gradient_accumulation_steps = 1
    private.max_grad_norm = 0.0
    if getattr(args, "trackio_static_space_id", False) is None:
        # Unless a space was named, Trackio would publish the logged losses with every push.
        private.trackio_static_space_id = False
    return private


def _conflicts(args: Any) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []

    def refuse(condition: Any, what: str, why: str, fix: str) -> None:
        if condition:
            found.append((what, why, fix))

    strategy = getattr(args, "train_sampling_strategy", "random")
    optimizer = str(getattr(args.optim, "value", args.optim))
    refuse(
        args.fp16,
        "fp16=True.",
        "its loss scaling divides the noise by the scale and skips steps depending on the data.",
        "use bf16=True, or float32.",
    )
    refuse(
        args.max_grad_norm not in (0, None, _DEFAULT_MAX_GRAD_NORM),
        f"max_grad_norm={args.max_grad_norm}.",
        "it clips the noisy average once more; the clipping that privacy rests on is per example.",
        "leave max_grad_norm out (hf_dp sets it to 0) and set PrivacyConfig(clipping_norm=...).",
    )
    for name in _COUNTS:
        value = getattr(args, name)
        refuse(
            not is_count(value) and not (name == "max_steps" and value == -1),
            f"{name}={shown(value)}.",
            "the sampling probability and the number of steps, which are accounted for, follow from it.",
            "give a whole number of at least 1.",
        )
    for name, (limit, means) in _RATES.items():
        value = getattr(args, name)
        refuse(
            not (is_number(value) and 0 <= value < limit),
            f"{name}={shown(value)}.",
            f"{means}, and the budget would be spent for it.",
            "give a finite number of at least 0" + (f" and below {limit:g}." if limit < math.inf else "."),
        )
    refuse(
        strategy != "random" or getattr(args, "group_by_length", False),
        f"train_sampling_strategy={strategy!r}.",
        "the guarantee holds for Poisson sampling, where every example is drawn independently; this strategy is not.",
        "leave it at 'random'; hf_dp draws the batches itself.",
    )
    refuse(
        args.auto_find_batch_size,
        "auto_find_batch_size=True.",
        "it starts over after steps that were already taken, so they would not be counted.",
        "set per_device_train_batch_size to what fits; it is only the micro-batch here.",
    )
    refuse(
        args.deepspeed,
        "DeepSpeed.",
        "its engine applies gradients inside backward, so there is no place for clipping and noise.",
        "use FSDP2 (fsdp_version: 2 in accelerate's config), which shards as much.",
    )
    refuse(
        args.n_gpu > 1,
        f"nn.DataParallel on {args.n_gpu} devices.",
        "it splits batches and sums gradients behind the clipping.",
        "start one process for each device (torchrun or accelerate launch), or make one visible.",
    )
    refuse(
        getattr(args, "use_liger_kernel", False),
        "use_liger_kernel=True.",
        "its fused kernels use parameters where no rule sees them.",
        "leave it out.",
    )
    refuse(
        args.torch_compile,
        "torch_compile=True.",
        "compiled graphs use parameters where no rule sees them.",
        "leave it out.",
    )
    refuse(
        "lomo" in optimizer or "layerwise" in optimizer,
        f"optim={optimizer!r}.",
        "it updates parameters during the backward pass, before clipping and noise.",
        "use an optimizer that steps after backward, such as the default adamw_torch.",
    )
    refuse(
        args.neftune_noise_alpha is not None,
        f"neftune_noise_alpha={args.neftune_noise_alpha}.",
        "its noise on the embeddings is scaled by the padded length, so one long example changes its neighbours.",
        "leave it out; the noise of private training regularises as well.",
    )
    return found


def refuse_dataset(dataset: Any) -> None:
    """Refuses training data that cannot be drawn from example by example.

    Raises:
        ConfigurationError: with its type.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise ConfigurationError(
            f"train_dataset is {kind} with the keys {', '.join(map(str, dataset))}.",
            why="its length is the number of its parts, not of its examples.",
            fix="pass one of its parts, for example train_dataset=data['train'].",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigurationError(
            f"train_dataset is {kind}, which can only be iterated.",
            why="Poisson sampling draws every example independently, so it needs their number and access by index.",
            fix="use a map-style dataset (for a streamed one: Dataset.from_generator or without streaming=True).",
        )
    try:
        n = len(dataset)
        if n:
            with unchanged_global_state():
                dataset[n - 1]
        again = len(dataset)
    except (LookupError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ConfigurationError(
            f"train_dataset is {kind}, whose last example cannot be read, or that has no length "
            f"({type(error).__name__}: {shown(error)}).",
            why="the sampling probability follows from its length, and each example must be there when it is drawn.",
            fix="correct __len__ and __getitem__ so that dataset[len(dataset) - 1] is its last example.",
        ) from error
    if again != n:
        raise ConfigurationError(
            f"train_dataset is {kind}, whose length was {n} and then {again}.",
            why="the sampling probability follows from it, and must be the same in the whole run.",
            fix="make a dataset of fixed length: one epoch's rows, or all rows with random choices in __getitem__.",
        )


def refuse_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuses optimizers that ask for the gradient again, or that would train nothing. None is in order.

    Raises:
        ConfigurationError: with its name.
    """
    if optimizer is None:
        return
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the gradient several times in one step.",
            why="each evaluation would be one more release, and none of them would have noise.",
            fix="use an optimizer that takes one gradient for each step, such as the default adamw_torch.",
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in trained for p in model.parameters() if p.requires_grad):
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds none of the model's trainable parameters.",
            why="nothing would be trained, and epsilon would be spent for nothing.",
            fix="make the optimizer when the model is complete (after adding adapters, say), or leave it out.",
        )


def refuse_overrides(trainer: Any, mixin: type, base: type) -> None:
    """Refuses a Trainer whose own methods would bypass the private step, or whose loss would be ignored.

    Raises:
        ConfigurationError: with the method and the class that defines it.
    """
    for method in ("training_step", "get_train_dataloader"):
        owner = _owner(trainer, method)
        if owner is not mixin and not issubclass(mixin, owner):
            raise ConfigurationError(
                f"{owner.__name__}.{method} comes before DPTrainerMixin's.",
                why="it would run instead of the private one, and nothing would be clipped, noised or counted.",
                fix="put DPTrainerMixin first: class MyTrainer(DPTrainerMixin, MyBaseTrainer), and do not override it.",
            )
    owner = _owner(trainer, "_get_train_sampler")
    if owner is not base:
        raise ConfigurationError(
            f"{owner.__name__} chooses its own training sampler.",
            why="a weighted or ordered sampler draws examples with other probabilities than are accounted for.",
            fix="leave the sampler to hf_dp; to balance classes, weight the per-example loss.",
        )
    has_own_loss = _owner(trainer, "compute_per_example_loss") is not mixin
    owner = _owner(trainer, "compute_loss")
    is_known = owner is base or is_sft_trainer(owner)
    if not (has_own_loss or (is_known and trainer.compute_loss_func is None)):
        name = "compute_loss_func" if is_known else f"{owner.__name__}.compute_loss"
        raise ConfigurationError(
            f"{name} gives one loss for the whole batch.",
            why="clipping needs each example's own loss; training would silently use another loss than yours.",
            fix="also override compute_per_example_loss(model, inputs) to return one loss for each example.",
        )


def refuse_parallel_model(trainer: Any, model: nn.Module) -> None:
    """Refuses what spreads a model or a batch in another way than DDP and FSDP2.

    Raises:
        ConfigurationError: with its name.
    """
    name = _unknown_parallelism(trainer, model)
    if name is not None:
        raise ConfigurationError(
            f"the model is under {name}.",
            why="where it splits examples or reduces gradients, nothing is known to clip each example's and to add "
            "the noise once.",
            fix="pass the plain model; start it with torchrun or accelerate launch, which use DDP, or choose FSDP2 "
            "(fsdp_version: 2 in accelerate's config).",
        )


def _unknown_parallelism(trainer: Any, model: nn.Module) -> str | None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return type(model).__name__
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "Transformers' own sharding (from_pretrained with a distributed_config)"
    accelerator = trainer.accelerator
    config = getattr(accelerator, "parallelism_config", None)
    for kind, words in _PARALLELISMS.items():
        if (getattr(config, f"{kind}_size", None) or 1) > 1:
            return words
    if (trainer.args.fsdp or trainer.is_fsdp_enabled) and not getattr(accelerator, "is_fsdp2", False):
        version = getattr(getattr(accelerator.state, "fsdp_plugin", None), "fsdp_version", None)
        return "FSDP1" if version == 1 else f"{accelerator.distributed_type}, where FSDP was asked for"
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    return None if kind in _KNOWN_TYPES or accelerator.num_processes == 1 else kind


def _owner(trainer: Any, method: str) -> type:
    return next(kind for kind in type(trainer).__mro__ if method in vars(kind))
