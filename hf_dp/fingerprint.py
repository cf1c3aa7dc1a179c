"""Is this the dataset that the checkpoint was trained on? A keyed digest answers without giving the data away."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

# Trainer's uploads leave out files in the output directory whose names begin with an underscore.
KEY_FILE = "_hf_dp_fingerprint_key"
_ROWS = 64


def fingerprint_key(output_dir: str | Path, create: bool) -> bytes | None:
    """The key of this output directory; without it a digest of private rows could be tested against guesses.

    Args:
        output_dir: where checkpoints go.
        create: whether to make a key where there is none.
    """
    path = Path(output_dir) / KEY_FILE
    if not path.exists():
        if not create:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(secrets.token_bytes(32))
    return path.read_bytes()


def fingerprint(dataset: Any, key: bytes) -> str | None:
    """A keyed digest of the size and of rows spread over `dataset`; None if rows change from one look to the next."""
    first, second = (_digest(dataset, key) for _ in range(2))
    return first if first == second else None


def _digest(dataset: Any, key: bytes) -> str:
    n = len(dataset)
    digest = hashlib.blake2b(key=key[:64], digest_size=16)
    digest.update(str(n).encode())
    for index in sorted({i * (n - 1) // max(_ROWS - 1, 1) for i in range(_ROWS)} if n > _ROWS else range(n)):
        digest.update(repr(dataset[index]).encode())
    return digest.hexdigest()
