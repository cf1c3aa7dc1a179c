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


def test_where_nothing_loops_no_use_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small(lambda m, x: m.layer(hidden(m, x)), **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    monkeypatch.setattr(Reader, "_alone", None)
    monkeypatch.setattr(Reader, "one_of", None)
    record(model, square, batch(4, LENGTH, 4), certificate=certificate)
