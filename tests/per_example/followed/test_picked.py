"""Rows that a model picks are no even number of each example's, and as many as examples need not be one of each.

Where they were picked by masks or numbers it is known whose each is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.followed.picked import Picked
from tests.per_example.small import relative_error

MARK = 8


class Tagged(nn.Module):
    """Tokens (B, T), of which `how` makes rows; the mean of what comes of each example's is classified."""

    def __init__(self, how: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.table, self.inner, self.out = how, nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        rows, owners = self.how(self.table(ids), ids)
        made = self.inner(rows).cos()
        return self.out(made.new_zeros(len(ids), 6).index_add(0, owners, made).sin())


def losses(model: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data["input_ids"]), data["labels"], reduction="none")


def marked(*counts: int) -> dict[str, Tensor]:
    """Rows of seven tokens, so many of which are marked."""
    ids = torch.arange(7).repeat(len(counts), 1)
    for i, count in enumerate(counts):
        ids[i, 1 : 1 + count] = MARK
    return {"input_ids": ids, "labels": torch.arange(len(counts)) % 3}


def owners_of(ids: Tensor, times: Tensor | int = 1) -> Tensor:
    rows = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
    return rows.repeat_interleave(times if isinstance(times, Tensor) else torch.full((ids.numel(),), times))


def by_mask(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return h[ids == MARK], owners_of(ids)[(ids == MARK).flatten()]


def by_numbers(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    chosen = (ids == MARK).flatten().nonzero().squeeze(1)
    return h.flatten(0, 1).index_select(0, chosen), owners_of(ids)[chosen]


def in_pieces(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    counts = (ids == MARK).sum(1).tolist()
    rows = torch.cat([one[1 : 1 + count] for one, count in zip(h, counts, strict=True)])
    return rows, torch.arange(len(ids)).repeat_interleave(torch.tensor(counts))


def once_or_twice(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    times = (1 + ids.eq(MARK).long()).flatten()
    return h.flatten(0, 1).repeat_interleave(times, 0), owners_of(ids, times)


def by_name(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    chosen = (ids == MARK).flatten().nonzero().squeeze(1)
    return torch.index_select(input=h.flatten(0, 1), dim=0, index=chosen), owners_of(ids)[chosen]


def placed(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Into as many places for all, by what is in them."""
    order = ids.flatten().argsort(stable=True)
    rows = torch.zeros_like(h.flatten(0, 1))
    rows[torch.arange(len(order))] = h.flatten(0, 1)[order]
    return rows, owners_of(ids)[order]


def turned(h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """By the same mask, of rows that were turned round and back."""
    return h.flip(0).flip(0)[ids == MARK], by_mask(h, ids)[1]


def exact(model: nn.Module, loss: Any, checked: Any, *others: Any) -> None:
    certificate = preflight(model, loss, checked)
    for data in (checked, *others):
        found, slow = record(model, loss, data, certificate=certificate), loop(model, loss, data)
        assert relative_error(found, slow) <= 1e-12
        coefficients = torch.linspace(0.5, 1, found.batch_size, dtype=torch.float64)
        sums = found.weighted_sum(coefficients)
        for name, whole in slow.weighted_sum(coefficients).items():
            torch.testing.assert_close(sums[name], whole, rtol=1e-10, atol=1e-12)


UNKNOWN = {one.__name__: one for one in (turned,)}
KNOWN = {one.__name__: one for one in (by_mask, by_numbers, by_name, in_pieces, once_or_twice, placed)}


@pytest.mark.parametrize("how", KNOWN)
@pytest.mark.parametrize("counts", [(2, 2, 2), (4, 1, 1), (0, 3, 5)], ids=["even", "uneven", "none"])
def test_rows_that_are_known_to_be_picked_are_their_examples_own(how: str, counts: tuple[int, ...]) -> None:
    others = [marked(*counts) for counts in ((1, 2, 3, 4), (3,), (0,), (0, 0), (1, 1, 1, 1, 1), (5, 0, 0))]
    exact(Tagged(KNOWN[how]), losses, marked(*counts), *others)


@pytest.mark.parametrize("how", UNKNOWN)
@pytest.mark.parametrize("counts", [(2, 2, 2), (4, 1, 1)], ids=["even", "uneven"])
def test_failure_92_picked_rows_are_refused_before_the_first_step(how: str, counts: tuple[int, ...]) -> None:
    """Of a text too, and where all examples of the check have as many: by the operation, and not by numbers."""
    with pytest.raises(UnsupportedModelError, match="it may be packed|were picked|cannot be read as"):
        preflight(Tagged(UNKNOWN[how]), losses, marked(*counts))


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)])
def test_failure_92_words_are_not_taken_for_as_many_pictures(counts: tuple[int, ...]) -> None:
    """Beside two pictures of each example, of which none is missing."""

    def described(model: Any, data: Any) -> Tensor:
        seen = model.inner(data["pictures"].flatten(0, 1).flatten(1)[:, :6].cos()).unflatten(0, (-1, 2)).sum(1)
        return losses(lambda ids: model(ids) + seen[:, :3], data)

    data = {**marked(*counts), "pictures": torch.rand(3, 2, 1, 3, 2, dtype=torch.float64) + 1}
    exact(Tagged(by_mask), described, data, {**data, **marked(5, 0, 1)})
    with pytest.raises(UnsupportedModelError, match="were picked|cannot be read as"):
        preflight(Tagged(turned), described, data)


def chunks(model: Any, data: Any) -> Tensor:
    """Patches of pictures (B, 1, 8, 8), so many at a time of all together."""
    rows = model.inner(data["pixels"].reshape(-1, 6))
    made = torch.cat([model.inner(few.cos()) for few in rows.split(40)])
    return made.view(len(data["pixels"]), -1).sin().sum(1)


def test_failure_92_rows_in_pieces_of_one_size_are_no_examples() -> None:
    several = [{"pixels": torch.randn(size, 1, 16, 12, dtype=torch.float64)} for size in (4, 1, 3, 5)]
    exact(Tagged(by_mask), chunks, *several)


def test_failure_92_neither_channels_nor_a_column_of_numbers_tell_how_long_examples_are() -> None:
    """Sound (B, 1, T) whose silence is left out, and series beside a number for each."""

    def voiced(model: Any, data: Any, turn: bool = False) -> Tensor:
        frames = data["sound"].reshape(len(data["sound"]), -1, 6)
        heard = frames.abs().sum(2) > 0
        rows = model.inner((frames.flip(0).flip(0) if turn else frames)[heard])
        owners = torch.arange(len(frames))[:, None].expand_as(heard)[heard]
        return rows.new_zeros(len(frames), 6).index_add(0, owners, rows.cos()).sin().sum(1)

    data = {"sound": torch.randn(3, 1, 42, dtype=torch.float64), "kind": torch.zeros(3, 1, dtype=torch.long)}
    with pytest.raises(UnsupportedModelError, match="rows were picked"):
        preflight(Tagged(by_mask), lambda model, data: voiced(model, data, turn=True), data)
    data["sound"][1, :, 6:24] = 0
    exact(Tagged(by_mask), voiced, data, {name: value[1:] for name, value in data.items()})


ONE_OF_EACH: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mask": lambda h, ids: h[ids == MARK],
    "numbers": lambda h, ids: h[(ids == MARK).nonzero(as_tuple=True)],
    "of all": lambda h, ids: h.flatten(0, 1)[(ids == MARK).flatten().nonzero().squeeze(1)],
    "selected": lambda h, ids: h.flatten(0, 1).index_select(0, (ids == MARK).flatten().nonzero().squeeze(1)),
}


@pytest.mark.parametrize("how", ONE_OF_EACH)
def test_failure_92_as_many_rows_as_examples_are_held_to_be_one_of_each(how: str) -> None:
    """In each micro-batch: one of each is exact, two of one and none of another are refused."""
    model = Tagged(lambda h, ids: (ONE_OF_EACH[how](h, ids), torch.arange(len(ids))))
    certificate = preflight(model, losses, marked(1, 1, 1))
    for data in (marked(1, 1, 1, 1), marked(1, 1)):
        found = record(model, losses, data, certificate=certificate)
        assert relative_error(found, loop(model, losses, data)) <= 1e-12
    with pytest.raises(UnsupportedModelError, match="not one of each, in order, of 4 examples"):
        record(model, losses, marked(2, 0, 1, 1), certificate=certificate)


@pytest.mark.parametrize("is_known", [True, False])
def test_rows_in_another_order_are_not_one_of_each(is_known: bool) -> None:
    def sorted_by(order: Tensor, h: Tensor) -> Tensor:
        return h[order] if is_known else torch.take_along_dim(h, order[:, None], 0)

    def turned(model: Any, data: Any) -> Tensor:
        order = data["input_ids"][:, 0].argsort(stable=True)
        made = model.out(sorted_by(order, model.table(data["input_ids"]).mean(1)).cos())
        return losses(lambda ids: made[order.argsort()], data)

    model, data = Tagged(by_mask), marked(1, 2, 3, 4)
    certificate = preflight(model, turned, data)
    data["input_ids"][:, 0] = torch.tensor([3, 1, 2, 0])
    if is_known:
        exact(model, turned, marked(1, 2, 3, 4), data)
        return
    with pytest.raises(UnsupportedModelError, match="not one of each, in order"):
        record(model, turned, data, certificate=certificate)


def test_failure_92_rows_viewed_as_those_of_examples_are_held_to_be_as_many_of_each() -> None:
    """Of each micro-batch; and so are every other of picked rows."""
    model = Tagged(by_mask)

    def viewed(model: Any, data: Any) -> Tensor:
        h, ids = model.table(data["input_ids"]), data["input_ids"]
        return F.cross_entropy(
            model.out(h[ids == MARK].view(len(ids), -1, 6).cos()).sum(1), data["labels"], reduction="none"
        )

    certificate = preflight(model, viewed, marked(2, 2, 2))
    for counts in ((3, 3), (1, 1, 1, 1)):
        found = record(model, viewed, marked(*counts), certificate=certificate)
        assert relative_error(found, loop(model, viewed, marked(*counts))) <= 1e-12
    with pytest.raises(UnsupportedModelError, match="not one of each, in order"):
        record(model, viewed, marked(4, 1, 1), certificate=certificate)
    halved = Tagged(lambda h, ids: (h[ids == MARK][::2], torch.arange(len(ids))))
    certificate = preflight(halved, losses, marked(2, 2, 2))
    with pytest.raises(UnsupportedModelError, match="not one of each, in order"):
        record(halved, losses, marked(4, 1, 1), certificate=certificate)


def test_the_last_token_of_sequences_whose_examples_are_second() -> None:
    """Of as many positions as examples too."""
    model = Tagged(lambda h, ids: (h.transpose(0, 1)[ids.argmin(1), torch.arange(len(ids))], torch.arange(len(ids))))
    certificate = preflight(model, losses, marked(2, 1, 3))
    for counts in ((1, 2, 3, 1, 2, 3, 1), (2, 3)):
        found = record(model, losses, marked(*counts), certificate=certificate)
        assert relative_error(found, loop(model, losses, marked(*counts))) <= 1e-12


@pytest.mark.parametrize(
    ("pick", "is_one"),
    [
        (lambda x: x[:, 0], None),
        (lambda x: x[0], None),
        (lambda x: x[None], None),
        (lambda x: x[..., 1], None),
        (lambda x: x.flatten(0, 1).view(3, 2, 4), None),
        (lambda x: x[[0, 1, 2]], True),
        (lambda x: x[torch.tensor([0, 2, 1])], False),
        (lambda x: x.flatten(0, 1)[::2], True),
        (lambda x: x.flatten(0, 1)[:3], False),
        (lambda x: x.sort(0).values, False),
        (lambda x: torch.cat([torch.tensor([]), x], dim=-2), None),
        (lambda x: torch.cat([x[:, :1], x], dim=1), None),
        (lambda x: x.gather(1, torch.zeros(3, 1, 4, dtype=torch.long)), None),
        (lambda x: x.unfold(dimension=-2, size=2, step=1), None),
        (lambda x: x.unfold(dimension=0, size=1, step=1), False),
    ],
)
def test_what_is_known_of_rows(pick: Callable[[Tensor], Tensor], is_one: bool | None) -> None:
    x = torch.randn(3, 2, 4)
    with Picked([x], 3) as picked:
        made = pick(x)
        assert picked.is_data(made)
        assert picked.has_one_of_each(made.cos()) is is_one
        assert picked.picked_by(made) is None


class Reads(TorchDispatchMode):
    """Counts the numbers that are read."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pick", "is_one", "reads"),
    [
        (lambda x: x[torch.arange(3), torch.tensor([1, 0, 1])], True, 0),
        (lambda x: x[torch.arange(3, device=x.device), :, torch.tensor([1, 0, 3])], True, 0),
        (lambda x: x[torch.arange(3), 1], True, 0),
        (lambda x: x[torch.arange(3).sub_(1), torch.tensor([1, 0, 1])], False, 1),
        (lambda x: x[torch.arange(3).flip(0), torch.tensor([1, 0, 1])], False, 1),
        (lambda x: x[torch.arange(2, -1, -1), torch.tensor([1, 0, 1])], False, 1),
    ],
)
def test_each_example_s_own_is_known_without_a_read(pick: Callable[[Tensor], Tensor], is_one: bool, reads: int) -> None:
    """Of a GPU, which would be waited for in each micro-batch (the last token's, before a head)."""
    x = torch.randn(3, 2, 4)
    with Reads() as counted, Picked([x], 3) as picked:
        made = pick(x)
        assert picked.has_one_of_each(made.cos()) is is_one
    assert counted.count == reads


def test_tables_and_pictures_that_fill_up_are_no_rows_of_examples() -> None:
    table, ids, pictures = torch.randn(9, 4), torch.tensor([[1, 2], [3, 4]]), torch.randn(2, 3, 1, 2, 2)
    with Picked([ids, pictures], 2, images=6) as picked:
        assert picked.picked_by(table[ids.flatten()]) is None
        assert picked.picked_by(pictures.flatten(0, 1)[torch.tensor([0, 1, 3, 4, 5])]) is None
        assert picked.picked_by(ids.flatten()[ids.flatten() > 1]) == "getitem"


class ByKind(nn.Module):
    """Examples of two kinds, which `how` lays one kind after the other, and back."""

    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.table, self.inner, self.out = how, nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, ids: Tensor, kind: Tensor) -> Tensor:
        h = self.table(ids)
        made = self.inner(self.how(h, kind)).cos().reshape(h.shape)
        order = kind.argsort(stable=True)
        return self.out((h + torch.zeros_like(h).index_copy(0, order, made)).mean(1))


def along(h: Tensor, order: Tensor) -> Tensor:
    return torch.take_along_dim(h, order[:, None, None], dim=0)


def of_kinds(*kinds: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(kinds))
    ids = torch.randint(0, 9, (len(kinds), 5), generator=generator)
    return {"input_ids": ids, "kind": torch.tensor(kinds), "labels": torch.arange(len(kinds)) % 3}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda h, kind: torch.cat([h[kind == 0], h[kind == 1]]), id="joined"),
        pytest.param(lambda h, kind: h[kind.argsort(stable=True)], id="sorted"),
        pytest.param(lambda h, kind: h[kind.argsort(stable=True)].view(-1, 6), id="sorted, and their positions"),
    ],
)
def test_failure_97_examples_sorted_by_kind_where_the_check_saw_one_kind(how: Any) -> None:
    exact(ByKind(how), of_their_kinds, of_kinds(0, 0, 0), of_kinds(0, 0, 0, 0, 0), of_kinds(1, 0, 1, 0, 0))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda h, kind: along(h, kind.argsort(stable=True)), id="sorted along an axis"),
        pytest.param(
            lambda h, kind: F.embedding(kind.argsort(stable=True), h.flatten(1)).view(h.shape), id="looked up"
        ),
        pytest.param(
            lambda h, kind: torch.cat([torch.vsplit(h, len(h))[i] for i in kind.argsort(stable=True)]), id="cut"
        ),
    ],
)
def test_failure_101_and_sorted_by_what_is_no_index(how: Any) -> None:
    refused_once_kinds_differ(how)


def of_their_kinds(model: Any, data: Any) -> Tensor:
    logits = model(data["input_ids"], data["kind"])
    return F.cross_entropy(logits, data["labels"], reduction="none")


def refused_once_kinds_differ(how: Any) -> None:
    model = ByKind(how)
    certificate = preflight(model, of_their_kinds, of_kinds(0, 0, 0))
    same = of_kinds(0, 0, 0, 0, 0)
    found = record(model, of_their_kinds, same, certificate=certificate)
    assert relative_error(found, loop(model, of_their_kinds, same)) <= 1e-12
    with pytest.raises(UnsupportedModelError, match="its rows were picked, and are not one of each"):
        record(model, of_their_kinds, of_kinds(1, 0, 1, 0, 0), certificate=certificate)


def test_rows_that_are_written_into_a_copy_leave_what_was_copied() -> None:
    x = torch.randn(3, 2, 4)
    with Picked([x], 3) as picked:
        h = x * 2
        made = h.masked_scatter(torch.ones(3, 2, 1, dtype=torch.bool), h[torch.tensor([1, 1, 0])])
        assert picked.has_one_of_each(h) is None
        assert picked.has_one_of_each(made) is False


def test_what_takes_its_shape_from_data_is_data_once_it_was_written() -> None:
    x = torch.randn(3, 3)
    with Picked([x], 3) as picked:
        plain, set_, written, viewed = (x.new_zeros(3, 3) for _ in range(4))
        set_[torch.tensor([0, 2])] = x[:2]
        written.index_add_(0, torch.tensor([0, 1, 2]), x)
        viewed[0].copy_(x[1])
        assert not picked.is_data(plain.cos())
        assert all(map(picked.is_data, (set_, written, viewed)))
