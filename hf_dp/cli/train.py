"""`hf-dp train`: run a recipe by its YAML file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_dp.cli.common import AsJson, print_json, refusals
from hf_dp.cli.shipped import named, without_data
from hf_dp.errors import ConfigurationError

if TYPE_CHECKING:
    from hf_dp.cli.outcome import Outcome


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="A name from `hf-dp recipes list`, or the path of a YAML file."),
    ] = None,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error about files or the hub came from.")
    ] = False,
    as_json: AsJson = False,
    help_: Annotated[bool, typer.Option("--help", help="Show this, or after RECIPE the flags of that recipe.")] = False,
) -> None:
    """Run a recipe: the script that lies beside its YAML file, with the settings in it.

    Example:

        hf-dp train causal_lm --text_file TEXT.txt --target_epsilon 3

    Flags win over the file. A recipe of hf_dp is given by its name, one of your
    own by its path: NAME.yaml runs NAME.py in the same folder; several files
    can share one script by naming it, `recipe: NAME.py`. On several devices
    start the script itself, for example with `accelerate launch`, after
    `hf-dp recipes copy`.

    With --json: the privacy report of the model that the recipe saved (or, by
    folder, of each of several), and the metrics that it wrote (results.json, or
    Trainer's save_metrics), from its output_dir.

    Exit codes: 0, trained; 2, refused, or files or the hub could not be read;
    any other is the recipe's own.
    """
    if recipe is None:
        if not help_:
            context.fail("Missing argument 'RECIPE': `hf-dp recipes list` names those that come with hf_dp.")
        typer.echo(context.get_help())
        return
    with refusals(traceback):
        path = named(recipe)
        script = recipe_script(path)
        flags = [*context.args, *["--help"] * help_]
        outcome = _outcome(settings(path), flags) if as_json and not help_ else None
        said_by_the_recipe: AbstractContextManager[Any] = redirect_stdout(sys.stderr) if outcome else nullcontext()
        with _as_the_main_program(script, [str(path), *flags]), said_by_the_recipe:
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
            except ConfigurationError as error:
                raise without_data(error, path, settings(path)) from error.__cause__
        if outcome is not None:
            print_json(outcome.read())


def settings(path: Path) -> dict[str, Any]:
    """What stands in a recipe's YAML file.

    Raises:
        ConfigurationError: no such file, no settings in it, or one twice.
    """
    # Here, as every command imports this module.
    import yaml

    class EachNameOnce(yaml.SafeLoader):  # type: ignore[misc]
        """Of two values for one name YAML's own reader takes the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands twice", node.start_mark)
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), EachNameOnce)  # a SafeLoader
    except (OSError, ValueError, LookupError, RecursionError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"recipe {str(path)!r} cannot be read: {error}.",
            why="a recipe is a YAML file of settings, or one of those that come with hf_dp, by its name.",
            fix="give the path of one, or a name from `hf-dp recipes list`.",
        ) from error
    if not isinstance(values, dict):
        raise _no_recipe(path, "no settings.")
    if others := [name for name in values if not isinstance(name, str)]:
        raise _no_recipe(path, f"a setting {others[0]!r}, which is no name.")
    return values


def recipe_script(path: Path) -> Path:
    """The script that a recipe's YAML file belongs to.

    Raises:
        ConfigurationError: no such file, no settings in it, or no such script.
    """
    name = settings(path).get("recipe", f"{path.stem}.py")
    if not isinstance(name, str) or Path(name).name != name:
        raise _no_recipe(path, f"recipe: {name!r}.")
    script = path.parent / (name if name.endswith(".py") else f"{name}.py")
    if not script.is_file():
        raise ConfigurationError(
            f"there is no {script.name} beside {str(path)!r}.",
            why="a YAML file only holds settings; the script of the same name does the work.",
            fix="keep the two together, or name the script in the file: `recipe: classify.py`.",
        )
    return script


def _no_recipe(path: Path, found: str) -> ConfigurationError:
    return ConfigurationError(
        f"recipe {str(path)!r} has {found}",
        why="it must be a mapping of settings; `recipe`, if it is there, names a script in the same folder.",
        fix="`hf-dp recipes copy classify_full DIRECTORY` gives one that shares another's script.",
    )


def _outcome(values: dict[str, Any], flags: list[str]) -> Outcome:
    # It reads the record with dp_accounting, which takes most of a second to import.
    from hf_dp.cli.outcome import Outcome, output_dir

    return Outcome(output_dir(values, flags))


@contextmanager
def _as_the_main_program(script: Path, arguments: list[str]) -> Iterator[None]:
    """As if by `python script arguments`: recipes read sys.argv and import their neighbours."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent.absolute())]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
