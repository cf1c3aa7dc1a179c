"""The one way out: a commit of the files that privacy.json names, of privacy.json and of the card."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from hf_dp.errors import HubError, LedgerError
from hf_dp.hub.page import check_text
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256
from hf_dp.hub.saved import may_be_published
from hf_dp.hub.source import open_source
from hf_dp.versions import library_versions


def upload(
    directory: str | Path,
    repo_id: str,
    *,
    message: str,
    path_in_repo: str = "",
    token: str | None = None,
    revision: str | None = None,
    run_as_future: bool = False,
) -> CommitInfo | Future[CommitInfo]:
    """Publish a saved model in one commit: all of it, or nothing. What the record that lies there names, and the new
    one does not, goes with it.

    Args:
        directory: with `privacy.json` and what it names. Nothing else in it goes up.
        repo_id: of a model repository that exists.
        message: of the commit.
        path_in_repo: a folder in the repository; by default its root.
        token: with write permission; None for the one that is logged in.
        revision: a branch; None for "main".
        run_as_future: return at once. The files must stay as they are until the future is done.

    Raises:
        LedgerError: no record, one that names no weights or a file that never goes up, files that are no longer those
            that it names, or a card that no longer says what it says.
        huggingface_hub.errors.HfHubHTTPError: the hub refused. Nothing of this commit is visible then.
    """
    directory = Path(directory)
    prefix = f"{path_in_repo.strip('/')}/" if path_in_repo else ""
    names = [RECORD_FILE, *checked_files(directory)]
    # As bytes: what was checked goes up, whoever writes there meanwhile.
    files: list[tuple[str, Path | bytes]] = [(CARD_FILE, checked_card(directory))]
    files += [(name, directory / name) for name in names]
    gone = _of_another_form(repo_id, prefix, [CARD_FILE, *names], token, revision)
    commit: Callable[..., Any] = _api().create_commit
    result: CommitInfo | Future[CommitInfo] = commit(
        repo_id,
        [
            *(CommitOperationAdd(prefix + name, content) for name, content in files),
            *map(CommitOperationDelete, gone),
        ],
        commit_message=message,
        token=token,
        revision=revision,
        run_as_future=run_as_future,
    )
    return result


def _of_another_form(repo_id: str, prefix: str, names: list[str], token: str | None, revision: str | None) -> list[str]:
    """What lies there of the model before, beside `names`: adapters would be loaded in place of a merged model."""
    try:
        there = open_source(repo_id, revision=revision, token=token)
        before = PrivacyRecord.from_json(there.path(prefix + RECORD_FILE).read_bytes())
    except (HubError, LedgerError):
        return []
    if there.is_local:  # a directory that has the repository's name
        return []
    return sorted({prefix + name for name in set(before.files) - set(names)} & there.names)


@functools.cache
def _api() -> HfApi:
    # One for all, so that commits in the background follow one another.
    return HfApi(library_name="hf_dp", library_version=library_versions()["hf_dp"])


def checked_files(directory: Path) -> list[str]:
    """The files that belong to the model saved in `directory`, each as its record says."""
    try:
        record = PrivacyRecord.from_json((directory / RECORD_FILE).read_bytes())
    except FileNotFoundError as error:
        raise _unpublishable(f"there is no {RECORD_FILE} in {str(directory)!r}") from error
    if not record.weights:
        raise _unpublishable(f"{RECORD_FILE} in {str(directory)!r} names no safetensors weights")
    for name, digest in record.files.items():
        if not may_be_published(name):
            raise _unpublishable(f"{RECORD_FILE} names {name!r}, which never goes up")
        if not (directory / name).is_file() or sha256(directory / name) != digest:
            raise _unpublishable(f"{name!r} is not the file that {RECORD_FILE} names")
    return sorted(record.files)


def checked_card(directory: Path) -> bytes:
    """The card of the model saved in `directory`, with the section and the metadata of its record."""
    record = PrivacyRecord.from_json((directory / RECORD_FILE).read_bytes())
    try:
        card = (directory / CARD_FILE).read_bytes()
    except FileNotFoundError as error:
        raise _unpublishable(f"there is no {CARD_FILE} in {str(directory)!r}") from error
    # One that is longer than can be looked through may go up: `verify` says so of it.
    for check in check_text(card, record, sha256(directory / RECORD_FILE), record.files):
        if not check.passed and check.name != "card, visible":
            raise _unpublishable(f"{CARD_FILE} in {str(directory)!r} is not the card of {RECORD_FILE}: {check.found}")
    return card


def _unpublishable(what: str) -> LedgerError:
    return LedgerError(
        f"{what}.",
        why="a published model without its true record would promise what nobody can check.",
        fix="save the model again with DPTrainer.save_model() or push_to_hub() after training.",
    )
