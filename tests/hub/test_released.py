"""What each release saved verifies, and its words are changed under no version that has been released.

`released/VERSION/` was written by the code of that release. Where the folder of the version of today does not verify,
its cards or caveats are in other words now: then `__version__` has to rise, or models that it saved would be called
changed after training.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_dp import __version__
from hf_dp.hub import verify
from tests.hub.forging import failed, in_card, in_record

RELEASED = sorted((Path(__file__).parent / "released").glob("*/*"))


def named(folder: Path) -> str:
    return f"{folder.parent.name}, {folder.name}"


@pytest.mark.parametrize("folder", RELEASED, ids=named)
def test_what_a_release_saved_verifies(folder: Path) -> None:
    found = verify(folder)
    assert found.report.versions["hf_dp"] == folder.parent.name
    assert (found.consistent, found.private) == (True, True), failed(folder)


@pytest.mark.parametrize(
    "change",
    [
        in_record("report", "epsilon", to=1.0),
        in_record("report", "caveats", to=[]),
        in_card("not covered", "covered"),
    ],
    ids=["epsilon", "caveats", "card"],
)
@pytest.mark.parametrize("folder", RELEASED, ids=named)
def test_negative_control_what_was_changed_since_does_not(folder: Path, change: object, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert callable(change)
    change(copy)
    assert not verify(copy).consistent


def test_this_version_is_compared_in_its_own_words() -> None:
    """Before a release its folder is saved anew (`scripts/released.py`)."""
    own = [folder for folder in RELEASED if folder.parent.name == __version__]
    assert own or ".dev" in __version__
    assert all(verify(folder).knows_the_words for folder in own)
