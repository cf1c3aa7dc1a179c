"""Terms of a mechanism as plain values: each of a kind, checked, to JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, NoReturn

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError


class Terms:
    """To JSON: the fields, an infinite norm as the string "inf". `terms_from_dict` is the inverse."""

    kind: str

    def __post_init__(self) -> None:
        known = self._kinds()
        if self.kind not in known:
            refuse_term("kind", self.kind, f"it is {' or '.join(map(repr, known))}")
        self._check()

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        return tuple(str(item.default) for item in dataclasses.fields(cls) if item.name == "kind")  # type: ignore[arg-type]

    def _check(self) -> None: ...

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {name: "inf" if value == math.inf else value for name, value in values.items()}


def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For readers of JSON, of which some take the first of two values for one name, and Python the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name twice among {', '.join(name for name, _ in pairs)[:100]}")
    return values


def values_or_error(text: str) -> Any:
    """What stands in JSON, each name once; or why nothing can be read."""
    try:
        return json.loads(text, object_pairs_hook=each_name_once)
    except (TypeError, ValueError, RecursionError) as error:
        return error


def refuse_term(name: str, value: object, rule: str) -> NoReturn:
    """Refuses a value that no mechanism has (`ConfigurationError`); `rule` is what it must be."""
    raise ConfigurationError(
        f"{name}={shown(value)} in the terms of a mechanism.",
        why=f"{rule}; what a run costs follows from it.",
        fix="make mechanisms with Plan.make, or take the file again from where it was written.",
    )
