"""The part of DPTrainerMixin that reads a checkpoint: what cannot be read is refused by its file's name."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_dp.ranks as ranks
from hf_dp.config import PrivacyConfig
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.places import nowhere
from hf_dp.step.written import plain_optimizer
from hf_dp.training.base import TrainerBehind
from hf_dp.training.logs import WITHHELD
from hf_dp.training.resuming.checkpoints import NUMBERED, STATE_FILE, half, numbers, what_lacks
from hf_dp.training.resuming.resume import SavedRun

logger = logging.getLogger(__name__)


class RestoringMixin(TrainerBehind):
    """Trainer's own methods, with refusals in place of the words of pickles, archives and JSON."""

    privacy: PrivacyConfig

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with damage_is_named(resume_from_checkpoint, "trainer_state.json"):
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint, "trainer_state.json")))
        if self.privacy.withhold_non_private_logs:
            _refuse_logged(resume_from_checkpoint, state)
        with damage_is_named(resume_from_checkpoint, "*.safetensors", "*.json"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As Trainer's, which asks a model for names that no model of one's own has. What is missing is refused."""
        if hasattr(self.model, "_keys_to_ignore_on_save"):
            super()._issue_warnings_after_load(load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with damage_is_named(checkpoint, "optimizer*", "scheduler.pt"), settings_are_kept(self.optimizer):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with damage_is_named(checkpoint, "scaler.pt"):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # After the preflight, and before the first step.
        with damage_is_named(checkpoint, f"rng_state{f'_{self.args.process_index}' * (self.args.world_size > 1)}.pth"):
            super()._load_rng_state(checkpoint)

    def read_best(self, promise: Mapping[str, Any], dataset: Any) -> SavedRun | None:
        """What the best checkpoint knows of its run; None if there is none any more.

        It is looked for beside the new ones first: where these were moved, another training may lie in its old place.

        Raises:
            LedgerError: it is of another training, or not as it was saved.
        """
        state = self.state
        beside = os.path.join(self._get_output_dir(None), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if os.path.isdir(beside):
            state.best_model_checkpoint = beside
        if (best := state.best_model_checkpoint) is None:
            return None
        if not os.path.isdir(best):
            ranks.warn(logger, "The best checkpoint, %r, is gone.", best)
            state.best_model_checkpoint = None
            return None
        try:
            (saved := SavedRun.read(best)).check(promise, dataset)
            self._refuse_other_logs(best)
        except LedgerError as error:
            raise LedgerError(
                f"the best checkpoint, {best!r}, is not one of this training, or not as it was saved: {error.found}",
                why="the ledger of this training would be told of its weights, which cost something else.",
                fix="put it back beside the others, or resume from the last one with load_best_model_at_end=False.",
            ) from error
        return saved

    def _refuse_other_logs(self, best: str) -> None:
        """Refuses a checkpoint that has another past: of a training that was begun anew, and promised the same.

        Asked by the rank that wrote it: how long an evaluation took is another number on each.
        """
        if not self.args.should_save:
            return
        with damage_is_named(best, "trainer_state.json"):
            then = TrainerState.load_from_json(str(Path(best, "trainer_state.json"))).log_history
        if json.dumps(then, sort_keys=True) != json.dumps(self.state.log_history[: len(then)], sort_keys=True):
            raise LedgerError(
                f"{best!r} logged something else before it than this training did.",
                why="another training wrote it.",
                fix="give each training an output_dir of its own.",
            )


def _refuse_logged(checkpoint: str, state: TrainerState) -> None:
    """Refuses to withhold from now on what a checkpoint has logged: all later ones would have it too."""
    logged = {name for entry in state.log_history for name in WITHHELD if entry.get(name)}
    counted = {name for name in ("total_flos", "num_input_tokens_seen") if getattr(state, name)}
    if found := sorted(logged | counted):
        raise LedgerError(
            f"{checkpoint!r} has {', '.join(found)} of its training, which withhold_non_private_logs=True withholds.",
            why="they are exact functions of the private data, would be in every later checkpoint, and the report and "
            "the card would say that there are none.",
            fix="resume with withhold_non_private_logs=False, as it was begun, or begin anew.",
        )


def refuse_half(checkpoint: str) -> None:
    """Refuses a checkpoint that is not there, or not whole.

    Raises:
        LedgerError: with what it lacks.
    """
    if not os.path.isdir(checkpoint):
        raise LedgerError(
            f"resume_from_checkpoint={str(checkpoint)!r}: {nowhere(checkpoint, 'none is read from the hub')}.",
            why="a training from the beginning would spend the budget once more.",
            fix="give the path of a folder checkpoint-N that is there, or True for the newest whole one in the output "
            "directory.",
        )
    _refuse_other_folder(Path(checkpoint))
    if (lack := what_lacks(Path(checkpoint))) is not None:
        raise half(f"{str(checkpoint)!r} is not whole: {lack}")


def _refuse_other_folder(place: Path) -> None:
    """Refuses an output directory or a saved model: to call it half a checkpoint would be to advise to delete it."""
    if NUMBERED.fullmatch(place.resolve().name):
        return
    held = [f"{PREFIX_CHECKPOINT_DIR}-{number}" for number in sorted(numbers(str(place)))]
    if not held and (place / STATE_FILE).exists():  # a checkpoint by another name; save_state() writes one beside some
        return
    newest = "True for the newest whole one in the output directory"
    raise LedgerError(
        f"resume_from_checkpoint={str(place)!r} is no checkpoint: it has {', '.join(held) or f'no {STATE_FILE}'}.",
        why="training goes on from the weights, the optimizer and the ledger of one step.",
        fix=f"give the path of one of these, or {newest}."
        if held
        else f"give the path of a folder checkpoint-N, or {newest}. To train a saved model further, load it as the "
        "model of a new trainer, with PrivacyConfig(after=...) and its folder where the same people are in the data.",
    )


@contextmanager
def damage_is_named(checkpoint: str | None, *patterns: str) -> Iterator[None]:
    try:
        yield
    except HfDpError:
        raise
    except Exception as error:
        if checkpoint is None:
            raise
        paths = sorted(path for pattern in patterns for path in Path(checkpoint).glob(pattern))
        names = ", ".join(path.name for path in [path for path in paths if _is_damaged(path)] or paths)
        raise LedgerError(
            f"{names or 'a file'} in {checkpoint!r} cannot be loaded ({type(error).__name__}: {error}).",
            why="training would not go on from where the checkpoint's ledger stands.",
            fix="resume from another checkpoint, with the model and the optimizer that it was saved with.",
        ) from error


@contextmanager
def settings_are_kept(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer reads its state. With that of another kind, and its settings, the next step would fail.

    Raises:
        LedgerError: with the settings that are gone.
    """
    before = [set(group) for group in optimizer.param_groups]
    yield
    lost = {name for had, group in zip(before, optimizer.param_groups, strict=True) for name in had - set(group)}
    if lost:
        kind = type(plain_optimizer(optimizer)).__name__
        raise LedgerError(
            f"the checkpoint's optimizer has no {', '.join(sorted(lost))}: it is not {kind}.",
            why="the next step would be paid for, and could not be taken.",
            fix="resume with the optimizer of the first run.",
        )


def _is_damaged(path: Path) -> bool:
    """Whether a file cannot even be opened; what is in it may still be wrong."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            loaded: Any = torch.load(path, map_location="meta", weights_only=True)
            return not isinstance(loaded, dict)
        else:
            path.read_text(encoding="utf-8")
    except Exception:  # noqa: BLE001 - each format has errors of its own
        return True
    return False
