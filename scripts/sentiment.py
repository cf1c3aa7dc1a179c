"""Three small tasks with two classes, as CSV files: python scripts/sentiment.py vaderSentiment-3.3.2.tar.gz FOLDER

The source distribution of vaderSentiment (`pip download --no-deps --no-binary :all: vaderSentiment==3.3.2`, MIT) has
snippets of film reviews, tweets and sentences of product reviews, with the mean of at least twenty people's ratings
from -4 to 4 (Hutto and Gilbert 2014, doi:10.1609/icwsm.v8i1.14550). Those rated between -0.25 and 0.25 are left out; a
fifth, drawn by a seed, is for the test.
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
import tarfile
from pathlib import Path

_TASKS = {"movie": "movieReviewSnippets", "tweets": "tweets", "amazon": "amazonReviewSnippets"}
_INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
_LEAST = 0.25


def _member(archive: tarfile.TarFile, end: str) -> bytes:
    (name,) = (name for name in archive.getnames() if name.endswith(end) and "/._" not in name)
    found = archive.extractfile(name)
    assert found is not None
    return found.read()


def main(source: str, folder: str) -> None:
    """Writes TASK_train.csv and TASK_test.csv of each, and labels.json."""
    out, draw = Path(folder), random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, _INNER))) as inner:
        texts = {task: _member(inner, f"{name}_GroundTruth.txt").decode("latin-1") for task, name in _TASKS.items()}
    for task, text in texts.items():
        lines = [line.split("\t") for line in io.StringIO(text, newline=None)]
        rated = [(line[2].strip(), float(line[1])) for line in lines if len(line) > 2]
        rows = [(words, "positive" if value > 0 else "negative") for words, value in rated if abs(value) > _LEAST]
        draw.shuffle(rows)
        tests = len(rows) // 5
        for split, chosen in (("test", rows[:tests]), ("train", rows[tests:])):
            with (out / f"{task}_{split}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("text", "category"), *chosen])
    (out / "labels.json").write_text(json.dumps(["negative", "positive"]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
