"""What a recording sees is exact: every use, with a certificate or without one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.uses import EXACT
from tests.zoo import adapted, text_batch


@pytest.mark.few(150)
@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("name", EXACT)
def test_exact_without_a_certificate(name: str, size: int) -> None:
    """Also where the batch is as long as a sequence (5) or as wide as the features (4)."""
    model, data = EXACT[name], batch(size, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("padding_idx", [None, 0, -4, 3, -1])
def test_failure_16_padding_does_not_count(padding_idx: int | None) -> None:
    model = Small(lambda m, x: F.embedding(m.ids(x), m.w, padding_idx), w=parameter(4, 4))
    model.ids = lambda x: (x[..., 0] * 9).long() % 4
    data = batch(3, 5, 4)
    found = record(model, square, data)
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    if padding_idx is not None:
        assert not found.weighted_sum(torch.ones(3))["w"][padding_idx].any()


def test_failure_17_four_dimensional_activations_have_a_norm() -> None:
    model = Small(lambda m, x: m.linear(x.view(len(x), 5, 2, 2)), linear=nn.Linear(2, 3))
    data = batch(3, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


def test_failure_17_freezing_after_a_recording_is_respected() -> None:
    model, data = EXACT["norms"], batch(3, 5, 4)
    model.rms.weight.requires_grad_(False)
    try:
        assert sorted(record(model, square, data).factors) == ["layer.bias", "layer.weight"]
    finally:
        model.rms.weight.requires_grad_(True)
    assert sorted(record(model, square, data).factors) == ["layer.bias", "layer.weight", "rms.weight"]


def test_failure_24_norm_weights_are_trained() -> None:
    sums = record(EXACT["norms"], square, batch(3, 5, 4)).weighted_sum(torch.ones(3))
    assert all(bool(value.any()) for value in sums.values())


@pytest.mark.parametrize("size", [1, 6, 7])
def test_an_empty_axis_is_a_zero_gradient(size: int) -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    found = record(model, lambda m, b: m(b["x"]).flatten(1).sum(1), batch(size, 0, 4))
    assert found.squared_norms().eq(0).all()


def before_the_last(x: Tensor) -> Tensor:
    """Numbers of all positions but the last: of a text of one token none."""
    return x[:, :-1, 0].abs().long() % 4


OF_NOTHING: dict[str, tuple[Any, dict[str, Any]]] = {
    "a scale": (lambda m, x: x[:, 1:] * m.w, {"w": parameter(4)}),
    "a scale of logits": (lambda m, x: x[:, 1:] * m.w, {"w": parameter()}),
    "a summand": (lambda m, x: x[:, 1:] + m.w[: x.shape[1] - 1], {"w": parameter(9, 4)}),
    "a difference": (lambda m, x: (m.w - x[:, 1:]).cos(), {"w": parameter(4)}),
    "copies": (lambda m, x: x[:, 1:] + m.w.expand(len(x), x.shape[1] - 1, 4), {"w": parameter(4)}),
    "repeated": (lambda m, x: x[:, 1:] + m.w.repeat(len(x), x.shape[1] - 1, 1), {"w": parameter(4)}),
    "looked up": (lambda m, x: m.w[before_the_last(x)], {"w": parameter(4, 4)}),
    "looked up by two": (lambda m, x: m.w[before_the_last(x), before_the_last(x)], {"w": parameter(4, 4)}),
    "looked up by none": (lambda m, x: x + m.w[torch.zeros(0, dtype=torch.long)].sum(), {"w": parameter(4, 4)}),
    "an embedding": (lambda m, x: m.e(before_the_last(x)), {"e": nn.Embedding(4, 4)}),
    "a norm": (lambda m, x: m.n(x[:, 1:]), {"n": nn.LayerNorm(4)}),
    "a slope": (lambda m, x: m.a(x[:, 1:]), {"a": nn.PReLU()}),
}


@pytest.mark.parametrize("name", OF_NOTHING)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_what_is_used_at_no_position_of_a_text_of_one_token_has_no_gradient_there(name: str, size: int) -> None:
    function, members = OF_NOTHING[name]
    model = Small(
        lambda m, x: torch.cat([m.first(x).flatten(1).cos(), function(m, x).flatten(1)], 1),
        first=nn.Linear(4, 4),
        **members,
    )
    certificate = preflight(model, square, batch(3, 5, 4))
    for positions in (1, 2):
        data = batch(size, positions, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout_mask(use_reentrant: bool) -> None:
    def inner(model: Any, x: Tensor) -> Tensor:
        return model.two(F.dropout(torch.tanh(model.one(x)), 0.5))

    model = Small(
        lambda m, x: checkpoint(lambda y: inner(m, y), m.zero(x), use_reentrant=use_reentrant),
        zero=nn.Linear(4, 4),
        one=nn.Linear(4, 4),
        two=nn.Linear(4, 4),
    )
    data = batch(3, 5, 4)
    torch.manual_seed(3)
    sums = record(model, square, data).weighted_sum(torch.ones(3))
    torch.manual_seed(3)
    square(model, data).sum().backward()
    assert all(torch.allclose(sums[name], p.grad, rtol=1e-12) for name, p in model.named_parameters())


def test_an_unseen_use_is_refused_under_a_certificate() -> None:
    model, data = EXACT["norms"], batch(3, 5, 4)
    uses = record(model, square, data).uses
    record(model, square, data, certificate=Certificate(uses))
    lacking = Certificate(use for use in uses if use.parameter != "rms.weight")
    with pytest.raises(UnsupportedModelError, match=r"rms.weight is used by rms_norm .*preflight did not see"):
        record(model, square, data, certificate=lacking)


class Labelled(nn.Module):
    """Scores each example against the embeddings of six label names, from the table of its own tokens."""

    def __init__(self, clamp: bool) -> None:
        super().__init__()
        self.table, self.clamp = nn.Embedding(9, 4).double(), clamp
        self.register_buffer("names", torch.arange(12).view(6, 2) % 9)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.clamp(min=0) if self.clamp else tokens
        return self.table(tokens).mean(1).tanh() @ self.table(self.names).mean(1).T


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("clamp", [False, True])
def test_one_table_for_what_examples_have_and_what_they_share(clamp: bool, size: int) -> None:
    """Six labels are six rows, as of six, of three or of two examples: never read as theirs."""
    model, generator = Labelled(clamp), torch.Generator().manual_seed(0)
    data = {"tokens": torch.randint(0, 9, (size, 5), generator=generator)}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["tokens"]).logsumexp(1)

    five = {"tokens": torch.randint(0, 9, (7, 5), generator=generator)}
    certificates: list[Certificate | None] = [None]
    try:
        certificates.append(preflight(model, loss, five))
    except UnsupportedModelError:
        assert clamp
    truth = loop(model, loss, data)
    for certificate in certificates:
        try:
            found = record(model, loss, data, certificate=certificate)
        except UnsupportedModelError as refused:
            assert "table.weight" in str(refused)  # noqa: PT017
            assert 6 % size == 0 or certificate is None
        else:
            assert relative_error(found, truth) <= 1e-12


@pytest.mark.few(40)
@pytest.mark.parametrize("name", EXACT)
def test_memory_is_freed_without_the_garbage_collector(name: str) -> None:
    """Factors are as large as the activations; a cycle would keep those of several batches."""
    model, data = EXACT[name], batch(3, 5, 4)
    certificate = Certificate(record(model, square, data).uses)
    gc.collect()
    gc.disable()
    try:
        found = record(model, square, data, certificate=certificate)
        kept = [weakref.ref(factors) for uses in found.factors.values() for factors in uses]
        del found
        assert not any(reference() for reference in kept)
    finally:
        gc.enable()


@pytest.mark.slow
def test_frozen_modules_may_be_compiled() -> None:
    torch.compiler.reset()
    model = adapted("LoRA", torch.float32)
    batch = text_batch("causal_lm", dtype=torch.float32)
    plain = record(model, per_example_losses, batch)
    frozen = [m for m in model.modules() if type(m).__name__ in ("LlamaRMSNorm", "SiLUActivation")]
    ran: list[int] = []

    def counted(graph: Any, given: Any) -> Any:
        return lambda *args: ran.append(1) or graph(*args)

    for module in frozen:
        module.compile(backend=counted)
    certificate = preflight(model, per_example_losses, batch)
    # torch compiles few variants of a module, of one class all together: none for the check.
    assert not ran
    found = record(model, per_example_losses, batch, certificate=certificate)
    assert len(ran) == len(frozen) > 0
    assert torch.allclose(found.squared_norms(), plain.squared_norms(), rtol=1e-5)


class CastToAWeight(nn.Module):
    """As Gemma 3n's norms do: of the parameter the type alone is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.square().type_as(self.weight).to(self.weight) * self.weight.to(x)


def test_what_is_cast_to_a_parameters_type_has_no_gradient_for_it() -> None:
    model, batch = CastToAWeight(), {"x": torch.randn(3, 2, 4, dtype=torch.float64)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(batch["x"]).sum((1, 2))
        return found

    certificate = preflight(model, loss, batch)
    found = record(model, loss, batch, certificate=certificate).squared_norms()
    torch.testing.assert_close(found, loop(model, loss, batch).squared_norms())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "derive",
    [
        lambda w: w * 2,
        lambda w: 1 + w.float(),
        lambda w: w.T,
        lambda w: torch.eye(4).index_copy(0, torch.tensor([0, 3]), w.float()[:2]),
    ],
)
def test_failure_85_what_is_derived_without_gradients_has_none(derive: Any, size: int) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            w = derive(m.w).to(x.dtype)
        return F.linear(x, w).cos() + m.w[0]

    model, data = Small(function, w=parameter(4, 4)), batch(size, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-7
