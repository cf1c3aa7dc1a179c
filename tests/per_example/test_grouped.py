"""Several rows as one example: norms and sums against a loop over the examples, by plain autograd, for every rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Dense, OneHot, Outer, PerExample, PerExampleGradients, Tables, record
from hf_dp.per_example.batch import take
from tests.per_example.rules.test_instantiate import MODELS
from tests.per_example.small import Small, batch, parameter, square
from tests.per_example.uses import EXACT
from tests.zoo import text_batch, tiny

EVEN, UNEVEN = [0, 0, 1, 1, 2, 2], [1, 0, 1, 2, 1, 0]


def error(model: nn.Module, loss: Callable[..., Tensor], data: dict[str, Any], owners: list[int]) -> float:
    """The worst relative error of losses, norms and weighted sums; of the latter, relative to the whole."""
    found = record(model, loss, data).grouped(owners)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = torch.linspace(0.3, 1.7, max(owners) + 1, dtype=torch.float64)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    norms, losses = [], []
    for place, weight in enumerate(weights):
        model.zero_grad()
        # Row by row, since a loop over examples must know nothing of batches.
        rows = [loss(model, take(data, [i])) for i, owner in enumerate(owners) if owner == place]
        torch.cat(rows).sum().backward()
        losses.append(sum(row.detach() for row in rows))
        own = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
        norms.append(sum(g.double().square().sum() for g in own.values()))
        for name, gradient in own.items():
            sums[name] += weight * gradient
    model.zero_grad()
    whole = torch.stack([v.norm() for v in sums.values()]).norm()
    ours = found.weighted_sum(weights)
    assert found.batch_size == len(weights) == len(found.losses)
    pairs = [(found.squared_norms(), torch.stack(norms)), (found.losses, torch.cat(losses))]
    return max(
        *(float((one.double() - truth.double()).norm() / truth.double().norm()) for one, truth in pairs),
        *(float((ours[name].double() - v).norm() / whole) for name, v in sums.items()),
    )


@pytest.mark.parametrize("name", [*EXACT, *MODELS])
def test_every_rule_is_exact_for_rows_that_are_one_example(name: str) -> None:
    model, length = {**EXACT, **MODELS}[name], 5 if name in EXACT or "images" in name else 10
    assert error(model, square, batch(len(UNEVEN), length, 4), UNEVEN) <= 1e-12


def lora() -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.0)
    model = peft.get_peft_model(tiny("llama_tied", "causal_lm", torch.float32), config).double().train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    return model


def checkpointed(reentrant: bool) -> nn.Module:
    model = tiny("gpt2", "causal_lm")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2, tied": (lambda: tiny("gpt2", "causal_lm"), "causal_lm"),
    "gpt2, checkpointed": (lambda: checkpointed(True), "causal_lm"),
    "gpt2, checkpointed, not reentrant": (lambda: checkpointed(False), "causal_lm"),
    "LoRA, tied": (lora, "causal_lm"),
    "bert": (lambda: tiny("bert", "masked_lm"), "masked_lm"),
    "vit": (lambda: tiny("vit", "image"), "image"),
    "mamba": (lambda: tiny("mamba", "causal_lm"), "causal_lm"),
    "mixtral": (lambda: tiny("mixtral, experts batched", "causal_lm"), "causal_lm"),
}


AS_FACTORS_ALONE = {"gpt2, checkpointed", "vit", "mamba", "mixtral"}


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("name", "length", "owners"),
    [
        pytest.param(
            name,
            length,
            owners,
            id=f"{name}-{how}",
            marks=[pytest.mark.slow] * (length == 7 and name in AS_FACTORS_ALONE),
        )
        for name in ARCHITECTURES
        for length, owners, how in ((2, UNEVEN, "kept as factors"), (7, EVEN, "as gradients"))
    ],
)
def test_architectures_are_exact(name: str, length: int, owners: list[int]) -> None:
    make, head = ARCHITECTURES[name]
    data = text_batch(head, size=6, length=length)
    assert error(make(), per_example_losses, data, owners) <= 1e-10


def test_both_ways_to_a_norm_were_tried() -> None:
    """Few positions are kept as factors, many become the gradients themselves: that depends on the rows together."""

    def kinds(length: int) -> tuple[int, int]:
        alone = record(tiny("llama", "causal_lm"), per_example_losses, text_batch("causal_lm", size=6, length=length))
        counts = [sum(isinstance(use, Outer) for uses in alone.factors.values() for use in uses)]
        together = alone.grouped(EVEN)
        return counts[0], sum(isinstance(use, Outer) for uses in together.factors.values() for use in uses)

    assert kinds(2)[1] == kinds(2)[0] > 10
    assert kinds(7)[1] < kinds(7)[0]


def test_rows_that_are_examples_of_their_own_change_no_bit() -> None:
    model, data = tiny("gpt2", "causal_lm", torch.float32), text_batch("causal_lm", size=4)
    alone, grouped = (record(model, per_example_losses, data) for _ in range(2))
    grouped = grouped.grouped(range(4))
    assert torch.equal(alone.squared_norms(), grouped.squared_norms())
    assert torch.equal(alone.rounding(), grouped.rounding())
    sums = grouped.weighted_sum(torch.ones(4))
    assert all(torch.equal(sums[name], v) for name, v in alone.weighted_sum(torch.ones(4)).items())


def test_examples_in_another_order_are_the_same() -> None:
    model, data = tiny("llama_tied", "causal_lm"), text_batch("causal_lm", size=6)
    order = [5, 1, 2, 0, 4, 3]
    one = record(model, per_example_losses, data).grouped(UNEVEN)
    two = record(model, per_example_losses, take(data, order)).grouped([UNEVEN[i] for i in order])
    assert torch.allclose(one.squared_norms(), two.squared_norms(), rtol=1e-12)


@settings(max_examples=30)
@example([0, 0, 1], 1, (1, 1), ["dense"], 0, False, torch.float32)
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    positions=st.integers(1, 9),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kinds=st.lists(st.sampled_from(["dense", "looked up", "instantiated"]), min_size=1, max_size=3),
    exponent=st.integers(-18, 18),
    is_cancelling=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_an_example_adds_is_at_most_its_norm(
    owners: list[int],
    positions: int,
    widths: tuple[int, int],
    kinds: list[str],
    exponent: int,
    is_cancelling: bool,
    dtype: torch.dtype,
) -> None:
    """In floating point, also where rows cancel, with the bound on rounding that comes along."""
    names = sorted(set(owners))
    owners = [names.index(owner) for owner in owners]
    generator = torch.Generator().manual_seed(exponent + 50)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * 10.0 ** (exponent / 2)
        if is_cancelling and len(values) > 1:
            values[1:2] = -values[:1] * (1 + 1e-6)
        return values.to(dtype)

    size, (p, d) = len(owners), widths
    uses: list[Any] = []
    for kind in kinds:
        right = Dense(drawn(size, positions, d).abs())
        if kind == "instantiated":
            uses.append(PerExample(drawn(size, p, d).float()))
        elif kind == "dense":
            uses.append(Outer(Dense(drawn(size, positions, p)), right))
        else:
            ids = torch.randint(0, p, (size, positions), generator=generator)
            uses.append(Outer(OneHot(ids, p), Dense(drawn(size, positions, d))))
    weight = nn.Parameter(torch.zeros(p, d))
    truth = torch.zeros(max(owners) + 1, p, d, dtype=torch.float64)
    for use in uses:
        rows = use.values if isinstance(use, PerExample) else Outer(use.left, use.right).instantiated().values
        truth.index_add_(0, torch.tensor(owners), rows.double())
    found = PerExampleGradients(torch.zeros(size), {"w": uses}, {"w": weight}).grouped(owners)
    norms, rounding = found.squared_norms(), found.rounding()
    # Rows that cancel leave the rounding of their size behind.
    scale = sum(100 * 10.0 ** (exponent if kind == "dense" else exponent / 2) for kind in kinds)
    for place in range(found.batch_size):
        added = found.weighted_sum(torch.eye(found.batch_size)[place])["w"].double()
        # No clipping norm is below 1e-15.
        assert float(added.square().sum()) <= float(norms[place] + rounding[place]) * (1 + 1e-5) + 1e-35
        assert float((added - truth[place]).abs().max()) <= 1e-5 * scale


def test_the_ids_of_tables_are_kept_and_nothing_is_touched_by_what_is_missing() -> None:
    model = Small(lambda m, x: m.w[(x[..., 0] * 99).long() % 3 + 1].cos(), w=parameter(9, 2))
    found = record(model, square, batch(6, 1, 1), tables=["w"])
    (use,) = found.factors["w"]
    assert isinstance(use, Outer)
    assert isinstance(use.left, OneHot)
    touched = {(UNEVEN[i], int(use.left.ids[i, 0])) for i in range(6)}
    examples, rows = Tables.of({"w": model.w}).touched(found.grouped(UNEVEN).factors)
    assert set(zip(examples.tolist(), rows.tolist(), strict=True)) == touched
    assert 0 not in rows.tolist()


@pytest.mark.parametrize("owners", [[0, 2, 2], [1, 1, 2], [0, 1], [-1, 0, 1]])
def test_owners_that_are_none_are_refused(owners: list[int]) -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    with pytest.raises(ValueError, match="owners|numbered"):
        record(model, square, batch(3, 5, 4)).grouped(owners)


def test_what_was_changed_in_place_is_refused() -> None:
    model, data = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 40)), batch(4, 2, 4)
    found = record(model, square, data)
    data["x"].mul_(2)
    with pytest.raises(UnsupportedModelError, match="in place"):
        found.grouped([0, 0, 1, 1])
