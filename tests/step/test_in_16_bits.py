"""In 16 bits rounding follows from how wide a micro-batch is: how far that moves a sum, and what removes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.losses import per_example_losses
from hf_dp.noise.grid import ROUNDING
from hf_dp.per_example import preflight, record
from hf_dp.per_example.batch import take
from tests.zoo import tiny

Collate = Callable[[list[Any]], dict[str, Tensor]]


def moved_besides(dtype: torch.dtype, size: int = 64) -> float:
    """How far those that stay move the sum of gradients of norm 1, in l2 norm, where the first is left out: they come
    into other micro-batches of eight, of other widths."""
    torch.manual_seed(0)
    model = tiny("llama", "causal_lm", dtype).train()
    lengths = torch.randint(12, 60, (size,)).tolist()
    mask = (torch.arange(60) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 20, (size, 60)) * mask
    data = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)}
    certificate = preflight(model, per_example_losses, take(data, range(4)))

    def total(rows: list[int]) -> Tensor:
        found = torch.zeros(())
        for part in (rows[i : i + 8] for i in range(0, len(rows), 8)):
            batch = {name: values[part, : max(lengths[i] for i in part)] for name, values in data.items()}
            gradients = record(model, per_example_losses, batch, certificate=certificate)
            sums = gradients.weighted_sum(gradients.squared_norms().rsqrt()).values()
            found = found + torch.cat([values.flatten().double() for values in sums])
        return found

    everyone = list(range(size))
    return float((total(everyone) - total(everyone[1:]) - total(everyone[:1])).norm())


def moved_by_copies(dtype: torch.dtype, copies: int, width: int) -> float:
    """As `moved_besides`, of so many copies of one text in one micro-batch, which a longer one widens to `width`."""
    torch.manual_seed(0)
    model = tiny("llama", "causal_lm", dtype).train()
    text, few = torch.randint(3, 20, (1, 12)), torch.randint(3, 20, (4, 12))
    checked = {"input_ids": few, "attention_mask": torch.ones_like(few), "labels": few}
    certificate = preflight(model, per_example_losses, checked)

    def total(positions: int) -> Tensor:
        ids = F.pad(text, (0, positions - 12)).expand(copies, -1)
        mask = ids.ne(0).long()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)}
        gradients = record(model, per_example_losses, batch, certificate=certificate)
        sums = gradients.weighted_sum(gradients.squared_norms().rsqrt()).values()
        return torch.cat([values.flatten().double() for values in sums])

    return float((total(width) - total(12)).norm())


@pytest.mark.slow
def test_in_16_bits_copies_of_a_text_move_together() -> None:
    """By as much as there are of them (docs/proof.md), unless all micro-batches are of one width."""
    few, many = (moved_by_copies(torch.bfloat16, copies, 60) for copies in (16, 64))
    assert 0.05 < few < many
    assert many == pytest.approx(4 * few, rel=0.2)
    assert moved_by_copies(torch.bfloat16, 64, 12) == 0
    assert moved_by_copies(torch.float32, 64, 60) < 1e-3


@pytest.mark.slow
def test_in_16_bits_those_that_stay_move_the_sum_by_more_than_noise_on_a_grid_leaves_room_for() -> None:
    """Nothing bounds it (docs/proof.md); in float32 there is room to spare."""
    assert moved_besides(torch.float32) < ROUNDING / 100
    assert ROUNDING < moved_besides(torch.bfloat16) < 0.05


def padded(rows: list[list[int]], multiple: int) -> dict[str, Tensor]:
    """Rows of ids beside one another."""
    width = -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = ids.ne(0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)}


def numbered(rows: list[list[int]]) -> dict[str, Tensor]:
    """Rows as long, without masks: a 1 begins another text in a row, which positions tell."""
    positions = []
    for row in rows:
        begins = [i for i, token in enumerate(row) if token == 1 or i == 0]
        positions.append([i - max(begin for begin in begins if begin <= i) for i in range(len(row))])
    return {"input_ids": torch.tensor(rows), "position_ids": torch.tensor(positions), "labels": torch.tensor(rows)}


def moved_by(
    joining: list[int], collate: Collate, *, autocast: bool, equal_widths: bool = False, attention: str = "sdpa"
) -> float:
    """How far a row moves the sum of what rows of 12 tokens add, most of them copies, each of norm 1, in micro-batches
    of a loader."""
    torch.manual_seed(0)
    model = tiny("llama", "causal_lm", torch.float32 if autocast else torch.bfloat16, attn_implementation=attention)
    model.config.use_cache = False
    text, *others = (torch.randint(3, 20, (12,)).tolist() for _ in range(5))

    def losses(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return per_example_losses(model, batch)

    certificate = preflight(model, losses, collate([text, *others]))
    split = LogicalBatchCollator(16, collate, equal_widths=equal_widths)

    def total(rows: list[list[int]]) -> Tensor:
        found = torch.zeros(())
        for batch in split([list(row) for row in rows])["micro_batches"]:
            gradients = record(model, losses, batch, certificate=certificate)
            stays = torch.tensor([ids[ids.ne(0)].tolist() != joining for ids in batch["input_ids"]])
            sums = gradients.weighted_sum(gradients.squared_norms().rsqrt() * stays).values()
            found = found + torch.cat([values.flatten().double() for values in sums])
        return found

    rows = [*others, *[text] * 11]
    return float((total([*rows, joining]) - total(rows)).norm())


LONG, SHORT, TWO_TEXTS = ([3 + i % 17 for i in range(n)] for n in (40, 9, 12))
TWO_TEXTS[5] = 1
TO_LONGEST, TO_FOURS, TO_SIXTEENS = (functools.partial(padded, multiple=n) for n in (1, 4, 16))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("joining", "collate"),
    [
        pytest.param(LONG, TO_LONGEST, id="longer"),
        pytest.param(SHORT, TO_FOURS, id="shorter, beside which a mask hides something"),
        pytest.param(TWO_TEXTS, numbered, id="of two texts, beside which there is a mask"),
    ],
)
@pytest.mark.slow
def test_failure_70_micro_batches_of_one_width_remove_it(joining: list[int], collate: Collate, autocast: bool) -> None:
    """With a mask that hides nothing attention adds up in another order: padding all to one width does not help rows
    that fill it."""
    assert moved_by(joining, collate, autocast=autocast) > ROUNDING
    assert moved_by(joining, collate, autocast=autocast, equal_widths=True) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_how_many_rows_there_are_changes_nothing_on_a_cpu(autocast: bool) -> None:
    assert moved_by([3 + i for i in range(12)], TO_LONGEST, autocast=autocast, equal_widths=True) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.slow
def test_on_a_cpu_it_is_mostly_masks_that_are_left_out(autocast: bool) -> None:
    """Where every row is padded, by however much, or attention is eager, little moves."""
    moved = moved_by(LONG, TO_LONGEST, autocast=autocast)
    assert moved_by(LONG, TO_SIXTEENS, autocast=autocast) < moved / 50
    assert moved_by(LONG, TO_LONGEST, autocast=autocast, attention="eager") < moved / 50
