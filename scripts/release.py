"""May this be released under a tag, from a repository? `make releasable`, before anything is built.

    python scripts/release.py v0.1.0 https://github.com/OWNER/NAME

Says what does not agree, and exits with 1: the version, CHANGELOG.md, CITATION.cff, what is left in changelog.d, and
the addresses in pyproject.toml. A wrong one would stand on the package index for ever.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """That of the package, from its source."""
    (found,) = re.findall(r'^__version__ = "(.*)"$', (root / "hf_dp/__init__.py").read_text(encoding="utf-8"), re.M)
    return str(found)


def addresses(root: Path = ROOT) -> list[str]:
    """Those that the package's metadata, the links of its README and CITATION.cff lead to."""
    cited = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))["repository-code"]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    links = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    linked = [link["replacement"].removeprefix("](") for link in links]
    return [cited, *project["project"]["urls"].values(), *linked]


def disagreements(tag: str, repository: str, root: Path = ROOT) -> list[str]:
    """What is not as a release with this tag, from this address, must have it."""
    found, released = [], version(root)
    if tag != f"v{released}":
        found.append(f"the tag is {tag}, the version {released}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", released):
        found.append(f"{released} is no version of a release")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## ", changes, flags=re.M)
    said = [section.partition("\n") for section in sections] or [("nothing", "", "")]
    dated = [re.fullmatch(r"\[(.*?)\] - (\d{4}-\d\d-\d\d)", heading.rstrip()) for heading, _, _ in said]
    newest, date = dated[0].groups() if dated[0] else (said[0][0], None)
    if newest != released or not date:
        found.append(f"CHANGELOG.md begins with {newest}, dated {date or 'nowhere'}: make changelog")
    found += [
        f"CHANGELOG.md has {heading} without a date: what stands there belongs to a release"
        for (heading, _, _), match in zip(said[1:], dated[1:], strict=True)
        if not match
    ]
    # Of no files at all towncrier makes a section that says so.
    if not re.search(r"^- ", said[0][2], re.M):
        found.append(f"CHANGELOG.md says nothing under {said[0][0]}: what changed is a list")
    found += [
        f"{path.name} is in changelog.d: make changelog" for path in sorted((root / "changelog.d").glob("*.*.md"))
    ]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if (citation["version"], str(citation["date-released"])) != (released, date):
        found.append(f"CITATION.cff has {citation['version']} of {citation['date-released']}")
    for address in addresses(root):
        if address != repository and not address.startswith(f"{repository}/"):
            found.append(f"{address} is named, and this is {repository}")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    problems = disagreements(*sys.argv[1:])
    sys.exit("\n".join(["Not to be released:", *problems]) if problems else None)
