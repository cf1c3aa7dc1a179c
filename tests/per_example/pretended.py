"""Steps on a GPU that is not there: its tensors have shapes and devices, and no numbers.

Operands on two devices are an error, and so is most of what would wait for the device: a number that is read, a shape
that follows from numbers. torch knows one such device in each process, and for good: `python -m
tests.per_example.pretended` makes all cases in one of its own, and prints as JSON what each came to.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_dp.accounting import AutomaticClipping, FlatClipping, GroupClipping
from hf_dp.clipping.table import rule_of
from hf_dp.losses import per_example_losses
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.per_example import PerExampleGradients, Pieces, preflight, record
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.per_example.rule import Certificate
from hf_dp.per_example.watched import Source, WatchedParameter
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum
from tests import zoo

GPU, B, T = "gpu", 5, 7
Batch = dict[str, Tensor]
Recorded = Callable[[nn.Module, Batch, Certificate], Iterator[PerExampleGradients]]


class Case(NamedTuple):
    """What is recorded and clipped, and how."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, torch.dtype], Batch]
    recorded: Recorded
    clipping: Any = FlatClipping(norm=1.0)


class Untouched(WatchedParameter):
    """A watched parameter on that device: nothing may compute with it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} with a watched parameter")


def _stands(usual: Callable[[Source], WatchedParameter], source: Source) -> WatchedParameter:
    plain, leaked, parameters = source.plain, source.watch.leaked, source.parameters
    if not isinstance(plain, FakeTensor):
        return usual(source)
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = torch.Tensor._make_wrapper_subclass(
            Untouched, plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device, requires_grad=True
        )
        made.register_hook(lambda _: leaked.update(parameters))
    made.source = source
    return made  # type: ignore[no-any-return]


def _added(tensor: Tensor, standard_deviation: float, generator: Any) -> None:
    # There are no generators on that device.
    tensor.add_(torch.empty_like(tensor, dtype=torch.float64).normal_(0, standard_deviation))


def step(case: Case) -> list[str]:
    """Two micro-batches recorded, clipped and summed; noise. The devices of the gradients."""
    model, given = case.build(), case.batch(B, T, torch.float32)
    certificate = preflight(model, per_example_losses, given)
    with ExitStack() as stack:
        enter(stack)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        on_device(model)
        batch = {name: torch.empty_like(value, device=GPU) for name, value in given.items()}
        total = ClippedSum(model, rule_of(case.clipping))
        for _ in range(2):
            for gradients in case.recorded(model, batch, certificate):
                total.add(gradients)
        total.release(GaussianNoise(Entropy(None)), 1.0, 0)
        total.set_gradients(8.0)
        return sorted({p.grad.device.type for p in model.parameters() if p.grad is not None})


def enter(stack: ExitStack) -> None:
    """Until `stack` is left, that device multiplies 16 bits on tensor cores, adds rows by index, and draws."""
    cores = {name: lambda device, *_: device.type == GPU for name in ("_has_tensor_cores", "_adds_in_place")}
    stack.enter_context(patch.multiple("hf_dp.per_example.products", **cores))
    stack.enter_context(patch("hf_dp.per_example.chosen._BY_INDEX", {GPU}))
    stack.enter_context(patch("hf_dp.per_example.chosen._sparse", dense))
    stack.enter_context(patch.object(WatchedParameter, "of", functools.partial(_stands, WatchedParameter.of)))
    stack.enter_context(patch.object(GaussianNoise, "on_device", lambda self, device, key, path: device))
    stack.enter_context(patch("hf_dp.noise.source._add_by_torch", _added))


def dense(begins: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """In place of a sparse matrix, which has no shapes without numbers."""
    return values.new_zeros(len(begins) - 1, len(columns))


def on_device(model: nn.Module) -> None:
    """Parameters, buffers and tensors in plain attributes, ties kept."""
    known: dict[int, Tensor] = {}

    def moved(value: Tensor) -> Tensor:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
        return nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made

    for module in model.modules():
        # torch.tensor, which caches call, makes nothing on that device.
        if hasattr(config := getattr(module, "config", None), "use_cache"):
            config.use_cache = False
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in list(holder.items()):
                if isinstance(value, Tensor):
                    holder[name] = known.setdefault(id(value), moved(value))


def whole(model: nn.Module, batch: Batch, certificate: Certificate) -> Iterator[PerExampleGradients]:
    yield record(model, per_example_losses, batch, certificate=certificate)


def grouped(
    owners: Sequence[int], model: nn.Module, batch: Batch, certificate: Certificate
) -> Iterator[PerExampleGradients]:
    yield next(whole(model, batch, certificate)).grouped(owners)


def in_pieces(model: nn.Module, batch: Batch, certificate: Certificate) -> Iterator[PerExampleGradients]:
    pieces = Pieces()
    for before, after in ((0, B), (B, 0)):
        yield pieces.joined(next(whole(model, batch, certificate)).grouped([0] * B, before, after))


def in_groups(model: nn.Module, batch: Batch, certificate: Certificate) -> Iterator[PerExampleGradients]:
    yield InGroups(model, per_example_losses, batch, certificate=certificate)


def twice(model: nn.Module, batch: Batch, certificate: Certificate) -> Iterator[PerExampleGradients]:
    torch.use_deterministic_algorithms(True)
    try:
        yield record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    finally:
        torch.use_deterministic_algorithms(False)


def family(name: str, head: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    return functools.partial(zoo.tiny, name, head, dtype), zoo.batches_of(name, head)


def adapter(method: str) -> tuple[Any, Any]:
    return functools.partial(zoo.adapted, method, torch.float32), functools.partial(
        zoo.text_batch, zoo.adapter_head(method)
    )


def spoilt(
    how: Callable[[Tensor], Any], model: nn.Module, batch: Batch, certificate: Certificate
) -> Iterator[PerExampleGradients]:
    """What must be found."""
    for gradients in whole(model, batch, certificate):
        how(gradients.losses)
        yield gradients


_LLAMA, _TIED = family("llama", "causal_lm"), family("gpt2", "causal_lm")
CASES = {
    "tied": Case(*_TIED, whole),
    "llama": Case(*_LLAMA, whole),
    "llama in float32": Case(*family("llama", "causal_lm", torch.float32), whole),
    "bert": Case(*family("bert", "sequence"), whole),
    "vit": Case(*family("vit", "image"), whole),
    "mamba": Case(*family("mamba", "causal_lm"), whole),
    "experts": Case(*family("mixtral, experts batched", "causal_lm"), whole),
    **{name: Case(*adapter(name), whole) for name in ("LoRA", "LoRA over a bf16 base", "DoRA", "trainable tokens")},
    "automatic": Case(*_LLAMA, whole, AutomaticClipping(norm=1.0)),
    "users": Case(*_LLAMA, functools.partial(grouped, [0, 1, 1, 2, 2])),
    "users in pieces": Case(*_TIED, in_pieces),
    "two passes": Case(*_TIED, twice),
    "groups": Case(*_LLAMA, in_groups, GroupClipping(norm=1.0, groups={"*.mlp.*": 1.0, "*": 1.0})),
}
CONTROLS = {
    "on the CPU": lambda losses: losses + torch.ones(B),
    "a number": lambda losses: float(losses.sum()),
    "chosen by a mask": lambda losses: losses[losses > 0],
}


def make_device() -> None:
    """In this process, for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(GPU)
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]


def leave() -> None:
    """Ends a process with that device, whose thread in torch may abort an interpreter that ends by itself."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Each case as JSON: the devices, or the error."""
    make_device()
    found: dict[str, Any] = {}
    controls = {name: Case(*_LLAMA, functools.partial(spoilt, how)) for name, how in CONTROLS.items()}
    for name in sys.argv[1:] or CASES:
        try:
            found[name] = step({**CASES, **controls}[name])
        except Exception as error:  # noqa: BLE001 - what a case runs into is its result
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
