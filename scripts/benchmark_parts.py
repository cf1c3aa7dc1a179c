"""Of what a private step is made: forms of gradients, noise, weights in few bits, Re-Attention; measured alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import (
    Dtype,
    Processor,
    clock_of,
    in_turns,
    measured_alone,
    median_of,
    peak_mib,
    ratio_of,
    setting_of,
    timed,
)  # fmt: skip
from workloads import CASES, VARIANTS, Counting, batches, build


def forms(
    batch: Annotated[int, typer.Option(help="Examples.")] = 8,
    length: Annotated[int, typer.Option(help="Positions of each example.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = 31,
    processor: Processor = False,
) -> None:
    """Norms and weighted sum of one weight's gradients: from Gram matrices, or from instantiated gradients kept; beside
    them the product that an ordinary step makes, and the norms alone."""
    from hf_dp.per_example.factors import Factors, Outer
    from hf_dp.per_example.gram import Dense
    from hf_dp.per_example.norms import squared_norms

    def step(form: Callable[[], Factors], total: torch.Tensor, coefficients: torch.Tensor) -> None:
        use = form()
        squared_norms([use])
        use.add_weighted_(total, coefficients)

    device, clock = setting_of("float32", "sdpa").device, clock_of(processor)
    for left, right in ((512, 512), (512, 1536), (512, 2048)):
        sides = [Dense(torch.randn(batch, length, size, device=device)) for size in (left, right)]
        outer, total = Outer(*sides), torch.zeros(left, right, device=device)
        rows, coefficients = [side.values.flatten(0, 1) for side in sides], torch.rand(batch, device=device)
        calls: dict[str, Callable[[], object]] = {
            "Gram": functools.partial(step, lambda use=outer: use, total, coefficients),
            "instantiated": functools.partial(step, outer.instantiated, total, coefficients),
            "the product alone": functools.partial(total.addmm_, rows[0].T, rows[1]),
            "Gram's norms alone": functools.partial(squared_norms, [outer]),
        }
        shown = []
        for name, times in in_turns(calls, repeats, device, clock).items():
            took = median_of(times)
            with Counting() as counting:
                calls[name]()
            shown.append(f"{name} {1000 * took:.2f} ms ({counting.operations / took / 1e9:.0f} Gflop/s)")
        print(f"{left} x {right}, B {batch}, T {length}: {', '.join(shown)}", flush=True)


def noise(
    size: Annotated[int, typer.Option(help="Numbers.")] = 2 * 10**7,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = 9,
    processor: Processor = False,
) -> None:
    """Numbers a second of torch.randn and of each source of noise, added to a sum; ratios to gaussian. In turns."""
    from hf_dp.accounting import GaussianNoise
    from hf_dp.noise.table import SOURCES, source_of
    from hf_dp.randomness import Entropy

    device = setting_of("float32", "sdpa").device
    total, plain = torch.zeros(size, device=device), torch.empty(size, device=device)
    calls: dict[str, Callable[[], object]] = {"torch, drawn": plain.normal_}
    for kind in SOURCES:
        source = source_of(GaussianNoise(multiplier=1.0, kind=kind), Entropy(None))
        calls[f"{kind}, drawn, scaled and added"] = functools.partial(source.add_, [total], 1.0, 0)
    seconds = in_turns(calls, repeats, device, clock_of(processor))
    usual = seconds["gaussian, drawn, scaled and added"]
    for name, times in seconds.items():
        took, ratio = median_of(times), ratio_of(times, usual)
        print(f"{name}: {size / took / 1e6:.0f} million a second, {1e9 * took / size:.1f} ns a number, {ratio:.2f}")


BITS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "bitsandbytes nf4": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32",
    },
    "bitsandbytes int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "torchao int8": {"quant_type": "Int8WeightOnlyConfig"},
}  # fmt: skip


def _in_bits(model: str, kind: str) -> Any:
    """A causal language model with LoRA on all linear layers, its base in so many bits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16 if kind == "bfloat16" else torch.float32}
    if kind.startswith("bitsandbytes"):
        options["quantization_config"] = BitsAndBytesConfig(**BITS[kind])
    elif kind.startswith("torchao"):
        import torchao.quantization

        options["quantization_config"] = TorchAoConfig(getattr(torchao.quantization, BITS[kind]["quant_type"])())
    base = AutoModelForCausalLM.from_pretrained(model, device_map="cpu", **options)
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()


def _bytes(value: torch.Tensor) -> int:
    """Of a parameter: also of the tensors that a quantised one is made of, and of the scales beside it."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    beside = [getattr(value, name, None) for name in ("quant_state", "SCB")]
    scales = [getattr(one, "absmax", one) for one in beside if one is not None]
    return int(value.nbytes) + sum(int(scale.nbytes) for scale in scales)


def _peak_of_a_step(model: str, kind: str) -> float:
    """MiB that this process takes at most from when the model is loaded, which makes some weights whole first, to the
    end of a private step on a micro-batch of 8 x 64 tokens."""
    adapted = _in_bits(model, kind)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    case = dataclasses.replace(CASES["llama lora"], batch=8, length=64, config=adapted.config.to_dict())
    VARIANTS["hf_dp"](case, adapted, batches(case, torch.device("cpu"))[:1])()
    return peak_mib()


def bits(
    model: Annotated[str, typer.Option(help="Of a causal language model.")],
    alone: Annotated[str | None, typer.Option(hidden=True, help="Only the peak memory of this one, in MiB.")] = None,
) -> None:
    """MiB of a model with LoRA over a frozen base in fewer bits: of its weights, and at most in a process that makes
    a private step; nothing is timed."""
    if alone is not None:
        print(_peak_of_a_step(model, alone))
        return
    sizes = {name: sum(map(_bytes, _in_bits(model, name).parameters())) / 2**20 for name in BITS}
    for name, size in sizes.items():
        peak = measured_alone("bits", "--model", model, "--alone", name)
        step = peak if isinstance(peak, str) else f"{peak:.0f} MiB"
        print(f"{name}: {size:.0f} MiB, {size / sizes['float32']:.2f}; with a step {step}")


def re_attention(
    repeats: Annotated[int, typer.Option(help="Timed forward passes.")] = 9,
    length: Annotated[int, typer.Option(help="Positions of each example.")] = 512,
    dtype: Dtype = "float32",
) -> None:
    """Time of a forward pass with Re-Attention as a ratio to plain sdpa, both fidelities."""
    from hf_dp import ReAttentionConfig
    from hf_dp.parts.re_attention import ReAttention
    from hf_dp.parts.re_attention.deviations import one_step, relative_counts

    setting = setting_of(dtype, "sdpa")
    for name in ("tied long", "llama lora"):
        case = dataclasses.replace(CASES[name], batch=4, length=length, lora=False)
        ids = batches(case, setting.device)[0]["input_ids"]
        models = {fidelity: build(case, setting).eval() for fidelity in ("plain", "isotropic", "per_feature")}
        for fidelity in ("isotropic", "per_feature"):
            config = ReAttentionConfig(fidelity=fidelity, token_frequencies="uniform")  # type: ignore[arg-type]
            attention = ReAttention(models[fidelity], config)
            shares = torch.linspace(0.01, 1, case.config["vocab_size"])
            attention.errors = one_step(relative_counts(models[fidelity], 64.0, shares), 1e-3)
        seconds: dict[str, list[float]] = {fidelity: [] for fidelity in models}
        with torch.no_grad():
            for _ in range(repeats + 1):
                for fidelity, model in models.items():
                    seconds[fidelity].append(timed(functools.partial(model, ids), setting.device))
        plain, *others = (values[1:] for values in seconds.values())
        ratios = ", ".join(f"{f} {ratio_of(t, plain):.2f}" for f, t in zip(list(models)[1:], others, strict=True))
        print(f"{case.family}, B 4, T {length}: plain {1000 * median_of(plain):.0f} ms, {ratios} times that")
