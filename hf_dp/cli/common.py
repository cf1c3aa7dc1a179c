"""What all commands share: refusals without a traceback, and strict JSON."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError

from hf_dp.errors import ConfigurationError, HfDpError, shortened
from hf_dp.figures import row_in_words
from hf_dp.launched import hand_over

NO, REFUSED = 1, 2
AsJson = Annotated[
    bool, typer.Option("--json", help="Print strict JSON on stdout and nothing else there; the rest goes to stderr.")
]
# What options are called in PrivacyConfig and TrainingArguments; `dataset_size` there is no n.
_IN_PYTHON = {
    "target-epsilon": "epsilon",
    "eps": "epsilon",
    "target-tpr": "tpr",
    "at-fpr": "fpr",
    "target-delta": "delta",
    "max-steps": "steps",
    "num-train-epochs": "epochs",
    "max-examples-per-unit": "max-examples",
}


def whole(text: str) -> int:
    """A whole number as it is typed: 10000, 10_000 or 1e4."""
    try:
        return int(text)
    except ValueError:
        with suppress(ValueError):
            if (number := float(text)).is_integer():
                return int(number)
    raise typer.BadParameter(f"{shortened(text, 100)!r} is no whole number. It is written as 10000, 10_000 or 1e4.")


def positive(text: str) -> int:
    """The same, of at least 1."""
    if (number := whole(text)) < 1:
        raise typer.BadParameter(f"{number} is not in the range x>=1.")
    return number


#: An option that is a whole number, and may be a large one; the second, of at least 1.
count = functools.partial(typer.Option, parser=whole, metavar="<int>")
some = functools.partial(typer.Option, parser=positive, metavar="<int>")
TextColumn = Annotated[str, typer.Option(help="The column of files that holds the texts.")]


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _as_in_plans(name: str) -> str:
    return _IN_PYTHON.get(name := _with_dashes(name), name)


# Of a command: how its options may be spelt besides, such as with underscores, as recipes have them.
SPELLINGS: dict[str, Any] = {"token_normalize_func": _with_dashes}
PLAN_SPELLINGS: dict[str, Any] = {"token_normalize_func": _as_in_plans}


@contextmanager
def refusals(traceback: bool | None = None) -> Iterator[None]:
    """What hf_dp refuses, and what the system does, is said in words, and ends the command with code 2.

    Args:
        traceback: keep that of an error of the system; False where the command could be asked to.
    """
    try:
        with _installed():
            yield
    except HfDpError as error:
        if not hand_over(error):
            typer.echo(f"Refused: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    except (OSError, SafetensorError) as error:  # the second, too, where a disk is full
        if traceback:
            raise
        hint = "" if traceback is None else "\n(--traceback shows where it came from.)"
        if not hand_over(error):
            typer.echo(shortened(f"{type(error).__name__}: {error}") + hint, err=True)
        raise typer.Exit(REFUSED) from None


@contextmanager
def _installed() -> Iterator[None]:
    """A package that hf_dp names among its own, and that is not there, is refused with how it is installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        needed = _needed(package)
        if needed is None or find_spec(package) is not None:
            raise
        requirement, extra = needed
        raise ConfigurationError(
            f"the package {package} is not installed.",
            why=f"it is needed for this, and {f'in the extra {extra!r}' if extra else 'a dependency'} of hf_dp.",
            fix=f"pip install '{requirement}'" + f" (the extra {extra!r})" * bool(extra) + ".",
        ) from error


def _needed(package: str) -> tuple[str, str] | None:
    """The requirement of hf_dp that names it, and the extra that this is of, if any."""
    try:
        lines = metadata.requires("hf-dp") or []
    except metadata.PackageNotFoundError:
        return None
    for line in lines:
        requirement, _, marker = line.partition(";")
        if re.split(r"[^\w.-]", requirement, maxsplit=1)[0].replace("-", "_").lower() == package.lower():
            extra = re.search(r"""extra == ['"]([^'"]+)""", marker)
            return requirement.strip(), extra[1] if extra else ""
    return None


def texts_of(path: Path, column: str) -> list[str]:
    """The texts in one column of a file, none of them empty.

    Raises:
        ConfigurationError: it cannot be read, has no rows, or one without a text there.
    """
    from hf_dp.data.files import check_columns, rows_of_file

    rows = rows_of_file(path)
    check_columns(str(path), rows, (column,), fix="name the column of the texts with --text-column.")
    texts = [str(row[column]) for row in rows]
    empty = [number for number, text in enumerate(texts) if not text.strip()]
    if empty:
        raise ConfigurationError(
            f"{path} has no text in {row_in_words(empty[0])} ({len(empty)} such rows).",
            why="there is nothing in it to learn, or to find again.",
            fix="take those rows out.",
        )
    return texts


def print_json(value: Any) -> None:
    """Strict JSON and nothing else; numbers that it does not have as the strings "inf", "-inf" and "nan"."""
    typer.echo(in_json(value))


def in_json(value: Any) -> str:
    """The same as text."""
    return json.dumps(_strict(value), indent=2, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
