"""A saved model to be read: a directory, or one commit of a repository on the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hf_dp.errors import HubError, LedgerError
from hf_dp.hub.record import RECORD_FILE, PrivacyRecord
from hf_dp.places import is_name, nowhere
from hf_dp.versions import library_versions

# Where accelerate puts them in a checkpoint.
_SHARDS = "pytorch_model_fsdp_0"
# The HTTP library's error (httpx in version 1, httpx2 in version 2) and OSError.
_NETWORK = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


@dataclass(frozen=True)
class Source:
    """Where the files of one saved model come from.

    Attributes:
        title: the directory, or the repository with the commit.
        names: POSIX paths of all files, relative to the model's folder; links are among them.
    """

    title: str
    names: frozenset[str]
    _directory: Path | None = None
    _remote: dict[str, Any] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """A local copy of one of `names`; downloaded where needed.

        Raises:
            LedgerError: there is no such file.
            HubError: it cannot be fetched.
        """
        if name not in self.names:
            in_shards = any(_SHARDS in PurePosixPath(path).parts for path in self.names)
            below = [path.removesuffix(f"/{name}") for path in self.names if path.endswith(f"/{name}")]
            others = f" There is one in {', '.join(sorted(below, key=_by_number)[-3:])}." if below else ""
            raise LedgerError(
                f"there is no {name} in {self.title}"
                + (", where weights are in FSDP2's shards." if in_shards else "."),
                why="without it nothing is known about the privacy of these weights.",
                fix="resume from the checkpoint and call save_model, which writes the whole model with its record."
                if in_shards
                else f"name what the trainer's save_model or push_to_hub wrote, or a whole checkpoint; a model's own "
                f"save_pretrained writes weights alone.{others}",
            )
        if self._directory is not None:
            if not (path := self._directory / name).is_file():
                raise LedgerError(
                    f"{name} in {self.title} is no file.",
                    why="what cannot be read cannot be checked; reading a pipe would never end.",
                    fix="take the folder again from where the private run saved it.",
                )
            return path
        with _refusals(lambda there: f"{self.title} cannot be read any more: {there}"):
            return Path(huggingface_hub.hf_hub_download(filename=name, **self._remote))

    def written(self, name: str) -> int:
        """When one of `names` was written, in nanoseconds; 0 on the hub, where nothing says so."""
        return 0 if self._directory is None else (self._directory / name).stat().st_mtime_ns

    @property
    def is_local(self) -> bool:
        """A directory, on the machine that trained it perhaps."""
        return self._directory is not None

    def is_regular(self, name: str) -> bool:
        """Whether a file of this name lies here itself, and is no link to another place."""
        if self._directory is None:
            return True
        path, top = self._directory / name, self._directory.resolve()
        # The hub's own cache is made of links to its blobs.
        blobs = top.parent.parent / "blobs"
        places = [top, blobs] if top.parent.name == "snapshots" else [top]
        return path.is_file() and any(path.resolve().is_relative_to(place) for place in places)

    def record(self) -> PrivacyRecord:
        """The model's `privacy.json`.

        Raises:
            LedgerError: it is missing, damaged, of another version, or too large.
            HubError: it cannot be fetched.
        """
        return PrivacyRecord.from_json(self.path(RECORD_FILE).read_bytes())


def _by_number(folder: str) -> tuple[int, str]:
    number = folder.rpartition("-")[2]
    return (int(number) if number.isdecimal() else -1), folder


def open_source(
    repo_or_directory: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Source:
    """A directory, if there is one of this name; otherwise a model repository on the hub, at one commit.

    Args:
        repo_or_directory: a path, or "owner/name".
        revision: a branch, tag or commit of the repository; None for its default.
        token: to read a private repository; None for the one that is logged in.

    Raises:
        HubError: neither, or no access.
    """
    given = os.fspath(repo_or_directory)
    if given and os.path.isdir(given):  # False, too, for a name that is too long for one
        return Source(str(Path(given)), frozenset(_names(Path(given))), Path(given))
    if os.path.exists(given) or not is_name(given):
        raise _refusal(nowhere(given, ""), "give a folder that is there, or a repository as OWNER/NAME.")
    api = huggingface_hub.HfApi(library_name="hf_dp", library_version=library_versions()["hf_dp"], token=token)
    with _refusals(lambda there: nowhere(given, there)):
        info = api.model_info(given, revision=revision)
    names = frozenset(sibling.rfilename for sibling in info.siblings or ())
    return Source(f"{given} at {info.sha}", names, None, {"repo_id": given, "revision": info.sha, "token": token})


def _names(directory: Path) -> Iterator[str]:
    """All that is no directory; a link to one is not looked into. Where no record lies, which may be a home of millions
    of files, two folders deep: checkpoints, and their parts."""
    is_model = os.path.lexists(directory / RECORD_FILE)
    for folder, folders, files in os.walk(directory):
        here = Path(folder)
        if not is_model and len(here.relative_to(directory).parts) == 2:
            folders.clear()
        links = [name for name in folders if (here / name).is_symlink()]
        yield from ((here / name).relative_to(directory).as_posix() for name in [*files, *links])


@contextmanager
def _refusals(found: Callable[[str], str]) -> Iterator[None]:
    """Turns what the hub answers into refusals; `found` makes what was found of what is said of the hub."""
    login = "for a private one, the token (`hf auth login`)"
    try:
        yield
    except (RepositoryNotFoundError, GatedRepoError) as error:
        there = "no repository of that name that this token may read"
        raise _refusal(found(there), f"correct the path or the name; {login}.") from error
    except RevisionNotFoundError as error:
        there = "the repository of that name has no such revision"
        raise _refusal(found(there), "correct the revision (on the command line --revision).") from error
    except HFValidationError as error:
        raise _refusal(found("no repository can have that name"), "correct the path or the name.") from error
    except UnicodeEncodeError as error:
        there = "nothing is read from the hub: the token (or the revision) has letters that no token has"
        raise _refusal(found(there), "correct the token, or the revision.") from error
    except OfflineModeIsEnabled as error:
        there = "no repository of that name can be read: the hub is switched off (HF_HUB_OFFLINE=1)"
        raise _refusal(found(there), "correct the path; or, for a repository, leave HF_HUB_OFFLINE out.") from error
    except _NETWORK as error:
        there = f"no repository of that name could be read ({type(error).__name__}: {error})"
        raise _refusal(found(there), f"correct the path; or, for a repository, the network, and {login}.") from error


def _refusal(found: str, fix: str) -> HubError:
    return HubError(f"{found}.", why="what cannot be read cannot be checked.", fix=fix)
