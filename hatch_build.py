"""What goes into a wheel beside the package: the recipes, so that `hf-dp train NAME` works without the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Data of one's own, and what was trained on it, lie in that folder too. In pyproject.toml the same for sources.
KINDS = ("*.py", "*.yaml", "common/**/*.py")


class Recipes(BuildHookInterface):
    """Not in an editable one, where a copy would grow old beside what it was copied from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            folder = Path(self.root, "recipes")
            for path in (path for kind in KINDS for path in folder.glob(kind)):
                build_data["force_include"][str(path)] = f"hf_dp/_recipes/{path.relative_to(folder).as_posix()}"
