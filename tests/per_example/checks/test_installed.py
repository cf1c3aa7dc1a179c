from __future__ import annotations

from torch import nn

from hf_dp.per_example.checks.installed import Installed


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
