"""A checkpoint in FSDP2's files for a run without FSDP2 or with other ones, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from accelerate.utils import load_fsdp_model
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import StateDictType

from hf_dp.step.written import plain_optimizer
from hf_dp.training.adapters import has_adapters, read_adapters
from hf_dp.training.base import TrainerBehind
from hf_dp.training.resuming.loaded import OPTIMIZER, SCHEDULE
from hf_dp.training.resuming.own_checkpoints import read_weights
from hf_dp.training.resuming.renamed import read_renamed

# As accelerate and Trainer name them.
_MODEL, _SHARDED_MODEL = "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"
_FULL_OPTIMIZER, _SHARDED_OPTIMIZER = "optimizer.bin", "optimizer_0"
_WHOLE = StateDictOptions(full_state_dict=True, strict=False)
Layout = Literal["ordinary", "FULL_STATE_DICT", "SHARDED_STATE_DICT"]


class LayoutsMixin(TrainerBehind):
    """The part of DPTrainerMixin that reads checkpoints of a layout that Trainer would not read here."""

    _read_whole: Path | None = None

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if resume_from_checkpoint and self.is_fsdp_enabled and layout_of(Path(resume_from_checkpoint)) == "ordinary":
            # As without FSDP2, which has not yet taken the weights apart.
            self.is_fsdp_enabled = False
            try:
                self._load_ordinary(resume_from_checkpoint, None)
            finally:
                self.is_fsdp_enabled = True
            self._read_whole = Path(resume_from_checkpoint)
        return super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, resume_from_checkpoint
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint, self._read_whole, was_read = Path(resume_from_checkpoint), None, self._read_whole
        if layout_of(checkpoint) != "ordinary":
            load_weights(self, model or self.model, checkpoint)
        elif was_read != checkpoint:
            self._load_ordinary(resume_from_checkpoint, model)

    def _load_ordinary(self, checkpoint: str, model: nn.Module | None) -> None:
        if has_adapters(model or self.model):
            read_adapters(Path(checkpoint), model or self.model)
        else:
            try:
                super()._load_from_checkpoint(checkpoint, model)
            except StrictDataclassError:
                # Trainer reads the config as that of any model, for the version in it: of a model with kinds of layers
                # that no other has it is not valid.
                read_weights(Path(checkpoint), model or self.model)
            else:
                read_renamed(Path(checkpoint), model or self.model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        # It may be of the training before the checkpoint that this one went on from, in another layout.
        if best is not None and (self.is_fsdp_enabled or layout_of(Path(best)) != "ordinary"):
            load_weights(self, self.model, Path(best))
        elif best is not None and has_adapters(self.model):
            read_adapters(Path(best), self.model)
            cast("nn.Module", self.model).eval()  # as Trainer leaves them
        else:
            super()._load_best_model()
            if best is not None:
                read_renamed(Path(best), self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if _layout_read_by(self) == "FULL_STATE_DICT" and hasattr(self.model, "peft_config"):
            # accelerate below 1.15 saves of an adapter what rank 0 holds, and reads no more on any other rank.
            options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
            whole = get_model_state_dict(self.model, options=options)  # type: ignore[arg-type]
            if self.args.should_save:
                torch.save(whole, Path(output_dir, _MODEL))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Without a schedule it is a checkpoint of the weights alone, of which Trainer reads no more.
        if checkpoint is None or not (Path(checkpoint) / SCHEDULE).is_file():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # Others read too little: accelerate of FULL_STATE_DICT for plain SGD, and its 1.10 of SHARDED_STATE_DICT for
        # Adam (without an error); Transformers 5.17 in several processes on a CPU.
        if layout_of(Path(checkpoint)) == _layout_read_by(self) == "ordinary" and self.args.world_size == 1:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            load_optimizer_and_scheduler(self, Path(checkpoint))


def layout_of(checkpoint: Path) -> Layout:
    """How a checkpoint was written: in Trainer's ordinary files, or in one of the ways of FSDP2."""
    if (checkpoint / _SHARDED_MODEL).is_dir():
        return "SHARDED_STATE_DICT"
    return "FULL_STATE_DICT" if (checkpoint / _MODEL).is_file() else "ordinary"


def load_weights(trainer: Any, model: Any, checkpoint: Path) -> None:
    """Reads the weights of a checkpoint in one of FSDP2's layouts into any model, and of any into one in shards. All
    ranks call it together. What was read is to be held against checksums: names that are missing are no error here."""
    layout = layout_of(checkpoint)
    if layout == "SHARDED_STATE_DICT":
        load_fsdp_model(_plugin(), trainer.accelerator, model, str(checkpoint), adapter_only=True)
    elif layout == "ordinary" and has_adapters(model):
        with _taken_apart(model):
            read_adapters(checkpoint, model)
    elif layout == "ordinary":
        for path in sorted(checkpoint.glob("model*.safetensors")):
            whole: dict[str, Any] = load_file(path)
            set_model_state_dict(model, whole, options=_WHOLE)
    else:
        # Of an adapter nothing else is there.
        options = StateDictOptions(full_state_dict=True, strict=not hasattr(model, "peft_config"))
        saved = torch.load(checkpoint / _MODEL, map_location="cpu", weights_only=True, mmap=True)
        set_model_state_dict(model, saved, options=options)


@contextmanager
def _taken_apart(model: Any) -> Iterator[None]:
    """Inside, the model in shards is given whole tensors, as PEFT reads them."""

    def load_state_dict(state: dict[str, Any], **_: Any) -> Any:
        del model.load_state_dict  # which torch calls
        try:
            return set_model_state_dict(model, state, options=_WHOLE)
        finally:
            model.load_state_dict = load_state_dict

    model.load_state_dict = load_state_dict
    try:
        yield
    finally:
        del model.load_state_dict


def load_optimizer_and_scheduler(trainer: Any, checkpoint: Path) -> None:
    """Reads the optimizer's state of any layout into that of any model, and the schedule, on all ranks together."""
    model, optimizer = trainer.model, plain_optimizer(trainer.optimizer)
    layout = layout_of(checkpoint)
    if {layout, _layout_read_by(trainer)} == {"ordinary"}:
        trainer.optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True))
    elif layout == "SHARDED_STATE_DICT":
        sharded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        load(sharded, storage_reader=FileSystemReader(checkpoint / _SHARDED_OPTIMIZER))
        set_optimizer_state_dict(model, optimizer, sharded["optimizer"])
    else:
        name = OPTIMIZER if layout == "ordinary" else _FULL_OPTIMIZER
        saved = torch.load(checkpoint / name, map_location="cpu", weights_only=True, mmap=True)
        if saved["state"]:
            if layout == "ordinary":
                now: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
                saved = _by_name(saved, now["param_groups"])
            set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(full_state_dict=True))
        else:
            # Of plain SGD, which torch does not take.
            for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in kept.items() if key != "params"})
    trainer.lr_scheduler.load_state_dict(torch.load(checkpoint / SCHEDULE, weights_only=True))


def _by_name(saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state by the names of parameters, where it is by their places in the optimizer's groups.

    Args:
        saved: as an optimizer's `state_dict`.
        groups: of the same parameters in the same order, with their names.
    """
    names = {
        place: name
        for kept, group in zip(saved["param_groups"], groups, strict=True)
        for place, name in zip(kept["params"], group["params"], strict=True)
    }
    return {
        "state": {names[place]: state for place, state in saved["state"].items()},
        "param_groups": [
            {**kept, "params": group["params"]} for kept, group in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def _plugin() -> Any:
    """What accelerate's readers look at, of a plugin for FSDP2."""
    return SimpleNamespace(
        fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT, state_dict_config=SimpleNamespace()
    )


def _layout_read_by(trainer: Any) -> Layout:
    """That which Trainer and accelerate read by themselves."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return "ordinary"
    return "FULL_STATE_DICT" if "FULL" in str(plugin.state_dict_type) else "SHARDED_STATE_DICT"
