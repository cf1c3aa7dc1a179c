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
        if not names and _is_name(folder, str(directory)):
            raise ConfigurationError(
                f"{str(directory)!r} is a recipe, and no directory is given.",
                why="a directory alone gets all recipes, and one of this name is hardly meant.",
                fix=f"`hf-dp recipes copy {directory} DIRECTORY`, or a directory of another name for all.",
            )
        asked: list[str | None] = [*names] if names else [None]
        chosen = {part for name in asked for part in _parts(folder, name)}
        for path in sorted(chosen):
            _check_place(directory, path, folder)
        for path in sorted(chosen):
            if not (directory / path).exists():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                with (directory / path).open("xb") as file:
                    file.write((folder / path).read_bytes())
    typer.echo(f"{len(chosen)} files are in {directory}.")


def _parts(folder: Path, name: str | None) -> set[Path]:
    """The files of one recipe, or of all without a name, by their paths in the folder."""
    settings, script = folder / f"{name}.yaml", folder / f"{name}.py"
    if name is None:
        own = {*folder.glob("*.yaml"), *folder.glob("*.py")}
    elif not _is_name(folder, name):
        raise unknown(name, folder)
    elif settings.is_file():
        own = {settings, recipe_script(settings)}
    else:
        own = {script}
    return {path.relative_to(folder) for path in (*own, *folder.glob("common/**/*.py"))}


def _is_name(folder: Path, name: str) -> bool:
    """Of a recipe in a folder: with settings, or a script alone. No path is one."""
    return name.isidentifier() and any((folder / f"{name}{ending}").is_file() for ending in (".yaml", ".py"))


def _check_place(directory: Path, path: Path, folder: Path) -> None:
    """Refuses to write over a file or through a link, in a directory that may be one itself.

    Raises:
        ConfigurationError: with another directory.
    """
    there = directory / path
    links = [place for place in (there, *(directory / part for part in path.parents[:-1])) if place.is_symlink()]
    if links:
        found, why = f"{str(links[0])!r} is a link.", "the copy would be written where it leads."
    elif there.exists() and (not there.is_file() or there.read_bytes() != (folder / path).read_bytes()):
        found, why = (
            f"{str(there)!r} is there, and is another than that of hf_dp.",
            "what was changed in it would be lost.",
        )
    elif wrong := [place for place in there.parents if place.exists() and not place.is_dir()]:
        found, why = f"{str(wrong[0])!r} is there, and is no directory.", "a recipe is several files."
    else:
        return
    raise ConfigurationError(found, why=why, fix="copy into another directory.")
