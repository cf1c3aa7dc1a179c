"""What goes into a wheel beside the package: the recipes, so that `hf-dp train NAME` works without the repository."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Recipes(BuildHookInterface):
    """Not in an editable one, where a copy would grow old beside what it was copied from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["recipes"] = "hf_dp/_recipes"
