"""Is this the dataset that the checkpoint was trained on? A keyed digest answers without giving the data away."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_dp.data.first_seen import left_as_it_was
from hf_dp.data.lengths import columns_of
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.randomness import key_global_state, unchanged_global_state
from hf_dp.units.rows import UnitRows

# Trainer's uploads leave out files in the output directory whose names begin with an underscore.
KEY_FILE = "_hf_dp_fingerprint_key"
_KEY_BYTES = 32
_ROWS = 64
_DEEP = 16
# As many columns, or a multiple of that, are saved, whatever rows have.
_SHOWN = 64

#: The keyed digest of each column, by the keyed digest of its name; None of one that changes from one look to the next.
Fingerprint = dict[str, str | None]


def fingerprint_key(output_dir: str | Path, create: bool) -> bytes | None:
    """The key of this output directory; without it a digest of private rows could be tested against guesses.

    Args:
        output_dir: where checkpoints go.
        create: whether to make a key where there is none.

    Raises:
        LedgerError: there is something in its place that cannot be read.
        ConfigurationError: there is none, and none can be written.
    """
    path = Path(output_dir) / KEY_FILE
    if not path.exists():
        if not create:
            return None
        try:
            _make_key(path)
        except OSError as error:
            raise ConfigurationError(
                f"output_dir={str(output_dir)!r} cannot be written into ({error.strerror}).",
                why="checkpoints go there, and the ledger in them: what was spent would be lost with the process.",
                fix="give a directory that can be written into, on a disk with room.",
            ) from error
    try:
        key = path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"the key {str(path)!r} cannot be read ({error}).",
            why="without it nobody can tell whether a checkpoint is of this data, and as it was saved.",
            fix="put the key back, or use a new output_dir.",
        ) from error
    return key if len(key) == _KEY_BYTES else None


def _make_key(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Never half a key: a short one would be no secret. mkstemp's files are readable by their owner only.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=KEY_FILE)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
    os.replace(temporary, path)


def fingerprint(dataset: Any, key: bytes, unit: str | None = None) -> Fingerprint:
    """Keyed digests of rows spread over `dataset`, column by column.

    Of a `datasets.Dataset` they are of what it stores, before its transform. Rows of others are read under global
    generators that are seeded with the key, so that what is drawn there is the same at each look and in each process.

    Args:
        unit: the column that says whose each row is: of that, all rows count.
    """
    whose = {} if unit is None else _whose(UnitRows.of(dataset, unit, 1, several=True), key)
    if isinstance(dataset, Dataset):
        dataset = dataset.with_format(None)
    n = len(dataset)
    chosen = sorted({i * (n - 1) // (_ROWS - 1) for i in range(_ROWS)}) if n > _ROWS else range(n)
    # Of few rows more looks: two could be the same by chance.
    with unchanged_global_state(), left_as_it_was(dataset):
        looks = [_columns(dataset, chosen, key) for _ in range(max(2, _ROWS // max(1, n)))]
    found = {name: digest for look in looks for name, digest in look.items()}
    return whose | {n: d if all(look.get(n) == d for look in looks) else None for n, d in found.items()}


def _whose(units: UnitRows, key: bytes) -> Fingerprint:
    name, value = (text.encode() for text in ("whose each row is", units.described))
    return {_digest(name, key, 8): _digest(value, key, 16)}


def _digest(value: bytes, key: bytes, size: int) -> str:
    return hashlib.blake2b(value, key=key, digest_size=size).hexdigest()


def told_to_all(found: Fingerprint, key: bytes) -> Fingerprint:
    """As it lies in checkpoints, which others may see: how many columns there are, and whether one changes, may follow
    from a single row. `from_all` is the inverse."""
    values = {name: _changing(name, key) if value is None else value for name, value in found.items()}
    missing = -len(values) % _SHOWN
    return dict(sorted({**values, **dict(islice(_nobodys(key), missing))}.items()))


def from_all(saved: Fingerprint, key: bytes) -> Fingerprint:
    """What `told_to_all` was given; of what was saved before it, itself."""
    real = saved.items() - dict(_nobodys(key)).items()
    return {name: None if value == _changing(name, key) else value for name, value in real}


def _nobodys(key: bytes) -> Iterator[tuple[str, str]]:
    """Names of columns that are none, and their digests."""
    for name in (f"no column {number}".encode() for number in range(_SHOWN - 1)):
        yield _digest(name, key, 8), _digest(name, key, 16)


def _changing(name: str, key: bytes) -> str:
    return _digest(f"{name} changes".encode(), key, 16)


def compare(one: Fingerprint, two: Fingerprint) -> tuple[bool, int]:
    """Whether two fingerprints under one key are of different rows, and how many columns could not be compared."""
    pairs = [(one[name], two[name]) for name in one.keys() & two.keys()]
    compared = [pair for pair in pairs if None not in pair]
    return one.keys() != two.keys() or any(a != b for a, b in compared), len(pairs) - len(compared)


def _columns(dataset: Any, chosen: Any, key: bytes) -> dict[str, str]:
    digests: dict[str, Any] = {}
    for index in chosen:
        key_global_state(key, index)
        row = dataset[index]
        columns = columns_of(row)
        # Each may change at a look, or not, by itself.
        for name, value in [("", row)] if columns is None else columns:
            digest = digests.setdefault(str(name), hashlib.blake2b(key=key, digest_size=16))
            for part in (str(index).encode(), *_parts(value)):
                digest.update(len(part).to_bytes(8, "little") + part)
    return {_digest(n.encode(), key, 8): d.hexdigest() for n, d in digests.items()}


def _parts(value: Any, depth: int = 0) -> Iterator[bytes]:
    """The content of a row, the same in every process: no addresses, as in the repr of an image, and no ellipsis."""
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _parts(value[name], depth + 1)
    elif isinstance(value, (list, tuple)):
        yield len(value).to_bytes(8, "little")
        for item in value:
            yield from _parts(item, depth + 1)
    elif isinstance(value, bytes):
        yield value
    elif value is None or isinstance(value, (str, int, float, complex)):
        yield repr(value).encode()
    elif hasattr(value, "tolist"):  # tensors and arrays
        yield from _parts(value.tolist(), depth + 1)
    elif hasattr(value, "tobytes"):  # images
        yield value.tobytes()
    elif hasattr(value, "__dict__") and depth < _DEEP:
        yield from _parts(vars(value), depth + 1)
    else:
        yield secrets.token_bytes(16)  # what cannot be looked into is not taken for equal
