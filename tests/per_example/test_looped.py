"""What is kept of a loop over examples, and asked in each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.errors import HfDpError
from hf_dp.per_example import apart, loop, preflight, record
from hf_dp.per_example.reading import Reader
from tests.per_example.small import Small, batch, relative_error, square
from tests.per_example.test_apart import LENGTH, Way, hidden, members


def test_factors_of_a_weight_that_is_computed_once_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are normed, or put together of others, before the loop begins."""

    def function(m: Any, x: Tensor) -> Tensor:
        weight = m.layer.weight / m.layer.weight.norm()
        return torch.stack([F.linear(rows, weight) for rows in hidden(m, x)])

    model, data, found = Small(function, **members()), batch(8, LENGTH, 4), list[int]()
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    usual = apart._together
    monkeypatch.setattr(apart, "_together", lambda known, size: found.append(len(known)) or usual(known, size))
    assert relative_error(record(model, square, data, certificate=certificate), loop(model, square, data)) <= 1e-12
    assert found == [8]


def by_size(m: Any, x: Tensor) -> list[int]:
    """In order, but where a number is large, as none is in the check."""
    sizes = x.mean((1, 2)).tolist()
    return sorted(range(len(x)), key=sizes.__getitem__) if bool(x.max() > 50) else list(range(len(x)))


def in_place_of_others(m: Any, x: Tensor) -> Tensor:
    out, h = torch.zeros_like(x), hidden(m, x)
    for place, number in enumerate(by_size(m, x)):
        out[place] = m.layer(h[number])
    return out


def beside_others(m: Any, x: Tensor) -> Tensor:
    made = [m.layer(rows) for rows in hidden(m, x)]
    return torch.stack([made[i] * made[j].cos() if i != j else made[i] for i, j in enumerate(by_size(m, x))])


def with_what_came_before(m: Any, x: Tensor) -> Tensor:
    made, before = list[Tensor](), torch.zeros(())
    for i, j in enumerate(by_size(m, x)):
        made.append(m.layer(hidden(m, x)[i]) + before)
        before = made[-1] if i != j else before
    return torch.stack(made)


TURNED: list[Way] = [
    lambda m, x: torch.stack([m.layer(hidden(m, x)[i]) for i in by_size(m, x)]),
    in_place_of_others, beside_others, with_what_came_before,
]  # fmt: skip


@pytest.mark.parametrize("way", TURNED)
def test_what_a_loop_mixes_in_few_steps_is_refused_there(way: Way) -> None:
    def losses(model: Any, data: Any) -> Tensor:
        found: Tensor = (model(data["x"]) - data["x"]).square().mean((1, 2))
        return found

    model, data = Small(way, **members()), batch(4, LENGTH, 4)
    certificate = preflight(model, losses, batch(3, LENGTH, 4))
    assert relative_error(record(model, losses, data, certificate=certificate), loop(model, losses, data)) <= 1e-12
    data["x"][0] += 100
    with pytest.raises(HfDpError, match="loop over examples"):
        record(model, losses, data, certificate=certificate)


def moved_right(rows: Tensor) -> Tensor:
    """As a decoder's tokens are made of labels."""
    moved = rows.new_zeros(rows.shape)
    moved[:, 1:] = rows[:, :-1].clone()
    moved[:, 0] = 1
    return moved


def beside_a_constant(m: Any, rows: Tensor) -> Tensor:
    both: Tensor = m.layer(torch.cat([rows, (m.w + m.table[: rows.shape[1]]).repeat(len(rows), 1, 1)], 1))
    return both


def of_two_lengths(m: Any, rows: Tensor) -> Tensor:
    """As a layer that reads words, and pictures beside them."""
    return torch.cat([m.layer(rows), m.layer(rows[:, :2].cos())], 1)


WHOLE: dict[str, Way] = {
    "a layer given rows of two lengths": of_two_lengths,
    "beside a constant, written": lambda m, x: beside_a_constant(m, m.table[(moved_right(x)[..., 0] * 9).long() % 7]),
    "beside a constant": lambda m, x: beside_a_constant(m, m.layer(x)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("size", [1, 4])
def test_a_loop_over_examples_that_calls_all_of_a_model_is_exact(name: str, size: int) -> None:
    def losses(model: Any, data: Any) -> Tensor:
        rows = data["x"].split(1)
        return torch.stack([model(one).square().mean() for one in rows])

    model = Small(WHOLE[name], **members())
    certificate, data = preflight(model, losses, batch(3, LENGTH, 4)), batch(size, LENGTH, 4)
    assert relative_error(record(model, losses, data, certificate=certificate), loop(model, losses, data)) <= 1e-12


def kept_as_they_are(m: Any, rows: Tensor) -> Tensor:
    """As models that may be given numbers of another type make sure of theirs."""
    return beside_a_constant(m, m.layer(rows.to(rows.dtype).contiguous()[:, 1:].float().double()))


@pytest.mark.parametrize("way", [beside_a_constant, kept_as_they_are])
def test_each_example_may_be_taken_out_when_its_turn_comes(way: Way) -> None:
    def losses(model: Any, data: Any) -> Tensor:
        return torch.stack([model(data["x"][i : i + 1]).square().mean() for i in range(len(data["x"]))])

    model = Small(way, **members())
    certificate, data = preflight(model, losses, batch(3, LENGTH, 4)), batch(4, LENGTH, 4)
    assert relative_error(record(model, losses, data, certificate=certificate), loop(model, losses, data)) <= 1e-12


@pytest.mark.parametrize("by", ["itself", "a view", "a view of a view"])
def test_what_two_examples_are_written_into_is_not_the_second_ones(by: str) -> None:
    def losses(model: Any, data: Any) -> Tensor:
        x = data["x"]
        whole = x.new_zeros(2 * LENGTH, 4)
        first = {"itself": whole, "a view": whole[:LENGTH], "a view of a view": whole.view(2, LENGTH, 4)[0]}[by]
        first[:LENGTH] = (x[0] * 9).long() % 7
        whole[LENGTH:] = (x[1] * 9).long() % 7
        made = torch.cat([whole, model.w.expand(2 * LENGTH, 4)], 1).square().sum(1)
        found = torch.stack([made[:LENGTH].mean(), made[LENGTH:].mean(), *(0 * x[2:]).sum((1, 2))])
        return found + model(x).square().mean((1, 2))

    model = Small(lambda m, x: m.layer(x), **members())
    with pytest.raises(HfDpError):
        record(model, losses, batch(3, LENGTH, 4))


def test_where_nothing_loops_no_use_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small(lambda m, x: m.layer(hidden(m, x)), **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    monkeypatch.setattr(Reader, "_alone", None)
    monkeypatch.setattr(Reader, "one_of", None)
    record(model, square, batch(4, LENGTH, 4), certificate=certificate)
