"""What importing the package costs, and that its public names are there."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.version import Version

import hf_dp
from hf_dp.versions import library_versions

ROOT = Path(__file__).resolve().parents[1]


# In an order in which none brings what must be absent of a later one.
IMPORTS = {
    "import hf_dp": ["torch", "transformers", "dp_accounting"],
    "import hf_dp.cli": [
        *("torch", "transformers", "dp_accounting", "huggingface_hub", "matplotlib", "numpy", "yaml"),
    ],
    "from hf_dp import PrivacyConfig": ["torch", "transformers"],
    "import hf_dp.audit": ["torch", "transformers", "datasets"],
    "import hf_dp.accounting": ["torch", "transformers"],
    "import hf_dp.hub": ["torch", "transformers", "peft"],
    "from hf_dp import load_report": ["torch", "transformers", "peft"],
    "import hf_dp.per_example": ["transformers", "accelerate", "peft", "datasets"],
}


@pytest.fixture(scope="module")
def brought() -> dict[str, list[str]]:
    """What was there after each of them, in one interpreter: this one has long imported everything."""
    code = f"import sys\nfor statement in {list(IMPORTS)!r}:\n    exec(statement)\n    print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {statement: line.split() for statement, line in zip(IMPORTS, result.stdout.splitlines(), strict=True)}


@pytest.mark.parametrize(("statement", "absent"), IMPORTS.items())
@pytest.mark.slow
def test_an_import_brings_only_what_it_needs(brought: dict[str, list[str]], statement: str, absent: list[str]) -> None:
    assert "hf_dp" in brought[statement]
    assert not set(absent) & set(brought[statement])


def test_every_public_name_is_there_and_listed() -> None:
    for name in hf_dp.__all__:
        assert getattr(hf_dp, name) is not None
    assert set(hf_dp.__all__) <= set(dir(hf_dp))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hf_dp' has no attribute 'DPTrainr'"):
        hf_dp.DPTrainr  # noqa: B018


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+(\.\d+)*([.+][0-9a-z.]+)?", hf_dp.__version__)
    # Of the code that runs: what was installed once, or not at all, may have been another checkout's.
    assert f'__version__ = "{library_versions()["hf_dp"]}"' in (ROOT / "hf_dp" / "__init__.py").read_text()


def test_the_bounds_of_every_dependency_are_what_the_tests_install() -> None:
    def pinned(name: str) -> dict[str, Version]:
        lines = (line.partition("==") for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
        return {package: Version(version) for package, equal, version in lines if equal and package[0] != "#"}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    oldest, newest = pinned("constraints-oldest.txt"), pinned("constraints.txt")
    # Those of `make oldest`.
    required = [
        Requirement(line)
        for line in project["dependencies"] + extras["dev"] + extras["docs"] + extras["trl"] + extras["secure"]
    ]
    assert len(required) > 20
    for line in extras["bench"] + extras["quantized"]:
        assert newest[Requirement(line).name] in Requirement(line).specifier, line
    # `make dist` builds in the environment of the tests.
    system = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    assert set(system["requires"]) < set(extras["dev"])
    assert set(oldest) == {requirement.name for requirement in required}
    for requirement in required:
        lowest = [Version(bound.version) for bound in requirement.specifier if bound.operator == ">="]
        assert lowest == [oldest[requirement.name]], requirement
        assert newest[requirement.name] in requirement.specifier
    said = [
        " and ".join(
            f"{name} {pins[name.lower()].major}.{pins[name.lower()].minor}" for name in ("torch", "Transformers")
        )
        for pins in (oldest, newest)
    ]
    start = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    runs = f"`make test` runs the tests with {said[1]}, `make oldest` with {said[0]}, the oldest that are allowed."
    assert runs in start


def test_what_a_message_says_to_install_is_the_extra_that_it_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    said = "".join(
        path.read_text(encoding="utf-8") for room in ("hf_dp", "recipes") for path in (ROOT / room).rglob("*.py")
    )
    named = re.findall(r"pip install '([^'{]+)'(?: \(the extra '(\w+)'\))?", said)
    assert {extra for _, extra in named} == {"secure", "quantized"}
    for requirement, extra in named:
        assert requirement in extras[extra]


def test_type_information_is_shipped() -> None:
    assert resources.files("hf_dp").joinpath("py.typed").is_file()


def test_links_of_the_readme_lead_somewhere_without_the_repository() -> None:
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    (link,) = hooks["fancy-pypi-readme"]["substitutions"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.sub(link["pattern"], link["replacement"], readme)
    for ours, theirs in zip(*(re.findall(r"\]\(([^)]*)\)", text) for text in (readme, shown)), strict=True):
        assert (ROOT / ours.partition("#")[0]).is_file(), ours
        assert theirs == f"{link['replacement'].removeprefix('](')}{ours}"
    assert re.sub(link["pattern"], link["replacement"], "](https://a.b) ](#c)") == "](https://a.b) ](#c)"


def test_no_text_names_a_package_that_is_on_no_index() -> None:
    files = [
        *ROOT.glob("*.md"),
        *(path for name in ("docs", "hf_dp", "recipes") for path in (ROOT / name).rglob("*.*")),
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in {".md", ".py", ".yaml"}}
    assert len(texts) > 50
    for path, text in texts.items():
        assert not re.search(r"install (-\S+ )*['\"]?hf[-_]dp", text), path
    # Where a first upload changes a line.
    found = {path.relative_to(ROOT).as_posix() for path, text in texts.items() if "pip install ." in text}
    assert found == {"README.md", "docs/index.md", "hf_dp/hub/record.py"}


def test_what_is_packed_is_what_is_tracked_and_never_data_beside_it(tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("no checkout: what is in the source distribution is what is here")
    own = ["my.csv", "out/privacy.json", "out/model.safetensors", "out/text.txt"]
    strays = [f"{room}/{name}" for room in ("hf_dp", "recipes", "recipes/common", "tests", "docs") for name in own]
    for name in (*listed, *strays, "recipes/mine/mine.py", "scripts/a.jsonl", "train.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    always = {"pyproject.toml", "LICENSE", ".gitignore"}
    source = {file.relative_path for file in SdistBuilder(str(tmp_path)).recurse_included_files()}
    assert source | always == set(listed)
    recipes: dict[str, Any] = {"force_include": {}}
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["Recipes"]
    hook(str(tmp_path), {}, None, None, "", "wheel").initialize("standard", recipes)
    wheel = {file.relative_path for file in WheelBuilder(str(tmp_path)).recurse_included_files()}
    wheel |= {Path(file).relative_to(tmp_path).as_posix() for file in recipes["force_include"]}
    assert wheel == {name for name in listed if name.startswith(("hf_dp/", "recipes/"))}
