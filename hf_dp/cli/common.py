"""What all commands share: refusals without a traceback, and strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from hf_dp.errors import HfDpError

NO, REFUSED = 1, 2
AsJson = Annotated[
    bool, typer.Option("--json", help="Print strict JSON on stdout and nothing else there; the rest goes to stderr.")
]


@contextmanager
def refusals() -> Iterator[None]:
    """Errors that hf_dp raises on purpose are printed in words, and end the command with code 2."""
    try:
        yield
    except HfDpError as error:
        typer.echo(f"Refused: {error}", err=True)
        raise typer.Exit(REFUSED) from None


def print_json(value: Any) -> None:
    """Strict JSON and nothing else; numbers that it does not have as the strings "inf", "-inf" and "nan"."""
    typer.echo(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
