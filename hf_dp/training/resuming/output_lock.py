"""One training at a time writes into an output directory; what another has left there is said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.config.after import places_of
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import RECORD_FILE, PrivacyRecord
from hf_dp.training.resuming.checkpoints import NUMBERED, numbers
from hf_dp.training.resuming.resume import steps_of

logger = logging.getLogger(__name__)

# Trainer's uploads leave out files in the output directory whose names begin with an underscore.
FILE = "_hf_dp_lock"
# Seconds. The workers of a dataloader outlive a process that was killed by about five, and hold its lock.
_PATIENCE = 15.0


@contextmanager
def alone_in(directory: str | Path) -> Iterator[None]:
    """Inside, no other training writes there, of this process or another. All ranks enter together; the first locks.

    The system drops the lock of a process that dies, however it dies. Where a file system has no locks, or nothing can
    be written, a warning says so.

    Raises:
        ConfigurationError: another training is in it, or there is none and it cannot be made.
    """
    lock = FileLock(Path(directory) / FILE)
    is_taken, is_missing, reason = False, False, ""
    if ranks.rank() == 0:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            is_missing, reason = True, f" ({error})"
        try:
            if not is_missing:
                lock.acquire(timeout=_PATIENCE)
        except Timeout:
            is_taken = True
        except (OSError, NotImplementedError) as error:
            ranks.warn(logger, "%r cannot be locked (%s): no other training may write there.", str(directory), error)
    try:
        found = ranks.gathered([is_taken, is_missing]).any(0)
        if found[1]:
            raise ConfigurationError(
                f"output_dir={str(directory)!r} cannot be made{reason}.",
                why="checkpoints go there, and the ledger in them: what was spent would be lost with the process.",
                fix="give a directory that there is, or that can be made.",
            )
        if found[0]:
            raise ConfigurationError(
                f"another training writes into output_dir={str(directory)!r}.",
                why="the two would overwrite each other's checkpoints and ledgers, and what is left would be true of "
                "neither.",
                fix="give each training an output_dir of its own, or wait for the other one to end (end() of a "
                "PrivateRun whose loop was left).",
            )
        yield
    finally:
        lock.release()


def warn_of_others(directory: str | Path, privacy: PrivacyConfig) -> None:
    """Says that there are checkpoints of another training, or the model that it saved, which one that begins anew has
    nothing of in its ledger."""
    here = os.path.realpath(directory)
    named = [os.path.realpath(place) for place in places_of(privacy.after)]
    if privacy.other_people or any(here in (place, os.path.dirname(place)) for place in named):
        return
    found = checkpoints = sorted(
        path.name for path in Path(directory).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()
    )
    if steps := _steps_of_saved(Path(directory)):
        found = [*checkpoints, f"a saved model (of {steps} steps)"]
    goes_on = "To go on from there instead, give resume_from_checkpoint=True. " if checkpoints else ""
    could = ": resume_from_checkpoint=True could take one of them" if checkpoints else ""
    if found:
        ranks.warn(
            logger,
            "%r has %s of an earlier training, and this one begins anew: what that one spent is not in its epsilon. "
            "%sWhere both are kept, or anyone saw the earlier one, people who are in both have spent both: name it in "
            "PrivacyConfig(after=...), for one budget. Otherwise delete what it left, or take another output_dir%s.",
            *(str(directory), ", ".join(found), goes_on, could),
        )  # fmt: skip


def warn_of_later(checkpoint: str | Path, ledger: Ledger) -> bool:
    """Says, and answers, that beside the checkpoint that a training goes on from lies what took more private steps than
    are in its ledger: others that were made after it, or a model that was saved then."""
    here = Path(checkpoint).absolute()
    if more := _with_more_steps(here.parent, ledger):
        ranks.warn(
            logger,
            "%r has %s, of more private steps than %r (of %d), from which this training goes on: what those spent is "
            "not in its epsilon, and cost nothing only if nobody has seen what came of it. To go on from the newest "
            "checkpoint, give resume_from_checkpoint=True. Where both are kept, or anyone saw the others, the people "
            "in the data have spent both; otherwise delete them.",
            *(str(here.parent), more, here.name, ledger.steps),
        )
    return bool(more)


def warn_of_later_than_before(after: str, ledger: Ledger) -> None:
    """Says that a training before went on after the record of it that a promise names.

    Args:
        after: where that lies.
        ledger: of that record.
    """
    here = Path(after).absolute()
    folder = here.parent if NUMBERED.fullmatch(here.name) else here
    if folder.is_dir() and (more := _with_more_steps(folder, ledger)):
        ranks.warn(
            logger,
            "%r has %s, of more private steps than %r (of %d), which after= names: what those spent is not in the "
            "epsilon of both. If they are kept, or anyone saw them, name the newest; otherwise delete them.",
            *(str(folder), more, here.name, ledger.steps),
        )


def _with_more_steps(folder: Path, ledger: Ledger) -> str:
    if ranks.rank():
        return ""
    found = {f"{PREFIX_CHECKPOINT_DIR}-{number}": steps_of(folder, number) for number in sorted(numbers(str(folder)))}
    found["a saved model"] = _steps_of_saved(folder)
    return ", ".join(f"{name} (of {steps})" for name, steps in found.items() if steps > ledger.steps)


def _steps_of_saved(folder: Path) -> int:
    """How many private steps the model has that was saved here; 0 if there is none."""
    try:
        return PrivacyRecord.from_json((folder / RECORD_FILE).read_bytes()).ledger.steps
    except (OSError, LedgerError):
        return 0
