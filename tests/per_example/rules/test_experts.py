"""Experts that multiply the rows of all examples at once, sorted by expert, give each example its own gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record
from scripts.judging import relative, sorted_in_float64
from tests import architectures, zoo
from tests.per_example.small import relative_error

EXPERTS, WIDTH, TOP = 4, 6, 2


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    with sorted_in_float64():
        yield


def grouped(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(x, matrices, offsets)
    return product


class Experts(nn.Module):
    """Each token's `TOP` best of `EXPERTS`, which `between` comes between sorting and multiplying."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda rows: rows, times: int = 1) -> None:
        super().__init__()
        self.matrices, self.times, self.between = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)), times, between
        self.scales, self.most = nn.Parameter(torch.randn(EXPERTS, WIDTH)), 10**6

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ids, order = chosen.reshape(-1).sort()
        rows = self.between(tokens[order // TOP])
        offsets = torch.bincount(ids, minlength=EXPERTS).cumsum(0).int()
        for _ in range(self.times):
            rows = grouped(rows, self.matrices, offsets).tanh() * self.scales[ids]
        rows = rows * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back].view(len(tokens), TOP, -1).sum(1)


class Routed(nn.Module):
    """Tokens (B, T) through experts, to one of three classes."""

    def __init__(self, **of_experts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.router = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.out = Experts(**of_experts), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        tokens = h.view(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP, dim=-1)
        h = h + self.experts(tokens, chosen, weights).view(h.shape)
        return self.out(h.mean(1))


def losses(model: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data["ids"]), data["labels"], reduction="none")


def data(size: int = 5, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"ids": torch.randint(0, 11, (size, length), generator=generator), "labels": torch.arange(size) % 3}


@pytest.mark.parametrize("times", [1, 2])
def test_a_module_that_sorts_is_exact_with_more_and_fewer_examples(times: int) -> None:
    model = Routed(times=times)
    certificate = preflight(model, losses, data(3))
    for size in (1, 2, 7, 14):
        found = record(model, losses, data(size), certificate=certificate)
        assert relative_error(found, loop(model, losses, data(size))) <= 1e-12
        assert relative_error(record(model, losses, data(size)), loop(model, losses, data(size))) <= 1e-12


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow), "gpt_oss"])
def test_experts_of_transformers_are_exact(name: str) -> None:
    model = zoo.tiny(name, "causal_lm")
    certificate = preflight(model, per_example_losses, zoo.text_batch("causal_lm"))
    batch = zoo.text_batch("causal_lm", 7)
    found = record(model, per_example_losses, batch, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-12
    used = {use.operation for use in certificate if "experts" in use.parameter and use.reading == "routed"}
    assert used == {"grouped_mm", *(["getitem"] if name == "gpt_oss" else [])}


@pytest.mark.parametrize("reentrant", [True, False])
def test_they_are_followed_once_more_where_a_checkpoint_computes_again(reentrant: bool) -> None:
    model: Any = zoo.tiny("qwen3_moe", "causal_lm")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    batch = zoo.text_batch("causal_lm", 4)
    certificate = preflight(model, per_example_losses, zoo.text_batch("causal_lm"))
    found = record(model, per_example_losses, batch, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-12


def test_in_float32_they_are_torchs_own_product() -> None:
    model, batch = zoo.tiny("mixtral", "causal_lm", torch.float32), zoo.text_batch("causal_lm", 5)
    found = record(model, per_example_losses, batch)
    assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-5


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_they_are_near_what_a_loop_gives(device: str, autocast: bool) -> None:
    """One in the same precision, in which each token goes to the same experts."""
    model = zoo.tiny("mixtral", "causal_lm", torch.float32 if autocast else torch.bfloat16).to(device)
    batch = {name: value.to(device) for name, value in zoo.text_batch("causal_lm", 4).items()}

    def losses(model: Any, batch: Any) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return per_example_losses(model, batch)

    found, truth = record(model, losses, batch, certificate=preflight(model, losses, batch)), loop(model, losses, batch)
    norms = found.squared_norms().sqrt(), truth.squared_norms().sqrt()
    torch.testing.assert_close(norms[0].double(), norms[1].double(), rtol=0.02, atol=0.0)
    weights = torch.linspace(0.5, 1.5, 4, device=device)
    ours, theirs = found.weighted_sum(weights), truth.weighted_sum(weights)
    assert {total.dtype for total in ours.values()} == {torch.float32}
    assert relative(ours, theirs) <= 0.02


def test_a_shared_expert_beside_them_is_exact_too() -> None:
    """Its second layer reads rows that follow from sorted ones, once these are in order again."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=architectures.VOCABULARY, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_experts=4,
        num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=12, shared_expert_intermediate_size=20,
        pad_token_id=0,
    )  # fmt: skip
    model: Any = Qwen2MoeForCausalLM(config).double().train()
    certificate = preflight(model, per_example_losses, zoo.text_batch("causal_lm"))
    batch = zoo.text_batch("causal_lm", 4)
    found = record(model, per_example_losses, batch, certificate=certificate)
    assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-12


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda rows: rows.roll(1, 0), id="rolled"),
        pytest.param(lambda rows: rows.flip(0), id="turned around"),
        pytest.param(lambda rows: rows - rows.cumsum(0), id="less what came before"),
    ],
)
def test_rows_of_which_nobody_knows_whose_they_are_are_refused(between: Any) -> None:
    with pytest.raises((UnsupportedModelError, PreflightError), match="grouped_mm|depends on its neighbours"):
        preflight(Routed(between=between), losses, data())


def test_experts_with_room_for_some_are_refused_where_the_tokens_left_out_are_of_few() -> None:
    class Limited(Experts):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            ids, order = chosen.reshape(-1).sort()
            kept = order[: len(order) - self.most]
            offsets = torch.bincount(ids[: len(kept)], minlength=EXPERTS).cumsum(0).int()
            rows = grouped(tokens[kept // TOP], self.matrices, offsets)
            return tokens.index_add(0, kept // TOP, rows)

    model = Routed()
    model.experts.__class__, model.experts.most = Limited, 5
    with pytest.raises((UnsupportedModelError, PreflightError)):
        preflight(model, losses, data())


def test_without_a_module_that_sorts_they_are_refused_with_a_way_out() -> None:
    """As in a function of a model's own."""
    model = Routed()
    matrices = model.experts.matrices
    del model.experts.matrices
    model.register_parameter("matrices", matrices)
    whole = model.experts.forward
    model.experts.forward = lambda *args: outside(model, whole, *args)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError) as refused:
        record(model, losses, data())
    assert "grouped_mm" in refused.value.found
    assert "set_experts_implementation('batched_mm')" in refused.value.fix


def outside(model: Any, whole: Callable[..., Tensor], *args: Tensor) -> Tensor:
    model.experts.__dict__["matrices"] = model.matrices
    return whole(*args)


@pytest.mark.parametrize("is_known", [True, False])
def test_rows_sorted_before_a_module_got_them_are_taken_for_rows_in_order_by_nobody(is_known: bool) -> None:
    """Beside rows in order, with as many, where the check saw one expert: in the check they were in order too."""

    def sorted_by(order: Tensor, tokens: Tensor) -> Tensor:
        return tokens[order] if is_known else torch.take_along_dim(tokens, order[:, None], 0)

    class Beside(Experts):
        def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            ids = chosen[:, 0]
            order, offsets = ids.argsort(stable=True), torch.bincount(ids, minlength=EXPERTS).cumsum(0).int()
            return self.multiplied(tokens, sorted_by(order, tokens), offsets)[order.argsort()]

    class Inner(nn.Module):
        def __init__(self, matrices: nn.Parameter) -> None:
            super().__init__()
            self.matrices = matrices

        def forward(self, tokens: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
            return grouped(rows, self.matrices, offsets).tanh()

    model = Routed()
    model.experts.__class__ = Beside
    model.experts.multiplied = Inner(model.experts.matrices)
    del model.experts.matrices, model.experts.scales
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(torch.tensor([9.0, 1.0, 0.0, 0.0]))
    if not is_known:
        with pytest.raises(UnsupportedModelError, match="grouped_mm"):
            preflight(model, losses, data(3))
        return
    certificate = preflight(model, losses, data(3))
    with torch.no_grad():
        model.router.weight.normal_(std=30)
    found = record(model, losses, data(6), certificate=certificate)
    assert relative_error(found, loop(model, losses, data(6))) <= 1e-10


@pytest.mark.parametrize("top", [1, 2])
def test_texts_of_one_token_are_exact_too(top: int) -> None:
    model = zoo.tiny("qwen3_moe", "sequence", num_experts_per_tok=top)
    certificate = preflight(model, per_example_losses, zoo.text_batch("sequence"))
    for size in (1, 2, 4):
        batch = zoo.text_batch("sequence", size)
        batch = {name: value[:, :1] if value.dim() > 1 else value for name, value in batch.items()}
        found = record(model, per_example_losses, batch, certificate=certificate)
        assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-10
