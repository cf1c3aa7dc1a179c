"""Units in a promise: a column and a bound, or neither; what a ledger keeps of them, and what no unit is called."""

from __future__ import annotations

from typing import Any

import pytest

from hf_dp.accounting import (
    ColumnExamplesUnit,
    ColumnUnit,
    ExampleUnit,
    UncountedColumnExamplesUnit,
    UncountedColumnUnit,
    UncountedExampleUnit,
    promised_unit,
    unit_terms,
)
from hf_dp.accounting.neighbours import ADD_OR_REMOVE
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.config import OutputBiasConfig, PrivacyConfig, ReAttentionConfig
from hf_dp.config.asked import promised
from hf_dp.errors import ConfigurationError


def config(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(target_epsilon=1.0, **{"unit": "user", "max_examples_per_unit": 3, **changes})


def test_it_comes_back_from_json_and_stands_in_the_promise() -> None:
    assert PrivacyConfig.from_json(config().to_json()) == config()
    assert {name: promised(config())[name] for name in ("unit", "max_examples_per_unit")} == {
        "unit": "user", "max_examples_per_unit": 3
    }  # fmt: skip
    plain = PrivacyConfig(target_epsilon=1.0)
    assert not {"unit", "max_examples_per_unit", "unit_sampling"} & promised(plain).keys()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"unit": None}, "max_examples_per_unit=3 without unit"),
        ({"max_examples_per_unit": None}, "with max_examples_per_unit=None"),
        ({"max_examples_per_unit": 0}, "with max_examples_per_unit=0"),
        ({"max_examples_per_unit": 2.5}, "with max_examples_per_unit=2.5"),
        ({"max_examples_per_unit": True}, "with max_examples_per_unit=True"),
        ({"unit": ""}, "unit=''"),
        ({"unit": "user | x"}, "unit='user | x'"),
        ({"unit": "u" * 61}, "unit='uuu"),
        ({"unit": ["user"]}, "unit=\\['user'\\]"),
        ({"unit_sampling": "rows"}, "unit_sampling='rows'"),
        (
            {"unit": None, "max_examples_per_unit": None, "unit_sampling": "examples"},
            "unit_sampling='examples' without",
        ),
        ({"unit_sampling": "examples", "max_examples_per_unit": 129}, "'examples' with max_examples_per_unit=129"),
        ({"unit_sampling": "examples", "accountant": "rdp"}, "'examples' with accountant='rdp'"),
        ({"unit_sampling": "examples", "max_batch_size": 50}, "'examples' with max_batch_size=50"),
        ({"unit_sampling": "examples", "re_attention": ReAttentionConfig()}, "'examples' with counts of all units"),
        ({"unit_sampling": "examples", "output_bias": OutputBiasConfig()}, "'examples' with counts of all units"),
        ({"unit": None, "max_examples_per_unit": None, "unit_sampling": "x"}, "unit_sampling='x'"),
    ],
)
def test_what_is_no_unit_is_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        config(**changes)


def test_the_terms_follow_from_the_promise() -> None:
    unit = unit_terms(7, config())
    assert unit == ColumnUnit(number=7, column="user", max_examples=3)
    assert terms_from_dict("unit", unit.to_dict()) == unit
    assert unit_terms(7, PrivacyConfig(target_epsilon=1.0)) == ExampleUnit(number=7)
    secret = PrivacyConfig(target_epsilon=1.0, sampling_probability=0.1, target_delta=1e-6)
    assert unit_terms(None, secret) == UncountedExampleUnit()
    with pytest.raises(ConfigurationError, match="number=None"):
        unit_terms(None, config())
    for more, terms in ((secret, UncountedColumnUnit), (config(dataset_size=9), UncountedColumnUnit)):
        unit = unit_terms(7, more.replace(unit="user", max_examples_per_unit=3))
        assert unit == terms(column="user", max_examples=3) == terms_from_dict("unit", unit.to_dict())
        assert (unit.number, unit.drawn, unit.apart, unit.adjacency) == (None, None, 1, ADD_OR_REMOVE)
        assert unit.name == unit_terms(7, config()).name


def test_examples_that_are_drawn_by_themselves_have_terms_of_their_own() -> None:
    apart = config(unit_sampling="examples")
    unit = unit_terms(7, apart, 20)
    assert unit == ColumnExamplesUnit(number=7, column="user", max_examples=3, examples=20)
    assert promised_unit(7, promised(apart), 20) == terms_from_dict("unit", unit.to_dict()) == unit
    assert (unit.drawn, unit.apart, unit_terms(7, config()).apart) == (20, 3, 1)
    secret = unit_terms(7, config(unit_sampling="examples", dataset_size=9), 20)
    assert secret == UncountedColumnExamplesUnit(column="user", max_examples=3)
    assert (secret.number, secret.drawn, secret.apart, secret.adjacency) == (None, None, 3, ADD_OR_REMOVE)
    with pytest.raises(ConfigurationError, match="max_examples=129"):
        UncountedColumnExamplesUnit(column="user", max_examples=129)
    for number, examples in ((7, None), (7, 0), (6, 19)):
        with pytest.raises(ConfigurationError, match=f"examples={examples}"):
            unit_terms(number, apart, examples)


@pytest.mark.parametrize(
    "change", [{"number": 0}, {"column": "a\nb"}, {"column": 3}, {"max_examples": 0}, {"kind": "x"}]
)
def test_terms_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(change)) if "kind" not in change else "unit"):
        terms_from_dict("unit", {**unit_terms(7, config()).to_dict(), **change})
