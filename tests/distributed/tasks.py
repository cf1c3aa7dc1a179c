"""What the processes of a gang do together; each function also runs in one process by itself."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import Ledger
from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Tables, preflight, record
from hf_dp.plan import Plan
from hf_dp.randomness import Entropy
from hf_dp.sampling import PoissonBatchSampler
from hf_dp.step import private_gradient
from tests.e2e.workbench import make, pad, pad_for_language, rows
from tests.zoo import adapted, tiny

STEPS, EXPECTED, MICRO = 5, 8, 2
SHARDS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
MODELS = {
    "tied gpt2": ("gpt2", "causal_lm"),
    "llama": ("llama", "causal_lm"),
    "llama lora": ("LoRA", "causal_lm"),
    "bert": ("bert", "sequence"),
}


def built(name: str, seed: int = 0) -> nn.Module:
    """One of `MODELS`, in float32; the same everywhere. Of "..., norms alone" nothing else is trained."""
    torch.manual_seed(seed)
    kind, head = MODELS[name.partition(", ")[0]]
    model = adapted(kind, torch.float32) if kind == "LoRA" else tiny(kind, head, torch.float32)
    for key, p in model.named_parameters():
        if name.endswith(", norms alone"):
            p.requires_grad_("norm" in key)
    return model


def collator_of(name: str) -> Any:
    """What pads the rows for the head of such a model."""
    return pad if MODELS[name.partition(", ")[0]][1] == "sequence" else pad_for_language


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
        **({"ddp_backend": "gloo"} if world > 1 else {}), **changes,
    }  # fmt: skip
    parts = {
        "train_dataset": rows() if data is None else data,
        "eval_dataset": rows(8),
        "data_collator": collator_of(name),
    }
    return make(Path(path), built(name), promise(**(privacy or {})), parts=parts, **values)


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


def evaluated_in_shards(path: str, name: str) -> dict[str, Any]:
    """As `trained_in_shards` on two ranks, with an evaluation after every second step."""
    with fsdp2_on_cpu():
        run = trainer(
            path, name, 2, eval_strategy="steps", eval_steps=2, fsdp=True, fsdp_config={"version": 2, **SHARDS}
        )
        run.train()
        losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        return {"parameters": gathered(run.model), "losses": losses}


def trained_with_its_checkpointing(path: str, name: str) -> dict[str, Any]:
    """As `trained_in_shards` on two ranks, with the checkpointing that accelerate wraps layers in."""
    return trained_in_shards(path, name, 2, None, {"activation_checkpointing": True})


def trained_in_shards(
    path: str, name: str, world: int, privacy: dict[str, Any] | None = None, sharding: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As `trained`, under FSDP2 as accelerate sets it up."""
    # accelerate splits BERT's embeddings and then what is in them, which torch refuses; so only the layers are named.
    layers = {"transformer_layer_cls_to_wrap": ["BertLayer"]} if name == "bert" else {}
    with fsdp2_on_cpu():
        config = {"version": 2, **SHARDS, **layers, **(sharding or {})}
        return trained(path, name, world, privacy, fsdp=True, fsdp_config=config)


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
    return {n.replace("_checkpoint_wrapped_module.", ""): whole.detach().clone() for n, whole in wholes.items()}


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


def sent_in_one_step(name: str, sharding: str | None, micro_batches: int) -> dict[str, list[int]]:
    """The elements of each collective of one private step, by the collective's name."""
    from tests.distributed.sharded import shard

    model = built(name)
    if sharding:
        shard(model, sharding)
    data, collate = rows(), collator_of(name)
    entropy = Entropy(0)
    plan = Plan.make(promise(noise_multiplier=1.0), PoissonBatchSampler(len(data), 8, entropy), 9, entropy)
    certificate = preflight(model, per_example_losses, collate(data[:5]))
    batches = [collate(data[i * MICRO : (i + 1) * MICRO]) for i in range(micro_batches)]
    engine = functools.partial(record, model, per_example_losses, certificate=certificate)
    with Collectives() as counted:
        private_gradient(model, engine, batches, plan, Ledger())
    found: dict[str, list[int]] = {}
    for kind, elements in counted.sent:
        found.setdefault(kind, []).append(elements)
    assert counted.dtypes.get("reduce_scatter_tensor", {"torch.float32"}) == {"torch.float32"}
    return found


def facts_of(name: str, sharding: str | None = None) -> dict[str, int]:
    """Numbers that a count is held against."""
    model = built(name)
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    return {"parameters": len(trained), "elements": sum(trained), "largest": max(p.numel() for p in model.parameters())}


def refused_by(path: str, what: str, shards: bool = False) -> str:
    """The error of a run in which the last rank differs in `what`."""
    import torch.distributed as dist

    is_odd, data, changes, privacy = dist.get_rank() == dist.get_world_size() - 1, rows(), {}, {}
    if is_odd:
        data = {"fewer rows": rows()[:-1], "another row": [*rows()[:-1], rows(seed=5)[-1]]}.get(what, data)
        changes = {"another learning rate": {"learning_rate": 0.2}}.get(what, {})
        privacy = {"another clipping norm": {"clipping_norm": 0.6}}.get(what, {})
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if shards else {}
    with fsdp2_on_cpu() if shards else nullcontext():
        run = trainer(path, "tied gpt2", dist.get_world_size(), privacy, data, **changes, **kept)
        with torch.no_grad():
            if is_odd and what == "another frozen layer":
                run.model.transformer.h[0].requires_grad_(False)
            if is_odd and what == "other weights":
                run.model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1e-3
        try:
            run.train()
        except HfDpError as error:
            assert run.ledger.steps == 0
            return f"{type(error).__name__}: {error}"
    return "no error"


def secrets_in_files(path: str) -> list[str]:
    """The files of a run with checkpoints that hold the secret of its draws."""
    run = trainer(path, "bert", 2, {"noise_multiplier": 1.0, "seed": None}, save_strategy="steps", save_steps=2)
    run.train()
    run.save_model(f"{path}/final")
    key = run._plan.entropy._key
    files = [p for p in Path(path).rglob("*") if p.is_file()]
    assert len(files) > 10
    return [str(p) for p in files if any(k in p.read_bytes() for k in (key, key.hex().encode()))]


def draws_of_all() -> dict[str, Any]:
    """What is the same on every rank, and what is not, without a seed."""
    entropy = Entropy.of_all_ranks(None)
    return {
        "draws": [PoissonBatchSampler(100, 10, entropy).draw(step) for step in range(5)],
        "noise": entropy.fresh("noise", 0).entropy,
        "key": entropy._key,
    }


def drifted() -> str:
    """The error of ranks that are at different steps."""
    import torch.distributed as dist

    model = nn.Linear(2, 2)
    entropy = Entropy(0)
    plan = Plan.make(promise(noise_multiplier=1.0), PoissonBatchSampler(100, 10, entropy), 9, entropy)
    ledger = Ledger()
    for _ in range(dist.get_rank()):
        ledger.charge(plan.event)
    try:
        private_gradient(model, lambda batch: pytest.fail("recorded"), [], plan, ledger)  # type: ignore[arg-type]
    except HfDpError as error:
        return str(error)
    return "no error"


def re_attended(path: str, world: int) -> dict[str, Any]:
    """A seeded run with noise, Re-Attention and a release of token frequencies."""
    attention = ReAttentionConfig(error="accumulated")
    privacy = {"noise_multiplier": None, "target_epsilon": 8.0, "seed": 3, "re_attention": attention}
    run = trainer(path, "bert", world, privacy)
    run.train()
    assert run._attention_noise is not None
    frequencies = run._attention_noise.frequencies
    return {"parameters": gathered(run.model), "frequencies": frequencies, "ledger": run.ledger.to_dict()}


def refusal(path: str, what: str) -> str:
    """The error of a trainer, or of one step, that asks for a parallelism that is not known."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    changes: dict[str, Any] = {}
    privacy: dict[str, Any] = {}
    if what in ("FSDP on a CPU", "FSDP1"):
        changes = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}}
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
        model, batch = built("llama"), pad_for_language(rows()[:4])
        if what == "HSDP by hand":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        elif what == "a sparse table in shards by hand":
            Tables.of({"table": fully_shard(model).model.embed_tokens.weight})
        elif what == "DoRA in shards":
            model = fully_shard(adapted("DoRA", torch.float32))
        elif what == "a DTensor by hand":
            head = model.lm_head
            head.weight = nn.Parameter(distribute_tensor(head.weight, init_device_mesh("cpu", (2,)), [Shard(0)]))
        record(model, per_example_losses, batch)
    except HfDpError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def saved_and_resumed(path: str, name: str, world: int, shards: bool, resume: bool, **changes: Any) -> dict[str, Any]:
    """`trained`, with a checkpoint after two steps: stopping there, or going on from it."""
    values = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "adam_epsilon": 1e-2,
              "learning_rate": 1e-2, **changes}  # fmt: skip
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if shards else {}
    with fsdp2_on_cpu() if shards else nullcontext():
        run = trainer(path, name, world, {"noise_multiplier": 0}, **values, **kept)
        run.train(resume_from_checkpoint=f"{path}/checkpoint-2" if resume else None)
        run.save_model(f"{path}/final")
        return {"parameters": gathered(run.model), "ledger": run.ledger.to_dict(), "steps": run.ledger.steps}
