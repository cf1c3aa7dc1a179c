"""The floors of docs/architecture.md, read off the imports: down only, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hf_dp"

# Of each room, and of each module that stands in none.
FLOORS = {
    "errors": 0,
    "launched": 0,
    "disk": 0,
    "ranks": 0,
    "randomness": 0,
    "versions": 0,
    "agreement": 0,
    "config": 1,
    "losses": 1,
    "per_example": 1,
    "accounting": 2,
    "clipping": 3,
    "sampling": 3,
    "noise": 3,
    "planning": 3,
    "hub": 3,
    "step": 4,
    "data": 4,
    "parts": 5,
    "training": 6,
    "demo": 7,
    "cli": 8,
}
# (importer, imported) on one floor. Everything else on a floor is a stranger to its neighbours.
PEERS = {
    ("launched", "errors"), ("ranks", "errors"), ("ranks", "launched"), ("randomness", "errors"),
    ("randomness", "ranks"), ("agreement", "errors"), ("agreement", "launched"), ("agreement", "ranks"),
}  # fmt: skip
# Libraries that a module must not import itself. What it imports through others is seen in test_package.py.
FORBIDDEN = {
    "errors": {"torch", "transformers"},
    "config": {"torch", "transformers"},
    "accounting": {"torch", "transformers"},
    "hub": {"torch"},
    "per_example": {"transformers", "accelerate", "peft", "datasets"},
}
TRAINER_NAMES = {"Trainer", "Seq2SeqTrainer", "TrainerCallback"}
MAY_IMPORT_TRAINER = {"training", "demo", "cli"}


class Import(NamedTuple):
    """`import module`, or `from module import name`."""

    line: int
    module: str
    name: str | None


def violations(package: Path) -> list[str]:
    """Every import under `package` that breaks a floor, one line of text each."""
    return [
        f"{path.relative_to(package)}:{found.line}: {problem}"
        for path in sorted(package.rglob("*.py"))
        for found in imports_of(path, package)
        for problem in problems(module_of(path, package), found, package)
    ] + [
        f"{path.relative_to(package)}: {module} has no floor; give it one in FLOORS and in docs/architecture.md"
        for path in sorted(package.rglob("*.py"))
        if (module := module_of(path, package)) and module not in FLOORS
    ]


def module_of(path: Path, package: Path) -> str:
    """The first name below the package: "per_example" for per_example/rules.py, "" for the package's own __init__."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """All imports of a file, also those inside functions; relative ones and import_module("hf_dp...") made absolute."""
    here = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            yield from (Import(node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            yield from (
                Import(node.lineno, argument.value, None)
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[0] == "transformers":
            yield Import(node.lineno, ast.unparse(node.value), node.attr)


def problems(importer: str, found: Import, package: Path) -> Iterator[str]:
    library, *inner = found.module.split(".")
    if library != package.name:
        yield from library_problems(importer, found, library)
        return
    if importer == "":
        return  # the package's __init__ names what it loads lazily; test_package.py shows that it loads nothing else
    imported = inner[0] if inner else found.name
    if imported == "__version__":
        return
    if imported is None or not ((package / f"{imported}.py").exists() or (package / imported).is_dir()):
        yield f"{importer} imports {imported or package.name} from the package itself; import it from its own module"
    elif importer in FLOORS and imported in FLOORS and importer != imported:
        above, below = FLOORS[importer], FLOORS[imported]
        if above < below:
            yield f"{importer} (F{above}) imports {imported} (F{below}): up"
        elif above == below and (importer, imported) not in PEERS:
            yield f"{importer} imports {imported}: both are on F{above}"


def library_problems(importer: str, found: Import, library: str) -> Iterator[str]:
    if library in FORBIDDEN.get(importer, ()):
        yield f"{importer} imports {library}"
    if library == "transformers" and importer not in MAY_IMPORT_TRAINER:
        from_trainer_module = found.module.startswith("transformers.trainer")
        if found.name in TRAINER_NAMES or (from_trainer_module and not found.module.endswith(("_utils", "_pt_utils"))):
            yield f"{importer} imports {found.name or found.module}: only {', '.join(sorted(MAY_IMPORT_TRAINER))} may"


def test_imports_go_down_the_floors_only() -> None:
    assert violations(PACKAGE) == []


def write_tree(root: Path, **sources: str) -> Path:
    """A package hf_dp with every known module empty but for `sources`; "__" in a name stands for a folder."""
    package = root / "hf_dp"
    for name, source in {**dict.fromkeys(FLOORS, ""), **sources}.items():
        path = package / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    (package / "__init__.py").write_text("from hf_dp.training.trainer import DPTrainer\n", encoding="utf-8")
    return package


def test_a_good_tree_has_no_violation(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path,
        config="from hf_dp.errors import HfDpError\n",
        noise="import torch\nfrom hf_dp.randomness import Entropy\n",
        losses="from transformers import PreTrainedModel\n",
        per_example__rules="import torch\nfrom hf_dp.per_example.factors import Outer\nfrom .factors import Dense\n",
        step="from hf_dp import noise, sampling\nimport hf_dp.step.clipped_sum\n",
        training="from transformers import Trainer\nfrom hf_dp.step.plan import A\nfrom hf_dp import __version__\n",
    )
    (package / "per_example.py").unlink()
    assert violations(package) == []


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"noise": "from hf_dp.step import private_gradient\n"}, "noise.py:1: noise (F3) imports step (F4): up"),
        ({"config": "def f():\n    import hf_dp.accounting\n"}, "config.py:2: config (F1) imports accounting (F2): up"),
        ({"data": "from hf_dp import training\n"}, "data.py:1: data (F4) imports training (F6): up"),
        ({"data": "from . import training\n"}, "data.py:1: data (F4) imports training (F6): up"),
        ({"hub": "import_module('hf_dp.step')\n"}, "hub.py:1: hub (F3) imports step (F4): up"),
        ({"demo__a": "from ..cli import app\n"}, "demo/a.py:1: demo (F7) imports cli (F8): up"),
        ({"noise": "from hf_dp.clipping import f\n"}, "noise.py:1: noise imports clipping: both are on F3"),
        ({"data": "import hf_dp.step\n"}, "data.py:1: data imports step: both are on F4"),
        ({"hub": "from hf_dp import DPTrainer\n"}, "hub imports DPTrainer from the package itself"),
        ({"hub": "import hf_dp\n"}, "hub imports hf_dp from the package itself"),
        ({"wrapper": ""}, "wrapper.py: wrapper has no floor"),
        ({"wrapper__x": ""}, "wrapper/x.py: wrapper has no floor"),
        ({"accounting": "import torch.nn\n"}, "accounting.py:1: accounting imports torch"),
        ({"config": "from torch import Tensor\n"}, "config.py:1: config imports torch"),
        ({"per_example__a": "import transformers\n"}, "per_example/a.py:1: per_example imports transformers"),
        ({"step": "from transformers import Trainer\n"}, "step.py:1: step imports Trainer: only"),
        ({"hub": "from transformers.trainer import x\n"}, "hub.py:1: hub imports x: only"),
        ({"hub": "import transformers.trainer\n"}, "hub.py:1: hub imports transformers.trainer: only"),
        ({"hub": "import transformers\nclass A(transformers.Trainer): pass\n"}, "hub.py:2: hub imports Trainer: only"),
    ],
)
def test_the_checker_can_fail(tmp_path: Path, sources: dict[str, str], message: str) -> None:
    found = violations(write_tree(tmp_path, **sources))
    assert len(found) == 1
    assert message in found[0]
