"""By its content alone the data of a checkpoint is known again, and only with a key that stays secret."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_dp.accounting import Ledger
from hf_dp.data.fingerprint import KEY_FILE, compare, fingerprint, fingerprint_key
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.training.resuming.resume import Fingerprints
from tests.training.resuming.resumed import SAVED, STEPS, trainer
from tests.training.workbench import rows

pytestmark = pytest.mark.usefixtures("checked_once")

KEY = bytes(range(32))


class Images:
    """Fresh objects at every look, whose repr shows their address; alike in their first and last values."""

    def __init__(self, middle: int = 0) -> None:
        self.middle = middle

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        pixels = torch.zeros(40, 40)
        pixels[20, 20] = self.middle
        return {"image": Image.new("L", (4, 4), index), "pixels": pixels, "array": pixels.numpy(), "label": index}


@pytest.mark.slow
def test_a_fingerprint_is_of_the_content() -> None:
    pytest.importorskip("PIL")
    kept = [Images(), Images()]
    one, two = (fingerprint(data, KEY) for data in kept)
    assert one == two is not None
    assert fingerprint(Images(middle=1), KEY) != one, "tensors are abbreviated when they are printed"
    assert fingerprint(Images(), KEY[::-1]) != one


class Augmented(Images):
    """Of one row in many, the pixels are drawn at each look; by a generator of its own, where there is one."""

    def __init__(self, middle: int = 0, own: bool = False) -> None:
        super().__init__(middle)
        self.generator = torch.Generator() if own else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = {"drawn": self.middle + torch.rand(3, generator=self.generator), "numpy": np.random.rand()}
        return {**drawn, "label": index + self.middle, "object": Opaque(index) if self.generator else random.random()}


class Opaque:
    """Without a content that can be looked into."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def test_rows_that_are_augmented_at_random_are_compared_all_the_same() -> None:
    states = torch.get_rng_state(), random.getstate()
    one = fingerprint(Augmented(), KEY)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    torch.rand(5)
    assert compare(one, fingerprint(Augmented(), KEY)) == (False, 0)
    assert compare(one, fingerprint(Augmented(middle=1), KEY)) == (True, 0)
    own = fingerprint(Augmented(own=True), KEY)
    assert list(own.values()).count(None) == 2, "of a generator of its own, and of what cannot be looked into"
    assert compare(own, fingerprint(Augmented(own=True), KEY)) == (False, 2)
    assert compare(own, fingerprint(Augmented(middle=1, own=True), KEY)) == (True, 2), "the labels differ"
    assert compare(one, fingerprint(Images(), KEY))[0], "other columns"


def test_a_transform_is_looked_behind() -> None:
    def data(first: int) -> Dataset:
        generator = np.random.default_rng()
        stored = Dataset.from_dict({"text": [f"words {i}" for i in range(first, first + 5)]})
        stored.set_transform(lambda rows: {"noisy": [generator.random() for _ in rows["text"]]})
        return stored

    one = fingerprint(data(0), KEY)
    assert compare(one, fingerprint(data(0), KEY)) == (False, 0)
    assert compare(one, fingerprint(data(1), KEY)) == (True, 0)


@pytest.mark.slow
def test_columns_that_could_not_be_compared_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def opaque(seed: int = 0) -> list[dict[str, Any]]:
        return [{**row, "noise": object()} for row in rows(seed=seed)]

    values: dict[str, Any] = {"seed": 7, "remove_unused_columns": False, "load_best_model_at_end": True}
    values |= {"eval_strategy": "steps", "eval_steps": SAVED, "metric_for_best_model": "loss"}
    trainer(tmp_path, opaque(), **values).train()
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, opaque(), **values).train(resume_from_checkpoint=True)
    assert caplog.text.count("1 of 3 columns of the data could not be compared") == 1, "the best one is not asked again"
    with pytest.raises(LedgerError, match="not the data"):
        trainer(tmp_path, opaque(seed=1), seed=7).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))


def test_a_directory_that_cannot_be_written_into_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(tempfile, "mkstemp", make)
    with pytest.raises(ConfigurationError, match=rf"output_dir='{tmp_path}' cannot be written into \(Read-only file"):
        fingerprint_key(tmp_path, create=True)
    assert fingerprint_key(tmp_path, create=False) is None


def test_the_key_is_whole_secret_and_kept(tmp_path: Path) -> None:
    assert fingerprint_key(tmp_path, create=False) is None
    key = fingerprint_key(tmp_path, create=True)
    assert key is not None
    assert len(key) == 32
    assert fingerprint_key(tmp_path, create=True) == key
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / KEY_FILE).write_bytes(b"")
    assert fingerprint_key(tmp_path, create=True) is None, "half a key is no secret"
    (tmp_path / KEY_FILE).unlink()
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(LedgerError, match="cannot be read .*Is a directory"):
        trainer(tmp_path).train()


def test_no_secret_is_in_a_checkpoint(checkpointed: Path) -> None:
    key = fingerprint_key(checkpointed, create=False)
    assert key is not None
    for file in (checkpointed / f"checkpoint-{SAVED}").iterdir():
        content = file.read_bytes()
        assert key not in content
        assert key.hex().encode() not in content


class OfAKind(torch.utils.data.Dataset[Any]):
    """Rows of which the third has a column that no other has, or that changes from one look to the next."""

    def __init__(self, **third: Any) -> None:
        self.third = third

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> dict[str, Any]:
        more = {name: value() for name, value in self.third.items()} if i == 2 else {}
        return {"input_ids": [i], "labels": i, **more}


def test_failure_146_what_is_saved_does_not_tell_which_columns_a_row_has(tmp_path: Path) -> None:
    plain, more, drawn = OfAKind(), OfAKind(rare=lambda: 1), OfAKind(rare=object)
    saved = [Fingerprints().saved(Ledger(), data, tmp_path, None, None) for data in (plain, more, drawn)]
    assert len({len(each.data or ()) for each in saved}) == 1
    assert {(len(name), len(value or "")) for each in saved for name, value in (each.data or {}).items()} == {(16, 32)}
    promise = {"unit": None}
    for one, own in zip(saved, (plain, more, drawn), strict=True):
        one = replace(one, ledger=Ledger(promise))
        told = one.check(promise, own)
        assert told is None if own is not drawn else (told or "").startswith("1 of 3 columns")
        for other in (plain, more):
            if other is not own and (own, other) != (drawn, more):  # of which nothing is to be compared
                with pytest.raises(LedgerError, match="not the data"):
                    one.check(promise, other)
    key = fingerprint_key(tmp_path, create=False)
    assert key
    older = replace(saved[1], data=fingerprint(more, key), ledger=Ledger(promise))  # as it was saved before
    assert older.check(promise, more) is None
