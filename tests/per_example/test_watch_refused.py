"""What a recording cannot see is refused by name; nothing is silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import RULES, Dense, Outer, Rule, loop, preflight, record
from hf_dp.per_example.rule import Bound
from tests.per_example.small import Small, batch, parameter, relative_error, square, traced
from tests.per_example.uses import EXACT, positions
from tests.zoo import text_batch, tiny


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *_: Any) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needed = len(ctx.needs_input_grad) - 2
        return gradient @ w.detach().T, x.flatten(0, 1).T @ gradient.flatten(0, 1), *[None] * needed


class _Random(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *_: Any) -> Tensor:
        return _Function.forward(ctx, x, w) * torch.rand(x.shape[0], 1, 1)


class _Pair(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, *_: Any) -> Any:
        return _Function.forward(ctx, x, w), x.detach().clone()


@torch.jit.script
def scripted(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


HIDDEN: list[Tensor] = []
_LINEAR = nn.Linear(4, 4)
REFUSED: dict[str, tuple[Small, str]] = {
    "an activation in place of a part of what parameters alone give": (
        Small(
            lambda m, x: x + F.leaky_relu(m.linear(torch.ones(2, 4, dtype=x.dtype))[0], 0.1, True),
            linear=nn.Linear(4, 4),
        ),
        "inplace=False",
    ),
    "a generated weight": (
        Small(lambda m, x: F.linear(x, m.linear(x).mean((0, 1)).diag(), m.b), linear=nn.Linear(4, 4), b=parameter(4)),
        "another of its operands needs a gradient",
    ),
    "einsum over the diagonal of a parameter": (
        Small(lambda m, x: torch.einsum("btd,dd->btd", m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 4)),
        "parameter w .*einsum",
    ),
    "einsum over an axis that is made longer": (
        Small(lambda m, x: torch.einsum("btd,ed->bte", m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(3, 1)),
        "parameter w .*einsum",
    ),
    "multi_dot": (
        Small(lambda m, x: torch.linalg.multi_dot([x[:, 0], m.w]), w=parameter(4, 4)),
        "parameter w .*multi_dot",
    ),
    "out=": (
        Small(lambda m, x: torch.matmul(x, m.w, out=torch.empty_like(x)), w=parameter(4, 4)),
        "parameter w is used by operation matmul",
    ),
    "alpha=2": (Small(lambda m, x: torch.add(x, m.w, alpha=2), w=parameter(4)), "alpha=2"),
    "max_norm": (
        Small(lambda m, x: m.table(positions(x)[None]) + x, table=nn.Embedding(12, 4, max_norm=1.0)),
        "max_norm",
    ),
    "scale_grad_by_freq": (
        Small(
            lambda m, x: m.table((9 * x[..., 0].abs()).long().clamp(max=11)),
            table=nn.Embedding(12, 4, scale_grad_by_freq=True),
        ),
        "mixes the counts",
    ),
    "a closure": (
        Small(lambda m, x: m.linear(x) + F.linear(x, HIDDEN[0]), linear=_LINEAR),
        "gradient reached linear.weight",
    ),
    "a custom function of two tensors of data": (
        Small(lambda m, x: _Function.apply(m.linear(x), m.w, x.cos()), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w by a use that no rule saw",
    ),
    "a custom function that is given an object": (
        Small(lambda m, x: _Function.apply(m.linear(x), 1 + m.w, object()), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w by a use that no rule saw",
    ),
    "a custom function that draws numbers": (
        Small(lambda m, x: _Random.apply(m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "parameter w is used by .*_Random.*random",
    ),
    "a custom function that gives two tensors": (
        Small(lambda m, x: _Pair.apply(m.linear(x), m.w)[0], linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "parameter w is used by .*_Pair.*something else than a row for each row",
    ),
    "a scripted function": (
        Small(lambda m, x: scripted(m.linear(x), m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w",
    ),
    "a scripted function on 1 + w": (
        Small(lambda m, x: scripted(m.linear(x), 1 + m.w), linear=nn.Linear(4, 4), w=parameter(4, 5)),
        "gradient reached w",
    ),
    "nn.LSTM that projects": (
        Small(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 4, batch_first=True, proj_size=2)),
        "rnn.weight_hh_l0.*lstm",
    ),
    "nn.MultiheadAttention of all examples as one": (
        Small(
            lambda m, x: m.attention(*[x.flatten(0, 1)] * 3)[0].view_as(x),
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        "attention.in_proj_weight.*multi_head_attention",
    ),
    "a compiled module": (
        Small(
            lambda m, x: m.inner(m.linear(x)),
            linear=nn.Linear(4, 4),
            inner=torch.compile(nn.Linear(4, 4), backend="eager"),
        ),
        r"inner is compiled \(torch.compile\)",
    ),
    "a traced module": (
        Small(lambda m, x: m.inner(m.linear(x)), linear=nn.Linear(4, 4), inner=traced(nn.Linear(4, 4))),
        r"inner is compiled \(torch.jit\)",
    ),
}
HIDDEN.append(_LINEAR.weight)


@pytest.mark.parametrize("size", [2, 3, 5, 10])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_at_every_batch_size(name: str, size: int) -> None:
    """Ten positions: batches that divide them, equal them, half of them, and neither."""
    model, message = REFUSED[name]
    data = batch(size, 10, 4)
    before = dict(model.named_parameters())
    with pytest.raises(UnsupportedModelError, match=f"(?s){message}"):
        record(model, square, data)
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())


def test_positions_that_come_first_are_the_reason() -> None:
    """Where another axis has as many as there are examples, that no axis has would be untrue."""
    model = Small(
        lambda m, x: m.conv(torch.tanh(m.first(x)).transpose(0, 1)).transpose(0, 1),
        first=nn.Linear(4, 4),
        conv=nn.Conv1d(3, 3, 1),
    )
    with pytest.raises(UnsupportedModelError, match=r"its first axis cannot be read as \d+ examples"):
        record(model, square, batch(3, 10, 4))


def test_a_model_that_is_called_for_one_row_after_the_other_is_told_so() -> None:
    def one_by_one(model: nn.Module, batch: Any) -> Tensor:
        rows = torch.from_numpy(batch["x"].numpy().copy())  # of which nobody knows any more whose they are
        return torch.stack([model(row[None]).square().mean() for row in rows])

    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match="called for each row by itself sees one: call it once for all"):
        record(model, one_by_one, batch(3, 10, 4))


def test_weights_that_are_divided_when_a_model_is_evaluated_are_refused_and_the_way_out_is_exact() -> None:
    """As RWKV's are, by powers of two."""

    def rescaled(m: Any, x: Tensor) -> Tensor:
        if m.every and not m.training:
            with torch.no_grad():
                m.linear.weight.div_(2)
        return m.linear(x)  # type: ignore[no-any-return]

    model = Small(rescaled, linear=nn.Linear(4, 4))
    model.every = True
    with pytest.raises(UnsupportedModelError, match="rescale_every = 0, with which it is exact"):
        preflight(model, square, batch(3, 10, 4))
    model.every = False
    preflight(model, square, batch(3, 10, 4))


def by_method(m: Any) -> None:
    m.base.requires_grad_(False)


def by_attribute(m: Any) -> None:
    for p in m.base.parameters():
        p.requires_grad = False


@pytest.mark.parametrize("freeze", [by_method, by_attribute])
def test_parameters_that_a_model_freezes_as_it_runs_are_refused_and_the_way_out_is_exact(freeze: Any) -> None:
    def frozen(m: Any, x: Tensor) -> Tensor:
        freeze(m)
        return m.linear(m.base(x).tanh())  # type: ignore[no-any-return]

    model = Small(frozen, base=nn.Linear(4, 4), linear=nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"freezes or unfreezes it as it runs(.|\n)*the model once"):
        preflight(model, square, batch(3, 10, 4))
    with torch.no_grad():
        model(batch(1, 10, 4)["x"])
    certificate = preflight(model, square, batch(3, 10, 4))
    for size in (1, 3, 10):
        found = record(model, square, batch(size, 10, 4), certificate=certificate)
        assert set(found.parameters) == {"linear.weight", "linear.bias"}
        assert relative_error(found, loop(model, square, batch(size, 10, 4))) <= 1e-12


PARAMETRISED: dict[str, tuple[Any, Any]] = {
    "of old": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "parametrised": (parametrizations.spectral_norm, lambda layer: remove_parametrizations(layer, "weight")),
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_spectral_norms_are_refused_and_the_way_out_is_exact(name: str) -> None:
    """They remember where the pass before was, in which nothing was of the rows."""
    normalised, removed = PARAMETRISED[name]
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    normalised(model.linear)
    with pytest.raises(PreflightError, match=r"Spectral norms(.|\n)*remove_spectral_norm(.|\n)*weight_norm"):
        preflight(model.train(), square, batch(3, 5, 4))
    removed(model.linear)
    preflight(model, square, batch(3, 5, 4))
    parametrizations.weight_norm(model.linear)
    preflight(model, square, batch(3, 5, 4))


def penalised(create_graph: bool) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        y = model(x).square().flatten(1).mean(1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
        return y + gradient.flatten(1).square().sum(1) if create_graph else square(model, {"x": batch["x"] + gradient})

    return loss


@pytest.mark.parametrize("create_graph", [True, False])
def test_gradients_taken_inside_the_loss_are_refused(create_graph: bool) -> None:
    """They would be recorded as uses of their own, and second derivatives not at all."""
    with pytest.raises(UnsupportedModelError, match=r"linear.weight.*(?s:.*)differentiates it by itself") as caught:
        record(EXACT["folded"], penalised(create_graph), batch(3, 5, 4))
    assert "constants in place of parameters" in caught.value.fix


def test_a_checkpoint_that_returns_what_parameters_alone_give_is_told_of_the_other_kind() -> None:
    model = tiny("t5", "seq2seq", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedModelError, match=r"autograd\.backward[^$]*'use_reentrant': False"):
        preflight(model, per_example_losses, text_batch("seq2seq", dtype=torch.float32))


def test_a_rule_of_ones_own() -> None:
    def bind(matrices: list[Tensor]) -> Bound:
        return Bound(matrices[0], {"w": matrices[1]}, {})

    def backward(saved: Any, operands: Any, gradient: Tensor, axis: Any, needs_input: bool) -> Any:
        outer = Outer(Dense(axis.positions(saved[0])), Dense(axis.positions(gradient)))
        return gradient @ operands.parameters["w"].T, {"w": outer}

    rule = Rule("multi_dot", bind, lambda x, o: (torch.linalg.multi_dot([x, o.parameters["w"]]), (x,)), backward)
    model, data = REFUSED["multi_dot"][0], batch(3, 5, 4)
    found = record(model, square, data, rules={**RULES, torch.linalg.multi_dot: rule})
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def chained(x: Tensor, weights: list[Tensor]) -> Tensor:
    if torch.overrides.has_torch_function((x, *weights)):
        found: Tensor = torch.overrides.handle_torch_function(chained, (x, *weights), x, weights)
        return found
    return x @ weights[0] @ weights[1]


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return chained(torch.tanh(x), [self.one, self.other])


def test_a_rule_of_ones_own_that_puts_several_parameters_into_one_role() -> None:
    """The second would be none that is watched."""

    def bind(x: Tensor, weights: list[Tensor]) -> Bound:
        several: Any = [weights[1]]
        return Bound(x, {"w": weights[0], "others": several}, {})

    rule = Rule("chained", bind, lambda x, o: (x, (x,)), lambda *given: (None, {}))
    with pytest.raises(UnsupportedModelError, match="another of its operands needs a gradient too"):
        record(Chained(), square, batch(3, 5, 4), rules={**RULES, chained: rule})


def test_a_reentrant_checkpoint_of_what_needs_no_gradient_is_named() -> None:
    """Torch runs it without gradients: an adapter in it is not trained."""
    layer = nn.Linear(4, 4)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        hidden: Tensor = torch.utils.checkpoint.checkpoint(model, batch["x"], use_reentrant=True)
        return hidden.square().sum(1)

    with pytest.raises(UnsupportedModelError, match="does not depend on any") as caught:
        record(layer, losses, {"x": torch.randn(3, 4)})
    assert "{'use_reentrant': False}" in caught.value.fix
