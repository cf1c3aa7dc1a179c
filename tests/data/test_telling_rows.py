"""The rows that a training would stop at are found in the columns, and refused with their error."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

import hf_dp.data.extremes as extremes
import hf_dp.per_example.checks.state as state
from hf_dp.data.telling_rows import (
    alike_batches,
    rows_beyond,
    short_rows,
    telling_rows,
    uneven_rows,
)
from hf_dp.data.widths import outermost, widths_of
from hf_dp.errors import PreflightError, UnsupportedModelError
from tests.zoo import text_batch, tiny

ROWS = [
    {"input_ids": [3, 4], "labels": 1},
    {"input_ids": [5, 99], "labels": 1},
    {"input_ids": [5, 6, 7], "labels": 0},
    {"input_ids": [5], "labels": 2},
    {"input_ids": [-2, 8], "labels": 1},
]


def extreme_rows(data: Any) -> list[int]:
    return extremes.extreme_rows(data).rows


def table(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("at_once", [1, 2, 10_000])
def test_the_longest_the_shortest_the_smallest_and_the_largest_of_each_column(at_once: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(extremes, "_AT_ONCE", at_once)
    assert extreme_rows(table(ROWS)) == [1, 2, 3, 4]
    assert extreme_rows(table(ROWS).remove_columns("labels")) == [1, 2, 3, 4]
    assert extreme_rows(table(ROWS).remove_columns("input_ids")) == [2, 3]


def test_rows_are_those_of_the_dataset_and_not_of_the_table_behind_it() -> None:
    assert extreme_rows(table(ROWS).select([3, 1, 0]).remove_columns("labels")) == [0, 1, 2]
    assert extreme_rows(table(ROWS).filter(lambda row: row["labels"] == 1, load_from_cache_file=False)) == [0, 1, 2]


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_the_format_makes_no_difference(kind: Any) -> None:
    data = table(ROWS).with_format(kind)
    assert extreme_rows(data) == [1, 2, 3, 4]
    assert data.format["type"] == kind


def test_positions_without_a_label_are_no_numbers() -> None:
    rows = [{"labels": [-100, 3]}, {"labels": [-100, -100]}, {"labels": [-5, 4]}, {"labels": [1, 1]}]
    assert extreme_rows(table(rows[:2])) == [0]
    assert extreme_rows(table(rows)) == [0, 2]


def test_missing_numbers_and_lists() -> None:
    rows = [{"labels": 1}, {"labels": 0}, {"labels": None}, {"labels": 2}, {"labels": 1}]
    assert extreme_rows(table(rows)) == [1, 2, 3]
    rows = [{"labels": [5, 3]}, {"labels": [4]}, {"labels": None}, {"labels": [None, 3]}]
    assert extreme_rows(table(rows)) == [0, 2, 3]
    assert extreme_rows(table([{"labels": []}, {"labels": []}]).cast_column("labels", _whole())) == [0]


def _whole(kind: str = "int64") -> Any:
    return datasets.Sequence(datasets.Value(kind))


@pytest.mark.parametrize("kind", ["int8", "int64", "uint8", "uint64"])
def test_whole_numbers_of_any_kind(kind: str) -> None:
    rows = [{"ids": [3]}, {"ids": [1, 7]}, {"ids": [9]}, {"ids": [4]}]
    assert extreme_rows(table(rows).cast_column("ids", _whole(kind))) == [0, 1, 2]
    least, most = (-(2**63), 2**63 - 1) if kind == "int64" else (0, 2**64 - 1) if kind == "uint64" else (1, 99)
    hashes = pa.array([5, least, most, 6], getattr(pa, kind)())
    assert extreme_rows(datasets.Dataset(pa.table({"hash": hashes}))) == [1, 2]


def test_lists_of_lists() -> None:
    choices = [{"input_ids": [[3], [4, 5]]}, {"input_ids": [[90], [4], [2]]}, {"input_ids": [[3], [1]]}]
    assert extreme_rows(table(choices)) == [0, 1, 2], "the longest inside, the longest outside, the smallest"


def test_columns_that_are_not_known_or_not_of_whole_numbers_tell_nothing() -> None:
    assert extreme_rows(row for row in ROWS) == []
    assert extreme_rows(table(ROWS).with_transform(lambda rows: rows)) == []
    assert extreme_rows(table([{"share": 0.5, "is_new": True}])) == []


def test_the_shortest_and_the_longest_where_there_are_different_lengths() -> None:
    found = extremes.extreme_rows(table(ROWS))
    assert found.uneven == [3, 2]
    assert extremes.extreme_rows(ROWS).uneven == [3, 2]
    assert extremes.extreme_rows(table(ROWS).select([0, 1, 4])) == ([0, 1, 2], [])
    sounds = [{"input_values": [0.5] * n} for n in (7, 3, 9)]
    assert extremes.extreme_rows(table(sounds)).uneven == [1, 2]
    assert extremes.extreme_rows(table(sounds).shuffle(seed=3)).uneven == [
        [len(row["input_values"]) for row in table(sounds).shuffle(seed=3)].index(n) for n in (3, 9)
    ]
    assert extremes.extreme_rows(table([{"text": "aa"}, {"text": ""}, {"text": "aaa"}])).uneven == [1, 2]
    for unknown in (table(ROWS).with_transform(lambda rows: rows), table([{"turns": [{"text": "a"}]}])):
        assert extremes.extreme_rows(unknown) == ([], [])


def padded(chosen: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in chosen)
    return {"input_ids": torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in chosen])}


def measure(row: Any) -> Any:
    return widths_of(padded([row]))


def test_rows_from_all_over_the_narrowest_first_with_those_that_fail_before_them() -> None:
    data: list[Any] = [{"input_ids": [3] * (5 + i % 7), "same": [0.5] * 100} for i in range(400)]
    data[399]["input_ids"], data[0] = [3] * 90, {"text": "no ids"}
    (first, *few), others = telling_rows(data, measure)
    sizes = [len(row["input_ids"]) for row in few]
    assert first is data[0]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 90
    assert len(few) <= 8
    assert len(others) == 32
    assert all(any(row is one for one in others) for row in (first, *few))


def test_of_rows_that_columns_tell_of_no_others_are_tried_but_those_beyond_them_and_those_that_fail() -> None:
    few = [{"input_ids": [3] * n} for n in (3, 5, 9)]
    shortest, longest = ({"input_ids": [3] * n} for n in (2, 9))
    assert rows_beyond(few, [shortest, longest], measure) == []
    assert rows_beyond(few, [longest], measure) == [few[0]]
    assert rows_beyond(few, [shortest], measure) == [few[0], few[-1]]
    assert rows_beyond([{"text": "no ids"}, *few], [shortest, longest], measure) == [{"text": "no ids"}]
    assert rows_beyond(few, [], measure) == few


@pytest.mark.parametrize("made", [list, table])
def test_of_rows_with_as_much_the_shortest_is_taken(made: Any) -> None:
    rows = [{"ids": [9] * n, "mask": [1] * n} for n in (4, 2, 3)]
    assert extreme_rows(made([*rows, {"ids": [1] * 5, "mask": [1] * 5}])) == [1, 3]


def test_two_rows_of_one_shape_differ_in_as_many_columns_as_can_be() -> None:
    def batch(rows: list[Any]) -> Any:
        whole = padded(rows)
        return {**whole, "mask": whole["input_ids"].ne(0).long()}

    few = [{"input_ids": ids} for ids in ([1, 2], [1, 3], [1, 2, 3], [4] * 9)]
    one, other, together = alike_batches(few, batch)
    assert one["input_ids"].tolist() == [[1, 2, 0]]
    assert other["input_ids"].tolist() == [[1, 2, 3]]
    assert len(together["mask"]) == 4


def test_the_rows_known_to_be_longest_and_shortest_are_among_the_uneven() -> None:
    data = [{"input_ids": [3] * n} for n in (5, 2, 5, 9, 5)]
    found = extremes.extreme_rows(data)
    assert outermost(uneven_rows(data, found, [data[0], data[2]]), measure) == [data[1], data[3]]
    alike = [data[0], data[2], data[4]]
    assert outermost(uneven_rows(alike, extremes.extreme_rows(alike), alike), measure) == [data[0], data[4]]


def test_rows_are_cut_short_for_the_oracle_unless_they_show_less_then() -> None:
    rows = [{"input_ids": [1] * 10 + [i] * n + [2] * 10} for i, n in ((3, 0), (4, 7), (5, 11))]

    def batch(chosen: list[Any]) -> dict[str, Any]:
        return {"x": torch.tensor([row["input_ids"][:2] + row["input_ids"][-9:] for row in chosen])}

    def lengths(chosen: list[Any]) -> dict[str, Any]:
        return {"x": torch.tensor([[len(row["input_ids"])] for row in chosen])}

    def loss(given: Any) -> torch.Tensor:
        return given["x"].float().sum(1)

    assert short_rows(rows, batch, loss) == rows, "all alike when they are cut"
    ids = [{"input_ids": list(range(n))} for n in (8, 40, 90)]
    assert [len(row["input_ids"]) for row in short_rows(ids, lengths, loss)] == [8, 12, 12]
    assert short_rows(ids, lengths, lambda given: loss(given) * 0) == ids


def test_lists_of_other_lengths_are_cut_too_where_what_is_left_goes_through() -> None:
    """A prompt and its answers, say."""
    rows = [{"long": list(range(n)), "short": list(range(n // 2))} for n in (30, 40, 90)]

    def batch(given: list[Any], least: int = 0) -> Any:
        if min(len(row["short"]) for row in given) < least:
            raise ValueError("these must be whole")
        return {"lengths": torch.tensor([[len(row["long"]), len(row["short"]), i] for i, row in enumerate(given)])}

    def summed(given: Any) -> Any:
        return given["lengths"].sum(1).float()

    def sizes(found: list[Any]) -> list[tuple[int, int]]:
        return [(len(row["long"]), len(row["short"])) for row in found]

    assert sizes(short_rows(rows, batch, summed)) == [(12, 12)] * 3
    assert sizes(short_rows(rows, lambda given: batch(given, least=15), summed)) == [(12, 15), (12, 20), (12, 45)]


class Switching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.is_long, self.width, self.cache = "sparse", True, 0, torch.zeros(2)
        self._own = "sparse"
        self.register_buffer("frequencies", torch.ones(2), persistent=False)


def test_switches_are_refused_and_everything_is_put_back() -> None:
    model = Switching()
    before = dict(vars(model))
    with state.unchanged_state(model):
        model.width, model.cache, model.frequencies, model.added = 7, torch.ones(3), torch.zeros(2), 0.5
    assert vars(model) == before
    assert model.frequencies.tolist() == [1, 1]
    for name in ("kind", "_own"):
        words = f"change {name} from 'sparse' to 'full', and it stays so"
        for error in ([], [PreflightError("this", why="it", fix="that")]):
            with pytest.raises(UnsupportedModelError, match=words), state.unchanged_state(model):  # noqa: PT012
                setattr(model, name, "full")
                for reason in error:
                    raise reason
            assert getattr(model, name) == "sparse"
    with pytest.raises(UnsupportedModelError, match="added from nothing to 'short'"), state.unchanged_state(model):
        model.added = "short"
    assert not hasattr(model, "added")


def test_what_a_model_notes_of_its_first_labels_is_a_switch_and_may_be_set_before() -> None:
    """Transformers' own heads do, where a loss of one's own calls the model with labels."""
    model, batch = tiny("bert", "sequence"), text_batch("sequence")
    model.config.problem_type = None
    words = r"change config\.problem_type from None to 'single_label_classification', and it stays so"
    with pytest.raises(UnsupportedModelError, match=words), state.unchanged_state(model):
        model(**batch)
    assert model.config.problem_type is None
    model.config.problem_type = "single_label_classification"  # as it is told to
    with state.unchanged_state(model):
        model(**batch)


@pytest.mark.parametrize(
    "odd",
    [{"labels": None}, {"labels": 9}, {"labels": -1}, {"labels": 0.5}, {"labels": "1"}, {"labels": []},
     {"labels": True},
     {"labels": np.int64(1)}, {"ids": [5, None]}, {"ids": [5, 0.5]}, {"ids": [99, 5]}, {"ids": [-7, 5]}, {"ids": [[5]]},
     {"ids": [5, 2**70]}, {"ids": np.array([5, 99])}, {"ids": torch.tensor([5, 6.5])}, {"mask": [1] * 4},
     {"mask": [1]}, {"more": 1}],
    ids=repr,
)  # fmt: skip
def test_in_a_list_the_one_row_that_is_unlike_the_others(odd: dict[str, Any]) -> None:
    rows = [{"ids": [5, 6, -100], "mask": [1, 1, 0], "labels": i % 3} for i in range(90)]
    rows[55] = {**rows[55], **odd}
    assert 55 in extreme_rows(rows)
    assert len(extreme_rows(rows)) < 9
    del rows[55]["labels"]
    assert 55 in extreme_rows(rows)


@pytest.mark.parametrize(
    "values",
    [[0.5, None], [True, None], [b"a", None], [[0.5], [None]], [["a"], [None]], [[[0.5]], [[0.5, None]]], ["a", None],
     [[1], None], [[1], [None]], [{"a": 1}, None], [2**64 - 2, None]],
    ids=repr,
)  # fmt: skip
def test_in_a_column_of_any_kind_the_one_value_that_is_missing(values: list[Any]) -> None:
    given, missing = values
    empty = given if isinstance(given, (bool, float, int, dict)) else type(given)()
    column = pa.array([given] * 40 + [missing] + [given] * 40 + [empty], pa.uint64() if given == 2**64 - 2 else None)
    assert 40 in extreme_rows(datasets.Dataset(pa.table({"x": column})))


def test_more_labels_than_ids() -> None:
    rows = [{"ids": [5] * n, "labels": [1] * n} for n in (4, 2, 3, 5)]
    rows[2]["labels"] = [1] * 4
    assert 2 in extreme_rows(table(rows))
    assert 0 in extreme_rows(table(rows).select([2, 0, 3]))
