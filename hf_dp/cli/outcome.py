"""What `hf-dp train --json` prints: what a recipe has saved about its run."""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import RECORD_FILE, load_report


def output_dir(settings: dict[str, Any], flags: list[str]) -> Path:
    """Where a recipe will save: the flag, which wins, or the setting in its YAML file.

    Raises:
        ConfigurationError: neither is there.
    """
    found = settings.get("output_dir")
    for flag, value in zip_longest(flags, flags[1:]):
        name, equals, attached = flag.partition("=")
        if name in ("--output_dir", "--output-dir"):
            found = attached if equals else value
    if found is None:
        raise ConfigurationError(
            "--json, and no output_dir.",
            why="the report and the metrics are read from where the recipe saves its model.",
            fix="give --output_dir, or put output_dir into the YAML file.",
        )
    return Path(str(found))


class Outcome:
    """Made before a run; `read` after it gives what that run, and no earlier one, has saved.

    Args:
        folder: the run's output folder, which need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._signatures()

    def _signatures(self) -> dict[str, tuple[int, ...]]:
        """The files in which a run speaks of itself, with what changes when one is written again."""
        paths = [self._folder / RECORD_FILE, self._folder / "results.json", *self._folder.glob("*_results.json")]
        paths += [path for path in self._folder.glob(f"*/{RECORD_FILE}") if "checkpoint-" not in path.parent.name]
        # To that one Trainer adds what earlier runs have left in it.
        chosen = [path for path in paths if path.is_file() and path.name != "all_results.json"]
        found = {path.relative_to(self._folder).as_posix(): path.stat() for path in chosen}
        return {name: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in found.items()}

    def read(self) -> dict[str, Any]:
        """The folder, the privacy report of the saved model, and what `results.json` and `trainer.save_metrics` hold.

        Where a recipe has saved a model in each of several folders, and none in this one, `reports` has theirs.

        Raises:
            LedgerError: the run has saved no model.
        """
        written = sorted(name for name, now in self._signatures().items() if self._before.get(name) != now)
        records = [name for name in written if name.endswith(RECORD_FILE)]
        if not records:
            raise LedgerError(
                f"the recipe has ended, and saved no model in {str(self._folder)!r}.",
                why=f"the report is read from its {RECORD_FILE}; an older one would speak of another run.",
                fix="let the script end with trainer.save_model().",
            )
        metrics: dict[str, Any] = {}
        for name in written:
            if name not in records:
                metrics |= json.loads((self._folder / name).read_text(encoding="utf-8"))
        if RECORD_FILE in records:
            report = {"report": load_report(self._folder).to_dict()}
        else:
            folders = [Path(name).parent for name in records]
            report = {"reports": {str(path): load_report(self._folder / path).to_dict() for path in folders}}
        return {"source": str(self._folder), **report, "metrics": metrics}
