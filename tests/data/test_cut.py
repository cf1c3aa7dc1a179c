"""Micro-batches cut by tokens: each example once, within the cap, and no random choice made anew."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator, Unit
from hf_dp.data.cut import by_tokens
from hf_dp.errors import ConfigurationError

CAP, ROWS = 64, 8


def examples(seed: int = 0, n: int = 60) -> list[dict[str, Any]]:
    """Of 2 to 40 tokens, a few longer than the cap alone."""
    draw = random.Random(seed)
    lengths = [CAP + 9, CAP, *(draw.randint(2, 40) for _ in range(n - 2))]
    draw.shuffle(lengths)
    return [{"input_ids": [i + 1] * length} for i, length in enumerate(lengths)]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Takes its rows apart, as some collators do."""
    ids = [torch.tensor(row.pop("input_ids")) for row in rows]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}


def texts(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Makes tokens itself, of which shorter texts may have more."""
    return padded([{"input_ids": [row["id"]] * row["tokens"]} for row in rows])


def cut(collate: Any, rows: list[Any], tokens: int | None = CAP) -> list[dict[str, Tensor]]:
    batches: list[dict[str, Tensor]] = LogicalBatchCollator(ROWS, collate, max_tokens=tokens)(rows)["micro_batches"]
    return batches


def check(batches: list[dict[str, Tensor]], n: int) -> None:
    shapes = [batch["input_ids"].shape for batch in batches]
    assert sorted(int(i) for batch in batches for i in batch["input_ids"][:, 0]) == [*range(1, n + 1)]
    assert all(rows * width <= CAP or rows == 1 for rows, width in shapes)
    assert all(rows <= ROWS for rows, _ in shapes)


@pytest.mark.parametrize("seed", range(5))
def test_each_example_is_in_one_micro_batch_within_the_cap(seed: int) -> None:
    batches = cut(padded, examples(seed))
    check(batches, 60)
    # None could take the next row in: the longest of it is as long as the shortest of the one before, or shorter.
    for one, other in itertools.pairwise(batches):
        rows, width = one["input_ids"].shape
        assert other["input_ids"].shape[1] <= int(one["input_ids"].ne(0).sum(1).min())
        assert rows == ROWS or (rows + 1) * width > CAP
    assert len(cut(padded, examples(seed), None)) == 8
    assert cut(padded, []) == []


def test_a_cap_beyond_all_rows_cuts_by_rows_alone() -> None:
    assert sorted(len(batch["input_ids"]) for batch in cut(padded, examples(), 10**6)) == [4, *[8] * 7]


def test_tokens_that_the_collator_makes_are_counted_when_it_has_made_them() -> None:
    draw = random.Random(0)
    rows = [{"id": i + 1, "text": "x" * draw.randint(1, 90), "tokens": draw.randint(1, 40)} for i in range(60)]
    check(cut(texts, rows), 60)


@pytest.mark.parametrize("kind", ["tokens", "texts"])
def test_a_random_choice_is_made_once_for_each_row_whoever_shares_its_micro_batch(kind: str) -> None:
    """To collate again what did not fit would choose among choices, by the rows beside."""
    draw = random.Random(0)

    def choosing(rows: list[Any]) -> dict[str, Tensor]:
        choices = torch.rand(len(rows))
        return {**(padded if kind == "tokens" else texts)(rows), "choice": choices}

    written = [{"id": i + 1, "text": "x" * draw.randint(1, 90), "tokens": draw.randint(1, 40)} for i in range(60)]
    collate = LogicalBatchCollator(ROWS, choosing, reproducible=True, max_tokens=CAP)
    torch.manual_seed(0)
    batches = collate(examples() if kind == "tokens" else written)["micro_batches"]
    torch.manual_seed(0)
    drawn = [float(torch.rand(1)) for _ in range(60)]
    assert sorted(float(x) for batch in batches for x in batch["choice"]) == sorted(drawn)


@pytest.mark.parametrize("tokens", [0, -1, 2.5, True, "64"])
def test_a_cap_is_a_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)max_tokens_per_micro_batch=.*What to do"):
        LogicalBatchCollator(ROWS, padded, max_tokens=tokens)


def test_what_has_no_tokens_is_refused() -> None:
    def images(rows: list[Any]) -> dict[str, Tensor]:
        return {"pixel_values": torch.zeros(len(rows), 3, 4, 4), "labels": torch.zeros(len(rows))}

    with pytest.raises(ConfigurationError, match=r"(?s)no tensor of shape \(examples, tokens\).*leave it out"):
        cut(images, [1, 2])
    assert len(cut(images, [1, 2], None)) == 1


@pytest.mark.parametrize("tokens", [None, CAP, 10**6])
@pytest.mark.parametrize("kind", ["tokens", "texts"])
def test_a_unit_is_whole_in_one_micro_batch_or_alone_in_several(kind: str, tokens: int | None) -> None:
    draw, units = random.Random(1), []
    for unit, count in enumerate([1] * 12 + [2, 3, 3, 4, 4, 7, 8, 9, 30]):
        few = [{"tokens": draw.randint(2, 30), "text": "x" * draw.randint(1, 90)} for _ in range(count)]
        units.append([{"id": unit + 1, **row} for row in few])
    units.append([{"id": len(units) + 1, "tokens": CAP + 9, "text": ""}])
    collate = texts if kind == "texts" else lambda rows: texts([{**row, "text": "x" * row["tokens"]} for row in rows])
    counts = {unit[0]["id"]: len(unit) for unit in units}
    draw.shuffle(units)
    cut = LogicalBatchCollator(ROWS, collate, max_tokens=tokens)([Unit(unit) for unit in units])
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for batch, whose in zip(cut["micro_batches"], cut["owners"], strict=True):
        ids, width = batch["input_ids"][:, 0].tolist(), batch["input_ids"].shape[1]
        assert len(ids) <= ROWS
        assert tokens is None or len(ids) == 1 or len(ids) * width <= tokens
        names = list(dict.fromkeys(ids))
        assert [names[unit] for unit in whose.units] == ids
        assert len(names) == 1 or not (whose.before or whose.after)
        for name in names:
            seen.setdefault(name, []).append((whose.before, ids.count(name), whose.after))
    for name, pieces in seen.items():
        starts = itertools.accumulate((n for _, n, _ in pieces), initial=0)
        assert pieces == [
            (start, n, counts[name] - start - n) for start, (_, n, _) in zip(starts, pieces, strict=False)
        ]
    assert {name: sum(n for _, n, _ in pieces) for name, pieces in seen.items()} == counts
    in_several = {counts[name] for name, pieces in seen.items() if len(pieces) > 1}
    assert in_several >= {9, 30}
    assert tokens == CAP or in_several == {9, 30}
    assert len(seen) == 22
    assert any(len(set(whose.units)) > 2 for whose in cut["owners"])


def test_each_piece_says_with_whom_it_was_made_as_wide_as_it_is() -> None:
    """What is wider than all before is held against the rows that made it so."""
    rows = [{"id": i + 1, "text": "x", "tokens": tokens} for i, tokens in enumerate([40, 5, 5, 5, 5, 5, 5, 5])]
    alone = lambda row: texts([{**row, "tokens": 5}])  # noqa: E731 - a transform that draws how long a row is
    for part, batch in by_tokens([dict(row) for row in rows], ROWS, CAP, texts, alone):
        assert batch["input_ids"].shape[1] == max(row["tokens"] for row in part) == 40
