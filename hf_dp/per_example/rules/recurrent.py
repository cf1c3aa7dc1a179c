"""Recurrent layers (LSTM, GRU, RNN) and their cells, of which each weight has one use, of all points in time.

What is added up at a gate comes from the input and from the state before: the factors of a weight are the gradients
there, and what it was multiplied with. A cell computes each of its units from the gates of this unit alone, so that its
derivatives at all points in time are formed at once, and gone through once, backwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved

_Cell = Callable[..., tuple[Tensor, ...]]


def _lstm(of_input: Tensor, of_state: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    enters, stays, candidate, leaves = (of_input + of_state).chunk(4, -1)
    cell = stays.sigmoid() * cell + enters.sigmoid() * candidate.tanh()
    return leaves.sigmoid() * cell.tanh(), cell


def _gru(of_input: Tensor, of_state: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    input_gates, state_gates = of_input.chunk(3, -1), of_state.chunk(3, -1)
    resets, stays = ((one + other).sigmoid() for one, other in zip(input_gates[:2], state_gates[:2], strict=True))
    candidate = (input_gates[2] + resets * state_gates[2]).tanh()
    return ((1 - stays) * candidate + stays * hidden,)


def _tanh(of_input: Tensor, of_state: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    return ((of_input + of_state).tanh(),)


def _relu(of_input: Tensor, of_state: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    return ((of_input + of_state).relu(),)


def recurrence(
    given: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    cell: _Cell,
    length: int,
) -> Tensor:
    """One layer, in one direction.

    Args:
        given: (B, length x features + states x hidden): what comes in at each point in time, then the first state.
        weight_ih: (gates, features), as torch has it, as are the others.
        weight_hh: (gates, hidden).
        bias_ih: (gates,).
        bias_hh: (gates,).
        cell: takes what is added up at the gates, of the input and of the state, (..., gates), and the state: one
            tensor (..., hidden) or two. Gives the next state, each unit from what is this unit's.
        length: the number of points in time.

    Returns:
        (B, length, states x hidden): the states after each.
    """
    operands = (given, weight_ih, weight_hh, bias_ih, bias_hh)
    if has_torch_function(operands):
        return handle_torch_function(recurrence, operands, *operands, cell=cell, length=length)
    inputs, states = _split(given, weight_ih, weight_hh, length)
    of_inputs, found = F.linear(inputs, weight_ih, bias_ih), []
    for step in range(length):
        states = cell(of_inputs[:, step], F.linear(states[0], weight_hh, bias_hh), *states)
        found.append(torch.cat(states, -1))
    return torch.stack(found, 1)


def _split(given: Tensor, weight_ih: Tensor, weight_hh: Tensor, length: int) -> tuple[Tensor, Saved]:
    split = length * weight_ih.shape[1]
    return given[:, :split].reshape(len(given), length, weight_ih.shape[1]), given[:, split:].split(
        weight_hh.shape[1], 1
    )


def _bind(
    given: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    **options: Any,
) -> Bound:
    parameters = {"weight_ih": weight_ih, "weight_hh": weight_hh, "bias_ih": bias_ih, "bias_hh": bias_hh}
    return Bound(given, parameters, options)


def _common(given: Tensor, operands: Operands) -> tuple[Tensor, dict[str, Any]]:
    """All in one type: under autocast an input may be in fewer bits than the weights."""
    tensors = [given, *(value for value in operands.parameters.values() if value is not None)]
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    parameters = {k: None if v is None else v.detach().to(dtype) for k, v in operands.parameters.items()}
    return given.to(dtype), parameters


def _forward(given: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    with torch.autocast(given.device.type, enabled=False):
        lifted, parameters = _common(given, operands)
        output = recurrence(lifted, **parameters, **operands.options)
    return output, (given, output)


def _backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    given, parameters = _common(saved[0], operands)
    weight_ih, weight_hh = parameters["weight_ih"], parameters["weight_hh"]
    length, hidden = operands.options["length"], weight_hh.shape[1]
    inputs, first = _split(given, weight_ih, weight_hh, length)
    before = torch.cat([torch.cat(first, 1).unsqueeze(1), saved[1][:, :-1]], 1).split(hidden, -1)
    with torch.enable_grad():
        of_inputs = F.linear(inputs, weight_ih, parameters["bias_ih"])
        of_states = F.linear(before[0], weight_hh, parameters["bias_hh"])
        leaves = [leaf.detach().requires_grad_() for leaf in (of_inputs, of_states, *before)]
        after = [each.sum() for each in operands.options["cell"](*leaves)]
        grad = functools.partial(torch.autograd.grad, inputs=leaves, retain_graph=True, materialize_grads=True)
        derivatives = [grad(each) for each in after]

    def of(number: int) -> Tensor:
        """(length, states after, B, gates of a unit, hidden) by what is added up at the gates; one by the state."""
        return torch.stack([each[number].unflatten(-1, (-1, hidden)) for each in derivatives]).movedim(2, 0)

    by_input, by_state = of(0), of(1)
    by_before = torch.cat([of(number) for number in range(2, len(leaves))], 3).transpose(2, 3)
    coming = gradient.to(given.dtype).unflatten(-1, (-1, hidden)).permute(1, 2, 0, 3)
    at_after, at_gates = torch.empty_like(coming), list[Tensor]()
    at_before = torch.zeros_like(coming[0])
    for step in reversed(range(length)):
        torch.add(coming[step], at_before, out=at_after[step])
        at_gates.append((at_after[step].unsqueeze(2) * by_state[step]).sum(0).flatten(1))
        at_before = (at_after[step].unsqueeze(1) * by_before[step]).sum(0)
        at_before[0] += at_gates[-1] @ weight_hh
    at_inputs = (at_after.unsqueeze(3) * by_input).sum(1).flatten(2).transpose(0, 1)
    at_states = torch.stack(at_gates[::-1], 1)
    factors: dict[str, Factors | None] = {}
    for role, gates, other in (("ih", at_inputs, inputs), ("hh", at_states, before[0])):
        if f"weight_{role}" in operands.watched:
            factors[f"weight_{role}"] = Outer(Dense(axis.positions(gates)), Dense(axis.positions(other)))
        if f"bias_{role}" in operands.watched:
            factors[f"bias_{role}"] = PerExample.over(axis.positions(gates))
    if not needs_input:
        return None, factors
    return torch.cat([(at_inputs @ weight_ih).flatten(1), *at_before], 1), factors


RECURRENT: Mapping[Any, Rule] = MappingProxyType(
    {recurrence: Rule("recurrence", _bind, _forward, _backward, reads_parameters=True)}
)


def _layers(cell: _Cell) -> Callable[..., Any]:
    def layers(
        input: Tensor,
        state: Any,
        weights: Sequence[Any],
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any = None,
        *_: Any,
    ) -> Any:
        if isinstance(has_biases, tuple | list):
            raise UnsupportedModelError(
                "a recurrent layer with trainable weights is given a packed sequence.",
                why="its rows lie point by point in time, those of all examples in the order of their lengths, and "
                "none can be told to be one example's.",
                fix="leave pack_padded_sequence out (of padded rows it is exact), and take of a row's outputs the one "
                "at its last token; where it is bidirectional, the way back begins in the padding: give all rows one "
                "width there (padding='max_length').",
            )
        each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
        if len(weights) != num_layers * directions * each:
            return NotImplemented
        states = state if isinstance(state, tuple | list) else [state]
        x, hidden = input if batch_first else input.transpose(0, 1), states[0].shape[-1]
        last: list[Tensor] = []
        for layer in range(num_layers):
            found: list[Tensor] = []
            for direction in range(directions):
                number = layer * directions + direction
                own, first = weights[number * each : (number + 1) * each], [each[number] for each in states]
                given = torch.cat([(x.flip(1) if direction else x).flatten(1), *first], 1)
                output = recurrence(given, *own, cell=cell, length=x.shape[1])
                last.append(output[:, -1])
                found.append(output[..., :hidden].flip(1) if direction else output[..., :hidden])
            x = torch.cat(found, -1)
            if layer < num_layers - 1:
                x = F.dropout(x, dropout, train)
        # As torch lays them out: models take views of them.
        of_last = [each.contiguous() for each in torch.stack(last).split(hidden, -1)]
        return x if batch_first else x.transpose(0, 1).contiguous(), *of_last

    return layers


def _single(cell: _Cell) -> Callable[..., Any]:
    def single(input: Tensor, state: Any, *weights: Any) -> Any:
        states = state if isinstance(state, tuple | list) else [state]
        output = recurrence(torch.cat([input, *states], 1), *weights, cell=cell, length=1)[:, 0]
        # Copies: loops change states in place.
        found = tuple(each.clone() for each in output.split(states[0].shape[-1], 1))
        return found if len(states) > 1 else found[0]

    return single


#: operation of torch -> the same by `recurrence`.
LAYERS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.lstm: _layers(_lstm),
        torch.lstm_cell: _single(_lstm),
        torch.gru: _layers(_gru),
        torch.gru_cell: _single(_gru),
        torch.rnn_tanh: _layers(_tanh),
        torch.rnn_tanh_cell: _single(_tanh),
        torch.rnn_relu: _layers(_relu),
        torch.rnn_relu_cell: _single(_relu),
    }
)
