"""`hf-dp train`: run a recipe by its YAML file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import yaml

from hf_dp.cli.common import REFUSED, refusals
from hf_dp.errors import ConfigurationError


def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe's settings.")],
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error about files or the hub came from.")
    ] = False,
) -> None:
    """Run a recipe: the script that lies beside its YAML file, with the settings in it.

    Example:

        hf-dp train recipes/classify.yaml --target_epsilon 3

    Flags after the file win over it; `python recipes/classify.py --help` lists
    those of a recipe. NAME.yaml runs NAME.py in the same folder; several files
    can share one script by naming it, `recipe: NAME.py`. On several devices
    start the script itself, for example with `accelerate launch`.
    """
    with refusals():
        script = recipe_script(recipe)
        with _as_the_main_program(script, [str(recipe), *context.args]):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except OSError as error:
                if traceback:
                    raise
                typer.echo(f"{type(error).__name__}: {error}\n(--traceback shows where it came from.)", err=True)
                raise typer.Exit(REFUSED) from None


def recipe_script(path: Path) -> Path:
    """The script that a recipe's YAML file belongs to.

    Raises:
        ConfigurationError: no such file, no settings in it, or no such script.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"recipe {str(path)!r} cannot be read: {error}.",
            why="a recipe is a YAML file of settings, such as recipes/classify.yaml.",
            fix="give the path of one; recipes come with the source of hf_dp.",
        ) from error
    name = values.get("recipe", f"{path.stem}.py") if isinstance(values, dict) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise ConfigurationError(
            f"recipe {str(path)!r} has " + ("no settings." if name is None else f"recipe: {name!r}."),
            why="it must be a mapping of settings; `recipe`, if it is there, names a script in the same folder.",
            fix="see recipes/classify_full.yaml for one that shares another's script.",
        )
    script = path.parent / (name if name.endswith(".py") else f"{name}.py")
    if not script.is_file():
        raise ConfigurationError(
            f"there is no {script.name} beside {str(path)!r}.",
            why="a YAML file only holds settings; the script of the same name does the work.",
            fix="keep the two together, or name the script in the file: `recipe: classify.py`.",
        )
    return script


@contextmanager
def _as_the_main_program(script: Path, arguments: list[str]) -> Iterator[None]:
    """As if by `python script arguments`: recipes read sys.argv and import their neighbours."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent.absolute())]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
