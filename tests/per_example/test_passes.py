"""Two passes give what one gives, keep no factors in between, and notice a second one that is another."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnseenUseError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, RowSum, record
from hf_dp.per_example.checks.survey import survey
from hf_dp.per_example.factors import Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.oracle import loop
from hf_dp.per_example.passes import check_two_passes, record_in_two_passes, refuse_two_passes
from hf_dp.per_example.pieces import Pieces
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.taken import TakenWatch, checksums
from tests.zoo import adapted, text_batch, tiny, with_dropout

MODELS: dict[str, Any] = {
    "tied": lambda: tiny("gpt2", "causal_lm", n_layer=1),
    "LoRA": lambda: adapted("LoRA"),
    "untied": lambda: tiny("llama", "causal_lm"),
    "DoRA": lambda: adapted("DoRA"),
    "OFT": lambda: adapted("OFT"),
    "RandLora": lambda: adapted("RandLora"),
    "layers that share weights": lambda: tiny("albert", "masked_lm"),
    "relative positions": lambda: tiny("t5", "seq2seq"),
}
HEADS = {"layers that share weights": "masked_lm", "relative positions": "seq2seq"}
TABLE = "transformer.wte.weight"


def slow_but(*fast: str) -> list[Any]:
    return [pytest.param(kind, marks=[] if kind in fast else [pytest.mark.slow]) for kind in MODELS]


def prepared(kind: str, model: Any = None) -> tuple[Any, dict[str, Tensor], Certificate]:
    """A model, a batch of four examples, and what is known of its uses."""
    model, batch = model or MODELS[kind](), text_batch(HEADS.get(kind, "causal_lm"), 4, 6)
    return model, batch, survey(model, per_example_losses, batch, rules=RULES)


def same(one: PerExampleGradients, two: PerExampleGradients, coefficients: Tensor, tolerance: float = 1e-10) -> bool:
    coefficients = coefficients.to(one.losses.dtype)
    sums, others = (found.weighted_sum(coefficients) for found in (two, one))
    # Of a gradient that is nothing (a bias of keys) there is rounding alone.
    whole = tolerance * math.hypot(*(float(v.norm()) for v in others.values()))
    return (
        torch.allclose(one.losses, two.losses, rtol=tolerance)
        and torch.allclose(one.squared_norms(), two.squared_norms(), rtol=tolerance)
        and all(torch.allclose(sums[n], v, rtol=tolerance, atol=whole) for n, v in others.items())
        and two.differing is not None
        and not two.differing
    )


@pytest.mark.parametrize("kind", slow_but("tied", "LoRA", "OFT"))
def test_two_passes_give_what_a_loop_over_examples_gives(kind: str) -> None:
    model, batch, certificate = prepared(kind)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    assert same(loop(model, per_example_losses, batch), two, torch.tensor([0.5, 0.0, 1.0, 2.0]))
    assert not two.factors


@pytest.mark.parametrize("kind", ["weights", "autocast"])
def test_in_16_bits_two_passes_give_what_one_gives(kind: str) -> None:
    dtype = torch.bfloat16 if kind == "weights" else torch.float32
    model, batch, certificate = prepared("tied", tiny("gpt2", "causal_lm", dtype, n_layer=1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
            return per_example_losses(model, batch)

    one, two = (take(model, loss, batch, certificate=certificate) for take in (record, record_in_two_passes))
    # Of the same factors: their sums are made in float32, in another order.
    assert same(one, two, torch.linspace(0, 1, 4), 1e-5)


@pytest.mark.parametrize("checkpoints", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_masks_of_dropout_are_those_of_the_first_pass(checkpoints: bool | None) -> None:
    model, batch, certificate = prepared("tied")
    if checkpoints is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    with_dropout(model)
    torch.manual_seed(3)
    one = record(model, per_example_losses, batch, certificate=certificate)
    after = torch.rand(3)
    torch.manual_seed(3)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    assert torch.equal(torch.rand(3), after)
    state = torch.get_rng_state()
    assert same(one, two, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


class Louder(torch.autograd.Function):
    """What it is given; its gradient grows from call to call, which no loss shows."""

    calls = itertools.count(1)

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * next(Louder.calls)


def moved_weights(model: Any, batch: Any) -> None:
    with torch.no_grad():
        model.transformer.wte.weight[0] += 1


def another_batch(model: Any, batch: Any) -> None:
    batch["input_ids"][1:] = batch["input_ids"][1:].flip(1)


def other_masks(model: Any, batch: Any) -> None:
    with_dropout(model)


def louder_gradients(model: Any, batch: Any) -> None:
    model.transformer.ln_f.register_forward_hook(lambda module, given, output: Louder.apply(output))


@pytest.mark.parametrize(
    ("sabotage", "differing"), [(moved_weights, 4), (other_masks, 4), (louder_gradients, 4), (another_batch, 3)]
)
def test_a_second_pass_that_is_another_is_noticed(sabotage: Callable[[Any, Any], None], differing: int) -> None:
    """Also where losses are the same, and in the examples that it changes alone."""
    model, batch, certificate = prepared("tied")
    if sabotage is louder_gradients:
        sabotage(model, batch)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate)
    if sabotage is not louder_gradients:
        sabotage(model, batch)
    for coefficients in (torch.ones(4).double(), torch.tensor([1.0, 0, 1, 1]).double(), torch.zeros(4).double()):
        two.weighted_sum(coefficients)
        assert two.differing is not None
        # What is left out of the sum may be anything.
        assert int(two.differing) == differing - int(4 - coefficients.sum()) or not coefficients.any()
        assert bool(two.differing) == bool(coefficients.any())


def test_checksums_are_of_each_example_and_all_its_factors() -> None:
    sides = [torch.randn(3, 5, size) for size in (2, 4)]
    for make in (lambda left, right: Outer(Dense(left), Dense(right)), lambda left, right: PerExample(right)):
        for value in (float("nan"), 0.0, float(sides[1][1, 2, 3]) * (1 + 2e-7)):
            other = sides[1].clone()
            other[1, 2, 3] = value
            found = checksums(make(*sides)).ne(checksums(make(sides[0], other)))
            assert found.tolist() == [False, True, False]
    assert checksums(PerExample(torch.ones(3))).shape == checksums(PerExample(torch.ones(3, 0))).shape == (3,)
    whole = torch.randn(3, 5, 4)
    assert torch.equal(*(checksums(PerExample(part)) for part in (whole[..., 1:], whole[..., 1:].contiguous())))


def test_a_loss_that_counts_its_calls_is_refused_before_the_first_step() -> None:
    model, batch, certificate = prepared("tied")
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return per_example_losses(model, batch) / next(calls)

    check_two_passes(model, per_example_losses, batch, certificate=certificate)
    with pytest.raises(UnsupportedModelError, match=r"^4 examples whose gradients were others when"):
        check_two_passes(model, loss, batch, certificate=certificate)


@pytest.mark.parametrize("owners", [[0, 0, 1, 1], [1, 0, 1, 1]])
def test_rows_of_one_unit(owners: list[int]) -> None:
    model, batch, certificate = prepared("tied")
    one = record(model, per_example_losses, batch, certificate=certificate).grouped(owners)
    two = record_in_two_passes(model, per_example_losses, batch, certificate=certificate, owners=(owners, 0, 0))
    assert same(one, two, torch.linspace(0, 1, one.batch_size))
    # One more pass, of another batch: its unit is told, and the other is not.
    batch["input_ids"][-1] = batch["input_ids"][-1].flip(0)
    two.weighted_sum(torch.ones_like(two.losses))
    assert int(two.differing) == 1  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="are not grouped"):
        two.grouped(owners)


@pytest.mark.parametrize("is_restricted", [False, True])
@pytest.mark.parametrize("pieces", [None, (0, 4)])
def test_rows_of_tables(is_restricted: bool, pieces: tuple[int, int] | None) -> None:
    """What is looked up is kept; of a unit in several micro-batches, until all of it has come."""
    model, batch, certificate = prepared("untied head", tiny("gpt2", "causal_lm", n_layer=1, tie_word_embeddings=False))
    kept = torch.arange(model.transformer.wte.weight.shape[0]).fmod(3).ne(0)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for take in (record, functools.partial(record_in_two_passes, owners=pieces and ([0] * 4, *pieces))):
        whole, rows = Pieces([TABLE]), RowSum(TABLE, model.transformer.wte.weight)
        for place in range(1 if pieces is None else 2):
            elsewhere = pieces if place == 0 else (pieces or (0, 0))[::-1]
            options = {} if take is record or elsewhere is None else {"owners": ([0] * 4, *elsewhere)}
            one = take(model, per_example_losses, batch, certificate=certificate, tables=[TABLE], **options)
            if take is record and elsewhere is not None:
                one = one.grouped([0] * 4, *elsewhere)
            last = whole.joined(one.restricted({TABLE: kept}) if is_restricted else one)
        sums = last.zeros(besides=[TABLE])
        last.add_weighted_sum_(sums, torch.linspace(0.5, 1, last.batch_size).double(), {TABLE: rows})
        ids, values = rows.coalesced()
        chosen = values.ne(0).any(1)
        found.append((last.squared_norms(), [ids[chosen], values[chosen], *sums.values()]))
        assert [*last.factors] == [TABLE] or pieces is not None or take is record
        assert bool(kept[ids[chosen]].all()) is is_restricted
    (norms, sums), (others, theirs) = found
    assert torch.allclose(norms, others, rtol=1e-10)
    assert all(torch.allclose(one, two, rtol=1e-10, atol=1e-12) for one, two in zip(sums, theirs, strict=True))


@pytest.mark.parametrize(
    ("kind", "most"), [("tied", 3), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("LoRA", "untied"))]
)
@pytest.mark.parametrize("joined", [False, True])
def test_no_more_is_kept_than_uses_of_one_parameter(kind: str, most: int, joined: bool) -> None:
    model, batch, certificate = prepared(kind)
    seen: list[int] = []

    class Counted(TakenWatch):
        def _hand_on(self, name: str) -> None:
            seen.append(sum(map(len, self.factors.values())))
            super()._hand_on(name)

    watch = Counted(Reader(4, None, certificate.readings), RULES, take=lambda name, uses: None, joined=joined)
    watch.run(model, per_example_losses, batch)
    assert max(seen) <= (most if joined else 1)
    assert not any(watch.factors.values())


def test_what_one_pass_refuses_two_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, certificate = prepared("tied")
    seen = Certificate(certificate - {next(use for use in certificate if "ln" in use.parameter)}, certificate.read)
    for take in (record, record_in_two_passes):
        with pytest.raises(UnseenUseError, match="preflight did not see"):
            take(model, per_example_losses, batch, certificate=seen)
    for take in (record, record_in_two_passes):
        monkeypatch.setitem(take.__globals__, "check_pictures", lambda model, batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            take(model, per_example_losses, batch, certificate=certificate)


def test_where_two_passes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_two_passes(nn.Linear(2, 2), in_pieces=True)
    with pytest.raises(UnsupportedModelError, match="passes=2 on meta without deterministic algorithms"):
        refuse_two_passes(nn.Linear(2, 2, device="meta"), in_pieces=False)
    monkeypatch.setattr("hf_dp.per_example.passes.is_sharded", lambda model: True)
    refuse_two_passes(nn.Linear(2, 2), in_pieces=False)
    with pytest.raises(UnsupportedModelError, match="passes=2 with units under FSDP2"):
        refuse_two_passes(nn.Linear(2, 2), in_pieces=True)
