"""Is this the dataset that the checkpoint was trained on? A keyed digest answers without giving the data away."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_dp.errors import LedgerError

# Trainer's uploads leave out files in the output directory whose names begin with an underscore.
KEY_FILE = "_hf_dp_fingerprint_key"
_KEY_BYTES = 32
_ROWS = 64


def fingerprint_key(output_dir: str | Path, create: bool) -> bytes | None:
    """The key of this output directory; without it a digest of private rows could be tested against guesses.

    Args:
        output_dir: where checkpoints go.
        create: whether to make a key where there is none.

    Raises:
        LedgerError: there is something in its place that cannot be read.
    """
    path = Path(output_dir) / KEY_FILE
    if not path.exists():
        if not create:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never half a key: a short one would be no secret. mkstemp's files are readable by their owner only.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=KEY_FILE)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        os.replace(temporary, path)
    try:
        key = path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"the key {str(path)!r} cannot be read ({error}).",
            why="without it nobody can tell whether a checkpoint is of this data, and as it was saved.",
            fix="put the key back, or use a new output_dir.",
        ) from error
    return key if len(key) == _KEY_BYTES else None


def fingerprint(dataset: Any, key: bytes) -> str | None:
    """A keyed digest of the size and of rows spread over `dataset`; None if rows change from one look to the next."""
    first, second = (_digest(dataset, key) for _ in range(2))
    return first if first == second else None


def _digest(dataset: Any, key: bytes) -> str:
    n = len(dataset)
    digest = hashlib.blake2b(key=key, digest_size=16)
    digest.update(str(n).encode())
    for index in sorted({i * (n - 1) // (_ROWS - 1) for i in range(_ROWS)} if n > _ROWS else range(n)):
        for part in _parts(dataset[index]):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """The content of a row, the same in every process: no addresses, as in the repr of an image, and no ellipsis."""
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, (list, tuple)):
        yield len(value).to_bytes(8, "little")
        for item in value:
            yield from _parts(item)
    elif isinstance(value, bytes):
        yield value
    elif value is None or isinstance(value, (str, int, float, complex)):
        yield repr(value).encode()
    elif hasattr(value, "tolist"):  # tensors and arrays
        yield from _parts(value.tolist())
    elif hasattr(value, "tobytes"):  # images
        yield value.tobytes()
