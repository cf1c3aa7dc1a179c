"""`hf-dp recipes`: those that come with hf_dp are listed, and copied."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated

import typer

from hf_dp.cli.common import refusals
from hf_dp.cli.shipped import shipped, unknown
from hf_dp.cli.train import recipe_script
from hf_dp.errors import ConfigurationError

recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with hf_dp.")


@recipes.command("list")
def list_() -> None:
    """Say what each recipe does.

    `hf-dp train NAME` runs it, and `hf-dp train NAME --help` has its flags.
    """
    with refusals():
        folder = shipped()
        settings: dict[Path, list[str]] = {script: [] for script in sorted(folder.glob("*.py"))}
        for path in sorted(folder.glob("*.yaml")):
            settings[recipe_script(path)].append(path.stem)
        for script, names in settings.items():
            does = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            typer.echo(f"{', '.join(names) or f'{script.stem} (a script to copy)'}\n    {does}")


@recipes.command()
def copy(
    *,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Which; left out: all.")] = None,
    directory: Annotated[Path, typer.Argument(help="Where to; it is made.", file_okay=False)],
) -> None:
    """Copy recipes, to be read and changed: settings, script and what all scripts share.

    Example:

        hf-dp recipes copy classify mine

    then `hf-dp train mine/classify.yaml`. What is there already stays, and is
    refused where it is not the same.
    """
    with refusals():
        folder = shipped()
        chosen = {part for name in names or [""] for part in _parts(folder, name)}
        for path in sorted(chosen):
            there = directory / path
            if there.exists() and there.read_bytes() != (folder / path).read_bytes():
                raise ConfigurationError(
                    f"{str(there)!r} is there, and is another than that of hf_dp.",
                    why="what was changed in it would be lost.",
                    fix="copy into another directory.",
                )
        for path in sorted(chosen):
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes((folder / path).read_bytes())
    typer.echo(f"{len(chosen)} files are in {directory}.")


def _parts(folder: Path, name: str) -> set[Path]:
    """The files of one recipe, or of all where the name is empty, by their paths in the folder."""
    settings, script = folder / f"{name}.yaml", folder / f"{name}.py"
    if not name:
        own = {*folder.glob("*.yaml"), *folder.glob("*.py")}
    elif settings.is_file():
        own = {settings, recipe_script(settings)}
    elif script.is_file():
        own = {script}
    else:
        raise unknown(name, folder)
    return {path.relative_to(folder) for path in (*own, *folder.glob("common/**/*.py"))}
