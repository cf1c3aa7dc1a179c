"""Whatever a field of the promise is given, it is refused by name or is what it says: never a raw error, never both."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hf_dp import OutputBiasConfig, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import calibrate_noise_multiplier, unit_terms
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.config.asked import promised
from hf_dp.errors import ConfigurationError
from hf_dp.hub import PrivacyRecord
from tests.strategies import arguments_of_configs, as_text, cases, changed, unless_refused

HOSTILE = [
    math.nan, math.inf, -math.inf, -1, -1e-300, 0, 0.0, 5e-324, 1e-300, 1e30, 1e308, 10**400, 10**5000, -(10**5000),
    True, False, "1", "x", "", b"x", None, 5, 1.5, [], [1.0], {}, {"a": 1}, object(), np.float32(1.0), np.int64(3),
    np.array([1.0, 2.0]), np.array(["a", "b"]), np.array(math.inf), torch.tensor(1.0), torch.tensor([1.0, 2.0]),
    torch.tensor(math.inf), Decimal("1.0"), Decimal("NaN"), Fraction(1, 2), 1j, "x" * 10**6, "\0", "\ud800",
    PurePosixPath("x.json"),
]  # fmt: skip
GIVEN: dict[type[Any], dict[str, Any]] = {
    PrivacyConfig: {"target_epsilon": 8.0},
    ReAttentionConfig: {},
    OutputBiasConfig: {},
    SparseEmbeddingConfig: {"method": "adafest+", "kept_rows": 5},
}
WITHOUT_NOISE = Path(__file__).resolve().parents[1] / "hub" / "version1" / "no_noise" / "privacy.json"
FIELDS = [(kind, name) for kind in GIVEN for name in kind.__dataclass_fields__]


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_any_value_of_any_field_is_refused_by_name_or_plain(kind: type[Any], name: str) -> None:
    refusals = []
    for value in HOSTILE:
        given = {**GIVEN[kind], name: value}
        if name == "noise_multiplier":
            del given["target_epsilon"]
        try:
            made = kind(**given)
        except ConfigurationError as error:
            refusals.append(error)
            continue
        kept = getattr(made, name)
        plain = (bool, int, float, str, type(None), ReAttentionConfig, SparseEmbeddingConfig, OutputBiasConfig)
        assert isinstance(kept, plain), f"{name}={kept!r} was accepted"
        assert not isinstance(kept, float) or math.isfinite(kept) or name == "clipping_norm"
        assert kind(**made.to_dict()) == made
        assert pickle.loads(pickle.dumps(made)) == made
    assert len(refusals) > len(HOSTILE) / 2
    for error in refusals:
        assert name.replace("_", "").rstrip("s") in str(error).lower().replace("_", "")
        assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "values",
    [
        {"target_epsilon": 10001.0},
        {"target_epsilon": 8.0, "target_delta": 5e-324},
        {"target_epsilon": 8.0, "target_delta": 1e-100},
        {"target_epsilon": 8.0, "clipping_norm": 1e30},
        {"target_epsilon": 8.0, "clipping_norm": 1e-30},
        {"noise_multiplier": 1e200},
        {"target_epsilon": 8.0, "withhold_non_private_logs": "x"},
        {"target_epsilon": 8.0, "withhold_non_private_logs": 1},
        {"target_epsilon": 8.0, "seed": 10**400},
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, Any]) -> None:
    name = list(values)[-1]
    with pytest.raises(ConfigurationError, match=name) as caught:
        PrivacyConfig(**values)
    assert caught.value.fix


@pytest.mark.parametrize(
    "values",
    [
        {"target_epsilon": 1e4, "target_delta": 1e-50, "clipping_norm": 1e15},
        {"target_epsilon": np.float64(8.0), "clipping_norm": 1},
        {"noise_multiplier": 1e150, "clipping_norm": 1e-15, "seed": 2**62},
    ],
)
def test_what_is_extreme_and_right_is_accepted(values: dict[str, Any]) -> None:
    config = PrivacyConfig(**values)
    assert PrivacyConfig.from_json(config.to_json()) == config


def test_ranges_are_the_same_wherever_they_are_asked_for() -> None:
    for epsilon in (0, -1.0, 1e5, math.inf, 10**400, "8"):
        with pytest.raises(ConfigurationError) as of_config:
            PrivacyConfig(target_epsilon=epsilon)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as of_calibration:
            calibrate_noise_multiplier(
                target_epsilon=epsilon,  # type: ignore[arg-type]
                target_delta=1e-5, sampling_probability=0.1, steps=1,
            )  # fmt: skip
        assert str(of_config.value) == str(of_calibration.value)
        assert ("text, not a number" in str(of_config.value)) == (epsilon == "8")


def test_a_path_is_kept_as_text() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention = ReAttentionConfig(token_frequencies="public", public_frequencies=PurePosixPath("x.json"))  # type: ignore[arg-type]
        config = PrivacyConfig(target_epsilon=1.0, re_attention=attention)
    assert PrivacyConfig.from_json(config.to_json()) == config
    assert attention.public_frequencies == "x.json"


@pytest.mark.parametrize("name", ["inf", "nan", "None"])
def test_a_column_or_a_folder_with_the_name_of_a_number_stays_a_text(name: str) -> None:
    config = PrivacyConfig(target_epsilon=1.0, unit=name, max_examples_per_unit=2, after=name)
    assert PrivacyConfig.from_json(config.to_json()) == config
    terms = unit_terms(10, config).to_dict()
    assert terms_from_dict("unit", terms).to_dict() == terms


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"target_epsilon": ' + "9" * 5000 + "}", '{"target_epsilon": 1, "target_epsilon": 8}', b"\xff", 5],
    ids=["deep", "long", "twice", "no text", "a number"],
)
def test_what_is_no_config_in_json_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="not a PrivacyConfig in JSON") as caught:
        PrivacyConfig.from_json(text)
    assert len(str(caught.value)) < 2000


def test_that_there_is_no_noise_is_said_where_that_is_asked_for_and_of_no_copy() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = PrivacyConfig(noise_multiplier=0, clipping_norm=2.0)
        config.replace(clipping_norm=1.0).replace(seed=1)
        PrivacyRecord.from_json(WITHOUT_NOISE.read_text(encoding="utf-8"))
        again = PrivacyConfig(target_epsilon=8.0).replace(target_epsilon=None, noise_multiplier=0)
    assert again.noise_multiplier == 0
    assert ["adds no noise" in str(one.message) for one in said] == [True, True]


@pytest.mark.fuzzed
@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@cases(150)
@example({"target_tpr": 0.5, "accountant": np.array([1, 2])})
@given(arguments_of_configs())
def test_any_arguments_are_a_promise_that_goes_to_json_and_back_or_refused(arguments: dict[str, Any]) -> None:
    config = unless_refused(lambda: PrivacyConfig(**arguments))
    if config is None:
        return
    assert PrivacyConfig(**config.to_dict()) == config
    assert PrivacyConfig.from_json(config.to_json()) == config
    assert json.loads(json.dumps(promised(config)["accountant"])) == config.accountant


@pytest.mark.fuzzed
@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@cases(40)
@given(st.data())
def test_any_text_is_a_promise_or_refused(data: Any) -> None:
    config = PrivacyConfig(
        target_epsilon=8.0, after=["a", "inf"], unit="inf", max_examples_per_unit=2,
        re_attention=ReAttentionConfig(), sparse_embeddings=SparseEmbeddingConfig(method="fest", kept_rows=3),
    )  # fmt: skip
    text: Any = data.draw(as_text(data.draw(changed(json.loads(config.to_json())))))
    read = unless_refused(lambda: PrivacyConfig.from_json(text))
    assert read is None or PrivacyConfig.from_json(read.to_json()) == read


def test_nothing_of_a_promise_can_be_set_and_no_other_name() -> None:
    made = PrivacyConfig(target_epsilon=8.0)
    for name in ("target_epsilon", "epsilon"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(made, name, 3.0)
    assert made == dataclasses.replace(made) == PrivacyConfig(target_epsilon=8.0)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("epsilon", "give target_epsilon for 'epsilon'."),
        ("sigma", "give noise_multiplier for 'sigma'."),
        ("max_grad_norm", "give clipping_norm for 'max_grad_norm'."),
        ("per_sample_max_grad_norm", "give clipping_norm for "),
        ("delta", "give target_delta for 'delta'."),
        ("noise_multiplyer", "give noise_multiplier for "),
        ("target_eps", "give target_epsilon for 'target_eps'."),
        ("noise_type", "give noise for "),
        ("sampling_prob", "give sampling_probability for "),
        ("batch_size", "leave out 'batch_size': the expected batch size is per_device_train_batch_size x "),
        ("expected_batch_size", "leave out 'expected_batch_size': the expected batch size is "),
        ("lot_size", "leave out 'lot_size': the expected batch size is "),
        ("max_physical_batch_size", "leave out 'max_physical_batch_size': a micro-batch has "),
        ("num_examples", "leave out 'num_examples': the training dataset is counted; "),
        ("num_epochs", "leave out 'num_epochs': the steps follow from "),
        ("size", "use only these: accountant, "),
        ("xyz", "use only these: accountant, "),
    ],
)
def test_a_name_of_others_is_told_what_it_is_called_here(name: str, meant: str) -> None:
    for made in (PrivacyConfig, PrivacyConfig(target_epsilon=8.0).replace):
        with pytest.raises(ConfigurationError, match=f"PrivacyConfig got '{name}'") as caught:
            made(**{name: 1.0})
        assert caught.value.fix.startswith(meant)


def test_a_number_for_the_noise_is_told_what_says_how_much_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"^noise=1\.0") as caught:
        PrivacyConfig(noise=1.0)  # type: ignore[arg-type]
    assert "noise_multiplier" in caught.value.fix


def test_a_part_has_no_other_names() -> None:
    with pytest.raises(ConfigurationError, match="ReAttentionConfig got 'temperature'"):
        PrivacyConfig(target_epsilon=8.0, re_attention={"temperature": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["target_epsilon", "noise_multiplier", "target_delta", "sampling_probability", "max_batch_size", "clipping_norm"],
)
def test_a_number_that_is_text_is_said_to_be_text(name: str) -> None:
    budget = {} if name in ("target_epsilon", "noise_multiplier") else {"target_epsilon": 8.0}
    with pytest.raises(ConfigurationError, match=f"^{name}='1e-05', which is text, not a number"):
        PrivacyConfig(**{**budget, name: "1e-05"})
