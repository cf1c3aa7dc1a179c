"""Models that tempt the engine to misread them: exact, or refused; never a number that is not true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.uses import OneByOne
from tests.zoo import text_batch, tiny


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.tanh(torch.cat([m.w.expand(len(x), 1, 4), x + m.w.expand(x.shape[1], 4)], 1)),
        lambda m, x: torch.tanh(torch.cat([m.w.repeat(len(x), 1, 1), x + m.w.repeat(x.shape[1], 1)], 1)),
        lambda m, x: (x - m.w) + (torch.ones(x.shape[1], 4).double() - m.w).cos(),
    ],
)
@pytest.mark.parametrize("size", [1, 5, 7, 14])
def test_copies_for_examples_and_for_positions(function: Callable[[Any, Tensor], Tensor], size: int) -> None:
    model = Small(function, w=parameter(4))
    data = batch(size, 14, 4)
    try:
        certificate = preflight(model, square, batch(3, 14, 4))
        found = record(model, square, data, certificate=certificate)
    except UnsupportedModelError as refused:
        assert " w " in str(refused)  # noqa: PT017
    else:
        assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_logits_that_another_layer_has_read_are_not_overwritten_unseen() -> None:
    model = tiny("llama", "causal_lm")
    model.calibration = nn.Linear(37, 20).double()

    def loss(model: Any, data: Any) -> Tensor:
        got: dict[str, Tensor] = {}
        handle = model.get_output_embeddings().register_forward_hook(lambda _, i, o: got.update(logits=o))
        try:
            losses = per_example_losses(model, data)
        finally:
            handle.remove()
        return losses + model.calibration(got["logits"]).cos().flatten(1).mean(1)

    data = text_batch("causal_lm", 3, 4)
    with pytest.raises(UnsupportedModelError, match="in place"):
        record(model, loss, data).squared_norms()


def test_a_penalty_on_the_logits_inside_the_model() -> None:
    model = tiny("llama", "causal_lm")

    def loss(model: Any, data: Any) -> Tensor:
        got: dict[str, Tensor] = {}
        head = model.get_output_embeddings()
        handle = head.register_forward_hook(lambda _, i, o: got.update(z=o.logsumexp(-1).square().mean(1)))
        try:
            losses = per_example_losses(model, data)
        finally:
            handle.remove()
        return losses + got["z"]

    data = text_batch("causal_lm")
    assert relative_error(record(model, loss, data), loop(model, loss, data)) <= 1e-10


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2)


def test_gradients_changed_in_place_after_they_were_recorded() -> None:
    model = Small(
        lambda m, x: (lambda y: torch.add(InPlace.apply(y.cos()), m.second(y)))(m.first(x)),
        first=nn.Linear(40, 40),
        second=nn.Linear(40, 40),
    )
    with pytest.raises(UnsupportedModelError, match="in place"):
        record(model, square, batch(3, 5, 40)).squared_norms()


def test_gradients_of_constants_changed_in_place_after_they_were_recorded() -> None:
    model = Small(
        lambda m, x: (lambda y: torch.add(InPlace.apply(y.cos()), F.linear(y, m.w.cos())))(m.first(x)),
        first=nn.Linear(40, 40),
        w=parameter(40, 40),
    )
    with pytest.raises(UnsupportedModelError, match="in place"):
        record(model, square, batch(3, 5, 40))


def test_a_batch_changed_before_its_norms_are_known() -> None:
    model, data = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(40, 40)), batch(3, 5, 40)
    found = record(model, square, data)
    data["x"].zero_()
    with pytest.raises(UnsupportedModelError, match="in place"):
        found.squared_norms()


def test_a_weight_kept_from_an_earlier_pass() -> None:
    model = Small(
        lambda m, x: m.one(x) + m.two(x), one=parametrizations.weight_norm(nn.Linear(4, 4)), two=nn.Linear(4, 4)
    )
    data = batch(3, 5, 4)
    certificate = preflight(model, square, data)
    with parametrize.cached():
        record(model, square, data, certificate=certificate)
        with pytest.raises(UnsupportedModelError, match="earlier pass"):
            record(model, square, data, certificate=certificate)


def test_what_a_pass_has_kept_of_weights_may_be_looked_at_when_it_is_over() -> None:
    def penalised(m: Any, x: Tensor) -> Tensor:
        m.penalty = m.linear.weight.square().sum()
        return torch.cat([m.linear(x).cos().flatten(1), m.penalty.expand(len(x), 1)], 1)

    model = Small(penalised, linear=nn.Linear(4, 4))
    record(model, square, batch(3, 5, 4))
    known = float(model.linear.weight.square().sum())
    assert model.penalty.item() == float(model.penalty) == model.penalty.tolist() == known
    assert f"{model.penalty:.3f}" == f"{known:.3f}"
    with torch.no_grad():
        assert (model.penalty + 1).sqrt() == (known + 1) ** 0.5
        with pytest.raises(UnsupportedModelError, match="earlier pass"):
            model.penalty.mul_(2)
    with pytest.raises(UnsupportedModelError, match="earlier pass"):
        model.penalty.sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01])
def test_the_default_epsilon_of_rms_norm_is_torchs(dtype: torch.dtype, scale: float) -> None:
    norm = nn.RMSNorm(4).to(dtype)
    model = Small(lambda m, x: m.norm(scale * x), norm=norm)
    model.to(dtype)
    data = {"x": batch(3, 5, 4)["x"].to(dtype)}
    found, truth = record(model, square, data), loop(model, square, data)
    assert torch.allclose(found.squared_norms(), truth.squared_norms(), rtol=0.05)


def test_hooks_on_gradients_are_refused() -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    handle = model.linear.weight.register_hook(lambda g: 0.1 * g)
    with pytest.raises(UnsupportedModelError, match=r"linear.weight has a hook"):
        record(model, square, batch(3, 5, 4))
    handle.remove()
    record(model, square, batch(3, 5, 4))


EXACT: dict[str, Small] = {
    "weight norm of a convolution": Small(
        lambda m, x: m.conv(x.mT).cos(), conv=parametrizations.weight_norm(nn.Conv1d(4, 3, 2))
    ),
    "an image's": Small(
        lambda m, x: m.conv(x[:, None]).cos(), conv=parametrizations.weight_norm(nn.Conv2d(1, 3, 2))
    ),
    "a vector of constants, indexed": Small(lambda m, x: x * m.w.exp()[(x > 0).long()], w=parameter(3)),
    "two scalars": Small(lambda m, x: x * (m.a + m.b) * (m.a * m.b), a=parameter(), b=parameter()),
    "a penalty on two parameters": Small(
        lambda m, x: (x * m.a).cos() * (m.a.square().sum() + m.b.square().sum()), a=parameter(4), b=parameter(4)
    ),
    "a vector of examples, scaled": Small(
        lambda m, x: (m.linear(x).mean((1, 2)) * m.s + m.s)[:, None], linear=nn.Linear(4, 2), s=parameter()
    ),
    "checkpointed constants and dropout": Small(
        lambda m, x: checkpoint(lambda y: F.dropout(m.a(F.dropout(y, 0.0)), 0.0), m.z(x), use_reentrant=False),
        a=parametrizations.weight_norm(nn.Linear(4, 4)),
        z=nn.Linear(4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, size: int) -> None:
    model, data = EXACT[name], batch(size, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("name", ["gpt2", pytest.param("opt", marks=pytest.mark.slow)])
def test_one_position_after_longer_ones(name: str) -> None:
    model = tiny(name, "sequence")
    certificate = preflight(model, per_example_losses, text_batch("sequence", 3, 7))
    data = {"input_ids": torch.tensor([[3], [4], [5]]), "labels": torch.tensor([0, 1, 2])}
    data["attention_mask"] = torch.ones_like(data["input_ids"])
    found = record(model, per_example_losses, data, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, data)) <= 1e-12


def windows(model: Any, x: Tensor, count: int) -> Tensor:
    rows = model.one(x.contiguous().unflatten(1, (count, -1)).flatten(0, 1)).cos()
    return model.two((rows @ rows.mT).softmax(-1) @ rows).unflatten(0, (-1, count)).flatten(1, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_windows_of_images_fewer_in_each_layer(size: int) -> None:
    model = Small(lambda m, x: windows(m, windows(m, x, 4)[:, ::2], 2), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    certificate, data = preflight(model, square, batch(3, 12, 4)), batch(size, 12, 4)
    found = record(model, square, data, certificate=certificate)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("by", ["a rule", "autograd"])
def test_what_a_constant_was_computed_with_is_changed_in_place(by: str) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        where = torch.arange(5)
        if by == "a rule":
            y = x + m.table(where)
            where.zero_()
        else:
            scale = where.double()[:, None]
            y = x + m.table.weight.cos() * scale
            scale.zero_()
        return y.cos()

    model = Small(function, table=nn.Embedding(5, 4))
    with pytest.raises(UnsupportedModelError, match="in place"):
        record(model, square, batch(3, 5, 4))


@pytest.mark.parametrize(
    ("function", "members"),
    [
        (lambda m, x: m.linear(x) + torch.func.vmap(m.linear)(x), {"linear": nn.Linear(4, 4)}),
        (lambda m, x: torch.func.vmap(lambda row: row * m.scalar.cos())(x), {"scalar": parameter()}),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_what_a_rule_cannot_read_is_refused_by_name(function: Any, members: dict[str, Any], size: int) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(members))):
        record(Small(function, **members), square, batch(size, 5, 4))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: F.linear(torch.fft.fft(x), torch.fft.fft(m.w)).real, (4, 4)),
        (lambda m, x: (torch.fft.fft(x) + torch.fft.fft(m.w)).real.cos(), (4,)),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 5])
def test_failure_84_complex_numbers_that_meet_data_are_refused_by_name(
    function: Any, shape: tuple[int, ...], size: int
) -> None:
    with pytest.raises(UnsupportedModelError, match="parameter w"):
        record(Small(function, w=parameter(*shape)), square, batch(size, 5, 4))


@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_layer_that_data_and_a_constant_take_with_as_many_axes(size: int) -> None:
    """DoRA reads the weight of a pooler off an identity, whose rows may be as many as the examples."""
    model = Small(
        lambda m, x: (m.linear(m.first(x).mean(1)) @ m.linear(torch.eye(4).double())).cos(),
        first=nn.Linear(4, 4),
        linear=nn.Linear(4, 4),
    )
    certificate, data = preflight(model, square, batch(3, 5, 4)), batch(size, 5, 4)
    for known in (certificate, None):
        found = record(model, square, data, certificate=known)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3, 4, 8, 24])
def test_what_a_checkpoint_computes_from_parameters_alone(size: int) -> None:
    """In its first pass, which has no gradients, it is a plain tensor, whose rows may be as many as the examples."""

    def layer(m: Any, x: Tensor) -> Tensor:
        return x @ m.up(m.down(torch.eye(4).double())) + m.up(m.down(x))

    def function(m: Any, x: Tensor) -> Tensor:
        return checkpoint(layer, m, x.requires_grad_(), use_reentrant=True) if m.training else layer(m, x)

    model = Small(function, down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 4, bias=False))
    certificate, data = preflight(model, square, batch(3, 5, 4)), batch(size, 5, 4)
    found = record(model, square, data, certificate=certificate)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_what_is_computed_without_gradients_has_none() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.w.exp()
        return x * scale + m.w

    model, data = Small(function, w=parameter(4)), batch(3, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


def test_a_list_with_an_entry_for_each_example_goes_with_them() -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))

    def loss(model: Any, data: Any) -> Tensor:
        return square(model, data) * torch.tensor([len(name) for name in data["names"]])

    data = {**batch(3, 5, 4), "names": ["a", "bc", "defg"]}
    found = record(model, loss, data, certificate=preflight(model, loss, data))
    assert relative_error(found, loop(model, loss, data)) <= 1e-12


def test_what_has_no_gradient_is_no_use() -> None:
    """VBLoRA looks for infinities while it trains."""

    def function(m: Any, x: Tensor) -> Tensor:
        assert not (m.training and m.w.isinf().any())
        return x * m.w

    model, data = Small(function, w=parameter(4)), batch(3, 5, 4)
    record(model, square, data, certificate=preflight(model, square, data))


def test_what_is_looked_at_in_training_alone_is_no_use() -> None:
    """VBLoRA looks for infinities in a single number."""

    def function(m: Any, x: Tensor) -> Tensor:
        assert not (m.training and m.w[0].isinf().any())
        return x * m.w

    model, data = Small(function, w=parameter(4)), batch(3, 5, 4)
    record(model, square, data, certificate=preflight(model, square, data))


def test_a_function_that_only_training_calls_is_refused_before_it_begins() -> None:
    model = Small(lambda m, x: x * (OneByOne.apply(m.w) if m.training else 2 * m.w), w=parameter(4))
    with pytest.raises(UnsupportedModelError, match="OneByOne"):
        preflight(model, square, batch(3, 5, 4))


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_where_no_example_has_a_gradient_nothing_is_certified(factor: float) -> None:
    model = Small(lambda m, x: factor * m.linear(x), linear=nn.Linear(4, 4))
    with pytest.raises(UnsupportedModelError, match="nothing to compare"):
        preflight(model, square, batch(3, 5, 4))


def test_what_training_alone_does_is_refused_before_it_begins() -> None:
    model = Small(
        lambda m, x: m.one(x).cos() + (m.two(x) if m.training else 0), one=nn.Linear(4, 4), two=nn.Linear(4, 4)
    )
    with pytest.raises(UnsupportedModelError, match="two"):
        preflight(model, square, batch(3, 5, 4))


def test_an_error_of_the_models_own_stays_its_own() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        record(Small(lambda m, x: m.linear(x), linear=nn.Linear(3, 4)), square, batch(3, 5, 4))


def test_the_type_of_a_weight_may_be_asked_for() -> None:
    model = Small(lambda m, x: x @ m.weight if "Double" in m.weight.type() else x, weight=parameter(4, 4))
    assert relative_error(record(model, square, batch(3, 5, 4)), loop(model, square, batch(3, 5, 4))) <= 1e-12
