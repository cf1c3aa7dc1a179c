"""What a step would take on a GPU that is not there: all operations that it starts, in turn, at known rates.

    python scripts/roofline.py --case "Llama 1B, 8 x 512" --case "Llama 1B, 4 x 1024"

Both steps run on a device whose tensors have shapes and no numbers (tests/per_example/pretended.py), with one layer and
with two; from these follow as many as the case has. An operation takes as long as its products, or as its bytes, or as
it takes to start, whichever is longest; of products and bytes the rates are those of hf_dp/planning/speed.py. Attention
is left out: kernels of a real GPU do not run here, and both steps have it. `hf-dp size` predicts by products and bytes
of weights alone; this has activations, the loss and what is started besides.

What Python does between two starts runs ahead of the device, unless it takes longer. It is measured here, on a CPU,
with tensors of hardly any numbers; where it is printed as longer than the step, the step takes as long.

Weights are in bf16; with --autocast in float32, and products in bf16 (`TrainingArguments(bf16=True)`).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from workloads import (  # noqa: E402
    GPU_CASES,
    MICRO_BATCHES,
    SMALL_CASES,
    Case,
    Cases,
    Setting,
    batches,
    build,
    loss_of,
    losses_of,
    predicted,
)

from hf_dp.accounting import FlatClipping  # noqa: E402
from hf_dp.clipping.table import rule_of  # noqa: E402
from hf_dp.noise.gaussian import GaussianNoise  # noqa: E402
from hf_dp.per_example import Certificate, preflight, record  # noqa: E402
from hf_dp.planning.speed import ADAM, GPUS, Gpu  # noqa: E402
from hf_dp.randomness import Entropy  # noqa: E402
from hf_dp.step.clipped_sum import ClippedSum  # noqa: E402
from tests.per_example import pretended  # noqa: E402

# Seconds between two starts, at least.
_START = 4e-6
# What is narrow where Python alone is measured: numbers of each head, and of everything else.
_HEAD, _NARROW = 2, 8
_REPEATS = 12
# What starts nothing.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "lift_fresh", "alias", "device"}
# What autocast computes in fewer bits; what it computes in more than it is given is left as it is.
_LOWERED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm")
_LOOKED_UP = {"embedding", "index_select", "index", "gather"}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Started(TorchDispatchMode):
    """The seconds and the number of each operation inside.

    Args:
        gpu: where they would run.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.seconds, self.number = gpu, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        # Tensors without numbers know no such product in torch 2.13.
        is_added = name in ("addmm", "baddbmm") and any(isinstance(value, torch.dtype) for value in args)
        result = kwargs["out"] if is_added else func(*args, **kwargs)
        if not func.is_view and name not in _FREE and not name.startswith("sym_"):
            product = self._product(name, args, kwargs, result)
            self.seconds[name] += max(product, self._moved(name, args, kwargs, result) / self.gpu.bandwidth, _START)
            self.number[name] += 1
        return result

    def _product(self, name: str, args: Any, kwargs: Any, result: Any) -> float:
        formula = flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))
        if formula is None:
            return 0.0
        operands = [value for value in args if isinstance(value, Tensor)][-2:]
        rate = self.gpu.full if any(value.dtype == torch.float32 for value in operands) else self.gpu.low
        # What type sums come out in is nothing that the formulas know.
        given = (value for value in args if not isinstance(value, torch.dtype))
        return float(formula(*given, **kwargs, out_val=result)) / rate

    def _moved(self, name: str, args: Any, kwargs: Any, result: Any) -> float:
        if name in _LOOKED_UP:
            return 2.0 * sum(value.nbytes for value in tree_leaves(result))
        touched = {id(value): value for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)}
        return float(sum(map(_bytes, touched.values())))


def _bytes(tensor: Tensor) -> int:
    """Of what is repeated (`expand`) once."""
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride else 1
    return number


def _no_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    one = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query + one


@contextmanager
def autocast_is_known() -> Iterator[None]:
    """Inside, autocast does on the pretended device what it does on others."""

    def lowered(name: str) -> Any:
        operation = getattr(torch.ops.aten, name)

        def in_fewer_bits(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(pretended.GPU, enabled=False):
                return operation(*map(_lowered, args), **kwargs)

        return in_fewer_bits

    with (
        torch.library._scoped_library("_", "IMPL", "AutocastPrivateUse1") as all_others,
        torch.library._scoped_library("aten", "IMPL", "AutocastPrivateUse1") as some,
    ):
        all_others.fallback(torch.library.fallthrough_kernel)
        for name in _LOWERED:
            some.impl(name, lowered(name))
        yield


def _lowered(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def started(case: Case, *, is_private: bool, gpu: Gpu) -> Started:
    """One logical batch, without the optimizer.

    Args:
        case: as it is.
        is_private: or an ordinary step.
        gpu: where.
    """
    model = build(case, Setting(torch.device("cpu"), torch.bfloat16))
    few = torch.randint(0, 60, (3, 17))
    batch = {"input_ids": few, "attention_mask": torch.ones_like(few), "labels": few}
    losses = functools.partial(losses_of, case)
    certificate = preflight(model, losses, batch) if is_private else None
    started = Started(gpu)
    with ExitStack() as stack:
        pretended.enter(stack)
        stack.enter_context(patch("torch.nn.functional.scaled_dot_product_attention", _no_attention))
        # Tensors without numbers all lie in one place.
        stack.enter_context(patch("hf_dp.noise.source._check", lambda tensors, standard_deviation: None))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        pretended.on_device(model)
        stack.enter_context(autocast_is_known())
        ids = torch.empty(case.batch, case.length, dtype=torch.int64, device=pretended.GPU)
        data = [{"input_ids": ids, "labels": ids} for _ in range(MICRO_BATCHES)]
        stack.enter_context(started)
        _all_of(case, model, data, certificate)
    return started


def _all_of(case: Case, model: nn.Module, data: list[dict[str, Tensor]], certificate: Certificate | None) -> None:
    if certificate is None:
        for one in data:
            (loss_of(case, model, one) / MICRO_BATCHES).backward()
        return
    total = ClippedSum(model, rule_of(FlatClipping(norm=1.0)))
    for one in data:
        total.add(record(model, functools.partial(losses_of, case), one, certificate=certificate))
    total.release(GaussianNoise(Entropy(None)), 1.0, 0)
    total.set_gradients(8.0)


def of_all_layers(case: Case, gpu: Gpu, *, is_private: bool) -> tuple[Counter[str], Counter[str]]:
    """The seconds and the number of each operation of a step, from one layer and from two."""
    layers = "n_layer" if "n_layer" in case.config else "num_hidden_layers"
    few = [dataclasses.replace(case, config={**case.config, layers: number}) for number in (1, 2)]
    one, two = (started(each, is_private=is_private, gpu=gpu) for each in few)
    more = case.config[layers] - 1

    def extended(first: Counter[str], second: Counter[str]) -> Counter[str]:
        return Counter({name: first[name] + more * (second[name] - first[name]) for name in {**first, **second}})

    return extended(one.seconds, two.seconds), extended(one.number, two.number)


def of_python(case: Case, *, is_private: bool) -> float:
    """Seconds of a processor for as many operations on hardly any numbers, the least of several logical batches."""
    heads = case.config.get("n_head") or case.config["num_attention_heads"]
    narrow = {"hidden_size": heads * _HEAD, "n_embd": heads * _HEAD, "intermediate_size": _NARROW, "vocab_size": 64}
    config = {name: narrow.get(name, value) for name, value in case.config.items()}
    case = dataclasses.replace(case, config=config, batch=2, length=4, rank=2)
    model = build(case, Setting(torch.device("cpu")))
    losses = functools.partial(losses_of, case)
    data = batches(case, torch.device("cpu"))
    certificate = preflight(model, losses, data[0]) if is_private else None
    seconds = []
    for _ in range(_REPEATS):
        model.zero_grad()
        begin = time.process_time()
        _all_of(case, model, data, certificate)
        seconds.append(time.process_time() - begin)
    return min(seconds)


def _trained(case: Case) -> int:
    with torch.device("meta"):
        model: nn.Module = build(case, Setting(torch.device("meta"), torch.bfloat16))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@app.command()
def run(
    case: Annotated[list[str], typer.Option(help=f"Of {', '.join([*GPU_CASES, *SMALL_CASES])}.")],
    autocast: Annotated[bool, typer.Option(help="Weights in float32, and products in bf16.")] = False,
    operations: Annotated[int, typer.Option(help="How many operations to print that differ most.")] = 0,
) -> None:
    """The ratio of each case, and how many operations are started."""
    pretended.make_device()
    gpu = GPUS["H100"]
    for name in case:
        chosen = Cases({**GPU_CASES, **SMALL_CASES})[name]
        chosen = dataclasses.replace(chosen, autocast=chosen.autocast or autocast)
        adam = ADAM * _trained(chosen) / gpu.bandwidth
        (own, own_number), (ours, our_number) = (
            of_all_layers(chosen, gpu, is_private=is_private) for is_private in (False, True)
        )
        ordinary, private = own.total() + adam, ours.total() + adam
        print(
            f"{name}: ordinary {ordinary * 1e3:,.0f} ms, {own_number.total():,.0f} operations; private "
            f"{private * 1e3:,.0f} ms, {our_number.total():,.0f}; {private / ordinary:.2f} x "
            f"({predicted(chosen):.2f} x by the arithmetic of hf-dp size)"
        )
        own_python, our_python = (of_python(chosen, is_private=is_private) * 1e3 for is_private in (False, True))
        print(f"    Python on this machine: {own_python:,.0f} ms, and {our_python:,.0f} ms for the private step")
        differ = sorted({*own, *ours}, key=lambda which: -abs(ours[which] - own[which]))
        for which in differ[:operations]:
            print(f"    {which}: {own[which] * 1e3:.1f} ms, {ours[which] * 1e3:.1f} ms")
    pretended.leave()


if __name__ == "__main__":
    app()
