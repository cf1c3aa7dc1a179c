"""What is built: installed without the repository it has its recipes, and its source distribution has its tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hf_dp
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
# What lies in a checkout and is nobody's.
STRAYS = ("recipes/my_private.csv", "recipes/out/x.safetensors", "hf_dp/out/x.csv", "tests/my.csv", "docs/my.json")


def run(*command: str, cwd: Path, path: Path) -> str:
    """What a command says, run in a folder by this interpreter, with a folder in front of what it imports from."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    checkout = tmp_path_factory.mktemp("checkout") / "hf-dp"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "out", "site", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    for name in STRAYS:
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("private")
    # As `make dist` does, and the wheel from the checkout as well, as `pip install .` does.
    for kind in ((), ("--wheel", "--outdir", str(folder / "direct"))):
        path = Path(os.environ.get("PYTHONPATH", ""))
        run("-m", "build", "--no-isolation", "--outdir", str(folder), *kind, cwd=checkout, path=path)
    return folder


@pytest.fixture(scope="module")
def site(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed; all that it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = dist.glob("*.whl")
    run(
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--target",
        str(folder),
        str(wheel),
        cwd=dist,
        path=dist,
    )
    return folder


def test_a_wheel_has_the_package_and_the_recipes_and_no_data(dist: Path) -> None:
    (wheel,), (direct,), (source,) = dist.glob("*.whl"), dist.glob("direct/*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(zipfile.ZipFile(direct).namelist()) == names
    with tarfile.open(source) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert "recipes/common/arguments.py" in packed
    assert not packed & set(STRAYS)
    package = {name for name in names if not name.startswith("hf_dp-")}
    listed = {
        path.relative_to(ROOT).as_posix()
        for room in ("hf_dp", "recipes")
        for path in (ROOT / room).rglob("*.*")
        if path.is_file() and path.suffix in {".py", ".yaml", ".typed"}
    }
    assert package == {re.sub("^recipes/", "hf_dp/_recipes/", name) for name in listed}
    assert {Path(name).suffix for name in package} == {".py", ".yaml", ".typed"}


def test_links_of_what_an_index_shows_lead_to_this_version(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    shown = zipfile.ZipFile(wheel).read(f"hf_dp-{hf_dp.__version__}.dist-info/METADATA").decode()
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(links) > 15
    for link in links:
        file = re.fullmatch(
            rf"https://github\.com/[\w/-]+/blob/v{re.escape(hf_dp.__version__)}/([\w./]+)(?:#.*)?", link
        )
        assert file is not None, link
        assert (ROOT / file[1]).is_file(), link


def test_recipes_are_listed_copied_and_run_without_the_repository(site: Path, tmp_path: Path) -> None:
    command = str(site / "bin" / "hf-dp")
    where = run("-c", "import hf_dp; print(hf_dp.__file__)", cwd=tmp_path, path=site)
    assert Path(where.strip()).is_relative_to(site)
    assert "causal_lm, causal_lm_lora\n" in run(command, "recipes", "list", cwd=tmp_path, path=site)
    assert "--head_noise" in run(command, "train", "classify", "--help", cwd=tmp_path, path=site)
    run(command, "recipes", "copy", "causal_lm", "mine", cwd=tmp_path, path=site)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    flags = ["--text_file", "text.txt", "--use_cpu", "true", "--smoke", "true", "--privacy_seed", "1"]
    said = [
        run(command, "train", recipe, *flags, "--output_dir", out, cwd=tmp_path, path=site)
        for recipe, out in (("causal_lm", "one"), ("mine/causal_lm.yaml", "two"))
    ]
    assert all("epsilon" in each for each in said)
    one, two = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "one", "text.txt", "two"]


def test_a_source_distribution_runs_its_own_tests(dist: Path, tmp_path: Path) -> None:
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    tests = ["tests/clipping", "tests/docs/test_habits.py", "tests/docs/test_workflows.py", "tests/test_package.py"]
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=folder, path=folder)
    assert re.search(r"\d+ passed", said), said
    assert "failed" not in said
