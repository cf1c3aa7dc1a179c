"""Training arguments that a private run cannot honour, each refused by name."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

from hf_dp.config import PrivacyConfig
from hf_dp.config.after import places_of
from hf_dp.config.ranges import is_count, is_number, shown
from hf_dp.errors import ConfigurationError

_DEFAULT_MAX_GRAD_NORM = 1.0
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
_FEW_BITS = ("fp16", "fp8")
_CLIPS = "it clips the noisy average once more; the clipping that privacy rests on is per example."
_LEAVE = "leave max_grad_norm out (hf_dp sets it to 0) and set PrivacyConfig(clipping_norm=...)."
_RATES = {
    "learning_rate": (1e30, "weights would become no numbers, or learn backwards"),
    "weight_decay": (1e6, "weights would become no numbers, or grow without end"),
    "adam_epsilon": (1e6, "no step would move anything"),
    "label_smoothing_factor": (1.0, "at 1 nothing is left of the labels, and outside of 0 to 1 they are no shares"),
    "num_train_epochs": (math.inf, "the number of steps follows from it"),
}


def private_arguments(args: Any, privacy: PrivacyConfig) -> Any:
    """A copy of the user's `TrainingArguments` in which one dataloader item is one step and nothing clips twice.

    Raises:
        ConfigurationError: an argument that would break the guarantee.
    """
    _refuse(_conflicts(args, privacy))
    private = copy.copy(args)
    private.gradient_accumulation_steps = 1
    private.max_grad_norm = 0.0
    if args.trackio_static_space_id is None:
        # Unless a space was named, Trackio would publish the logged losses with every push.
        private.trackio_static_space_id = False
    return private


def refuse_changed_arguments(args: Any, privacy: PrivacyConfig) -> None:
    """Refuses what was put into the copy of `private_arguments` since, before a training begins (`ConfigurationError`).

    The rest of what may be changed there is read when training begins, or was read when the trainer was made.
    """
    _refuse(_conflicts(args, privacy))
    refuse_changed_steps(args)


def refuse_changed_steps(args: Any) -> None:
    """Of these what Trainer reads in each step, and a callback may have put there since (`ConfigurationError`)."""
    if args.gradient_accumulation_steps != 1:
        raise ConfigurationError(
            f"trainer.args.gradient_accumulation_steps={args.gradient_accumulation_steps}, set after the trainer was "
            "made.",
            why="what its loader gives is a whole batch each time, and so many would be drawn and paid for before the "
            "optimizer moves once.",
            fix="leave it at 1 there, and give it to TrainingArguments: the expected batch size is settled when the "
            "trainer is made.",
        )
    if args.max_grad_norm != 0:  # of None Trainer makes an error after the first step
        raise ConfigurationError(
            f"trainer.args.max_grad_norm={args.max_grad_norm}, set after the trainer was made.", why=_CLIPS, fix=_LEAVE
        )


def _refuse(conflicts: list[tuple[str, str, str]]) -> None:
    for found, why, fix in conflicts:
        raise ConfigurationError(found, why=why, fix=fix)


def _conflicts(args: Any, privacy: PrivacyConfig) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []

    def refuse(condition: Any, what: str, why: str, fix: str) -> None:
        if condition:
            found.append((what, why, fix))

    optimizer = str(getattr(args.optim, "value", args.optim))
    # By the arguments or, where they say nothing, by accelerate's config or environment.
    chosen = args.mixed_precision
    refuse(
        args.fp16 or chosen in _FEW_BITS,
        "fp16=True." if args.fp16 else f"mixed precision {chosen!r}, as accelerate was told.",
        "its loss scaling divides the noise by the scale and skips steps depending on the data.",
        "use bf16=True, or float32.",
    )
    refuse(
        args.max_grad_norm not in (0, None, _DEFAULT_MAX_GRAD_NORM),
        f"max_grad_norm={args.max_grad_norm}.",
        _CLIPS,
        _LEAVE,
    )
    for name in _COUNTS:
        value = getattr(args, name)
        refuse(
            not is_count(value, at_least=1) and not (name == "max_steps" and value == -1),
            f"{name}={shown(value)}.",
            "the sampling probability and the number of steps, which are accounted for, follow from it.",
            "give a whole number of at least 1.",
        )
    probability, size = privacy.sampling_probability, privacy.dataset_size
    named, once = f"sampling_probability={probability}", f"in {math.ceil(1 / (probability or 1))} steps"
    if size is not None:
        named, once = f"dataset_size={size}", f"in as many steps as batches make {size} examples"
    refuse(
        privacy.hides_n and args.max_steps == -1,
        f"num_train_epochs={shown(args.num_train_epochs)} and no max_steps, with {named}.",
        "an epoch is n examples, and n is secret: the number of steps must be a number of its own.",
        f"give max_steps; {once} each example is drawn once on average.",
    )
    refuse(
        os.path.realpath(str(args.output_dir)) in map(os.path.realpath, places_of(privacy.after)),
        f"output_dir={shown(args.output_dir)} with after={shown(privacy.after)}.",
        "the model of this training would take the place of the record that its checkpoints go on after.",
        "give this training an output_dir of its own.",
    )
    for name, (limit, means) in _RATES.items():
        value = getattr(args, name)
        is_nothing = name == "num_train_epochs" and args.max_steps == -1 and not value
        refuse(
            is_nothing or not (is_number(value) and 0 <= value < limit),
            f"{name}={shown(value)}.",
            f"{means}, and the budget would be spent for it.",
            f"give a number of at least 0 and below {limit:g}." if limit < math.inf else "give a finite one above 0.",
        )
    refuse(
        args.train_sampling_strategy != "random",
        f"train_sampling_strategy={args.train_sampling_strategy!r}.",
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
        args.use_liger_kernel,
        "use_liger_kernel=True.",
        "its fused kernels use parameters where no rule sees them.",
        "leave it out.",
    )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    refuse(
        args.torch_compile or backend.lower() != "no",
        "torch_compile=True."
        if args.torch_compile
        else f"torch.compile by {backend!r}, as accelerate was told (dynamo_backend, ACCELERATE_DYNAMO_BACKEND).",
        "compiled graphs use parameters where no rule sees them.",
        "leave it out; frozen modules may be compiled by themselves (module.compile()).",
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
    refuse(
        "underflow_overflow" in args.debug,
        "debug='underflow_overflow'.",
        "it ends the training where one example's activations are not finite, and prints what they were.",
        "leave it out: such an example adds nothing to a step, and non_finite_examples in the log counts them.",
    )
    return found
