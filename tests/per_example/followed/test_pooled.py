"""What is computed of one example's rows alone is that example's: rows that are pooled, and states of rows at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, relative_error, square
from tests.per_example.test_picked_rows_elsewhere import OTHERS, WIDTH, layers, loss, marked, refused


def some(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Those in which each example has a position that is marked."""
    return [batch for batch in batches if int(batch["mask"].sum(1).min())]


POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0).values,
    "last": lambda rows: rows[-1],
    "attention": lambda rows: (rows[:, :1].softmax(0) * rows).sum(0),
    "an order": lambda rows: rows.sort(0).values.cumsum(0)[0],
}


def of_pieces(how: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    def function(m: Any, data: Any) -> Tensor:
        mask = data["mask"].bool()
        rows = m.third(m.linear(data["x"]).tanh()[mask]).tanh()
        made: Tensor = m.other(torch.stack([how(few) for few in rows.split(mask.sum(1).tolist())])).square().sum(1)
        return made

    return function


@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1)])
@pytest.mark.parametrize("name", POOLED)
def test_pooled_rows_are_their_example_s(name: str, counts: tuple[int, ...]) -> None:
    """Also where they are as many as examples, by chance."""
    batches = [*some(OTHERS), marked(4, 1, 1, 1, 3), marked(2, 2), marked(1, 3, 1)]
    assert not refused(of_pieces(POOLED[name]), marked(*counts), batches, **layers(), third=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1)])
def test_of_no_rows_the_sum_is_the_example_s_whose_number_of_rows_it_was(counts: tuple[int, ...]) -> None:
    members = {**layers(), "third": nn.Linear(WIDTH, WIDTH)}
    assert not refused(of_pieces(lambda rows: rows.sum(0)), marked(*counts), **members)


def sentences(*texts: list[int]) -> dict[str, Tensor]:
    """Examples of sentences with so many marked words."""
    ends = [torch.arange(len(one)).repeat_interleave(torch.tensor(one, dtype=torch.long)) + 1 for one in texts]
    mask = torch.stack([torch.cat([one, one.new_zeros(6 - len(one))]) for one in ends])
    number = torch.tensor([len(one) for one in texts])
    return {**marked(*mask.bool().sum(1).tolist()), "mask": mask, "number": number}


def one_by_one(rows: list[Tensor]) -> Tensor:
    made = rows[0].new_zeros(len(rows), WIDTH)
    for i, row in enumerate(rows):
        made[i] = row
    return made


JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "stack": torch.stack,
    "vstack": torch.vstack,
    "cat": lambda rows: torch.cat([row[None] for row in rows]),
    "written": one_by_one,
    "padded": lambda rows: nn.utils.rnn.pad_sequence([row[None] for row in rows], batch_first=True)[:, 0],
}


def of_sentences(m: Any, data: Any, join: Callable[[list[Tensor]], Tensor] = torch.stack) -> Tensor:
    h, mask, number = m.linear(data["x"]).tanh(), data["mask"], data["number"].tolist()
    counts = [row.count(one + 1) for row, n in zip(mask.tolist(), number, strict=True) for one in range(n)]
    owners = torch.arange(len(mask)).repeat_interleave(data["number"])
    if not counts:
        return h.sum((1, 2))  # type: ignore[no-any-return]
    made = m.other(join([few.cos().sum(0) for few in h[mask > 0].split(counts)])).tanh().square().sum(1)
    return torch.zeros(len(mask), dtype=made.dtype).index_add(0, owners, made) + h.sum((1, 2))


CROSSED = [sentences([2, 1], [1], []), sentences([], [1], [1, 2]), sentences([1, 2], [1, 1], [], [])]
# One without a marked word, in the place of an example that has no sentence.
EMPTY = sentences([2, 0], [], [1])


@pytest.mark.parametrize("join", JOINS)
def test_as_many_pieces_as_examples_are_not_one_of_each(join: str) -> None:
    """Sentences of which the check saw one in each example: norms were of other examples' sentences."""
    model = Small(lambda m, data: of_sentences(m, data, JOINS[join]), **layers())
    certificate = preflight(model, loss, sentences([2], [1], [3]))
    same = sentences([1], [3], [1], [2])
    assert relative_error(record(model, loss, same, certificate=certificate), loop(model, loss, same)) <= 1e-9
    for batch in (*CROSSED, EMPTY):
        with pytest.raises(HfDpError, match="not one of each, in order"):
            record(model, loss, batch, certificate=certificate)


def test_pieces_are_their_example_s_where_each_has_some_number() -> None:
    batches = [*CROSSED, sentences([1], [1], [1]), sentences([1, 1], [1]), sentences([2, 2, 1], [], [])]
    assert not refused(of_sentences, sentences([2, 1], [1], [3, 1, 1]), batches, **layers())


def in_turn(m: Any, data: Any) -> Tensor:
    """States of those examples that are at work, which begin as zeros."""
    x, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
    state = torch.zeros(len(x), WIDTH, dtype=x.dtype)
    for t in range(x.shape[1]):
        state = state.clone()
        state[mask[:, t]] = m.cell(x[mask[:, t], t], state[mask[:, t]])
    return state.square().sum(1) + x.sum((1, 2))


def in_turn_by_numbers(m: Any, data: Any) -> Tensor:
    x, mask = m.linear(data["x"]).tanh(), data["mask"]
    state = x.new_zeros(len(x), WIDTH), x.new_zeros(len(x), WIDTH)
    for t in range(x.shape[1]):
        at = mask[:, t].nonzero().squeeze(1)
        made = m.cell(x[:, t][at], (state[0][at], state[1][at]))
        state = state[0].index_copy(0, at, made[0]), state[1].index_copy(0, at, made[1])
    return state[0].square().sum(1) + x.sum((1, 2))


@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1), (6, 6)])
@pytest.mark.parametrize(("function", "cell"), [(in_turn, nn.GRUCell), (in_turn_by_numbers, nn.LSTMCell)])
def test_states_of_the_rows_at_work_are_their_examples(function: Any, cell: Any, counts: tuple[int, ...]) -> None:
    members = {"linear": nn.Linear(WIDTH, WIDTH), "cell": cell(WIDTH, WIDTH)}
    assert not refused(function, marked(*counts), **members)


ONE_BY_ONE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "rows": lambda m, h, mask: torch.stack([m.other(one[on]).square().sum() for one, on in zip(h, mask, strict=True)]),
    "sums": lambda m, h, mask: (
        m.other(torch.stack([h[i][mask[i]].sum(0) for i in range(len(h))])).square().sum(1)  # of none too
    ),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("counts", [(2, 1, 3), (1, 1, 1)])
def test_examples_one_by_one_are_their_own(name: str, counts: tuple[int, ...]) -> None:
    """But where there are as many positions: then nobody knows whether these are one example's."""

    def function(m: Any, data: Any) -> Tensor:
        return ONE_BY_ONE[name](m, m.linear(data["x"]).tanh(), data["mask"].bool())

    square = [batch for batch in OTHERS if batch["mask"].shape[0] == batch["mask"].shape[1]]
    others = [batch for batch in OTHERS if batch["mask"].shape[0] != batch["mask"].shape[1]]
    assert not refused(function, marked(*counts), others, **layers())
    refused(function, marked(*counts), square, **layers())


def test_rows_that_were_known_to_be_others_stay_so_after_what_is_not_followed() -> None:
    """In the check each example had one row, in order."""

    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"].bool()
        rows = torch.cat([one[on] for one, on in zip(h, mask, strict=True)])
        owners = torch.arange(len(mask)).repeat_interleave(mask.sum(1))
        made = m.other(rows[rows[:, 0].detach().argsort().argsort().argsort()].flip(1)).square().sum(1)
        owners = owners[rows[:, 0].detach().argsort().argsort().argsort()]
        return h.sum((1, 2)).index_add(0, owners, made)

    refused(function, marked(1, 1, 1), [marked(2, 0, 1), marked(0, 3, 0), marked(2, 2, 0, 0)], **layers())


def test_a_sentence_without_words_is_not_the_example_s_that_has_the_only_word() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        counts = [row.count(k + 1) for row, n in zip(mask.tolist(), data["number"], strict=True) for k in range(n)]
        rows = h.flatten(0, 1)[mask.flatten().nonzero().squeeze(1)]
        made = torch.vstack([few.sum(0) for few in rows.split(counts)])
        order, owners = made[:, 0].detach().argsort(), torch.arange(len(mask)).repeat_interleave(data["number"])
        made = torch.zeros_like(made).index_copy(0, torch.arange(len(made)), made[order])
        return h.sum((1, 2)).index_add(0, owners[order], m.other(made).tanh().square().sum(1))

    refused(function, sentences([2], [1], [3]), [sentences([1], [0], []), sentences([0], [1], [])], **layers())


def test_examples_in_another_order_are_no_others_beside_numbers_in_order() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order = mask.sum(1).argsort(stable=True).tolist()
        rows = m.other(h.sum(1)[order] * mask.sum(1).add(1.0)[:, None]).square().sum(1)
        return torch.zeros_like(rows).index_copy(0, torch.tensor(order), rows)

    assert 0 < refused(function, marked(1, 1, 1), **layers()) < len(OTHERS)


def segments(rows: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([piece.square().sum() for piece in rows.split(mask.sum(1).tolist())])


# Of examples s in some other order, with the masks of these.
REORDERED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "joined": lambda m, s, k: segments(m.other(torch.cat([s[i][k[i]] for i in range(len(s))])), k),
    "cut short": lambda m, s, k: segments(m.other(torch.cat([s[i][: int(n)] for i, n in enumerate(k.sum(1))])), k),
    "side by side": lambda m, s, k: segments(m.other(torch.cat([x[y] for x, y in zip(s, k, strict=True)])), k),
    "each by itself": lambda m, s, k: torch.stack([m.other(s[i][k[i]]).square().sum() for i in range(len(s))]),
    "pooled": lambda m, s, k: m.other(torch.stack([s[i][k[i]].sum(0) for i in range(len(s))])).square().sum(1),
}
ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "picked": lambda h, order: h[order],
    "computed": lambda h, order: h.index_select(0, order).sin(),
    "stacked": lambda h, order: torch.stack([h[i] for i in order.tolist()]).clone(),
    "written": lambda h, order: torch.zeros_like(h).index_copy(0, order.argsort(), h),
}


@pytest.mark.parametrize("name", REORDERED)
@pytest.mark.parametrize("order", ORDERS)
def test_a_row_of_examples_in_another_order_is_not_the_example_of_its_number(name: str, order: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        places = mask.sum(1).argsort(stable=True)
        found = REORDERED[name](m, ORDERS[order](h, places), mask[places].bool())
        return found[places.argsort()] + h.sum((1, 2))

    for check in (marked(2, 2, 2), marked(1, 1, 1)):
        refused(function, check, **layers())


@pytest.mark.parametrize("is_flat", [True, False])
def test_examples_in_another_order_that_are_looked_up_are_refused(is_flat: bool) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order, length = mask.sum(1).argsort(stable=True), h.shape[1]
        ids = order[:, None] if is_flat else order[:, None] * length + torch.arange(length)
        found = nn.functional.embedding(ids, h.flatten(1) if is_flat else h.flatten(0, 1)).view_as(h)
        return m.other(found).square().sum((1, 2))[order.argsort()]

    assert 0 < refused(function, marked(1, 1, 1), **layers()) <= len(OTHERS)


def test_a_way_out_for_experts_is_not_given_to_a_model_without_any() -> None:
    """A module of one's own has no `set_experts_implementation`."""

    def picked(m: Any, x: Tensor) -> Tensor:
        hidden, mask = m.linear(x), x[..., 0] > 0
        rows = torch.zeros_like(hidden)
        rows[mask] = m.norm(hidden[mask])
        return rows

    model = Small(picked, linear=nn.Linear(4, 6), norm=nn.GroupNorm(3, 6))
    with pytest.raises(UnsupportedModelError, match="group_norm") as found:
        record(model, square, {"x": torch.randn(5, 7, 4, dtype=torch.float64)})
    assert "set_experts_implementation" not in found.value.fix
