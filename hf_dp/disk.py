"""Files that last: written to the disk itself, and a full disk that is called so."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The system's words through libraries in Rust, and torch's own for a write that was cut short.
_SAID = (
    "os error 27", "os error 28", "os error 122", "unexpected pos", "PytorchStreamWriter failed", "file write failed",
)  # fmt: skip


def flush(folder: Path) -> None:
    """Writes what lies in `folder` to its disk: renamed before that, files could be empty after a loss of power."""
    for path in _all_in(folder):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process's, renamed meanwhile
            continue
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot
                raise
        finally:
            os.close(descriptor)


def _all_in(folder: Path) -> Iterator[str]:
    # Not by `rglob`, which before Python 3.13 fails where another process takes a folder away meanwhile.
    for place, _, names in os.walk(folder, topdown=False):
        yield from (os.path.join(place, name) for name in names)
        yield place


@contextmanager
def full_disk_is_named(folder: Path, kept: str) -> Iterator[None]:
    """Calls a full disk one, whatever the library that met it says.

    Args:
        folder: written into.
        kept: what is safe all the same, for the message.

    Raises:
        OSError: (ENOSPC) in place of the library's error.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
        what = f"No space to write ({free:,} bytes are free on this disk). {kept}"
        raise OSError(errno.ENOSPC, what, str(folder)) from error


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(words in str(error) for words in _SAID):
            return True
        error = error.__cause__ or error.__context__
    return False
