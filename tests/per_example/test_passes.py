"""Two passes give what one gives, and keep no factors in between."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp.errors import UnseenUseError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, preflight, record
from hf_dp.per_example.passes import TakenWatch, record_in_two_passes
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rules import RULES
from tests.zoo import adapted, text_batch, tiny, with_dropout

MODELS: dict[str, Any] = {
    "tied": lambda: tiny("gpt2", "causal_lm"),
    "untied": lambda: tiny("llama", "causal_lm"),
    "LoRA": lambda: adapted("LoRA"),
    "DoRA": lambda: adapted("DoRA"),
    "layers that share weights": lambda: tiny("albert", "masked_lm"),
    "relative positions": lambda: tiny("t5", "seq2seq"),
}


def head_of(kind: str) -> str:
    return {"layers that share weights": "masked_lm", "relative positions": "seq2seq"}.get(kind, "causal_lm")


def same(one: PerExampleGradients, two: PerExampleGradients, coefficients: Tensor, tolerance: float = 1e-10) -> bool:
    sums = [found.weighted_sum(coefficients) for found in (two, one)]
    return (
        torch.equal(one.losses, two.losses)
        and torch.allclose(one.squared_norms(), two.squared_norms(), rtol=tolerance)
        and all(
            torch.allclose(sums[0][n], v, rtol=tolerance, atol=tolerance * float(v.norm())) for n, v in sums[1].items()
        )
    )


def prepared(kind: str, checkpointed: bool = False) -> tuple[Any, dict[str, Tensor], Any]:
    model, batch = MODELS[kind](), text_batch(head_of(kind), 4, 6)
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, batch, preflight(model, per_example_losses, batch)


@pytest.mark.parametrize("kind", MODELS)
def test_two_passes_give_what_one_gives(kind: str) -> None:
    model, batch, certificate = prepared(kind)
    one, two = (
        take(model, per_example_losses, batch, certificate=certificate) for take in (record, record_in_two_passes)
    )
    assert same(one, two, torch.tensor([0.5, 0.0, 1.0, 2.0], dtype=torch.float64))
    assert one.uses == two.uses
    assert not any(two.factors.values())
    assert two.differing is not None
    assert not two.differing


@pytest.mark.parametrize("checkpointed", [False, True])
def test_masks_of_dropout_are_those_of_the_first_pass(checkpointed: bool) -> None:
    model, batch, certificate = prepared("tied", checkpointed)
    with_dropout(model)
    torch.manual_seed(3)
    one = record(model, per_example_losses, batch, certificate=certificate)
    after = torch.rand(3)
    torch.manual_seed(3)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    assert torch.equal(torch.rand(3), after)
    assert same(one, two, torch.ones(4, dtype=torch.float64))
    state = torch.get_rng_state()
    two.weighted_sum(torch.ones(4, dtype=torch.float64))
    assert torch.equal(torch.get_rng_state(), state)
    assert two.differing is not None
    assert not two.differing


def test_a_second_pass_that_is_another_is_seen() -> None:
    model, batch, certificate = prepared("untied")
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    with torch.no_grad():
        model.lm_head.weight[0] += 1
    two.weighted_sum(torch.ones(4, dtype=torch.float64))
    assert two.differing is not None
    assert int(two.differing) == 4


@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [1, 0, 1, 1], [0, 1, 2, 3]])
def test_rows_of_one_unit(owners: list[int]) -> None:
    model, batch, certificate = prepared("tied")
    one = record(model, per_example_losses, batch, certificate=certificate).grouped(owners)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate, owners=(owners, 0, 0))
    assert same(one, two, torch.linspace(0, 1, one.batch_size, dtype=torch.float64))


def test_rows_of_a_unit_that_has_more_elsewhere_are_summed_in_one_pass() -> None:
    model, batch, certificate = prepared("untied")
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate, owners=([0] * 4, 4, 2))
    ones = torch.ones(4, dtype=torch.float64)
    expected = record(model, per_example_losses, batch, certificate=certificate)
    found = two.weighted_sum(ones.to(two.losses.dtype))
    assert all(torch.allclose(found[name], value) for name, value in expected.weighted_sum(ones).items())
    assert torch.equal(two.losses, expected.losses)
    assert (two.elsewhere, two.differing) == ((4, 2), None)


@pytest.mark.parametrize(("kind", "most"), [("untied", 1), ("LoRA", 1), ("layers that share weights", 20)])
def test_no_more_is_kept_than_uses_of_one_parameter(kind: str, most: int) -> None:
    model, batch, certificate = prepared(kind)
    seen: list[int] = []

    class Counted(TakenWatch):
        def _keep(self, name: str, factors: Any) -> None:
            super()._keep(name, factors)
            seen.append(sum(map(len, self.factors.values())))

    watch = Counted(Reader(4, None, certificate.readings), RULES, take=lambda name, uses: seen.append(len(uses)))
    watch.run(model, per_example_losses, batch)
    assert 1 <= max(seen) <= most
    assert not any(watch.factors.values())


def test_what_one_pass_refuses_two_refuse() -> None:
    model, batch, certificate = prepared("untied")

    calls = [functools.partial(take, model, certificate=certificate) for take in (record, record_in_two_passes)]
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient)
    for call in calls:
        with pytest.raises(UnsupportedModelError, match="has a hook on its gradient"):
            call(per_example_losses, batch)
    model = tiny("llama", "causal_lm")
    seen = Certificate(certificate - {next(use for use in certificate if "norm" in use.parameter)}, certificate.read)
    for take in (record, record_in_two_passes):
        with pytest.raises(UnseenUseError, match="preflight did not see"):
            take(model, per_example_losses, batch, certificate=seen)
