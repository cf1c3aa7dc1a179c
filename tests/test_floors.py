"""The floors of docs/architecture.md, read off the imports: down only, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "hf_dp"

# Of each room, and of each module that stands in none.
FLOORS = {
    "errors": 0,
    "launched": 0,
    "disk": 0,
    "places": 0,
    "figures": 0,
    "ranks": 0,
    "randomness": 0,
    "versions": 0,
    "agreement": 0,
    "config": 1,
    "losses": 1,
    "per_example": 1,
    "audit": 2,
    "accounting": 2,
    "units": 2,
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
# What one can read in one sitting. A table of rules is looked up in, not read.
LONGEST = 300
TABLES_OF_RULES = {"parts/re_attention/rules.py"}
# What is not the package: many short cases of one subject.
LONGEST_OUTSIDE = 400

# A part is known by its field of the promise, its class and its words; code and comments of other rooms have none.
PART = re.compile(
    r"re[_ -]?attention|attention ?noise|sparse[_ -]?(embedding|training)|token[_ ](frequenc|presence)|\bfest|adafest",
    re.IGNORECASE,
)
# The settings are the promise; the public names; and what files of version 1 say, which are read for ever.
MAY_NAME_PARTS = {"parts", "config", "__init__.py", "hub/version1.py"}


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


def named_parts(package: Path) -> list[str]:
    """Every line that names a part of a training outside the rooms that may."""
    return [
        f"{name}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if not {name := path.relative_to(package).as_posix(), name.split("/")[0]} & MAY_NAME_PARTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PART.search(line)
    ]


def module_of(path: Path, package: Path) -> str:
    """The first name below the package: "per_example" for per_example/rule.py, "" for the package's own __init__."""
    first = path.relative_to(package).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def _first(node: ast.Attribute) -> str:
    return ast.unparse(node.value).split(".")[0]


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@functools.cache
def imports_of(path: Path, package: Path) -> list[Import]:
    """All imports of a file, also those inside functions; relative ones and import_module("hf_dp...") made absolute."""
    return list(_imports_in(path.read_text(encoding="utf-8"), path, package))


def _imports_in(text: str, path: Path, package: Path) -> Iterator[Import]:
    here, uses_transformers = (package.name, *path.relative_to(package).with_suffix("").parts), "transformers" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (parent, node.module)))
            yield from (Import(node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node.func) in {"import_module", "__import__"}:
            yield from (
                Import(node.lineno, argument.value, None)
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            )
        elif uses_transformers and isinstance(node, ast.Attribute) and _first(node) == "transformers":
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


def circle(package: Path) -> list[str]:
    """Modules of which each imports the next, and the last the first; none where there is no circle.

    Imports inside functions and for type checkers count too, but for those of the package's own __init__, which names
    for type checkers what it loads when it is first used.
    """
    files = {name_of(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {
        name: {
            other
            for found in imports_of(path, package)
            for other in (found.module, f"{found.module}.{found.name}")
            if other in files and other != name
        }
        for name, path in files.items()
        if name != package.name
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def name_of(path: Path, package: Path) -> str:
    """As it is imported: "hf_dp.per_example.rules", and "hf_dp.per_example" for its __init__."""
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def too_long(folder: Path, longest: int = LONGEST) -> list[str]:
    """Files that nobody reads in one sitting, with their lengths."""
    lengths = {
        path.relative_to(folder).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(folder.rglob("*.py"))
    }
    return [f"{name}: {n} lines" for name, n in lengths.items() if n > longest and name not in TABLES_OF_RULES]


def in_the_tree() -> set[str]:
    """The modules and folders that the tree of docs/architecture.md shows, folders with a "/" at their end."""
    tree = (
        (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1].strip().splitlines()
    )
    found, above = set(), [""]
    for line in tree[1 : tree.index(next(line for line in tree if line.startswith("recipes/")))]:
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        above = [*above[:depth], name]
        found.add("".join(above))
    return found


def test_imports_go_down_the_floors_only() -> None:
    assert violations(PACKAGE) == []


def test_parts_are_named_in_their_room_only() -> None:
    assert named_parts(PACKAGE) == []


def test_warnings_are_said_in_one_way() -> None:
    """By one rank, and above a progress bar."""
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in files.items() if re.search(r"\blog\w*\.warn", text)} == {"ranks.py"}


def test_no_import_leads_back_to_where_it_stands() -> None:
    assert circle(PACKAGE) == []


def test_every_file_can_be_read_in_one_sitting() -> None:
    assert too_long(PACKAGE) == []


@pytest.mark.parametrize("folder", ["tests", "scripts", "recipes"])
def test_so_can_every_test_script_and_recipe(folder: str) -> None:
    assert (PACKAGE.parent / folder).is_dir()
    assert too_long(PACKAGE.parent / folder, LONGEST_OUTSIDE) == []


def test_the_tree_that_is_drawn_is_the_package() -> None:
    drawn = in_the_tree()
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    there = modules | {f"{path.relative_to(PACKAGE).as_posix()}/" for path in PACKAGE.rglob("*/")}
    assert drawn - there == set()
    # Of a folder drawn without a file the files are its own affair.
    closed = {name for name in drawn if name.endswith("/") and not any(o.startswith(name) for o in drawn - {name})}
    own = {name for name in modules if name.endswith("/__init__.py") or any(name.startswith(f) for f in closed)}
    assert modules - drawn - own == set()


def write_tree(root: Path, **sources: str) -> Path:
    """A package hf_dp with every known module empty but for `sources`.

    In a name "__" stands for a folder, and at its end for the folder's own __init__.
    """
    package = root / "hf_dp"
    folders = {name.split("__")[0] for name in sources if "__" in name}
    for name, source in {**dict.fromkeys(FLOORS.keys() - folders, ""), **sources}.items():
        *parents, last = name.split("__")
        path = package.joinpath(*parents, f"{last or '__init__'}.py")
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


@pytest.mark.parametrize(
    "line",
    [
        "if config.re_attention is not None:", "# Re-Attention needs it.", "import AttentionNoise", "sparse-embedding",
        "sparse: SparseTraining", "rows of DP-FEST", "AdaFest()", "token_frequencies = None", "# of the token presence",
    ],
)  # fmt: skip
def test_a_part_that_is_named_elsewhere_is_found(tmp_path: Path, line: str) -> None:
    sources = {"step__a": f"x = 1\n{line}\n", "config__a": line, "parts__a": line, "hub__version1": line}
    assert named_parts(write_tree(tmp_path, **sources)) == [f"step/a.py:2: {line}"]


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        ({"noise__a": "from hf_dp.noise.b import x\n", "noise__b": "import hf_dp.noise.a\n"}, {"noise.a", "noise.b"}),
        ({"noise__a": "def f():\n    from .b import x\n", "noise__b": "from . import a\n"}, {"noise.a", "noise.b"}),
        (
            {"noise__a": "from hf_dp.noise.b import x\n", "noise__b": "if TYPE_CHECKING:\n    from .a import A\n"},
            {"noise.a", "noise.b"},
        ),
        ({"noise__": "from .a import x\n", "noise__a": "from hf_dp.noise import b\n"}, {"noise", "noise.a"}),
        (
            {"noise__a": "from .b import x\n", "noise__b": "from .c import x\n", "noise__c": "from .a import x\n"},
            {"noise.a", "noise.b", "noise.c"},
        ),
    ],
)
def test_circles_are_found(tmp_path: Path, sources: dict[str, str], names: set[str]) -> None:
    package = write_tree(tmp_path, **sources)
    assert set(circle(package)) == {f"hf_dp.{name}" for name in names}


def test_long_files_are_found(tmp_path: Path) -> None:
    line = "x = 1\n"
    package = write_tree(tmp_path, noise__a=300 * line, noise__b=301 * line, parts__re_attention__rules=301 * line)
    assert too_long(package) == ["noise/b.py: 301 lines"]
    assert too_long(package, 301) == []
