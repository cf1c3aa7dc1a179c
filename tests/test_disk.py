"""What is written to the disk while other processes write beside it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_dp.disk import flush


def test_a_folder_that_another_process_takes_away_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rank 0 does with what it saves aside, while others flush the checkpoint that is theirs too."""
    (tmp_path / "checkpoint-2" / "aside").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "rng_state_1.pth").write_bytes(b"states")
    list_of, sync = os.scandir, mock.Mock(wraps=os.fsync)

    def listed(place: Any) -> Any:
        if not isinstance(place, int) and os.path.basename(place) == "aside":
            with mock.patch.object(os, "scandir", list_of):
                shutil.rmtree(place, ignore_errors=True)
        return list_of(place)

    monkeypatch.setattr(os, "fsync", sync)
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", listed)
        flush(tmp_path)
    assert sync.call_count == 3  # the file, and the two folders that are left
