"""Whatever a recipe's file holds: settings that it trains with, or a refusal, and no error of somebody else's."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError
from tests.conftest import ROOT
from tests.strategies import cases, spoilt, unless_refused

BASE = yaml.safe_load((ROOT / "recipes" / "classify.yaml").read_text(encoding="utf-8"))
NAMES = sorted(
    {item.name for kind in (TrainingArguments, PrivacyConfig) for item in dataclasses.fields(kind) if item.init}
    | {*BASE, "smoke", "re_attention", "privacy_seed", "nothing", "", "-", "target-epsilon"}
)
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 99), st.floats(), st.text(max_size=4),
    st.sampled_from(["inf", "\x00", "x", "1e-3", "{}", "[", '{"a": 1}', [], {}, [1, "a"], {1: 2}, {"budget_share": 2},
                     10**400, "a" * 3000, "steps", "epoch"]),
)  # fmt: skip


@pytest.fixture
def parse(part: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Any]:
    """What the recipe makes of a file with this content."""
    recipe, arguments = part("classify"), part("common.arguments")
    monkeypatch.chdir(tmp_path)  # outputs go there, wherever they are told to go
    (kind,) = (v for v in vars(recipe).values() if dataclasses.is_dataclass(v) and v.__module__ == "classify")

    def of(text: bytes) -> Any:
        Path("recipe.yaml").write_bytes(text)
        monkeypatch.setattr(sys, "argv", ["classify.py", "recipe.yaml"])
        return arguments.parse(kind)

    return of


@pytest.mark.fuzzed
@cases(20)
@given(st.dictionaries(st.sampled_from([*NAMES, 1]), VALUES, max_size=3), st.data())
@pytest.mark.slow
def test_any_settings_are_read_or_refused(parse: Callable[[bytes], Any], given: dict[Any, Any], data: Any) -> None:
    text = yaml.safe_dump({**BASE, "output_dir": "out", **given}, allow_unicode=True).encode(errors="surrogatepass")
    text = data.draw(spoilt(text)) if data.draw(st.integers(0, 3)) == 0 else text
    with suppress(SystemExit):  # with its usage, of argparse
        made = unless_refused(lambda: parse(text))
        assert made is None or isinstance(made[2], PrivacyConfig)


@pytest.mark.parametrize(
    "text",
    [b"target_epsilon: 1\ntarget_epsilon: 8", b"re_attention: {budget_share: 0.1, budget_share: 0.2}",
     b"target_epsilon: 1\ntarget-epsilon: 8", b"1: 2", b"- a", b"a", b"", b"\xff\xfe", b"a: 2020-13-45", b"? [1]\n: 2",
     b"!!python/object:os.system x", b"[" * 1000, b"a: \x00", b"output_dir: out\naccelerator_config: nowhere.json"],
    ids=lambda text: repr(text[:40]),
)  # fmt: skip
def test_what_is_no_file_of_settings_is_refused(parse: Callable[[bytes], Any], text: bytes) -> None:
    if text.startswith(b"output_dir"):
        text = yaml.safe_dump(BASE).encode() + b"\n" + text.partition(b"\n")[2]
    with pytest.raises(ConfigurationError):
        parse(text)


def test_what_is_too_long_for_a_name_is_refused(parse: Callable[[bytes], Any]) -> None:
    with pytest.raises(ConfigurationError, match="encoder"):
        parse(yaml.safe_dump({**BASE, "output_dir": "out", "encoder": "s[" * 1500}).encode())
