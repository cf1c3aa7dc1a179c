"""Rows of examples that lie along a second axis, time first, and are laid below one another: each is its example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, relative_error, square

LENGTH = 6


def time_first(m: Any, x: Tensor) -> Tensor:
    """As language models of old have it: the head works on all positions of all examples."""
    output, _ = m.rnn(x.transpose(0, 1))
    rows = m.head(torch.tanh(output.view(output.size(0) * output.size(1), -1)))
    return rows.view(output.size(0), output.size(1), -1).transpose(0, 1)


def copied(m: Any, x: Tensor) -> Tensor:
    rows = m.head(m.first(x.transpose(0, 1)).reshape(-1, 4)).unflatten(0, (LENGTH, -1))
    return rows.transpose(0, 1)


def shifted(m: Any, x: Tensor) -> Tensor:
    """What was a point in time before, beside the first."""
    before = m.first(x.transpose(0, 1))
    rows = m.head(torch.cat([before[:1], before[:-1]]).flatten(0, 1))
    return rows.view(x.shape[1], len(x), -1).transpose(0, 1)


def by_steps(m: Any, x: Tensor) -> Tensor:
    state, found = x.new_zeros(len(x), 4), []
    for t in range(x.shape[1]):
        found.append(state := torch.tanh(m.first(x[:, t]) + state))
    return m.head(torch.stack(found).view(-1, 4)).view(x.shape[1], len(x), -1).transpose(0, 1)


def stacked(m: Any, x: Tensor) -> Tensor:
    """Two views of each example, all of the first before all of the second."""
    both = m.head(m.first(torch.stack([x, x.sin()]).flatten(0, 1))).unflatten(0, (2, -1))
    return both[0] * both[1]


def repeated(m: Any, x: Tensor) -> Tensor:
    """Each example three times, pooled."""
    pooled = torch.tanh(m.first(x)).mean(1).repeat_interleave(3, 0)
    made: Tensor = m.head(torch.tanh(pooled)).unflatten(0, (-1, 3)).prod(1)
    return made


def of_the_batch(m: Any, x: Tensor) -> Tensor:
    rows = m.head(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], -1, 3).transpose(0, 1)
    return m.first(x).mean(2, keepdim=True) * rows.cos()


def chosen_and_rejected(m: Any, x: Tensor) -> Tensor:
    return torch.mul(*torch.tanh(m.head(m.first(torch.cat([x, 2 * x])))).chunk(2))


def attending(m: Any, x: Tensor) -> Tensor:
    """Attention of several heads, time first, as fairseq has it."""
    given = m.first(x.transpose(0, 1))
    heads = given.contiguous().view(len(given), -1, 2).transpose(0, 1)
    weights = torch.bmm(heads, heads.transpose(1, 2))
    weights = weights.view(len(x), 2, *weights.shape[1:]).masked_fill(x[:, None, None, :, 0] > 1, -9)
    weights = weights.view(-1, *weights.shape[2:]).softmax(-1)
    made = (weights @ heads).transpose(0, 1).contiguous().view(given.shape)
    found: Tensor = m.head(made.reshape(-1, 4)).view(*given.shape[:2], -1).transpose(0, 1)
    return found


def in_windows(m: Any, x: Tensor) -> Tensor:
    """What is cut into windows, with a row before each, and gives queries, keys and values at once: three, as the
    examples may be."""
    rows = m.first(x).unsqueeze(1).expand(-1, 2, -1, -1).reshape(-1, *x.shape[1:])
    before = x.mean(1, keepdim=True).repeat(1, 2, 1).reshape(-1, 1, 4)
    rows = torch.tanh(torch.cat([before, rows], 1))
    packed = m.head(rows).unflatten(-1, (3, 1)).permute(2, 0, 1, 3)
    made = (packed[0] @ packed[1].mT).softmax(-1) @ packed[2]
    found: Tensor = m.head(made.expand(-1, -1, 4) + rows).unflatten(0, (-1, 2))
    return found


WAYS: list[Callable[[Any, Tensor], Tensor]] = [
    time_first, copied, shifted, by_steps, stacked, repeated, of_the_batch, chosen_and_rejected, attending, in_windows,
]  # fmt: skip


def made(way: Callable[[Any, Tensor], Tensor]) -> Small:
    members: dict[str, nn.Module] = {"rnn": nn.LSTM(4, 4)} if way is time_first else {"first": nn.Linear(4, 4)}
    return Small(way, head=nn.Linear(4, 3), **members)


@pytest.mark.parametrize("way", WAYS)
def test_they_are_followed(way: Callable[[Any, Tensor], Tensor]) -> None:
    model = made(way)
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    for size in (1, 2, 3, 4, LENGTH, 2 * LENGTH):  # also as many as points in time
        data = batch(size, LENGTH, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_other_lengths_too(size: int) -> None:
    """What is certified of one length is read of another, of as many points in time as examples as well."""
    model = made(time_first)
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    for length in (1, 2, 3, 4, 9):
        data = batch(size, length, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_not_where_sizes_alone_tell_which_axis_it_is() -> None:
    """Which they do not where there are as many points in time as examples: in the middle of a training."""

    def turned_by_sizes(m: Any, x: Tensor) -> Tensor:
        given = torch.einsum("bth,hk->tbk", m.first(x), _mixing(x))
        found: Tensor = m.head(given.reshape(-1, 4)).view(*given.shape[:2], -1).transpose(0, 1)
        return found

    with pytest.raises(HfDpError):
        preflight(made(turned_by_sizes), square, batch(3, LENGTH, 4))


def test_not_where_numpy_has_put_them_there() -> None:
    """Which lets go of what was known, at one length at least."""

    def through_numpy(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            rows = torch.from_numpy(x.transpose(0, 1).contiguous().numpy().copy()).reshape(-1, 4)
        found: Tensor = m.head(rows).unflatten(0, (x.shape[1], -1)).transpose(0, 1)
        return found

    model = Small(through_numpy, head=nn.Linear(4, 3))
    with pytest.raises(HfDpError):
        preflight(model, square, batch(3, LENGTH, 4))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_heads_of_other_examples_are_not_taken_for_own_ones(size: int) -> None:
    """Queries of which the examples lead, beside keys of which the heads do."""

    def mixed(m: Any, x: Tensor) -> Tensor:
        queries = m.first(x.transpose(0, 1)).contiguous().view(x.shape[1], -1, 2).transpose(0, 1)
        keys = m.first(x).view(*x.shape[:2], 2, 2).permute(2, 0, 1, 3).flatten(0, 1)
        rows = ((queries @ keys.mT).softmax(-1) @ keys).transpose(0, 1).contiguous().view(x.shape[1], -1, 4)
        found: Tensor = m.head(rows).transpose(0, 1)
        return found

    with pytest.raises(HfDpError):
        preflight(made(mixed), square, batch(size, LENGTH, 4))


def turned(m: Any, x: Tensor) -> Tensor:
    """Examples first again, by what is no view."""
    return torch.einsum("tbh,hk->btk", m.first(x).transpose(0, 1), _mixing(x)).reshape(-1, 4)


def turned_twice(m: Any, x: Tensor) -> Tensor:
    return torch.einsum("bth,hk->tbk", m.first(x), _mixing(x)).transpose(0, 1).reshape(-1, 4)


def turned_in_place(m: Any, x: Tensor) -> Tensor:
    return m.first(x).transpose(0, 1).clone().transpose_(0, 1).reshape(-1, 4)  # type: ignore[no-any-return]


def _mixing(x: Tensor) -> Tensor:
    return torch.eye(4, dtype=x.dtype) + 0.25


def some(m: Any, rows: Tensor, x: Tensor) -> Tensor:
    """The head on some rows, whose these are is followed."""
    chosen, made = x[..., 0].flatten() > -0.5, torch.zeros_like(rows)
    made[chosen] = torch.tanh(m.head(rows[chosen]))
    return made


def every(m: Any, rows: Tensor, x: Tensor) -> Tensor:
    """The head on all rows, beside others that are followed."""
    return torch.tanh(m.head(rows)) + some(m, m.first(x).reshape(-1, 4), x)


@pytest.mark.parametrize("use", [some, every])
@pytest.mark.parametrize("way", [turned, turned_twice, turned_in_place])
def test_as_many_points_in_time_as_examples_are_no_examples(way: Any, use: Any) -> None:
    model = Small(
        lambda m, x: use(m, way(m, x), x).view(*x.shape).square().mean(1), first=nn.Linear(4, 4), head=nn.Linear(4, 4)
    )
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    for size, length in ((2, 2), (4, 4), (LENGTH, LENGTH), (4, LENGTH), (8, 4)):
        data = batch(size, length, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_what_a_loop_puts_side_by_side_is_refused_before_anything_is_spent() -> None:
    """And not once there are as many points in time as examples."""

    def padded(m: Any, x: Tensor) -> Tensor:
        rows = torch.tanh(nn.utils.rnn.pad_sequence(list(m.first(x)))).view(-1, 4)
        found: Tensor = m.head(rows).view(x.shape[1], len(x), -1).transpose(0, 1)
        return found

    with pytest.raises(HfDpError):
        preflight(made(padded), square, batch(3, LENGTH, 4))
