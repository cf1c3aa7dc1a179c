"""What the processes of a gang do together; each function also runs in one process by itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_dp.ranks as ranks
from hf_dp import OutputBiasConfig, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Tables, record
from hf_dp.per_example.taken import TakenWatch
from hf_dp.training import checks
from tests.distributed.gang import ON_GPU
from tests.training.workbench import ROWS, Rows, make, pad, pad_for_language, rows
from tests.zoo import ADAPTERS, adapted, tiny, with_dropout

STEPS, EXPECTED, MICRO = 5, 8, 2
SHARDS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
MODELS = {
    "tied gpt2": ("gpt2", "causal_lm"),
    "llama": ("llama", "causal_lm"),
    "llama lora": ("LoRA", "causal_lm"),
    "bert": ("bert", "sequence"),
}
# One layer that runs several times, images, adapters beside trained modules, an encoder with a decoder.
FURTHER = {
    "albert": ("albert", "sequence"),
    "vit": ("vit", "image"),
    "llama lora and head": ("modules_to_save, untied head", "causal_lm"),
    "tied llama lora and embedding": ("modules_to_save, tied", "causal_lm"),
    # Values computed from parameters alone: of one layer, and handed on from the first layer to the others.
    "llama dora": ("DoRA", "causal_lm"),
    "t5": ("t5", "seq2seq"),
    "deberta": ("deberta-v2", "sequence"),
}
# Its output has a bias that is trained.
OF_WORDS = {"bert of words": ("bert", "masked_lm")}


def kind_of(name: str) -> tuple[str, str]:
    """Architecture or adapter, and head."""
    return {**MODELS, **FURTHER, **OF_WORDS}[name.partition(", ")[0]]


def built(name: str, seed: int = 0) -> nn.Module:
    """One of the models, in float32; the same everywhere. Of "..., norms alone" nothing else is trained."""
    torch.manual_seed(seed)
    kind, head = kind_of(name)
    model = adapted(kind, torch.float32) if kind in ADAPTERS else tiny(kind, head, torch.float32)
    for key, p in model.named_parameters():
        if name.endswith(", norms alone"):
            p.requires_grad_("norm" in key)
    return model


def rows_of(name: str) -> Rows:
    """What such a model is trained on; some users have one row, others up to six."""
    if kind_of(name)[1] != "image":
        return [{**row, "user": i * i % 29} for i, row in enumerate(rows())]
    draw = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 12, 12, generator=draw), "labels": i % 3} for i in range(ROWS)]


def collator_of(name: str) -> Any:
    """What makes a batch of rows for the head of such a model."""
    return {"sequence": pad, "image": stack}.get(kind_of(name)[1], pad_for_language)


def stack(examples: Rows) -> dict[str, Tensor]:
    """A collator for images."""
    return {key: torch.stack([torch.as_tensor(e[key]) for e in examples]) for key in examples[0]}


def device() -> torch.device:
    """This process's own GPU where the gang talks by NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU in os.environ else torch.device("cpu")


def prepared(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`batch` on the device."""
    return {key: values.to(device()) for key, values in batch.items()}


def promise(**changes: Any) -> PrivacyConfig:
    """Clipped, reproducible draws; no noise unless `changes` say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PrivacyConfig(**{"noise_multiplier": 0, "clipping_norm": 0.5, "seed": 3, **changes})


def trainer(
    path: str, name: str, world: int, privacy: dict[str, Any] | None = None, data: Any = None, **changes: Any
) -> Any:
    """A trainer whose expected batch is `EXPECTED` on any number of processes."""
    fresh_accelerator()
    accumulation = EXPECTED // (MICRO * world)
    values = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": accumulation, "max_steps": STEPS,
        "use_cpu": device().type == "cpu", **changes,
    }  # fmt: skip
    if world > 1:
        values["ddp_backend"] = "gloo" if device().type == "cpu" else "nccl"
    parts = {
        "train_dataset": rows_of(name) if data is None else data,
        "eval_dataset": rows_of(name)[:8],
        "data_collator": collator_of(name),
        "max_tokens_per_micro_batch": values.pop("tokens", None),
    }
    return make(Path(path), built(name), promise(**(privacy or {})), parts=parts, **values)


def trained_and_saved(path: str, name: str) -> None:
    """By one process."""
    run = trainer(path, name, 1, {"noise_multiplier": 1.0})
    run.train()
    run.save_model()


def trained_after(path: str, name: str, world: int, before: str, in_shards: bool = False) -> dict[str, Any]:
    """`trained` after a training whose folder the first process alone can see."""
    unseen = mock.patch("hf_dp.training.planned.read_earlier", side_effect=FileNotFoundError)
    train = trained_in_shards if in_shards else trained
    with unseen if ranks.rank() else nullcontext():
        return train(path, name, world, {"noise_multiplier": 1.0, "after": before})


def trained_alone(name: str, privacy: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    """`trained` by one process, in a folder that goes."""
    with TemporaryDirectory() as path:
        return trained(path, name, 1, dict(privacy))


def trained(path: str, name: str, world: int, privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The parameters after `STEPS` steps through Trainer, the ledger's entries and what was logged."""
    run = trainer(path, name, world, privacy, logging_steps=1, **changes)
    run.train()
    return {
        "parameters": gathered(run.model),
        "steps": run.ledger.steps,
        "report": run.privacy_report().to_dict() if hasattr(run.privacy_report(), "to_dict") else None,
        "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
        "wrapped": type(run.model_wrapped).__name__,
    }


def differing_on_the_last(path: str, in_shards: bool) -> dict[str, Any]:
    """What two processes refuse where the last has other gradients in the second pass of a step."""
    usual_check, usual_keep = checks.check_two_passes, TakenWatch._keep

    def keep(watch: Any, name: str, factors: Any) -> None:
        usual_keep(watch, name, factors.scaled(1 + 1e-6) if watch.take.__name__ == "add_dropped" else factors)

    def check(*given: Any, **more: Any) -> None:
        usual_check(*given, **more)
        if ranks.rank():
            TakenWatch._keep = keep  # type: ignore[method-assign]

    shards = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if in_shards else {}
    with mock.patch.object(checks, "check_two_passes", check), fsdp2_on_cpu() if in_shards else nullcontext():
        run = trainer(path, "llama", 2, {"passes": 2}, **shards)
        try:
            run.train()
        except UnsupportedModelError as error:
            return {"refusal": str(error), "steps": run.ledger.steps}
        finally:
            TakenWatch._keep = usual_keep  # type: ignore[method-assign]
    return {"refusal": "", "steps": run.ledger.steps}


def evaluated_in_shards(path: str, name: str) -> dict[str, Any]:
    """As `trained_in_shards` on two ranks, with an evaluation after every second step."""
    with fsdp2_on_cpu():
        run = trainer(
            path, name, 2, eval_strategy="steps", eval_steps=2, fsdp=True, fsdp_config={"version": 2, **SHARDS}
        )
        tried, found = run._try_evaluation, {}
        run._try_evaluation = lambda: (tried(), found.update(is_sharded=all(map(is_shard, run.model.parameters()))))
        run.train()
        losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        return {"parameters": gathered(run.model), "losses": losses, **found}


def is_shard(p: Tensor) -> bool:
    """Whether FSDP2 has taken a parameter apart."""
    return isinstance(p, DTensor)


def trained_with_its_checkpointing(path: str, name: str) -> dict[str, Any]:
    """As `trained_in_shards` on two ranks, with the checkpointing that accelerate wraps layers in."""
    return trained_in_shards(path, name, 2, None, {"activation_checkpointing": True})


def trained_with_dropout_and_its_checkpointing(path: str, name: str) -> int:
    """How many steps two ranks take of a model that drops out, its layers checkpointed by accelerate or themselves."""
    steps = 0
    for own in (False, True):
        with fsdp2_on_cpu():
            config = {"version": 2, **SHARDS, "activation_checkpointing": not own}
            run = trainer(f"{path}/{own}", name, 2, fsdp=True, fsdp_config=config, gradient_checkpointing=own)
            with_dropout(run.model)
            run.train()
            steps += run.ledger.steps
    return steps


def trained_in_shards(
    path: str, name: str, world: int, privacy: dict[str, Any] | None = None, sharding: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As `trained`, under FSDP2 as accelerate sets it up."""
    # accelerate splits these models' embeddings and then what is in them, which torch refuses.
    names = {"bert": "BertLayer", "vit": "ViTLayer", "deberta": "DebertaV2Layer"}
    layers = {"transformer_layer_cls_to_wrap": [names[name]]} if name in names else {}
    with fsdp2_on_cpu():
        config = {"version": 2, **SHARDS, **layers, **(sharding or {})}
        return trained(path, name, world, privacy, fsdp=True, fsdp_config=config)


def trained_by_tokens(path: str, name: str, in_shards: bool) -> dict[str, Any]:
    """`trained` on two ranks whose shares are cut into other numbers of micro-batches; and how many these lacked."""
    lacking: list[int] = []
    dummies = PoissonDataLoader.dummies

    def counted(loader: Any, item: Any) -> Any:
        found = dummies(loader, item)
        lacking.append(len(found))
        return found

    PoissonDataLoader.dummies = counted  # type: ignore[method-assign]
    config = {"version": 2, **SHARDS, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    shards: dict[str, Any] = {"fsdp": True, "fsdp_config": config} if in_shards else {}
    try:
        with fsdp2_on_cpu() if in_shards else nullcontext():
            found = trained(path, name, 2, None, tokens=12, include_num_input_tokens_seen="non_padding", **shards)
    finally:
        PoissonDataLoader.dummies = dummies  # type: ignore[method-assign]
    return {**found, "lacking": sum(lacking)}


@contextmanager
def fsdp2_on_cpu(version: int = 2) -> Iterator[None]:
    """accelerate takes no plugin for FSDP on a CPU, and would use DDP without a word; here it takes it."""
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        plugin = fsdp_plugin or vars(self).get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            plugin.fsdp_version = version

    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


def fresh_accelerator() -> None:
    """As at the start of a process; the process group stays."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    wholes = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {n.replace("_checkpoint_wrapped_module.", ""): whole.detach().cpu().clone() for n, whole in wholes.items()}


def farthest(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


class Collectives(TorchDispatchMode):
    """Counts what is sent, by name, with the number of elements of each and their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.dtypes: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            elements = sum(t.numel() for t in tree_leaves(args) if isinstance(t, Tensor))
            name = func.overloadpacket.__name__.strip("_")
            if "wait" not in name:
                self.sent.append((name, elements))
                dtypes = {str(t.dtype) for t in tree_leaves(args) if isinstance(t, Tensor)}
                self.dtypes.setdefault(name, set()).update(dtypes)
        return func(*args, **(kwargs or {}))


def released(path: str, world: int, part: str, unit: dict[str, Any]) -> dict[str, Any]:
    """A seeded run with noise, and a part that releases frequencies once: of tokens for Re-Attention, or of labels."""
    config = {"re_attention": ReAttentionConfig(error="accumulated"), "output_bias": OutputBiasConfig()}[part]
    privacy = {"noise_multiplier": None, "target_epsilon": 8.0, "seed": 3, part: config, **unit}
    name, kept = ("bert of words", part) if part == "output_bias" else ("bert", "token_frequencies")
    run = trainer(path, name, world, privacy)
    run.train()
    frequencies = run._run.parts[kept].shares.cpu()
    return {"parameters": gathered(run.model), "frequencies": frequencies, "ledger": run.ledger.to_dict()}


def refusal(path: str, what: str) -> str:
    """The error of a trainer, or of one step, that asks for a parallelism that is not known."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from tests.distributed.sharded import shard

    changes: dict[str, Any] = {}
    privacy: dict[str, Any] = {}
    if what in ("FSDP on a CPU", "FSDP1"):
        changes = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}}
    elif what == "HSDP of accelerate":
        changes = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), "fsdp": True,
                   "fsdp_config": {"version": 2, **SHARDS}}  # fmt: skip
    elif what == "Re-Attention in shards":
        changes = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}}
        privacy = {"re_attention": ReAttentionConfig(token_frequencies="uniform")}
    elif what == "sparse embeddings in shards":
        changes = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}}
        privacy = {"sparse_embeddings": SparseEmbeddingConfig()}
    try:
        if changes:
            with nullcontext() if what == "FSDP on a CPU" else fsdp2_on_cpu(1 if what == "FSDP1" else 2):
                trainer(path, "tied gpt2", dist.get_world_size(), privacy, **changes)
            return "no error"
        model, batch = built("llama").to(device()), prepared(pad_for_language(rows()[:4]))
        kind = device().type
        if what == "HSDP by hand":
            fully_shard(model, mesh=init_device_mesh(kind, (2, 1), mesh_dim_names=("replicate", "shard")))
        elif what == "a sparse table in shards by hand":
            Tables.of({"table": shard(model, "whole").model.embed_tokens.weight})
        elif what == "a DTensor by hand":
            head = model.lm_head
            head.weight = nn.Parameter(distribute_tensor(head.weight, init_device_mesh(kind, (2,)), [Shard(0)]))
        record(model, per_example_losses, batch)
    except HfDpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def best_of_all(path: str, world: int) -> tuple[str, dict[str, Tensor]]:
    """The best checkpoint by an evaluation after each step, and the parameters that it leaves."""
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    run = trainer(path, "bert", world, {"noise_multiplier": 1.0}, **each, **best)
    run.eval_dataset = rows(8, seed=9)
    run.train()
    return str(run.state.best_model_checkpoint), gathered(run.model)


def saved_and_resumed(
    path: str, name: str, world: int, shards: str | None, resume: bool | str, **changes: Any
) -> dict[str, Any]:
    """`trained`, with a checkpoint after two steps: stopping there, or going on from it.

    Args:
        shards: the state_dict_type of FSDP2, or None for DDP.
        resume: True from the first checkpoint, "newest" from the newest whole one.
    """
    values = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "adam_epsilon": 1e-2,
              "learning_rate": 1e-2, **changes}  # fmt: skip
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS, "state_dict_type": shards}} if shards else {}
    with fsdp2_on_cpu() if shards else nullcontext():
        run = trainer(path, name, world, {"noise_multiplier": 0}, **values, **kept)
        run.train(resume_from_checkpoint=f"{path}/checkpoint-2" if resume is True else resume == "newest")
        run.save_model(f"{path}/final")
        # As before a push.
        run.save_model(_internal_call=True)
        return {"parameters": gathered(run.model), "ledger": run.ledger.to_dict(), "steps": run.ledger.steps}
