"""Rows that hold several examples, or one example in several rows, are not cut evenly, and where it is known whose each
is, they are cut as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import Small, batch, parameter, relative_error


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1).double()


def packed_loss(model: Any, data: Any) -> Tensor:
    mask = data["mask"].bool()
    kept = model.linear(data["x"][mask]) * data["x"][mask]
    return torch.zeros_like(data["x"]).masked_scatter(mask[..., None], kept).sum((1, 2))


def packed(*lengths: int) -> dict[str, Tensor]:
    mask = torch.zeros(len(lengths), 6, dtype=torch.long)
    for i, length in enumerate(lengths):
        mask[i, :length] = 1
    return {"x": batch(len(lengths), 6, 1)["x"], "mask": mask}


def hidden(model: Any, data: Any) -> Tensor:
    """The same losses, of rows of which nobody knows whose they are."""
    mask = data["mask"].bool()
    rows = data["x"][mask].flip(0).flip(0)
    return torch.zeros_like(data["x"]).masked_scatter(mask[..., None], model.linear(rows) * rows).sum((1, 2))


LENGTHS = [(6, 6, 6), (1, 6, 6, 6, 6), (2, 0, 1, 1, 1)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_rows_are_not_cut_evenly(lengths: tuple[int, ...]) -> None:
    """Nor are those certified of which all examples of the check have as many."""
    with pytest.raises(UnsupportedModelError, match="it may be packed|not one of each, in order"):
        preflight(Packed(), hidden, packed(*lengths))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_rows_are_cut_as_they_are_where_that_is_known(lengths: tuple[int, ...]) -> None:
    model = Packed()
    certificate = preflight(model, packed_loss, packed(*lengths))
    for other in (*LENGTHS, (4,), (0,), (0, 0), (3, 3), (1, 1, 1)):
        found = record(model, packed_loss, packed(*other), certificate=certificate)
        slow = loop(model, packed_loss, packed(*other))
        torch.testing.assert_close(found.squared_norms(), slow.squared_norms(), rtol=1e-12, atol=0)


def test_packed_rows_are_not_told_by_another_axis_of_the_batch() -> None:
    """Two labels for each example do not make an even number of rows theirs."""
    data = {**packed(6, 6, 6), "pair": torch.zeros(3, 2, dtype=torch.long)}
    with pytest.raises(UnsupportedModelError, match="packed"):
        preflight(Packed(), hidden, data)


class WithToken(nn.Module):
    """As transformers of pictures have one before all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.inner = nn.Parameter(torch.ones(1, 1, 4, dtype=torch.float64)), Packed()

    def forward(self, data: Any) -> Tensor:
        return hidden(self.inner, data) * self.token.sum()


def test_who_has_no_matrices_of_experts_is_not_told_how_to_run_them() -> None:
    with pytest.raises(UnsupportedModelError, match="packed") as caught:
        preflight(WithToken(), lambda model, data: model(data), packed(6, 6, 6))
    assert "set_experts_implementation" not in caught.value.fix


def packed_pairs_loss(model: Any, data: Any) -> Tensor:
    rows = {"x": data["ids"].flatten(0, 1)[..., None].double(), "mask": data["mask"].flatten(0, 1)}
    return hidden(model, rows).unflatten(0, (-1, 2)).sum(1)


def packed_pairs(*lengths: int) -> dict[str, Tensor]:
    mask = packed(*lengths)["mask"].unflatten(0, (-1, 2))
    return {"ids": torch.arange(1, mask.numel() + 1).view_as(mask), "mask": mask}


def test_failure_38_packed_rows_of_pairs_are_not_cut_evenly() -> None:
    """An even number of rows for each pair is no sign that they are the pair's own."""
    with pytest.raises(UnsupportedModelError, match="packed"):
        preflight(Packed(), packed_pairs_loss, packed_pairs(*[6] * 6))


def several_for_each(size: int, answers: int = 4, length: int = 5) -> dict[str, Tensor]:
    """Questions, each with several answers, which are views of one tensor."""
    ids = torch.randint(0, 40, (size, 1 + answers, length), generator=torch.Generator().manual_seed(size))
    return {"question": ids[:, 0], "answers": ids[:, 1:]}


def against_answers(model: Any, data: Any) -> Tensor:
    asked = model(data["question"])
    answers = model(data["answers"].flatten(0, 1)).unflatten(0, (len(asked), -1))
    scores = (answers @ asked.unsqueeze(-1)).squeeze(-1)
    return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long), reduction="none")


def three_at_once(model: Any, data: Any) -> Tensor:
    given = [data["question"], data["answers"][:, 0], data["answers"][:, 1]]
    return F.triplet_margin_loss(*model(torch.cat(given)).chunk(3), reduction="none")


@pytest.mark.parametrize("losses", [against_answers, three_at_once])
def test_texts_of_an_example_that_are_pooled_all_at_once(losses: Any) -> None:
    model = Small(
        lambda m, ids: F.normalize(m.out(m.table(ids).mean(1))), table=nn.Embedding(40, 4), out=nn.Linear(4, 4)
    )
    certificate = preflight(model, losses, several_for_each(3))
    for size in (1, 2, 4, 5, 6):
        data = several_for_each(size)
        found = record(model, losses, data, certificate=certificate)
        assert relative_error(found, loop(model, losses, data)) <= 1e-12


def test_rows_that_are_joined_in_no_order_are_not_cut() -> None:
    """Below the texts the same again, turned round: as many of each example, and none in its place."""

    def turned(model: Any, data: Any) -> Tensor:
        x = data["x"]
        first, second = model(torch.cat([x, x.flip(0).flip(0)])).chunk(2)
        return (first * second).sum((1, 2))

    with pytest.raises(UnsupportedModelError, match="not one of each, in order"):
        preflight(Packed().linear, turned, {"x": torch.randn(3, 5, 4, dtype=torch.float64)})


def beside_answers(model: Any, data: Any) -> Tensor:
    """As `hidden`, through NumPy, which lets go of what was known; with as many rows as used answers on average."""
    mask, rows = data["mask"].bool(), torch.from_numpy(data["x"].numpy()[data["mask"].numpy() > 0])
    made = torch.zeros_like(data["x"]).masked_scatter(mask[..., None], model.linear(rows) * rows).sum((1, 2))
    answers = model.table(data["answers"].flatten(0, 1)).mean((1, 2))
    return made + answers.view(len(mask), -1).square().sum(1)


def test_packed_rows_are_not_told_by_as_many_answers() -> None:
    model, data = Packed(), {**packed(4, 4, 4), "answers": several_for_each(3)["answers"]}
    model.table = nn.Embedding(40, 4).double()
    with pytest.raises(UnsupportedModelError, match="packed"):
        preflight(model, beside_answers, data)


def test_packed_rows_are_not_told_by_several_numbers_of_each() -> None:
    """Where nothing that is used has as many rows as these."""
    data = {**packed(6, 6, 6), "pair": torch.zeros(3, 6, 2, dtype=torch.long)}
    with pytest.raises(UnsupportedModelError, match="packed"):
        preflight(Packed(), hidden, data)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_row_times_examples_is_not_copied_for_their_features(size: int) -> None:
    """A product with the transpose of examples has as many rows as features, and none of them is an example."""
    model, data = Small(lambda m, x: m.row @ x.cos().T, row=parameter(1, 4)), batch(size, 4)

    def losses(model: Any, data: Any) -> Tensor:
        return model(data["x"]).squeeze(0).square()  # type: ignore[no-any-return]

    found = record(model, losses, data)
    assert relative_error(found, loop(model, losses, data)) <= 1e-12


def test_two_rows_for_each_example() -> None:
    """Of a pair, in a loss that is no sum over the two."""
    table = torch.randn(40, 4, dtype=torch.float64)
    model = Small(lambda m, x: m.out(m.linear(x).tanh().mean(1)), linear=nn.Linear(4, 4), out=nn.Linear(4, 1))

    def margin(model: Any, data: Any) -> Tensor:
        first, second = model(table[data["ids"].flatten(0, 1)]).unflatten(0, (-1, 2)).squeeze(-1).unbind(1)
        return F.softplus(second - first)

    def pairs(size: int, length: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, 40, (size, 2, length))}

    certificate = preflight(model, margin, pairs(3, 5))
    for size, length in ((1, 5), (2, 3), (2, 2), (5, 7), (4, 1)):
        data = pairs(size, length)
        found = record(model, margin, data, certificate=certificate)
        assert relative_error(found, loop(model, margin, data)) <= 1e-12


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.maximum(x, m.w),
        lambda m, x: x - m.w,
        lambda m, x: torch.cdist(x, m.w[None]),
        lambda m, x: x.cos() * m.w.expand(len(x), -1),
        lambda m, x: x.cos() * m.w.repeat(len(x), 1),
    ],
    ids=["elementwise", "subtracted", "distances", "expanded", "repeated"],
)
def test_failure_87_copies_for_packed_rows_are_not_cut_evenly(function: Any) -> None:
    """A parameter's copies, one for each row, are no more one example's than the rows."""
    model = Small(function, w=parameter(1))

    def loss(model: Any, data: Any) -> Tensor:
        mask = data["mask"].bool()
        return torch.zeros_like(data["x"]).masked_scatter(mask[..., None], model(data["x"][mask])).square().sum((1, 2))

    def trained() -> None:
        certificate = preflight(model, loss, packed(6, 6, 6))
        record(model, loss, packed(4, 5, 6), certificate=certificate)

    with pytest.raises(UnsupportedModelError, match="packed"):
        trained()
