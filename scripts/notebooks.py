"""Makes the notebooks of the first two tutorials from their pages, so that the text exists once.

    python scripts/notebooks.py                                  without outputs where a page has changed
    python scripts/notebooks.py --execute classifier --base DIR  runs it with the model in a folder, and keeps outputs

What is run publishes nothing: names on the hub are looked for on a hub of this machine's own (tests/hub/server.py).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "notebooks"
PAGES = ("tutorial", "classifier")
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$\n?", re.M | re.S)
SITE = {
    "language_info": {"name": "python"},
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
}


def path_of(page: str) -> Path:
    """Where the notebook of a page lies."""
    return FOLDER / f"{page}.ipynb"


def notebook_of(text: str) -> Any:
    """A page as a notebook without outputs: Python as it is, commands after a `!`, all else as it is read."""
    cells, end = [], 0
    for block in BLOCK.finditer(text):
        cells += words(text[end : block.start()])
        kind, code = block.groups()
        code = code if kind == "python" else re.sub(r"^(?=\S)", "!", code, flags=re.M)
        cells.append(new_code_cell(code.rstrip("\n"), id=f"cell-{len(cells)}"))
        end = block.end()
    made = [*cells, *words(text[end:])]
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"  # the same whenever it is made
    return new_notebook(cells=made, metadata=SITE)


def words(text: str) -> list[Any]:
    """What is read between two snippets; links lead one folder up."""
    text = re.sub(r"\]\((?=[\w]+\.md|figures/)", "](../", text.strip("\n"))
    return [new_markdown_cell(text)] if text else []


def sources(notebook: Any) -> list[tuple[str, str]]:
    """What stands in each cell, outputs aside."""
    return [(cell["cell_type"], cell["source"]) for cell in notebook["cells"]]


def executed(notebook: Any, folder: Path, environment: dict[str, str]) -> Any:
    """The notebook, run from its first cell to its last in a folder; bars and warnings are left out of what it keeps.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", **environment}
    client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}})
    client.execute(env=given)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = tidied(cell["outputs"])
            cell["metadata"].pop("execution", None)  # times of day
    return notebook


def tidied(outputs: list[Any]) -> list[Any]:
    """What is worth keeping: what was printed in one piece, as it stands on a terminal in the end, and all displays."""
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.replace("\r\n", "\n")).split("\n")
    shown = [line.rpartition("\r")[2] for line in lines if not re.search(r"[\u2800-\u28ff]", line.rpartition("\r")[2])]
    text = "\n".join(shown)
    displays = [output for output in outputs if output["output_type"] != "stream"]
    return [*displays, *([new_output("stream", name="stdout", text=text)] if text.strip() else [])]


def of_this_machine(endpoint: str, token: str, folder: Path) -> dict[str, str]:
    """The environment in which the hub is one of this machine's own."""
    return {
        "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_CACHE": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--execute", choices=PAGES, help="the tutorial to run")
    parser.add_argument("--base", type=Path, help="the folder of the model that it starts from")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for page in PAGES:
        made = notebook_of((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
        if given.execute == page:
            sys.path.insert(0, str(ROOT))
            from tests.docs.bases import ENCODER, LANGUAGE_MODEL
            from tests.hub.server import TOKEN, Hub

            hub = Hub()
            hub.publish(LANGUAGE_MODEL if page == "tutorial" else ENCODER, given.base)
            with tempfile.TemporaryDirectory() as folder:
                made = executed(made, Path(folder), of_this_machine(hub.endpoint, TOKEN, Path(folder)))
            hub.close()
        elif path_of(page).exists() and sources(nbformat.read(path_of(page), 4)) == sources(made):
            continue
        nbformat.write(made, path_of(page))


if __name__ == "__main__":
    main()
