"""What a promise says of trainings before: where they lie, whose data it was, and what others read of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dp.config import PrivacyConfig
from hf_dp.config.after import names_of
from hf_dp.config.asked import notes, promised
from hf_dp.errors import ConfigurationError


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"after": ""}, "after=''"),
        ({"after": 3}, "after=3"),
        ({"after": []}, r"after=\(\)"),
        ({"after": ["a", ""]}, "after=\\('a', ''\\)"),
        ({"after": ["a", ["b", "c"]]}, "after="),
        ({"after": [None]}, r"after=\(None,\)"),
        ({"after": [""]}, "after=''"),
        ({"after": [[]]}, r"after=\(\[\],\)"),
        ({"after": [["a"]]}, r"after=\(\['a'\],\)"),
        ({"after": [b"a"]}, "after="),
        ({"other_people": "yes"}, "other_people='yes'"),
    ],
)
def test_what_says_nothing_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        PrivacyConfig(target_epsilon=1.0, **fields)


def test_others_read_the_name_and_not_where_it_lies() -> None:
    config = PrivacyConfig(target_epsilon=1.0, after=Path("/home/me/out/sft"))
    assert config.after == "/home/me/out/sft"
    assert PrivacyConfig.from_json(config.to_json()) == config
    assert config.published()["after"] == "sft"
    assert "after" not in promised(config)  # moved, it is the same training: its digest is in the promise
    names = ["out/sft/", "owner/name", "a/**b**", "..", "x" * 99]
    assert names_of(tuple(names)) == ["sft", "name", "__b__", "folder", "x" * 60]
    assert names_of(names_of("a/**b**")[0]) == ["__b__"]


def test_of_several_each_is_read_and_one_of_a_list_is_one() -> None:
    config = PrivacyConfig(target_epsilon=1.0, after=[Path("/home/me/sft"), "out/corpus"])
    assert config.after == ("/home/me/sft", "out/corpus")
    assert PrivacyConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(PrivacyConfig(target_epsilon=1.0, after=("/home/me/sft", "out/corpus")))
    assert config.published()["after"] == ("sft", "corpus")
    alone = PrivacyConfig(target_epsilon=1.0, after=["out/sft"])
    assert alone == PrivacyConfig(target_epsilon=1.0, after="out/sft")
    assert alone.published()["after"] == "sft"


def test_a_promise_without_it_is_written_as_before() -> None:
    plain, others = (PrivacyConfig(target_epsilon=1.0, other_people=said) for said in (False, True))
    assert not {"after", "other_people"} & promised(plain).keys()
    assert promised(others)["other_people"] is True
    assert (len(notes(plain)), len(notes(others))) == (0, 1)
    (besides,) = notes(others.replace(after="out"))
    assert "Besides those trainings" in besides
    assert "Besides" not in notes(others)[0]
