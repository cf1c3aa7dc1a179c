"""Where memory is short the checks take more time and less memory, and see what they saw."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import precision as in_bits
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.padding import check_padding
from hf_dp.per_example.precision import computed_in
from tests.per_example.checks.test_padding import TEXTS, collator
from tests.per_example.small import Small, batch, square
from tests.zoo import adapted, text_batch, tiny

_MOST = 64  # float32 numbers that a copy of a weight may have for longer than one operation


def copies(model: nn.Module) -> list[Tensor]:
    """What has the size of a frozen weight of `model`, in float32."""
    gc.collect()
    shapes = {p.shape for p in model.parameters() if not p.requires_grad and p.numel() > _MOST}
    return [t for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.float32 and t.shape in shapes]


def gradients(model: Any, data: Any, autocast: bool = False) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        per_example_losses(model, data).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return found


def in_half(model: nn.Module) -> nn.Module:
    """`model`, whose frozen weights are in bfloat16."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    return model


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_frozen_weights_are_lifted_where_they_are_used(kind: str, checkpointed: bool, autocast: bool) -> None:
    model, data = in_half(adapted(kind, torch.float32)), text_batch("causal_lm", dtype=torch.float32)
    frozen = {name: (p.data_ptr(), p.dtype, p._version) for name, p in model.named_parameters() if not p.requires_grad}
    assert {dtype for _, dtype, _ in frozen.values()} == {torch.bfloat16}
    with computed_in(model, data, torch.float32):
        exact = gradients(model, data, autocast)
    before = len(copies(model))
    with computed_in(model, data, torch.float32, checkpointed=checkpointed, sparing=True):
        found = gradients(model, data, autocast)
        losses = per_example_losses(model, data)
        assert len(copies(model)) == before  # of a graph that is still there
    assert losses.requires_grad
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True))
    now = {name: (p.data_ptr(), p.dtype, p._version) for name, p in model.named_parameters() if not p.requires_grad}
    assert now == frozen


@pytest.mark.parametrize("own", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_layers_are_checkpointed_as_they_were_afterwards(own: dict[str, bool] | None) -> None:
    def switches() -> list[dict[str, Any]]:
        return [{n: v for n, v in vars(m).items() if "gradient_checkpointing" in n} for m in model.modules()]

    model: Any = adapted("LoRA", torch.float32)
    data = text_batch("causal_lm", dtype=torch.float32)
    if own is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(own)
    before, exact = switches(), gradients(model, data)
    for sparing in (False, True):
        with computed_in(model, data, torch.float32, checkpointed=True, sparing=sparing):
            is_on = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
            assert is_on == (sparing or own is not None)
            found = gradients(model, data)
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(found, exact, strict=True))
        assert switches() == before


def test_a_switch_that_is_only_read_is_left_alone() -> None:
    class Own(nn.Linear):
        gradient_checkpointing = property(lambda self: False)

    with computed_in(Own(4, 4), {}, torch.float32, checkpointed=True):
        pass


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An accelerator whose memory suffices for what spares it; which way was tried."""
    tried: list[bool] = []

    @contextmanager
    def short(*args: Any, sparing: bool = False, **options: Any) -> Iterator[dict[str, Any]]:
        tried.append(sparing)
        if not sparing:
            raise torch.OutOfMemoryError("no room")
        with computed_in(*args, sparing=sparing, **options) as exact:
            yield exact

    for name in ("padding", "preflight"):
        monkeypatch.setattr(sys.modules[f"hf_dp.per_example.checks.{name}"], "computed_in", short)
    return tried


def leaking(m: Any, x: Tensor) -> Tensor:
    return m.linear(m.frozen(x) + 0.01 * x.mean(0)).cos()


def graphs() -> list[Tensor]:
    """What a backward pass could still begin with."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is Tensor and one.grad_fn is not None]


@pytest.mark.parametrize("is_right", [True, False])
def test_what_does_not_fit_is_checked_with_as_many_bits(full: list[bool], is_right: bool) -> None:
    def right(m: Any, x: Tensor) -> Tensor:
        return m.linear(m.frozen(x)).cos()

    model = Small(right if is_right else leaking, linear=nn.Linear(4, 4), frozen=nn.Linear(4, 4)).bfloat16()
    model.frozen.requires_grad_(False)  # type: ignore[union-attr]
    data = {"x": batch(3, 5, 4)["x"].bfloat16()}
    if is_right:
        for _ in range(2):
            before = len(graphs())
            preflight(model, square, data)
        assert full == [False, True] * 2
        assert len(graphs()) == before
    else:
        with pytest.raises(PreflightError, match="depends on its neighbours"):
            preflight(model, square, data)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.slow
def test_padding_is_checked_as_well(full: list[bool], side: str) -> None:
    model = in_half(adapted("LoRA", torch.float32))
    if side == "right":
        check_padding(model, per_example_losses, TEXTS, collator(side))
        assert full[:3] == [False, True, True]
    else:
        with pytest.raises(PreflightError, match="when longer or shorter examples are beside it"):
            check_padding(tiny("gpt2", "causal_lm", torch.bfloat16), per_example_losses, TEXTS, collator(side))


def in_place(m: Any, x: Tensor) -> Tensor:
    weight = m.frozen.weight.float()
    weight.mul_(3)
    out: Tensor = nn.functional.linear(m.linear(x), weight)
    return out


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "turned": lambda m, x: m.linear(x) @ m.frozen.weight.T,
    "in .data": lambda m, x: nn.functional.linear(m.linear(x), m.frozen.weight.data),
    "joined": lambda m, x: nn.functional.linear(m.linear(x), torch.cat([m.frozen.weight, m.frozen.weight])),
    "in a list": lambda m, x: torch.einsum("bti,oi->bto", [m.linear(x), m.frozen.weight]),
    "in a recurrent layer": lambda m, x: m.recurrent(m.linear(x))[0],
    "added in place": lambda m, x: m.linear(x)[0].mul(1).addmm_(x[0], m.frozen.weight),
    "beside what is sparse": lambda m, x: m.frozen(torch.sparse.mm(torch.eye(5).to_sparse(), m.linear(x)[0])),
    "widened, and written into": in_place,
}


@pytest.mark.parametrize("use", USES)
def test_weights_are_lifted_however_they_are_used(use: str) -> None:
    def found(dtype: torch.dtype, sparing: bool) -> Tensor:
        torch.manual_seed(0)
        parts = {"linear": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "recurrent": nn.LSTM(4, 4, batch_first=True)}
        model: Any = Small(USES[use], **parts).bfloat16()
        model.frozen.requires_grad_(False)
        model.recurrent.requires_grad_(False).to(dtype)
        model.frozen.to(dtype)
        with computed_in(model, {"x": batch(3, 5, 4)["x"].float()}, torch.float32, sparing=sparing) as data:
            model(data["x"]).square().sum().backward()
            gradient: Tensor = model.linear.weight.grad
        return gradient

    assert torch.equal(found(torch.bfloat16, True), found(torch.float32, False))


def test_a_model_that_computes_in_float32_is_held_to_its_tolerance() -> None:
    model = in_half(adapted("LoRA", torch.float32))
    with computed_in(model, {}, torch.float32, sparing=True):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_cannot_be_computed_so_is_out_of_memory() -> None:
    def computed(sparing: bool) -> None:
        raise RuntimeError("expected the same dtype") if sparing else torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        in_bits.with_memory_to_spare(computed)


def test_too_little_for_that_as_well() -> None:
    def never(sparing: bool) -> None:
        tried.append(sparing)
        raise torch.OutOfMemoryError("no room")

    tried: list[bool] = []
    with pytest.raises(torch.OutOfMemoryError):
        in_bits.with_memory_to_spare(never)
    assert tried == [False, True]


Write = Callable[[nn.Module], object]


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.weight.mul_(2),
        lambda m: m.weight.data.mul_(2),
        lambda m: m.weight.__imul__(2),
        lambda m: m.weight.__setitem__(slice(None), 2 * m.weight),
        lambda m: setattr(m.weight, "data", 2 * m.weight.data),
    ],
)
def test_what_a_model_writes_into_a_frozen_weight_is_there(write: Write) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            write(m.frozen)
        return m.linear(m.frozen(x)).cos()

    model = Small(forward, linear=nn.Linear(4, 4), frozen=nn.Linear(4, 4)).bfloat16()
    model.frozen.requires_grad_(False)  # type: ignore[union-attr]
    before = model.frozen.weight.detach().clone()  # type: ignore[union-attr]
    with computed_in(model, {"x": batch(3, 5, 4)["x"].bfloat16()}, torch.float32, sparing=True) as data:
        model(data["x"])
    assert torch.equal(model.frozen.weight.bfloat16(), 2 * before)  # type: ignore[union-attr,arg-type]
