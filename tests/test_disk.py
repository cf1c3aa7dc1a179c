"""Files that are there whole, or as they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hf_dp import disk


def test_a_file_is_replaced_by_a_whole_one_that_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "card"
    disk.write_whole(path, b"first")
    disk.write_whole(path, b"second")

    def full(place: Path) -> None:
        assert place.read_bytes() == b"third"
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(disk, "flush", full)
    with pytest.raises(OSError, match="full"):
        disk.write_whole(path, b"third")
    assert [(file, file.read_bytes()) for file in tmp_path.iterdir()] == [(path, b"second")]


def test_a_file_is_as_readable_as_others_or_a_secret_of_its_owner(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    disk.write_whole(tmp_path / "open", b"")
    disk.write_whole(tmp_path / "secret", b"", 0o600)
    modes = {file.name: os.stat(file).st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes["open"] == modes["other"]
    assert modes["secret"] == 0o600
