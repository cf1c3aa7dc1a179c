"""Which versions compute here: read in one place."""

from __future__ import annotations

from importlib import metadata

_LIBRARIES = ("hf-dp", "dp-accounting")


def version(distribution: str) -> str:
    """Of an installed distribution; "0+uninstalled" of one that is not, such as a source tree on the path."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "0+uninstalled"


def library_versions() -> dict[str, str]:
    """Of what computed epsilon: `hf_dp` and `dp_accounting`."""
    return {name.replace("-", "_"): version(name) for name in _LIBRARIES}
