"""What all commands share: refusals without a traceback, and strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from hf_dp.errors import HfDpError

REFUSED = 2


@contextmanager
def refusals() -> Iterator[None]:
    """Errors that hf_dp raises on purpose are printed in words, and end the command with code 2."""
    try:
        yield
    except HfDpError as error:
        typer.echo(f"Refused: {error}", err=True)
        raise typer.Exit(REFUSED) from None


def print_json(value: Any) -> None:
    """Strict JSON and nothing else; infinities as the string "inf"."""
    typer.echo(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return "inf" if isinstance(value, float) and value == math.inf else value
