"""Checkpoints, each whole or not there; and the newest whole one, where a crash has left halves of others."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

import hf_dp.ranks as ranks
from hf_dp.agreement import warn_of_drift
from hf_dp.disk import flush, full_disk_is_named
from hf_dp.errors import LedgerError
from hf_dp.hub import refuse_in_the_way
from hf_dp.hub.checkpoint import missing_files
from hf_dp.training.base import TrainerBehind
from hf_dp.training.resuming.loaded import checksums

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
# In the output directory, with a checkpoint that is being written, and with a whole one on its way to its place. Names
# with an underscore are never uploaded, and these are no checkpoints to whoever looks for some.
_ASIDE, _WHOLE = "_saving", "_saved"
_CHECKPOINTS = f"{PREFIX_CHECKPOINT_DIR}-*"
NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)[^/]*\.(safetensors|bin)|pytorch_model_fsdp_\d+")
_PICKLED = re.compile(r"(optimizer|scheduler|scaler|pytorch_model.*|adapter_model)\.(pt|bin)|rng_state.*\.pth")
_STATES = ("optimizer", "scheduler", "rng_state")
_NONE, _HALVES = -1, -2  # in place of a step


class CheckpointMixin(TrainerBehind):
    """The part of DPTrainerMixin that writes checkpoints aside and renames them, and finds the newest whole one."""

    _is_aside = False
    _values_to_save: dict[str, str] | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; with `resume_from_checkpoint=True` from the newest checkpoint that is whole, and the same on
        all ranks.

        Raises:
            ConfigurationError: something else in the output directory has the name of what will be written there.
            LedgerError: there are checkpoints, and none is whole.
        """
        refuse_files_in_the_way(str(self.args.output_dir))
        if resume_from_checkpoint is True:
            # Where there is none at all, Trainer says so.
            resume_from_checkpoint = newest_whole(str(self.args.output_dir)) or True
        elif resume_from_checkpoint:
            finish_for(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, _ASIDE) if self._is_aside else run_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As Trainer's: all ranks write aside, and when all have written, the folder is renamed.

        Raises:
            OSError: with the disk's name, where it is full.
        """
        run_dir, name = self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._once_on_each_machine(lambda: clear(run_dir))
        self._is_aside = True
        self._values_to_save = checksums(self.model, None if self.args.save_only_model else self.optimizer)
        warn_of_drift(self._values_to_save)
        try:
            with written_aside(run_dir) as aside:
                super()._save_checkpoint(model, trial)
                self._remember_best(run_dir, aside)
        finally:
            self._is_aside = False
        ranks.wait()
        self._once_on_each_machine(lambda: put_in_place(run_dir, name))
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(run_dir, name))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(run_dir, self.args.save_total_limit, best_model_checkpoint=best, use_mtime=True)

    def _once_on_each_machine(self, act: Callable[[], None]) -> None:
        """By rank 0 first: machines that share its disk then find that it is done."""
        for is_first in (True, False):
            if self.args.local_process_index == 0 and (self.args.process_index == 0) == is_first:
                act()
            ranks.wait()

    def _remember_best(self, run_dir: str, aside: Path) -> None:
        """Where the best checkpoint will lie, which Trainer looks for beside the one that is being written."""
        state, step = self.state, self.state.best_global_step
        place = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")
        if step and place != state.best_model_checkpoint and (step == state.global_step or os.path.exists(place)):
            state.best_model_checkpoint = place
            if self.args.should_save:
                state.save_to_json(str(aside / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / STATE_FILE))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_aside:  # before the checkpoint is whole, nobody may see its weights
            super()._push_from_checkpoint(checkpoint_folder)


def refuse_files_in_the_way(output_dir: str) -> None:
    """Refuses an output directory in which something else has the name of what is written (`ConfigurationError`)."""
    refuse_in_the_way(output_dir, _ASIDE, _WHOLE)


@contextlib.contextmanager
def written_aside(run_dir: str) -> Iterator[Path]:
    """The folder for a checkpoint that is being written, on the disk at the end; an error takes it away.

    Raises:
        OSError: with the disk's name, where it is full.
    """
    aside = Path(run_dir, _ASIDE)
    try:
        with full_disk_is_named(Path(run_dir), "The checkpoints before this one are as they were."):
            yield aside
            flush(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def clear(run_dir: str) -> None:
    """Of what a process that was killed has left, the whole is put in its place, and the rest goes."""
    finish(run_dir)
    shutil.rmtree(Path(run_dir, _ASIDE), ignore_errors=True)


def put_in_place(run_dir: str, name: str) -> None:
    """What was written aside under this name is a checkpoint from now on."""
    aside, whole = Path(run_dir, _ASIDE), Path(run_dir, _WHOLE)
    if (aside / name).exists():
        whole.mkdir(exist_ok=True)
        (aside / name).rename(whole / name)
        finish(run_dir)


def finish(run_dir: str) -> None:
    """Puts whole checkpoints in their place, in that of another one of as many steps too, as was begun before a crash.

    Until the last renaming it is found here, and the older one until it is whole.
    """
    aside, whole = Path(run_dir, _ASIDE), Path(run_dir, _WHOLE)
    if not whole.exists():
        return
    for folder in whole.glob(_CHECKPOINTS):
        place, replaced = Path(run_dir, folder.name), aside / "replaced"
        if place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            aside.mkdir(exist_ok=True)
            place.rename(replaced)
        folder.rename(place)
    with contextlib.suppress(OSError):  # files of a file browser or of NFS
        whole.rmdir()
    shutil.rmtree(aside, ignore_errors=True)


def finish_for(checkpoint: str | os.PathLike[str], output_dir: str | os.PathLike[str] | None) -> None:
    """`finish` where a checkpoint lies that is named; where another training may be at work, for that one alone."""
    folder, name = os.path.split(os.path.abspath(checkpoint))
    is_own = output_dir is not None and os.path.realpath(output_dir) == os.path.realpath(folder)
    if ranks.rank() == 0 and (is_own or os.path.isdir(os.path.join(folder, _WHOLE, name))):
        finish(folder)
    ranks.wait()


def newest_whole(output_dir: str) -> str | None:
    """The newest whole checkpoint in `output_dir`, as rank 0 sees it; None if there are no checkpoints.

    Raises:
        LedgerError: there are, and none is whole.
    """
    step, halves = torch.tensor(_NONE), list[str]()
    if ranks.rank() == 0 and os.path.isdir(output_dir):
        finish(output_dir)
        halves = [f"{path.name}: it was being written" for path in Path(output_dir, _ASIDE).glob(_CHECKPOINTS)]
        for number in sorted(numbers(output_dir), reverse=True):
            lack = what_lacks(Path(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{number}"))
            if lack is None:
                step.fill_(number)
                break
            halves.append(f"{PREFIX_CHECKPOINT_DIR}-{number}: {lack}")
        if halves and step == _NONE:
            step.fill_(_HALVES)
    ranks.from_first_(step)
    if step == _HALVES:
        raise half(f"no checkpoint in {output_dir!r} is whole" + (f" ({'; '.join(halves)})" if halves else ""))
    if step == _NONE:
        return None
    found = os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{int(step)}")
    if halves:
        ranks.warn(
            logger,
            "Passed over, since it is not whole (%s). Training goes on from %r; the steps after it are lost, and cost "
            "nothing if nobody has seen anything of them.", "; ".join(halves), found,
        )  # fmt: skip
    return found


def numbers(folder: str) -> list[int]:
    found = (NUMBERED.fullmatch(path.name) for path in Path(folder).iterdir() if path.is_dir())
    return [int(match[1]) for match in found if match]


@contextlib.contextmanager
def others_named(checkpoint: Path | None, check: Callable[[Path], object]) -> Iterator[None]:
    """Where a training does not go on from `checkpoint`, the refusal names those beside it that it can go on from.

    Args:
        check: refuses a checkpoint of another training.

    Raises:
        LedgerError: the one that is raised inside, with the whole checkpoints that `check` lets pass, newest first.
    """
    try:
        yield
    except LedgerError as error:
        if checkpoint is None:
            raise
        own, folder = list[str](), checkpoint.absolute().parent
        for number in sorted(numbers(str(folder)), reverse=True):
            other = folder / f"{PREFIX_CHECKPOINT_DIR}-{number}"
            with contextlib.suppress(LedgerError):
                if what_lacks(other) is None:
                    check(other)
                    own.append(repr(str(other)))
        if not own:
            raise
        way = f"{error.fix} Or name a checkpoint of this training in resume_from_checkpoint: {', '.join(own)}."
        raise LedgerError(error.found, why=error.why, fix=way) from error


def what_lacks(checkpoint: Path) -> str | None:
    """What shows that a checkpoint was not written to its end, or not deleted to its end; None if nothing does."""
    try:
        json.loads(state := (checkpoint / STATE_FILE).read_bytes())
    except FileNotFoundError:
        return f"it has no {STATE_FILE}"
    except (OSError, ValueError, RecursionError):
        return f"{STATE_FILE} cannot be read"
    paths = list(checkpoint.rglob("*"))
    if not any(_WEIGHTS.fullmatch(path.name) for path in paths):
        return "it has no weights"
    for path in paths:
        if _is_cut(path):
            return f"{path.relative_to(checkpoint)} is cut"
        if path.name.endswith(".index.json") and (shards := _shards(path) - {other.name for other in paths}):
            return f"{', '.join(sorted(shards))} is missing"
    gone = [kind for kind in _STATES if not any(checkpoint.glob(f"{kind}*"))]
    if gone and len(gone) < len(_STATES):  # with save_only_model=True there are none
        return f"it has no {gone[0]}"
    return next(missing_files(checkpoint), None) if b'"saved_ledger"' in state else None


def _is_cut(path: Path) -> bool:
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return False
        except (OSError, SafetensorError):
            return True
    if path.suffix == ".distcp":
        return not (path.parent / ".metadata").exists()  # written when all ranks have written
    return _PICKLED.fullmatch(path.name) is not None and path.is_file() and not zipfile.is_zipfile(path)


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {index.name + " (cut)"}


def half(what: str) -> LedgerError:
    """The refusal of what is not whole."""
    return LedgerError(
        f"{what}.",
        why="weights, optimizer and ledger of different moments would make epsilon untrue.",
        fix="resume from a whole checkpoint, or delete these and train from the beginning, if nobody has seen them.",
    )
