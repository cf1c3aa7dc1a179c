"""Autograd Functions of parameters and data: run again for each example, and held against what is computed for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hf_dp.per_example.functions as functions
from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.per_example import PerExampleGradients, loop, preflight, record
from hf_dp.per_example.functions import IS_OF_C, Applied, by_rows, functions_seen
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.per_example.pieces import Pieces
from hf_dp.per_example.rule import Certificate
from hf_dp.step.clipped_sum import ClippedSum
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.uses import Product


class Centred(Product):
    """Each example sees the mean of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Product.forward(ctx, x - x.mean(0, keepdim=True), w)


class Later(Product):
    """Each example sees a share of the mean of all: none until it is changed."""

    share = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Product.forward(ctx, x - Later.share * x.mean(0, keepdim=True), w)


class Dropping(Product):
    """Draws numbers of which torch does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = torch.from_numpy(np.random.rand(len(x), 1, 1) * 2)
        return Product.forward(ctx, x, w) * ctx.kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, gradient * ctx.kept)


class Counting(Product):
    """Computes something else each time."""

    number = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        Counting.number += 1
        ctx.number = Counting.number
        return Product.forward(ctx, x, w) * ctx.number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, gradient * ctx.number)


class Averaged(Product):
    """Divides by the number of examples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.number = len(x)
        return Product.forward(ctx, x, w) / ctx.number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, gradient / ctx.number)


class Times(torch.autograd.Function):
    """Given what all examples share, too; which it may change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, shared: Tensor, by: float) -> Tensor:
        if by:
            shared += by
        ctx.save_for_backward(x, w, shared.clone())
        return x @ w.detach() * shared

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w, shared = ctx.saved_tensors
        gradient = gradient * shared
        return gradient @ w.detach().T, x.flatten(0, -2).T @ gradient.flatten(0, -2), None, None


class Cast(Product):
    """As Functions are written that are used under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Product.forward(ctx, x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return Product.backward(ctx, gradient)


class Reversed(torch.autograd.Function):
    """Whose gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * -3


class Aside(torch.autograd.Function):
    """Computes from a parameter, with a gradient of its own, and is given what does not show whether it is data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, gradient * -3


class LookedUp(torch.autograd.Function):
    """Whose gradient is sparse."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(ids, w)
        return w[ids]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ids, w = ctx.saved_tensors
        return None, torch.sparse_coo_tensor(ids.reshape(1, -1), gradient.reshape(-1, w.shape[1]), w.shape)


# As models keep them, from before anything was watched.
REVERSED, PRODUCT = Reversed.apply, Product.apply


class Holder:
    def __init__(self, held: Tensor) -> None:
        self.held = held


class Held(torch.autograd.Function):
    """Given the mean of all examples, in something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, holder: Holder) -> Tensor:
        ctx.mean = holder.held.mean((0, 1))
        return w * ctx.mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.mean, None


def of_the_last(m: Any, x: Tensor) -> Tensor:
    shared = torch.ones(5, dtype=x.dtype)
    output: Tensor = Times.apply(m.linear(x), m.w, shared, 0.0)
    shared.mul_(2)
    return output.cos()


UNLIKE = {
    "random": lambda m, x: Dropping.apply(m.linear(x), m.w).cos(),
    "folded": lambda m, x: Dropping.apply(m.linear(x).view(-1, 2, 4), m.w).cos().view(len(x), -1),
    "counting": lambda m, x: Counting.apply(m.linear(x), m.w).cos(),
    "changed since": of_the_last,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", UNLIKE)
def test_one_that_computes_something_else_when_it_is_run_again_is_refused_by_name(kind: str, size: int) -> None:
    """In training mode, where nothing is held against the oracle."""

    def function(m: Any, x: Tensor) -> Tensor:
        return UNLIKE[kind](m, x) if m.training else m.linear(x) @ m.w

    model = Small(function, linear=nn.Linear(4, 4), w=parameter(4, 5))
    with pytest.raises((UnsupportedModelError, PreflightError), match=r"parameter w is used by|neighbours"):
        record(model, square, batch(size, 6, 4))


def test_one_that_counts_the_examples_is_refused_by_name() -> None:
    model = Small(lambda m, x: Averaged.apply(m.linear(x), m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5))
    with pytest.raises(UnsupportedModelError, match=r"parameter w is used by operation .*Averaged"):
        record(model, square, batch(3, 6, 4))


def test_one_that_changes_what_all_examples_share_is_refused_by_name() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        output: Tensor = Times.apply(m.linear(x), m.w, torch.ones(5, dtype=x.dtype), 1.0)
        return output.cos()

    model = Small(function, linear=nn.Linear(4, 4), w=parameter(4, 5))
    with pytest.raises(UnsupportedModelError, match="changes what it is given"):
        record(model, square, batch(3, 6, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(4,), (1, 4), (4, 4)])
def test_what_all_examples_share_may_have_as_many_rows_as_there_are_examples(shape: tuple[int, ...], size: int) -> None:
    """Which preflight has seen to be no data."""

    def function(m: Any, x: Tensor) -> Tensor:
        output: Tensor = Times.apply(m.linear(x), m.w, torch.ones(shape, dtype=x.dtype), 0.0)
        return output.cos()

    model, data = Small(function, linear=nn.Linear(4, 4), w=parameter(4, 4)), batch(size, 4, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(3, 4, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3])
def test_under_autocast_it_is_run_again_under_autocast(size: int) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Cast.apply(m.linear(x), m.w).float().cos()

    model = Small(function, linear=nn.Linear(4, 4), w=parameter(4, 5)).float()
    data = {"x": batch(size, 6, 4)["x"].float()}
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-2


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (lambda m, x: PRODUCT(x @ REVERSED(m.v), m.w).cos(), r"parameter v .*Reversed(.*\n)*.* as MyFunction\.apply\("),
        (lambda m, x: PRODUCT(x @ m.v, m.w).cos(), r"gradient reached w (.*\n)*.* as MyFunction\.apply\("),
    ],
)
def test_failure_85_one_that_was_taken_from_its_class_before(function: Any, refused: str, size: int) -> None:
    model, data = Small(function, v=parameter(4, 4), w=parameter(4, 5)), batch(size, 6, 4)
    if IS_OF_C:
        with pytest.raises(UnsupportedModelError, match=refused):
            record(model, square, data)
        return
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3])
def test_those_that_c_calls_past_python_are_seen(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from torch 2.14 on, whichever is installed."""
    monkeypatch.setattr(functions, "IS_OF_C", True)
    monkeypatch.setattr(torch.autograd.Function, "apply", torch._C._FunctionBase.__dict__["apply"])
    model, data = Small(lambda m, x: Product.apply(x, m.w).cos(), w=parameter(4, 5)), batch(size, 6, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12
    taken = Reversed.apply
    with pytest.raises(UnsupportedModelError, match=r"parameter w .*Reversed(.*\n)*.* as MyFunction\.apply\("):
        record(Small(lambda m, x: (x @ taken(m.w)).cos(), w=parameter(4, 4)), square, data)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("other", [object, torch.exp, "data"])
def test_failure_85_what_a_forward_pass_derives_from_parameters_is_refused_by_name(other: Any, size: int) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        given = x.cos() if other == "data" else other
        return F.linear(x, Aside.apply(x, given, m.w)).cos()

    with pytest.raises(UnsupportedModelError, match=r"parameter w is used by operation .*Aside"):
        record(Small(function, w=parameter(4, 4)), square, batch(size, 6, 4))


@pytest.mark.parametrize("size", [1, 3])
def test_one_whose_gradient_is_sparse(size: int) -> None:
    model = Small(
        lambda m, x: m.linear(LookedUp.apply(x[..., 0].gt(0).long(), m.w)), linear=nn.Linear(4, 4), w=parameter(2, 4)
    )
    data = batch(size, 6, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [2, 3])
def test_data_in_what_is_no_tensor_are_found(size: int) -> None:
    model = Small(lambda m, x: (x + Held.apply(m.w, Holder(x))).cos(), w=parameter(4))
    with pytest.raises(PreflightError, match="neighbours"):
        record(model, square, batch(size, 6, 4))


@pytest.mark.parametrize("has_certificate", [True, False])
def test_one_that_mixes_examples_is_found(has_certificate: bool) -> None:
    model = Small(lambda m, x: Centred.apply(m.linear(x), m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5))
    with pytest.raises(UnsupportedModelError, match="it mixes them"):
        (preflight if has_certificate else record)(model, square, batch(3, 5, 4))


def kept(model: nn.Module, data: Any, certificate: Certificate) -> PerExampleGradients:
    return record(model, square, data, certificate=certificate)


def of_units(model: nn.Module, data: Any, certificate: Certificate) -> PerExampleGradients:
    return kept(model, data, certificate).grouped([0, 0, 1])


def in_pieces(model: nn.Module, data: Any, certificate: Certificate) -> PerExampleGradients:
    pieces = Pieces()
    pieces.joined(kept(model, data, certificate).grouped([0, 0, 0], after=3))
    return pieces.joined(kept(model, data, certificate).grouped([0, 0, 0], before=3))


def in_two_passes(model: nn.Module, data: Any, certificate: Certificate) -> PerExampleGradients:
    return record_in_two_passes(model, square, data, certificate=certificate)


def in_groups(model: nn.Module, data: Any, certificate: Certificate) -> PerExampleGradients:
    return InGroups(model, square, data, certificate=certificate)


@pytest.mark.parametrize("how", [kept, of_units, in_pieces, in_two_passes, in_groups])
@pytest.mark.parametrize("mixes", [True, False])
def test_where_answers_have_to_be_waited_for_the_logical_batch_is_refused_when_it_ends(
    mixes: bool, how: Callable[..., PerExampleGradients], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that begins to mix after the check."""

    model = Small(lambda m, x: Later.apply(m.linear(x), m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5))
    data = batch(3, 5, 4)
    certificate = preflight(model, square, data)
    monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())
    monkeypatch.setattr(Later, "share", float(mixes))
    total = ClippedSum(model, Flat(FlatClipping(norm=1.0)))
    gradients = how(model, data, certificate)
    # What looks at them without a sum, as the choice of rows does, asks them.
    assert how is in_groups or bool(gradients.differing) == mixes
    total.add(gradients)
    assert bool(gradients.differing) == mixes
    if not mixes:
        return total.meet(0)
    with pytest.raises(UnsupportedModelError, match=r"^[1-3] examples whose gradients were others"):
        total.meet(0)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_arguments_that_a_checkpoint_keeps(size: int) -> None:
    """They are put away by a Function of nothing else."""

    def function(m: Any, x: Tensor) -> Tensor:
        return x * checkpoint(torch.exp, m.w, use_reentrant=False)

    model, data = Small(function, w=parameter(4)), batch(size, 5, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(3, 5, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_one_of_nothing_but_an_empty_tensor_is_left_alone() -> None:
    """Some checkpoints keep their arguments by such a one."""
    empty = torch.empty(0, requires_grad=True)
    assert by_rows(Applied(Product, Product.apply), (empty, "kept"), {}, [empty], print) is None


def test_all_is_as_it_was_afterwards() -> None:
    sparse, bases = torch.sparse_coo_tensor, (torch.autograd.Function, torch.autograd.function._SingleLevelFunction)
    before = [dict(vars(base)) for base in bases]
    with functions_seen(), functions_seen():
        assert [dict(vars(base)) for base in bases] != before
        assert torch.sparse_coo_tensor is not sparse
    assert [dict(vars(base)) for base in bases] == before
    assert torch.sparse_coo_tensor is sparse
