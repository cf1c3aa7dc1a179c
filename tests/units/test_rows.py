"""Whose each row is, which rows a step uses, and which micro-batch they lie in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from hf_dp.errors import ConfigurationError
from hf_dp.randomness import Entropy
from hf_dp.units.packing import Size, packed
from hf_dp.units.rows import UnitRows, without_column


@given(owners=st.lists(st.integers(-3, 3), min_size=1, max_size=30), most=st.integers(1, 4), step=st.integers(0, 9))
def test_each_row_has_one_unit_and_a_step_uses_at_most_so_many(owners: list[int], most: int, step: int) -> None:
    units, entropy = UnitRows(owners, "user", most), Entropy(3)
    names = list(dict.fromkeys(owners))
    assert (len(units), units.rows) == (len(names), len(owners))
    for unit, name in enumerate(names):
        own = [row for row, owner in enumerate(owners) if owner == name]
        drawn = units.drawn(unit, step, entropy)
        assert drawn == sorted(set(drawn)) == units.drawn(unit, step, entropy)
        assert set(drawn) <= set(own)
        assert len(drawn) == units.count(unit) == min(most, len(own))


@pytest.mark.slow
def test_of_many_rows_each_subset_is_as_likely_whatever_other_units_have() -> None:
    units = UnitRows(["a"] * 4 + ["b"], "user", 2)
    more = UnitRows(["a"] * 4 + ["b"] * 9, "user", 2)
    entropy = Entropy(0)
    found = [tuple(units.drawn(0, step, entropy)) for step in range(3000)]
    assert found == [tuple(more.drawn(0, step, entropy)) for step in range(3000)]
    counts = Counter(found)
    # Standard deviation of each of 6 counts: 20.
    assert len(counts) == 6
    assert all(abs(count - 500) < 100 for count in counts.values())
    assert [units.drawn(0, 5, Entropy(None)) for _ in range(20)] != [units.drawn(0, 5, Entropy(None))] * 20


def test_one_unit_with_ten_thousand_rows_and_ten_thousand_units_with_one() -> None:
    one, many = UnitRows(["x"] * 10_000, "user", 4), UnitRows(range(10_000), "user", 4)
    assert (len(one), one.count(0), len(many), many.count(9_999)) == (1, 4, 10_000, 1)
    assert many.drawn(1234, 0, Entropy(0)) == [1234]


@given(
    owners=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=20),
    most=st.integers(1, 4),
)
def test_of_rows_of_several_units_no_unit_has_too_many_and_no_further_row_could_be_taken(
    owners: list[list[int]], most: int
) -> None:
    units = UnitRows(owners, "user", most, several=True)
    assert (len(units), units.rows) == (len({one for row in owners for one in row}), len(owners))
    chosen = units.chosen()
    counts = Counter(one for row in chosen for one in set(owners[row]))
    assert chosen == sorted(set(chosen)) == units.chosen()
    assert max(counts.values()) <= most
    for row in set(range(len(owners))) - set(chosen):
        assert any(counts[one] == most for one in owners[row])
    # Where each row is of one unit, nothing is left out without need.
    alone = UnitRows([row[0] for row in owners], "user", most)
    assert len(alone.chosen()) == sum(alone.count(unit) for unit in range(len(alone)))


def test_which_rows_are_chosen_follows_from_whose_they_are() -> None:
    owners = ["a"] * 60 + ["b"] * 60
    chosen = UnitRows(owners, "user", 20).chosen()
    assert sum(row < 60 for row in chosen) == 20
    # Spread over all: that all are in one half has a probability below 1e-6.
    assert min(chosen) < 30 < 60 + 30 < max(chosen)
    described = UnitRows(owners, "user", 20).described
    assert described == UnitRows([[one] for one in owners], "user", 20, several=True).described
    others = [["a", "b"], *([one] for one in owners[1:])]
    assert described != UnitRows(others, "user", 20, several=True).described


def test_what_checkpoints_rest_on_is_as_it_was() -> None:
    """The choice, and what a fingerprint says of whose each row is: with others no checkpoint of before would go on."""
    units = UnitRows([f"u{i % 4}" for i in range(16)], "user", 2)
    assert (units.chosen(), units.described[:16]) == ([2, 3, 4, 8, 9, 10, 11, 13], "0df75d7ebe1e454a")
    owners = [["a"], ["a", "b"], ["b", "c"], ["c"], ["c", "a"], ["b"], ["a"]]
    units = UnitRows(owners, "user", 2, several=True)
    assert (units.chosen(), units.described[:16]) == ([1, 2, 4], "67cc4320ba6b72b9")


@pytest.mark.slow
def test_where_n_is_secret_no_choice_depends_on_where_rows_lie_and_so_on_others() -> None:
    """Shuffled by a public seed, everybody's rows lie elsewhere with one user less."""
    data = [{"user": f"u{i // 4}", "id": i} for i in range(24)]

    def chosen(rows: list[dict[str, Any]], secrets: list[Entropy | None]) -> list[list[int]]:
        shuffled = Dataset.from_list(rows).shuffle(seed=42)
        units, ids = UnitRows.of(shuffled, "user", 2, several=True), list(shuffled["id"])
        return [sorted(ids[row] for row in units.chosen(secret)) for secret in secrets]

    # Negative control: by a public order others' rows change with the last user.
    assert [i for i in chosen(data, [None])[0] if i < 20] != chosen(data[:-4], [None])[0]
    for rows in (data, data[:-4]):
        found = chosen(rows, [Entropy(seed) for seed in range(1500)])
        for user in range(len(rows) // 4):
            counts = Counter(tuple(i for i in one if i // 4 == user) for one in found)
            # Standard deviation of each of 6 counts: 14.
            assert len(counts) == 6
            assert all(abs(count - 250) < 75 for count in counts.values())
    assert len(set(map(tuple, chosen(data, [Entropy(3)] * 2)))) == 1


@pytest.mark.parametrize("value", [[], ["a", None], ["a", 1], [["a"]], [{"a": 1}]], ids=str)
def test_a_row_of_several_units_names_each(value: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"row 1 \(counted from 0\) of the training data has"):
        UnitRows([["b"], value], "user", 2, several=True)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["a", None], r"row 1 \(counted from 0\) of the training data has None in the column 'user'"),
        (["", "a"], r"row 0 \(counted from 0\) of the training data has ''"),
        (["a", " \t"], "it says nothing"),
        ([1.0, 2.0], "it is a float"),
        ([1, float("nan")], "it is a float"),
        ([True, False], "it is a bool"),
        ([["a", "b"], ["a"]], "a row of several units is none's alone"),
        ([{"a": 1}], "it is a dict"),
        ([1, "1"], "others are int"),
    ],
)
def test_a_row_that_does_not_say_whose_it_is_is_refused(values: list[Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        UnitRows.of([{"user": value} for value in values], "user", 2)


def test_numbers_of_numpy_are_numbers() -> None:
    assert len(UnitRows.of([{"user": value} for value in (np.int64(1), 1, np.int32(2))], "user", 2)) == 2


@pytest.mark.parametrize(
    "data", [Dataset.from_dict({"x": [1]}), [{"x": 1}], [{"user": 1}, {"x": 1}], ("a", "b")], ids=str
)
def test_data_without_the_column_is_refused(data: Any) -> None:
    with pytest.raises(ConfigurationError, match="unit='user', and the training dataset"):
        UnitRows.of(data, "user", 2)


def test_a_unit_that_is_no_column_is_told_what_unit_is() -> None:
    with pytest.raises(ConfigurationError) as refused:
        UnitRows.of(Dataset.from_dict({"text": ["a"], "user_id": [1]}), "user", 2)
    assert "has the columns text, user_id" in refused.value.found
    assert refused.value.fix.startswith("give unit= the name of the column that says whose each row is")


def test_the_column_is_read_whatever_the_format_and_then_gone() -> None:
    plain = Dataset.from_dict({"x": [1, 2, 3], "user": ["a", "b", "a"]})
    seen = plain.with_transform(lambda batch: {name: [f"{name}!"] * len(next(iter(batch.values()))) for name in batch})
    for data in (plain, plain.with_format("torch", columns=["x"]), seen):
        assert len(UnitRows.of(data, "user", 2)) == 2
        assert set(without_column(data, "user")[0]) == {"x"}
    assert without_column([{"x": 1, "user": 2}], "user") == [{"x": 1}]


@given(sizes=st.lists(st.integers(1, 9), max_size=30).map(sorted), most=st.integers(1, 9))
def test_units_are_packed_whole_and_in_order(sizes: list[int], most: int) -> None:
    def packed_rows(sizes: list[int]) -> list[range]:
        return packed([Size(rows) for rows in sizes], lambda size: size.rows <= most)

    parts = packed_rows(sizes)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    filled = [sum(sizes[place] for place in part) for part in parts]
    # More only where one alone has more.
    assert all(total <= most or len(part) == 1 for total, part in zip(filled, parts, strict=True))
    ones = packed_rows([1] * len(sizes))
    assert [len(part) for part in ones[:-1]] == [most] * (len(ones) - 1)
