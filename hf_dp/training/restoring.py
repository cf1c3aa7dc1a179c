"""The part of DPTrainerMixin that reads a checkpoint: what cannot be read is refused by its file's name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.trainer_callback import TrainerState

from hf_dp.errors import HfDpError, LedgerError

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object


class RestoringMixin(_Base):
    """Trainer's own methods, with refusals in place of the words of pickles, archives and JSON."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with damage_is_named(resume_from_checkpoint, "trainer_state.json"):
            TrainerState.load_from_json(str(Path(resume_from_checkpoint, "trainer_state.json")))
        with damage_is_named(resume_from_checkpoint, "*.safetensors", "*.json"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

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
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
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
