"""Which files belong to a saved model. What privacy.json does not name is never published."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path, PurePosixPath
from types import TracebackType

from hf_dp.errors import LedgerError
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord

# What models, tokenizers and processors are saved as. Pickles hold arguments, optimizer and generator states.
_KINDS = {".safetensors", ".json", ".jinja", ".py", ".model", ".spm", ".tiktoken", ".codes", ".tokenizer"}
# Other texts and tables could be anybody's.
_NAMES = {"vocab.txt", "merges.txt", "dict.txt", "corpus.jsonl", "corpus.csv"}
# These hold losses, or belong to this machine.
_NEVER = ("trainer_state.json", "*results.json", "metrics.json", "_*", ".*")
_FEW = 4096  # bytes
_NEVER_INSIDE = ("checkpoint-*", "last-checkpoint", "runs", "_*", ".*")


def may_be_published(name: str) -> bool:
    """Whether a file of this name (a POSIX path) may be part of a published model, on systems of either case."""
    path = PurePosixPath(name.casefold())
    *folders, last = path.parts or ("",)
    return (
        (path.suffix in _KINDS or last in _NAMES)
        and not path.is_absolute()
        and not any(fnmatch.fnmatchcase(folder, pattern) for folder in folders for pattern in _NEVER_INSIDE)
        and not any(fnmatch.fnmatchcase(last, pattern) for pattern in _NEVER)
        and last not in (CARD_FILE.casefold(), RECORD_FILE)
    )


class SavedFiles:
    """Notices what is written into a directory: `with SavedFiles(directory) as saved: ...`, then `saved.names`.

    A run's output directory may hold anything; what belongs to the model is what saving it wrote. A file that only grew
    at its end meanwhile is a log of somebody's, such as one of Transformers' own messages.

    Attributes:
        names: POSIX paths of the files that belong to the model and may be published.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self.names: list[str] = []

    def __enter__(self) -> SavedFiles:
        self._make_old()
        self._before = _signatures(self._directory)
        logs = [name for name in self._before if _may_be_a_log(name)]
        self._ends = {name: _ends(self._directory / name, self._before[name][1]) for name in logs}
        return self

    def _make_old(self) -> None:
        """Gives the files of an earlier save an old time, so that the coarsest clock shows that one is rewritten."""
        try:
            earlier = PrivacyRecord.from_json((self._directory / RECORD_FILE).read_bytes())
        except (OSError, LedgerError):
            return
        for path in (self._directory / name for name in earlier.files if may_be_published(name)):
            if path.is_file():
                os.utime(path, (0, 0))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = _signatures(self._directory)
        written = sorted(name for name, signature in after.items() if self._before.get(name) != signature)
        self.names = [name for name in written if not self._only_grew(name)]

    def _only_grew(self, name: str) -> bool:
        path, size = self._directory / name, self._before.get(name, (0, 0))[1]
        return 0 < size < path.stat().st_size and self._ends.get(name) == _ends(path, size)


def _ends(path: Path, size: int) -> bytes:
    """The first and the last few bytes of the first `size`: files in the way may be large."""
    try:
        with path.open("rb") as file:
            first = file.read(min(size, _FEW))
            file.seek(max(0, size - _FEW))
            return first + file.read(min(size, _FEW))
    except PermissionError:
        return b""


def _may_be_a_log(name: str) -> bool:
    # The others are written whole, and may be large.
    return PurePosixPath(name).suffix not in (".safetensors", ".json")


def _signatures(directory: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for folder, folders, files in os.walk(directory):
        here = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if may_be_published((here / name / "any.json").as_posix())]
        for name in files:
            # Links that lead nowhere, and pipes, are nobody's model.
            if may_be_published((path := here / name).as_posix()) and (directory / path).is_file():
                stat = (directory / path).stat()
                found[path.as_posix()] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return found
