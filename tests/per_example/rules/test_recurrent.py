"""Recurrent layers and cells beside a loop over single examples, and beside what torch computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error, square

_KINDS: dict[str, Any] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
_CELLS: dict[str, Any] = {
    "LSTM": nn.LSTMCell,
    "GRU": nn.GRUCell,
    "RNN": nn.RNNCell,
    "RNN of relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}
_OPTIONS: list[dict[str, Any]] = [
    {"batch_first": True},
    {"batch_first": True, "bias": False, "num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bidirectional": True},
]


def _of_all(found: Any) -> Tensor:
    """(B, n): all that such a layer gives, of which states have the examples second."""
    output, state = found
    return torch.cat([output.flatten(1), *(each.transpose(0, 1).flatten(1) for each in state)], 1)


def _run(model: Any, x: Tensor, *state: Tensor) -> Tensor:
    is_first = model.rnn.batch_first
    output, last = model.rnn(x if is_first else x.transpose(0, 1), *state)
    last = last if isinstance(last, tuple) else (last,)
    return _of_all((output if is_first else output.transpose(0, 1), last))


@pytest.mark.few(12)
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("options", _OPTIONS, ids=str)
@pytest.mark.parametrize("kind", _KINDS)
def test_layers_are_exact(kind: str, options: dict[str, Any], size: int) -> None:
    """Also with as many examples as features (4) or points in time (5); forwards they are torch's own."""
    model = Small(lambda m, x: _run(m, m.first(x)).cos(), first=nn.Linear(4, 4), rnn=_KINDS[kind](4, 3, **options))
    data = batch(size, 5, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(6, 5, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    torch.testing.assert_close(found.losses, square(model, data).detach())


@pytest.mark.parametrize("kind", _CELLS)
def test_cells_are_exact(kind: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(3):
            state = m.cell(m.first(x[:, step]), state)
        return torch.cat(state if isinstance(state, tuple) else [state], 1)

    model, data = Small(run, first=nn.Linear(4, 4), cell=_CELLS[kind](4, 3)), batch(3, 3, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_what_layers_give_may_be_viewed_as_torchs_own(kind: str) -> None:
    def viewed(m: Any, x: Tensor) -> Tensor:
        output, last = m.rnn(x.transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        return output.view(-1).view_as(output).transpose(0, 1).flatten(1) + last.view(2, -1, 3).sum(0).repeat(1, 10)

    model = Small(viewed, rnn=_KINDS[kind](4, 3, bidirectional=True))
    certificate = preflight(model, square, batch(3, 5, 4))
    data = batch(4, 5, 4)
    found = record(model, square, data, certificate=certificate)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_first_states_that_are_computed_get_their_gradients() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        state = m.start(x[:, 0]).cos().unsqueeze(0)
        return _run(m, x, (state[..., :3], state[..., 3:]))

    model, data = Small(run, start=nn.Linear(4, 6), rnn=nn.LSTM(4, 3, batch_first=True)), batch(3, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: _run(m, x, m.w.expand(2, len(x), -1).contiguous()),
        lambda m, x: _run(m, x, m.w.repeat(1, len(x), 1)),
        lambda m, x: _run(m, x, m.w[:, 0].unsqueeze(1).expand(-1, len(x), 3)),
    ],
    ids=["expanded", "repeated", "expanded by other numbers"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_first_states_that_are_learnt(function: Any, size: int) -> None:
    """Also with as many examples as layers (2) or as positions (4)."""
    model, data = Small(function, rnn=nn.GRU(4, 3, 2, batch_first=True), w=parameter(2, 1, 3)), batch(size, 4, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(5, 4, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_layers_over_what_all_examples_share(kind: str, size: int) -> None:
    """A table of positions that is not trained, say."""
    table = torch.randn(1, 5, 4, dtype=torch.float64)
    rnn = _KINDS[kind](4, 4, batch_first=True)
    model = Small(lambda m, x: (m.first(x) + m.rnn(table)[0]).cos(), first=nn.Linear(4, 4), rnn=rnn)
    data = batch(size, 5, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(3, 5, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_of_cells_may_be_changed_in_place(kind: str) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in range(3):
            state = m.cell(x[:, step], state)
            for each in state if isinstance(state, tuple) else (state,):
                each.mul_(0.5)[:, 0] = 0
        return torch.cat(state if isinstance(state, tuple) else [state], 1)

    model, data = Small(run, cell=_CELLS[kind](4, 3)), batch(3, 3, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


def test_one_weight_may_be_frozen() -> None:
    model, data = Small(lambda m, x: _run(m, x), rnn=nn.GRU(4, 3, batch_first=True)), batch(3, 5, 4)
    model.rnn.weight_ih_l0.requires_grad_(False)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


def test_dropout_between_layers_is_on_in_training() -> None:
    model = Small(lambda m, x: _run(m, x), rnn=nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5)).train()
    data = batch(3, 5, 4)
    torch.manual_seed(1)
    found = record(model, square, data, certificate=preflight(model, square, data))
    assert not torch.equal(found.losses, square(copy.deepcopy(model).eval(), data).detach())


def test_packed_sequences_are_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]

    model = Small(run, rnn=nn.LSTM(4, 3, batch_first=True))
    with pytest.raises(UnsupportedModelError, match="given a packed sequence") as caught:
        record(model, square, batch(3, 5, 4))
    assert "bidirectional" in caught.value.fix


def test_the_lists_of_weights_that_layers_keep_are_put_back() -> None:
    model, data = Small(lambda m, x: _run(m, x), rnn=nn.LSTM(4, 3, batch_first=True)), batch(3, 5, 4)
    before = model.rnn._flat_weights
    record(model, square, data)
    assert model.rnn._flat_weights is before
    assert all(one is other for one, other in zip(before, model.rnn.parameters(), strict=True))
