"""What the benchmark runs: models, logical batches, and one training step of each kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_dp.units.packing import Owners

MICRO_BATCHES = 4


@dataclass(frozen=True)
class Case:
    """A model and the shape of its micro-batches."""

    family: str
    batch: int
    length: int
    config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    rank: int = 8
    checkpointing: bool = False
    autocast: bool = False
    dataset_size: int | None = None


def _gpt2(vocabulary: int, width: int, layers: int, tied: bool = True) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024,
        "tie_word_embeddings": tied,
    }  # fmt: skip


_LLAMA = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
_DEEP = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_BY_LAYER = {**{f"model.layers.{layer}.*": 1.0 for layer in range(8)}, "lm_head.*": 1.0, "*": 1.0}
_BERT = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_labels": 10,
}  # fmt: skip
_EXPERTS = {
    "vocab_size": 16384, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384,
}  # fmt: skip
_LLAMA_135M = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
# As many operations as of one with 1.2 billion parameters, and nothing to compute in any of them.
_HOST = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


class Cases(dict[str, Case]):
    """By name; who asks for one that there is not is told which there are."""

    def __missing__(self, name: str) -> Case:
        raise SystemExit("\n  ".join([f"There is no case {name!r}. There are:", *self]))


CASES = Cases(
    {
        "tied": Case("gpt2", 8, 128, _gpt2(16384, 512, 4)),
        "untied": Case("gpt2", 8, 128, _gpt2(16384, 512, 4, tied=False)),
        "tied long": Case("gpt2", 4, 512, _gpt2(16384, 512, 4)),
        "tied short": Case("gpt2", 64, 32, _gpt2(16384, 512, 4)),
        "llama lora": Case("llama", 8, 256, _LLAMA, lora=True),
        "llama 135M lora": Case("llama", 8, 64, _LLAMA_135M, lora=True),
        "host": Case("llama", 8, 6, _HOST),
        "host lora": Case("llama", 8, 6, _HOST, lora=True),
        "bert": Case("bert", 8, 128, _BERT),
        "llama, 8 layers": Case("llama", 4, 256, _DEEP),
        "llama, checkpointing": Case("llama", 4, 256, _DEEP, checkpointing=True),
        "llama, checkpointing, autocast": Case("llama", 4, 256, _DEEP, checkpointing=True, autocast=True),
        "large vocabulary": Case("gpt2", 4, 256, _gpt2(151936, 896, 1)),
        "experts": Case("qwen3_moe", 8, 128, _EXPERTS),
        "experts lora": Case("qwen3_moe", 8, 128, _EXPERTS, lora=True),
    }
)

_LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
_GPT2_MEDIUM = {"vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024}
_WIDE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPU_CASES = {
    "Llama 1B, 4 x 1024": Case("llama", 4, 1024, _LLAMA_1B),
    "Llama 1B, 8 x 1024": Case("llama", 8, 1024, _LLAMA_1B),
    "Llama 1B, 8 x 512, LoRA r 16": Case("llama", 8, 512, _LLAMA_1B, lora=True, rank=16),
    "Llama 1B, 32 x 512, LoRA r 16": Case("llama", 32, 512, _LLAMA_1B, lora=True, rank=16),
    "Llama 1B, 8 x 1024, LoRA r 16": Case("llama", 8, 1024, _LLAMA_1B, lora=True, rank=16),
    "Llama 1B, 8 x 512": Case("llama", 8, 512, _LLAMA_1B),
    "Llama 1B, 8 x 512, checkpointing": Case("llama", 8, 512, _LLAMA_1B, checkpointing=True),
    "Llama 1B, 2 x 2048": Case("llama", 2, 2048, _LLAMA_1B),
    "Llama 1B, 4 x 1024, autocast": Case("llama", 4, 1024, _LLAMA_1B, autocast=True),
    "Llama 1B, 8 x 512, LoRA r 16, autocast": Case("llama", 8, 512, _LLAMA_1B, lora=True, rank=16, autocast=True),
    "GPT-2 medium, tied, 8 x 512": Case("gpt2", 8, 512, _GPT2_MEDIUM),
    "vocabulary 152 k, 8 x 512": Case("qwen2", 8, 512, _WIDE),
    "Llama 1B, 8 x 512, LoRA r 16, checkpointing": Case(
        "llama", 8, 512, _LLAMA_1B, lora=True, rank=16, checkpointing=True
    ),
    "Llama 1B, 2 x 2048, LoRA r 16": Case("llama", 2, 2048, _LLAMA_1B, lora=True, rank=16),
}
_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
SMALL_CASES = {
    "small": Case("llama", 2, 16, _SMALL),
    "small, autocast": Case("llama", 2, 16, _SMALL, autocast=True),
    "small, LoRA, checkpointing": Case("llama", 2, 16, _SMALL, lora=True, checkpointing=True),
}


@dataclass(frozen=True)
class Setting:
    """What all models of one run share."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"


def build(case: Case, setting: Setting) -> nn.Module:
    """A random model in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(case.family, **case.config)
    auto = AutoModelForSequenceClassification if case.family == "bert" else AutoModelForCausalLM
    # Where it will be: a CPU takes long to draw a billion numbers.
    with setting.device:
        model: nn.Module = auto.from_config(config, attn_implementation=setting.attention)
        if case.lora:
            from peft import LoraConfig, get_peft_model

            of_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "num_experts" in case.config else None
            adapters = LoraConfig(r=case.rank, target_modules="all-linear", target_parameters=of_experts)
            model = get_peft_model(model, adapters)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(setting.device, torch.float32 if case.autocast else setting.dtype).train()


def loss_of(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss."""
    with _autocast(case, batch):
        loss: Tensor = model(**batch).loss
    return loss


def losses_of(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """Each example's own."""
    from hf_dp.losses import per_example_losses

    with _autocast(case, batch):
        return per_example_losses(model, batch)


def _autocast(case: Case, batch: Any) -> torch.autocast:
    return torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=case.autocast)


def batches(case: Case, device: torch.device) -> list[dict[str, Tensor]]:
    """One logical batch."""
    made = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(0, case.config["vocab_size"], (case.batch, case.length), device=device)
        labels = torch.randint(0, 10, (case.batch,), device=device) if case.family == "bert" else ids
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


class Counting(TorchDispatchMode):
    """Floating-point operations of matrix products, attention and convolutions, by torch's own formulas.

    Attributes:
        operations: how many.
        bytes: of all tensors that an operation reads or writes, views left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Nor the view that a tensor which was just copied is handed on as.
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            touched = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in touched)
        # An operation in place, or the CPU's kernel of attention, does the same work.
        name = func.overloadpacket.__name__.replace("_for_cpu", "").removesuffix("_")
        formula = flop_registry.get(getattr(torch.ops.aten, name, None))
        if formula is not None:
            # What type sums come out in is nothing that the formulas know.
            self.operations += formula(
                *(a for a in args if not isinstance(a, torch.dtype)), **(kwargs or {}), out_val=result
            )
        return result


def predicted(case: Case, dtype: torch.dtype = torch.bfloat16) -> float:
    """By arithmetic: the time of a private step on one H100 over an ordinary one's."""
    from hf_dp.planning.sized import ModelSize
    from hf_dp.planning.speed import GPUS, predicted_ratio

    with torch.device("meta"):
        size = ModelSize.of(build(case, Setting(torch.device("meta"), dtype)))
    return predicted_ratio(
        size, GPUS["H100"], length=case.length, micro_batch=case.batch, micro_batches=MICRO_BATCHES,
        bytes_computed=dtype.itemsize, checkpointing=case.checkpointing,
    )  # fmt: skip


Variant = Callable[[Case, nn.Module, list[dict[str, Tensor]]], Callable[[], None]]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def ordinary(case: Case, model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
    """Forward, backward and AdamW over all micro-batches."""
    optimizer = optimizer_of(model)

    def step() -> None:
        for batch in data:
            (loss_of(case, model, batch) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(
    case: Case,
    model: nn.Module,
    data: list[dict[str, Tensor]],
    sizes: tuple[int, ...] | None = None,
    **promise: Any,
) -> Callable[[], None]:
    """The library's own step; draw, noise and ledger included. With `sizes` the rows are those of units with so many
    each, over and over; of one size that is more than a micro-batch has, in several."""
    from hf_dp import PrivacyConfig
    from hf_dp.accounting import Ledger
    from hf_dp.per_example import PerExampleGradients, preflight, record
    from hf_dp.per_example.checks.memory import writes_noted
    from hf_dp.per_example.in_groups import InGroups
    from hf_dp.per_example.passes import record_in_two_passes
    from hf_dp.randomness import Entropy
    from hf_dp.sampling.poisson import PoissonBatchSampler
    from hf_dp.step.plan import Plan
    from hf_dp.step.private_gradient import private_gradient

    size, entropy, ledger = MICRO_BATCHES * len(data[0]["input_ids"]), Entropy(None), Ledger()
    sampler = PoissonBatchSampler.of(case.dataset_size or 1000 * size, size, entropy)
    plan = Plan.make(PrivacyConfig(noise_multiplier=1.0, **promise), sampler, 10**6, entropy)
    optimizer = optimizer_of(model)
    largest = max(data, key=lambda batch: len(batch["input_ids"]))
    few = {name: value[:3, :17] if value.dim() > 1 else value[:3] for name, value in largest.items()}
    losses = functools.partial(losses_of, case)
    with writes_noted(model):  # PEFT takes frozen weights of experts out in each pass, and puts them back
        certificate = preflight(model, losses, few)

    draws = iter(sampler)

    def recorded(micro_batch: tuple[int, dict[str, Tensor]]) -> PerExampleGradients:
        place, batch = micro_batch
        if plan.config.passes == 2:
            return record_in_two_passes(model, losses, batch, certificate=certificate)
        if plan.config.clipping == "groups":
            return InGroups(model, losses, batch, certificate=certificate)
        found = record(model, losses, batch, certificate=certificate)
        return found if sizes is None else found.grouped(*_owners(sizes, place, len(batch["input_ids"])))

    def step() -> None:
        next(draws)
        with _deterministic(plan.config.passes == 2):
            private_gradient(model, recorded, enumerate(data), plan, ledger)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def _deterministic(is_asked: bool) -> Iterator[None]:
    """Inside, algorithms are deterministic, as two passes need them on a GPU."""
    before, settings = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic
    is_filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    if is_asked:
        # What finds reads of memory that nothing was written to, and changes no result.
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(is_asked or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = is_filled  # type: ignore[attr-defined]


def _owners(sizes: tuple[int, ...], place: int, rows: int) -> Owners:
    """Of the micro-batch at `place`."""
    if sizes[0] > rows:
        before = place * rows % sizes[0]
        return Owners([0] * rows, before, sizes[0] - before - rows)
    units = enumerate(itertools.cycle(sizes))
    return Owners(list(itertools.islice((unit for unit, size in units for _ in range(size)), rows)))


def in_pieces(case: Case, model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
    """`private` on units of two micro-batches each."""
    return private(case, model, data, sizes=(2 * len(data[0]["input_ids"]),))


def _opacus(mode: str) -> Variant:
    def make(case: Case, model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

        config = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "expected_batch_size": len(data) * len(data[0]["labels"]),
        }
        if mode == "hooks":
            wrapped: Any = GradSampleModule(model)
            optimizer: Any = DPOptimizer(optimizer_of(model), **config)
        else:
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
            optimizer = DPOptimizerFastGradientClipping(optimizer_of(model), **config)

        def step() -> None:
            for i, batch in enumerate(data):
                last = i == len(data) - 1
                ids = batch["input_ids"]
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
                logits = wrapped(input_ids=ids, attention_mask=batch["attention_mask"], position_ids=positions).logits
                labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
                losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                losses = losses.view_as(labels).mean(1)
                optimizer.signal_skip_step(do_skip=not last)
                if mode == "hooks":
                    losses.sum().backward()
                else:
                    losses.mean().backward(retain_graph=True)
                    optimizer.zero_grad(True)
                    coefficients = wrapped.get_clipping_coef()
                    wrapped.disable_hooks()
                    (coefficients * losses).sum().backward()
                    wrapped.enable_hooks()
                optimizer.step()
                optimizer.zero_grad()

        return step

    return make


VARIANTS: dict[str, Variant] = {
    "ordinary": ordinary,
    "hf_dp": private,
    "hf_dp in two passes": functools.partial(private, passes=2),
    "hf_dp in groups": functools.partial(private, clipping="groups", groups=_BY_LAYER),
    "hf_dp automatic": functools.partial(private, clipping="automatic"),
    "hf_dp chacha20": functools.partial(private, noise="chacha20"),
    "hf_dp grid": functools.partial(private, noise="grid"),
    "hf_dp by user": functools.partial(private, sizes=(4,)),
    "hf_dp by user, uneven": functools.partial(private, sizes=(1, 3, 4)),
    "hf_dp by user, in pieces": in_pieces,
    "opacus ghost": _opacus("ghost"),
    "opacus hooks": _opacus("hooks"),
}
