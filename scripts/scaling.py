"""What a private step of a small model takes and sends on each rank, beside the arithmetic of docs/scaling.md.

    torchrun --standalone --nproc-per-node 2 scripts/scaling.py
    torchrun --standalone --nproc-per-node 2 scripts/scaling.py --weak
    python scripts/scaling.py --large

The first prints a table and exits with 1 if anything is off by more than 15 %; on a machine with GPUs it uses them and
NCCL. The second gives each process the same work, and the first alone too: the time of one by the time of all is the
efficiency of weak scaling. On a CPU each process has a core and a thread of its own. Processes that work at the same
time and send nothing tell what the machine itself takes away. The third prints the arithmetic for models of 7 and 70
billion parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.losses import per_example_losses
from hf_dp.per_example import PerExampleGradients, preflight, record
from hf_dp.per_example.factors import Outer
from hf_dp.planning.memory import Estimate, estimate
from hf_dp.planning.sized import ModelSize
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient

LENGTH, MICRO_BATCH, MICRO_BATCHES, LORA_RANK, TOLERANCE, TURNS = 64, 4, 2, 4, 0.15, 7
CASES = ("llama, full", "tied gpt2, full", "llama, LoRA")


def build(case: str) -> nn.Module:
    """About a million parameters in float32; the large one has seven times as many."""
    torch.manual_seed(0)
    if case == "large":
        config = AutoConfig.for_model("gpt2", vocab_size=5000, n_embd=288, n_layer=6, n_head=4, n_positions=LENGTH)
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        return AutoModelForCausalLM.from_config(config)
    if case.startswith("tied gpt2"):
        config = AutoConfig.for_model("gpt2", vocab_size=2000, n_embd=128, n_layer=6, n_head=4, n_positions=LENGTH)
        config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
        return AutoModelForCausalLM.from_config(config)
    config = AutoConfig.for_model(
        "llama", vocab_size=2000, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    if case.endswith("LoRA"):
        names = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
        # Beside a B of zeros A has no gradient, and nothing is kept of it.
        lora = LoraConfig(r=LORA_RANK, target_modules=sorted(names), init_lora_weights=False)
        model = get_peft_model(model, lora)
    return model


class Watcher(TorchDispatchMode):
    """What is sent, and the most bytes of whole weights that FSDP2 holds at any time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}
        self.whole = 0
        states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
        groups = [g for s in states.values() for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]]
        self._parameters = [p for group in groups if group is not None for p in group.fsdp_params]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = func.overloadpacket.__name__.strip("_")
            most = max((nbytes(t) for t in tree_leaves((args, result)) if isinstance(t, Tensor)), default=0)
            if "wait" not in kind:
                self.sent[kind] = self.sent.get(kind, 0) + most
        outputs = [t for p in self._parameters for t in getattr(p, "all_gather_outputs", ())]
        self.whole = max(self.whole, sum(t.untyped_storage().nbytes() for t in outputs))
        return result


def nbytes(tensor: Tensor) -> int:
    """Of its elements on this rank."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.numel() * held.element_size()


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind tensors, shared memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def factor_tensors(gradients: PerExampleGradients) -> Iterator[Tensor]:
    for uses in gradients.factors.values():
        for use in uses:
            yield from (use.left.tensor, use.right.tensor) if isinstance(use, Outer) else (use.values,)


class Run:
    """A model, its data and its optimizer on this rank; a step is one logical batch.

    Args:
        case: one of `CASES`, or "large" for a model that computes for about a second.
        strategy: "DDP" or "FSDP2".
    """

    def __init__(self, case: str, strategy: str) -> None:
        device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
        self.model = build(case).to(device)
        if strategy == "FSDP2":
            for module in [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == 6]:
                for block in module:
                    fully_shard(block)
            fully_shard(self.model)
        ids = torch.randint(3, 2000, (MICRO_BATCHES * MICRO_BATCH, LENGTH), device=device)
        self._batches = [{"input_ids": part, "labels": part} for part in ids.split(MICRO_BATCH)]
        entropy = Entropy(None)
        config = PrivacyConfig(noise_multiplier=1.0)
        self._plan = Plan.make(config, PoissonBatchSampler.of(1000, 16, entropy), 100, entropy)
        few = {name: values[:3] for name, values in self._batches[0].items()}
        self._certificate = preflight(self.model, per_example_losses, few)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.factors = 0

    def gradient(self) -> ClippedSum:
        """That of one private step."""
        return private_gradient(self.model, self._record, self._batches, self._plan, Ledger())

    def _record(self, batch: Any) -> PerExampleGradients:
        gradients = record(self.model, per_example_losses, batch, certificate=self._certificate)
        self.factors = storages(factor_tensors(gradients))
        return gradients


def measure(case: str, strategy: str) -> dict[str, int]:
    """Bytes by the names that `Estimate` gives them."""
    run = Run(case, strategy)
    with Watcher(run.model) as watcher:
        total = run.gradient()
    run.optimizer.step()
    found = {
        "factors": run.factors,
        "weights": sum(nbytes(p) for p in run.model.parameters()),
        # They are views of few buffers, the shards too.
        "sum of gradients": storages(total.gradients.values()),
        "Adam": sum(nbytes(v) for s in run.optimizer.state.values() for v in s.values() if v.dim()),
    }
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    if strategy == "FSDP2":
        found["whole weights, without the buffer"] = watcher.whole
        found["all-gather of the weights"] = int(share * watcher.sent.get("allgather_into_tensor_coalesced", 0)) or int(
            share * sum(v for k, v in watcher.sent.items() if k.startswith("allgather_base"))
        )
        found["reduce-scatter of the sum"] = int(share * watcher.sent.get("reduce_scatter_tensor", 0))
    else:
        found["all-reduce of the sum"] = int(2 * share * watcher.sent.get("allreduce", 0))
    return found


def weak() -> None:
    """Seconds for a step, median of turns: rank 0 alone, all without sending, and all with."""
    rank, world = dist.get_rank(), dist.get_world_size()
    runs = {strategy: Run("large", strategy) for strategy in ("DDP", "FSDP2")}
    turns = {"one process": "DDP", "at the same time, apart": "DDP", "DDP": "DDP", "FSDP2": "FSDP2"}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(TURNS + 1):
        for name, strategy in turns.items():
            dist.barrier()
            apart = name not in runs
            began = time.perf_counter()
            if rank == 0 or name != "one process":
                with mock.patch.multiple(ranks, world_size=lambda: 1, rank=lambda: 0) if apart else nullcontext():
                    runs[strategy].gradient()
                runs[strategy].optimizer.step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            dist.barrier()
            # The first turn makes the optimizer's state.
            seconds[name] += [time.perf_counter() - began] if turn else []
    if rank == 0:
        alone = statistics.median(seconds["one process"])
        print(f"{world} ranks, {TURNS} turns\n\n| | seconds for a step | efficiency |\n| --- | --- | --- |")
        for name, times in seconds.items():
            spread = f"{min(times):.2f} to {max(times):.2f}"
            median = statistics.median(times)
            print(f"| {name} | {median:.2f} ({spread}) | {alone / median:.0%} |")


def expected(case: str, strategy: str) -> dict[str, int]:
    """The same names, by arithmetic."""
    size = ModelSize.of(build(case.replace("LoRA", "full")), LORA_RANK if case.endswith("LoRA") else None)
    one: Estimate = estimate(
        size, strategy, dist.get_world_size(), length=LENGTH, micro_batch=MICRO_BATCH, micro_batches=MICRO_BATCHES,
        bytes_computed=4,
    )  # fmt: skip
    numbers = {**one.memory, **one.sent}
    if strategy == "FSDP2":
        largest = max(v for unit, v in size.units.items() if unit)
        numbers["whole weights, without the buffer"] = numbers["whole weights"] - 4 * largest
    return numbers


def large() -> None:
    """Llama 2's two sizes on 8 and 64 ranks."""
    shapes = {
        "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
                "num_key_value_heads": 8},
    }  # fmt: skip
    print(
        "| model | ranks | | weights, sum, Adam | whole weights and gradients | factors | in all | sent in one step |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, shape in shapes.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=32000, **shape))
        for rank, trained in ((16, "LoRA"), (None, "full")):
            size = ModelSize.of(model, rank)
            for world in (8, 64):
                for strategy in ("DDP", "FSDP2"):
                    one = estimate(size, strategy, world, length=1024, micro_batch=1, micro_batches=1024 // world)
                    held = sum(v for k, v in one.memory.items() if "whole" not in k and k != "factors")
                    whole = sum(v for k, v in one.memory.items() if "whole" in k)
                    values = (held, whole, one.memory["factors"], one.total_memory, one.total_sent)
                    numbers = " | ".join(f"{v / 1e9:.1f}" for v in values)
                    print(f"| {name}, {trained} | {world} | {strategy} | {numbers} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weak", action="store_true", help="only the efficiency of weak scaling")
    parser.add_argument("--large", action="store_true", help="only the arithmetic for 7B and 70B")
    options = parser.parse_args()
    if options.large:
        large()
        return 0
    if options.weak and not torch.cuda.is_available():
        # Before there are any other threads.
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank())
    if options.weak:
        weak()
        dist.destroy_process_group()
        return 0
    worst, first = 0.0, dist.get_rank() == 0
    if first:
        print(f"{dist.get_world_size()} ranks\n\n| model | | of what | measured, kB | estimated, kB | off |")
        print("| --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for strategy in ("DDP", "FSDP2"):
            measured = measure(case, strategy)
            estimated = expected(case, strategy)
            for name, value in measured.items():
                off = estimated[name] / value - 1 if value else float(bool(estimated[name]))
                worst = max(worst, abs(off))
                if first:
                    numbers = f"{value / 1e3:.0f} | {estimated[name] / 1e3:.0f} | {off:+.1%}"
                    print(f"| {case} | {strategy} | {name} | {numbers} |")
    if first:
        print(f"\nAt most {worst:.1%} off.")
    dist.destroy_process_group()
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
