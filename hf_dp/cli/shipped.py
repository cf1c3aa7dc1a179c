"""The recipes that come with hf_dp: where they lie, and which there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigurationError

_PACKAGE = Path(__file__).resolve().parents[1]
# What tells their folder from another one of that name.
_SHARED = Path("common", "arguments.py")
# Where their data lies, seen from a checkout.
_DATA = Path("..", "shared", "data")


def shipped() -> Path:
    """Their folder: in the package, where it was installed, and beside it in a checkout.

    Raises:
        ConfigurationError: neither is there.
    """
    for folder in (_PACKAGE / "_recipes", _PACKAGE.parent / "recipes"):
        if (folder / _SHARED).is_file():
            return folder
    raise ConfigurationError(
        f"the hf_dp in {str(_PACKAGE)!r} has no recipes.",
        why="they are part of its wheel, and of a checkout of its source.",
        fix="install it from one of these, or give the path of a YAML file with its script beside it.",
    )


def named(recipe: str) -> Path:
    """The YAML file that is given by its path, or is of this name among those that come with hf_dp.

    Raises:
        ConfigurationError: no recipe has this name, or it is a script alone.
    """
    name = recipe.replace("-", "_")  # as options have it
    if not name.isidentifier():
        return Path(recipe)
    folder = shipped()
    path = folder / f"{name}.yaml"
    if path.is_file():
        return path
    if path.with_suffix(".py").is_file():
        raise ConfigurationError(
            f"the recipe {name!r} has no settings.",
            why="it is a script to be read, changed and started as one.",
            fix=f"`hf-dp recipes copy {name} DIRECTORY`, then python DIRECTORY/{name}.py.",
        )
    raise unknown(recipe, folder)


def without_data(error: ConfigurationError, recipe: Path, settings: Mapping[str, Any]) -> ConfigurationError:
    """A refusal of a recipe; of data that its YAML file names as all presets do, what to put in its place."""
    cause = error.__cause__
    if not (isinstance(cause, FileNotFoundError) and _DATA in Path(str(cause.filename)).parents):
        return error
    flags = [f"--{name} FILE" for name, value in settings.items() if _DATA in Path(str(value)).parents]
    return ConfigurationError(
        error.found,
        why="the settings name public data that does not come with hf_dp.",
        fix=f"give data of your own: {' '.join(flags)} (`hf-dp train {recipe.stem} --help` says of which form); or get "
        "this one, see docs/recipes.md. `hf-dp train sequential_recommendation` needs none: it makes its own.",
    )


def unknown(recipe: str, folder: Path) -> ConfigurationError:
    """No recipe of a folder has this name."""
    return ConfigurationError(
        f"no recipe is called {recipe!r}.",
        why="what runs is a recipe that comes with hf_dp, or a YAML file.",
        fix="choose one of `hf-dp recipes list`: "
        f"{', '.join(sorted(path.stem for path in folder.glob('*.yaml')))}; or give a path.",
    )
