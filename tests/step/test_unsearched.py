"""While the gradients of a micro-batch are there, Python searches for no garbage; and a step leaves none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hf_dp.accounting import Ledger
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from hf_dp.per_example.modules import named_modules
from hf_dp.step.private_gradient import private_gradient
from hf_dp.step.unsearched import unsearched
from tests.step.test_private_gradient import make_plan
from tests.zoo import adapted, text_batch, tiny


@pytest.fixture
def searching() -> Iterator[None]:
    gc.collect()
    yield
    gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_it_goes_on_afterwards(searching: None, fails: bool) -> None:
    with pytest.raises(KeyError) if fails else unsearched(), unsearched():
        assert not gc.isenabled()
        if fails:
            raise KeyError
    assert gc.isenabled()


def test_where_a_program_has_switched_it_off_it_stays_off(searching: None) -> None:
    gc.disable()
    with unsearched():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_data_is_prepared_as_in_any_loop_and_a_step_leaves_no_cycles(searching: None) -> None:
    model, few = adapted("LoRA"), text_batch("causal_lm")
    certificate, seen = preflight(model, per_example_losses, few), []

    def prepared() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(2):
            seen.append(("data", gc.isenabled()))
            yield few

    def recorded(batch: dict[str, torch.Tensor]) -> object:
        seen.append(("gradients", gc.isenabled()))
        return record(model, per_example_losses, batch, certificate=certificate)

    plan, ledger = make_plan(noise_multiplier=1.0), Ledger()
    private_gradient(model, recorded, prepared(), plan, ledger)  # type: ignore[arg-type]
    assert seen == 2 * [("data", True), ("gradients", False)]
    gc.collect()
    gc.disable()
    private_gradient(model, recorded, prepared(), plan, ledger)  # type: ignore[arg-type]
    assert gc.collect() == 0


def test_a_walk_through_modules_leaves_no_cycles(searching: None) -> None:
    model = tiny("llama", "causal_lm")
    gc.collect()
    gc.disable()
    found, all_found = named_modules(model), named_modules(model, by_each_name=True)
    assert gc.collect() == 0
    assert found == [*model.named_modules()]
    assert all_found == [*model.named_modules(remove_duplicate=False)]
