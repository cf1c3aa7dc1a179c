"""Runs docs/tutorial.md up to its publishing, as a reader would, and keeps its figure.

    python scripts/tutorial.py --model build/smollm2 --figure docs/figures/tutorial.png

`make model` makes the model. The tests run the whole page, publishing included.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE, PUBLISHING = "HuggingFaceTB/SmolLM2-135M-Instruct", "## Publish"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2", help="from make model")
    parser.add_argument("--figure", type=Path, help="where loss and epsilon over the steps are drawn")
    given = parser.parse_args()
    model, figure = given.model.absolute(), given.figure and given.figure.absolute()
    page = ROOT / "docs" / "tutorial.md"
    text = page.read_text(encoding="utf-8").partition(PUBLISHING)[0]
    assert BASE in text
    text = text.replace(BASE, str(model))
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        namespace = {"__name__": "tutorial"}
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            source = "\n" * text[: block.start(1)].count("\n") + block[1]
            exec(compile(source, str(page), "exec"), namespace)
        if figure:
            shutil.copy("loss_and_epsilon.png", figure)
        os.chdir(ROOT)
    print(f"evaluation losses {namespace['losses']}, {(time.perf_counter() - begun) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
