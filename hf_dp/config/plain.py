"""Terms of a mechanism as plain values: each of a kind, checked, to JSON. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NoReturn

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError


class Terms:
    """To JSON: the fields, infinity as the string "inf". `terms_from_dict` is the inverse."""

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


def refuse_term(name: str, value: object, rule: str) -> NoReturn:
    """Refuses a value that no mechanism has (`ConfigurationError`); `rule` is what it must be."""
    raise ConfigurationError(
        f"{name}={shown(value)} in the terms of a mechanism.",
        why=f"{rule}; what a run costs follows from it.",
        fix="make mechanisms with Plan.make, or take the file again from where it was written.",
    )
