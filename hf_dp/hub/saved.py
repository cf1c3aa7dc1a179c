"""Which files belong to a saved model: what saving it wrote. What privacy.json does not name is never published."""

from __future__ import annotations

import fnmatch
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from hf_dp.disk import flush, full_disk_is_named
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub.card_file import set_unreadable_aside, without_claim
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord

# What models, tokenizers and processors are saved as. Pickles hold arguments, optimizer and generator states.
_KINDS = {
    ".safetensors", ".json", ".jinja", ".py", ".model", ".spm", ".tiktoken", ".codes", ".tokenizer", ".bpe", ".vocab",
    ".arpa",
}  # fmt: skip
# Other texts and tables could be anybody's.
_NAMES = (
    "*vocab*.txt", "*merges*.txt", "vocab.tsv", "dict.txt", "pieces.txt", "unigrams.txt", "lexicon.txt",
    "corpus.jsonl", "corpus.csv",
)  # fmt: skip
# These hold losses, or belong to this machine.
_NEVER = (
    "trainer_state.json", "*results.json", "metrics.json", "groups.json", "hits.json", "chosen_rows.json",
    "for_owner_only_*", "_*", ".*",
)  # fmt: skip
_NEVER_INSIDE = ("checkpoint-*", "last-checkpoint", "runs", "_*", ".*")
_ALWAYS = {CARD_FILE, RECORD_FILE, "training_args.bin"}
_ASIDE = "_saving-model"
# Of weights in more or fewer files than now, as `save_pretrained` takes them away.
_SHARDS = "model-[0-9][0-9][0-9][0-9][0-9]-of-[0-9][0-9][0-9][0-9][0-9].safetensors"
# Of two saves into one folder the files would move into each other's.
_ONE_AT_A_TIME = threading.RLock()


def may_be_published(name: str) -> bool:
    """Whether a file of this name (a POSIX path) may be part of a published model, on systems of either case."""
    path = PurePosixPath(name.casefold())
    *folders, last = path.parts or ("",)
    return (
        (path.suffix in _KINDS or any(fnmatch.fnmatchcase(last, pattern) for pattern in _NAMES))
        and not path.is_absolute()
        and not any(fnmatch.fnmatchcase(folder, pattern) for folder in folders for pattern in _NEVER_INSIDE)
        and not any(fnmatch.fnmatchcase(last, pattern) for pattern in _NEVER)
        and last not in (CARD_FILE.casefold(), RECORD_FILE)
    )


def model_files(folder: Path) -> list[str]:
    """The files in a folder of `saved_aside` that belong to the model and may be published (POSIX paths)."""
    return [name for name in _names(folder) if may_be_published(name) and not (folder / name).is_symlink()]


def left_out(folder: Path) -> list[str]:
    """What else a save wrote into a folder of `saved_aside`: loading may need it, and it is not published."""
    return sorted(set(_names(folder)) - set(model_files(folder)) - _ALWAYS)


@contextmanager
def saved_aside(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to save a model into, whose files then move into `directory`.

    What else lies there, or is written there meanwhile, is not the model's. At no moment do weights lie beside the
    record or the card of others: before the files move, the card loses its claim and the record goes. The files that an
    earlier record names and that were not saved again go with it. An error leaves `directory` as it was.

    Raises:
        ConfigurationError: something else has the name of what is written, or another process saves here too.
        OSError: with the disk's name, where it is full.
    """
    directory = Path(directory)
    # No two of a name: a record never gets the digests of what another process writes meanwhile.
    aside, name = directory / _ASIDE, secrets.token_hex(8)
    folder, here = aside / name, aside / f"{name}.here"
    with _ONE_AT_A_TIME, full_disk_is_named(directory, "What was saved here before is as it was."):
        refuse_in_the_way(directory)
        shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed, or that is told so
        folder.mkdir(parents=True)
        here.touch()
        try:
            # PEFT, and this package, write into a card that is there.
            card = directory / CARD_FILE
            if card.is_file() and (bare := without_claim(card.read_bytes())) is not None:
                (folder / CARD_FILE).write_bytes(bare)
            yield folder
            _refuse_taken_away(here)
            flush(folder)
            _move(folder, directory)
        except FileNotFoundError:
            _refuse_taken_away(here)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            here.unlink(missing_ok=True)
            with suppress(OSError):  # that of another process is in it
                aside.rmdir()


def broken_off(directory: str | os.PathLike[str]) -> bytes | None:
    """The record of a save that was killed when weights of it had moved into `directory`, and the record not; None if
    there is none: until then the weights there are those that lay there before."""
    aside = Path(directory, _ASIDE)
    for path in [*aside.glob(RECORD_FILE), *aside.glob(f"*/{RECORD_FILE}")]:
        with suppress(OSError, LedgerError):
            weights = PrivacyRecord.from_json(text := path.read_bytes()).weights
            if not all((path.parent / name).is_file() for name in weights):
                return text
    return None


def _refuse_taken_away(here: Path) -> None:
    """Refuses to go on where another process has cleared away what was written (`here` is never written again)."""
    if not here.exists():
        raise ConfigurationError(
            f"another process saves a model into {str(here.parent.parent)!r} at the same time.",
            why="weights of one would lie beside the record of the other.",
            fix="give each a folder of its own, and save again; processes that train together need one process group "
            "(torchrun, accelerate launch), of which the first one saves.",
        )


def refuse_in_the_way(directory: str | os.PathLike[str], *folders: str) -> None:
    """Refuses an output directory with files where folders go (these, and that of `saved_aside`), or the reverse.

    Raises:
        ConfigurationError: with their names.
    """
    directory = Path(directory)
    found = [f"{name} is a folder" for name in (CARD_FILE, RECORD_FILE) if (directory / name).is_dir()]
    found += [f"{name} is a file" for name in (*folders, _ASIDE) if (directory / name).is_file()]
    if found:
        raise ConfigurationError(
            f"in {str(directory)!r} {', '.join(found)}.",
            why="checkpoints, the model, its card and its record are written there under these names.",
            fix="rename it, or use another output_dir.",
        )


def _move(folder: Path, directory: Path) -> None:
    names = _names(folder)
    stale = set(_earlier_files(directory)) - set(names)
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
    set_unreadable_aside(directory)
    card = directory / CARD_FILE
    if card.is_file() and (bare := without_claim(text := card.read_bytes())) not in (None, text):
        (folder / _ASIDE).write_bytes(bare)
        os.replace(folder / _ASIDE, card)
    (directory / RECORD_FILE).unlink(missing_ok=True)
    for name in stale:
        (directory / name).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == CARD_FILE, name == RECORD_FILE)):
        os.replace(folder / name, directory / name)


def _earlier_files(directory: Path) -> list[str]:
    """What the record of an earlier save names, and shards of one that was broken off."""
    shards = [path.name for path in directory.glob(_SHARDS)]
    try:
        record = PrivacyRecord.from_json((directory / RECORD_FILE).read_bytes())
    except (OSError, LedgerError):
        return shards
    return [*shards, *filter(may_be_published, record.files)]


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
