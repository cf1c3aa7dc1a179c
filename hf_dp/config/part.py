"""What the settings of the parts of a promise have in common. Imports no torch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import PurePath
from typing import Any, Self

from hf_dp.config.names import refuse_unknown


class PartConfig:
    """The settings of one part."""

    def __new__(cls, *_: Any, **values: Any) -> Self:
        known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        refuse_unknown(cls.__name__, values, known)  # before `__init__`, which would say what is wrong, and no way out
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ConfigurationError: an unknown field, or a value out of range.
        """
        return cls(**values)


def as_path(value: object) -> object:
    """A path as the text that JSON can hold; anything else as it is."""
    return os.fspath(value) if isinstance(value, PurePath) else value
