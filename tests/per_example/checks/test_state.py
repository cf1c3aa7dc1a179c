"""What passes leave in a model, its buffers included, is put back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.state import put_back, unchanged_state


class Cached(nn.Module):
    """Positions that are computed where there are none yet, as rotary embeddings keep theirs."""

    def __init__(self, is_saved: bool = False) -> None:
        super().__init__()
        self.register_buffer("positions", None, persistent=is_saved)

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or len(self.positions) < x.shape[1]:
            self.positions = torch.arange(x.shape[1])
        return x + self.positions[: x.shape[1]]


@pytest.mark.parametrize("check", [put_back, unchanged_state])
def test_a_buffer_that_has_no_value_yet_has_none_afterwards(check: type) -> None:
    model = Cached()
    for size in (2, 3):
        with check(model):
            model(torch.ones(1, size))
        assert dict(model._buffers) == {"positions": None}
        assert "positions" not in vars(model)
    model(torch.ones(1, 2))
    with check(model):
        model.positions = None
    assert model.positions.tolist() == [0, 1]


def test_one_that_is_saved_is_refused_when_it_gets_a_value_and_has_none_afterwards() -> None:
    model = Cached(is_saved=True)
    with pytest.raises(UnsupportedModelError, match="buffer 'positions' changes"), unchanged_state(model):
        model(torch.ones(1, 2))
    assert dict(model._buffers) == {"positions": None}


def test_a_name_that_comes_and_goes_with_no_value_is_no_change() -> None:
    model = nn.Module()
    with unchanged_state(model):
        model.register_buffer("late", None)
    assert not model._buffers
    model.register_buffer("early", None)
    with unchanged_state(model):
        del model.early
    assert dict(model._buffers) == {"early": None}


def test_a_module_with_a_buffer_without_a_value_may_be_gone() -> None:
    """Also from where a pass has taken it, as layers of torch that keep no statistics have such buffers."""
    model = nn.Module()
    model.norm = nn.BatchNorm1d(4, track_running_stats=False)
    with unchanged_state(model):
        del model.norm
