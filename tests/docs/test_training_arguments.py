"""docs/training_arguments.md says of every field what the code does with it."""

from __future__ import annotations

import ast
import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.training.refusals import private_arguments

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "training_arguments.md").read_text(encoding="utf-8")
FIELDS = {field.name for field in dataclasses.fields(TrainingArguments)}
# Of a version above the oldest that the tests run with.
NEWER = {"activation_checkpointing", "activation_checkpointing_kwargs"}
PRIVACY = PrivacyConfig(target_epsilon=8.0)


def named(page: str, heading: str) -> set[str]:
    """The fields that a section is about: of a table those of the first column."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    about = "\n".join(re.findall(r"^\| (.*?) \|", section, re.M)) or section
    return set(re.findall(r"`(\w+)(?:=[^`]*)?`", about)) & (FIELDS | NEWER)


def refused(page: str) -> list[tuple[str, Any]]:
    """Each `field=value` of the table of refusals."""
    (section,) = re.findall(r"^## Refused$(.*?)^## ", page, re.M | re.S)
    column = "\n".join(re.findall(r"^\| (.*?) \|", section, re.M))
    return [(name, ast.literal_eval(value)) for name, value in re.findall(r"`(\w+)=([^`]+)`", column)]


def arguments(**changes: Any) -> Any:
    """As Trainer's; what Transformers itself would refuse or act upon is set afterwards."""
    args = copy.copy(TrainingArguments("nowhere", use_cpu=True, report_to="none"))
    for name, value in changes.items():
        object.__setattr__(args, name, value)
    return args


class Watched:
    """Arguments that remember which of their fields were read."""

    def __init__(self, args: Any) -> None:
        self.__dict__.update(_args=args, read=set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self._args, name)

    def __copy__(self) -> Any:
        return copy.copy(self._args)


def complaints(page: str) -> list[str]:
    """What is wrong with the page."""
    kinds = {heading: named(page, heading) for heading in ("Refused", "Changed", "As Trainer's")}
    found = [f"{name} is not there" for name in FIELDS - set().union(*kinds.values())]
    found += [f"{name} is as Trainer's and changed" for name in kinds["As Trainer's"] & kinds["Changed"]]
    watched = Watched(arguments())
    private_arguments(watched, PRIVACY)
    about = {"output_dir", *kinds["Refused"], *kinds["Changed"]}
    return found + [f"{name} is looked at, and the page does not say so" for name in watched.read & FIELDS - about]


def test_every_field_is_there_and_what_the_code_looks_at_is_refused_or_changed() -> None:
    assert complaints(PAGE) == []


@pytest.mark.parametrize(("name", "value"), refused(PAGE), ids=lambda value: str(value))
def test_what_is_said_to_be_refused_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        private_arguments(arguments(**{name: value}), PRIVACY)
    assert error.value.found.lower().startswith(name)


def test_negative_controls_a_field_less_and_a_refusal_less_are_noticed() -> None:
    private_arguments(arguments(), PRIVACY)  # so that each value above is what was refused
    assert complaints(PAGE.replace("`eval_delay`, ", "")) == ["eval_delay is not there"]
    without = re.sub(r"^\| `fp16=True`.*\n", "", PAGE, flags=re.M).replace(
        "## As Trainer's", "## As Trainer's\n`fp16`\n"
    )
    assert complaints(without) == ["fp16 is looked at, and the page does not say so"]
