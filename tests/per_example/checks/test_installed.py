from __future__ import annotations

from torch import nn

from hf_dp.per_example.checks.installed import Installed
from tests.zoo import tiny


def test_modules_and_hooks_are_known_by_place_and_identity() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    installed = Installed(model)
    model.train(False).zero_grad()
    assert installed.is_of(model)
    handle = model[0].register_full_backward_hook(lambda *_: None)
    assert not installed.is_of(model)
    handle.remove()
    assert installed.is_of(model)
    model[0], model[1] = model[1], model[0]
    assert not installed.is_of(model)


def test_what_asks_for_gradients_may_be_hooked_again_and_again() -> None:
    """As TRL does where it switches checkpointing off and on in each step."""
    model = tiny("gpt2", "causal_lm")
    model.enable_input_require_grads()
    installed = Installed(model)
    model.enable_input_require_grads()
    assert installed.is_of(model)
    model.get_input_embeddings().register_forward_hook(lambda *_: None)
    assert not installed.is_of(model)
