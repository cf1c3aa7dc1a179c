"""Experts whose matrices are W + A B: gradients of A and B come without those of W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft.tuners.lora import layer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record
from scripts.judging import sorted_in_float64
from tests import zoo
from tests.per_example.small import relative_error
from tests.training.test_target_parameters import model_of

EXPERTS, WIDTH, MIDDLE, RANK = 3, 6, 10, 2


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with sorted_in_float64():
        yield


class Experts(nn.Module):
    """Each token through its expert, whose matrix `fold` makes of a large one and two small ones."""

    def __init__(self, fold: Callable[[Any], Tensor], is_trained: bool) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(EXPERTS, MIDDLE, WIDTH), requires_grad=is_trained)
        self.left = nn.Parameter(torch.randn(EXPERTS, MIDDLE, RANK))
        self.right = nn.Parameter(torch.randn(EXPERTS, RANK, WIDTH))
        self.fold = fold

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        experts, order = ids.sort(stable=True)
        offsets = torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()
        rows = torch.ops.transformers.grouped_mm_fallback(tokens[order], self.fold(self).mT, offsets)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back]


class Adapted(nn.Module):
    """Tokens (B, T) through experts, to one of three classes."""

    def __init__(self, fold: Callable[[Any], Tensor], is_trained: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.experts, self.out = nn.Embedding(11, WIDTH), Experts(fold, is_trained), nn.Linear(MIDDLE, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        rows = self.experts(h.view(-1, WIDTH), ids.view(-1) % EXPERTS)
        return self.out(rows.view(*ids.shape, -1).tanh().mean(1))


def losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["labels"], reduction="none")


def batch_of(size: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"ids": torch.randint(0, 11, (size, 7), generator=generator), "labels": torch.arange(size) % 3}


def folded(model: Any, **scales: float) -> Tensor:
    return torch.baddbmm(model.whole, model.left, model.right, **scales)


def used_otherwise_too(model: Any) -> Tensor:
    """Of its entries one product is of the whole matrix as well."""
    made = folded(model, alpha=0.5)
    return made * made[:1, :1, :1]


FOLDS = {
    "LoRA": lambda model: folded(model, alpha=0.7),
    "with less of the whole": lambda model: folded(model, alpha=-2.0, beta=0.25),
    "a whole that is broadcast": lambda model: torch.baddbmm(model.whole[:1], model.left, model.right),
    "with a function after it": lambda model: folded(model).tanh(),
    "used otherwise too": used_otherwise_too,
    "twice": lambda model: folded(model) + folded(model, alpha=2.0).mT.contiguous().mT,
    "swapped": lambda model: torch.baddbmm(model.whole.mT, model.right.mT, model.left.mT).mT,
}


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
def test_they_are_exact(fold: Callable[[Any], Tensor], is_trained: bool) -> None:
    model, batch = Adapted(fold, is_trained), batch_of()
    certificate = preflight(model, losses, batch_of(3))
    found = record(model, losses, batch, certificate=certificate)
    assert relative_error(found, loop(model, losses, batch)) < 1e-12


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation inside gives."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(given) if isinstance(value, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return given


_FOLDS_AT_ONCE = pytest.mark.skipif(
    not hasattr(layer, "_LoraFactorsProxy"), reason="PEFT before 0.21 adds up A B first"
)


@pytest.mark.parametrize("of", ["a small model", pytest.param("PEFT's target_parameters", marks=_FOLDS_AT_ONCE)])
def test_no_gradient_of_the_whole_is_made_for_each_example(of: str) -> None:
    size = 16
    if of == "a small model":
        model, batch, loss = Adapted(FOLDS["LoRA"]), batch_of(size), losses
        whole = EXPERTS * MIDDLE * WIDTH
    else:
        model, loss = model_of("qwen3_moe", torch.float64), per_example_losses
        batch = zoo.text_batch("causal_lm", size)
        whole = max(p.numel() for name, p in model.named_parameters() if "experts" in name)
    certificate = preflight(model, loss, {name: value[:3] for name, value in batch.items()})
    with Largest() as largest:
        record(model, loss, batch, certificate=certificate).squared_norms()
    assert largest.numbers < size * whole
    if of == "a small model":
        dense = Adapted(FOLDS["with a function after it"])
        certificate = preflight(dense, losses, batch_of(3))
        with Largest() as largest:
            record(dense, losses, batch, certificate=certificate)
        assert largest.numbers == size * whole, "a control: it is seen where it is made"
