"""Saving and publishing: a private model carries its record and its card, and nothing else goes up."""

from __future__ import annotations

import json
import logging
import os
import shutil
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from transformers.utils.hub import PushInProgress

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError
from hf_dp.hub import (
    CARD_FILE,
    RECORD_FILE,
    PrivacyRecord,
    refuse_in_the_way,
    saved_aside,
    set_unreadable_aside,
    upload,
    with_what_was_there,
    write_card,
)
from hf_dp.hub.about import RESULTS
from hf_dp.training.resuming.resume import STATE_KEY
from hf_dp.training.runs import RunsMixin
from hf_dp.training.saving import (
    can_save_itself,
    claim,
    refuse_unclaimed,
    say_once,
    warn_of_no_record,
    with_each_once,
    write_claim,
)
from hf_dp.training.tokenizer_settings import tokenizers_as_given

logger = logging.getLogger(__name__)

_FROM_SCRATCH = "This model was trained from scratch on "
_FROM_NOTHING = "This model is a fine-tuned version of [](https://huggingface.co/) on "
_FROM_A_DIRECTORY = "This model is a fine-tuned version of a model that lay in a directory, on "


class PublishingMixin(RunsMixin):
    """The part of DPTrainerMixin that saves and publishes. All that leaves goes through `hf_dp.hub.upload`."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, with `privacy.json` and a model card beside the weights; whole also where checkpoints are in
        shards, which have none of the three. What was saved there before stays until all is written.

        Raises:
            ConfigurationError: a PEFT model whose adapter was taken out.
            LedgerError: weights of another training, or of a checkpoint that was read and then refused.
        """
        refuse_unclaimed(self.model, self)
        directory, saves = Path(output_dir or str(self.args.output_dir)), self.args.should_save
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            ranks.warn_of_missing(logger, "save_model()")
        record = claim(self._plan, self.ledger) if saves and self._plan is not None else None
        if self._plan is None:
            warn_of_no_record(self.model)
        if saves and os.path.realpath(directory) == os.path.realpath(str(self.args.output_dir)):
            self._finish_current_push()  # it reads the files that are about to be replaced
        files = saved_aside(directory) if saves else nullcontext(directory)
        with files as aside, tokenizers_as_given(self.processing_class, self.data_collator):
            super().save_model(str(aside), _internal_call=True)
            is_checkpoint = _internal_call and output_dir is not None
            if plugin is not None and not is_checkpoint and "FULL" not in str(plugin.state_dict_type):
                self._save(str(aside), state_dict=self.accelerator.get_state_dict(self.model))
            self._save_beside(aside)
            if record is not None:
                write_claim(aside, directory.absolute().name, record, self.model)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def save_state(self) -> None:
        """As Trainer's, with what was spent so far, by which `hf-dp report` knows whose log it is.

        It never goes up, and is no checkpoint: nothing resumes from it.
        """
        state: Any = self.state
        saved = dict(state.stateful_callbacks)
        spent = {"saved_ledger": None, "spent": self.ledger.to_dict()}
        state.stateful_callbacks[STATE_KEY] = {"args": {}, "attributes": spent}
        try:
            super().save_state()
        finally:
            # A checkpoint may be written from this state again.
            state.stateful_callbacks = saved

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As Trainer's, also of a model that has no `save_pretrained` and several names for some of its weights."""
        model: Any = self.model
        if not can_save_itself(self.accelerator.unwrap_model(model, keep_torch_compile=False)):
            state_dict = with_each_once(model.state_dict() if state_dict is None else state_dict)
        super()._save(output_dir, state_dict)

    def _save_beside(self, directory: Path) -> None:
        """What belongs to the model and is not in its weights."""
        if self._begun is not None and self.args.should_save:
            self._begun.save_beside(directory)

    def create_model_card(self, *args: Any, results: bool = False, **kwargs: Any) -> None:
        """As Trainer's, with a privacy section, without seeds, and with what people wrote into the card before it.

        Args:
            args, kwargs: as Trainer's.
            results: whether to publish the training losses and evaluation metrics that Trainer logged. They are exact
                functions of the data: epsilon does not cover them.

        Raises:
            ConfigurationError: something else has the name of the card.
        """
        path = Path(str(self.args.output_dir)) / CARD_FILE
        if self.is_world_process_zero():
            refuse_in_the_way(path.parent)
            set_unreadable_aside(path.parent)  # Trainer reads it too
        old = path.read_bytes() if path.is_file() else b""
        logged = self.state.log_history
        try:
            self.state.log_history = logged if results else []
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = logged
        if not self.is_world_process_zero() or not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith("- seed:")]
        if getattr(getattr(self.model, "config", None), "_name_or_path", ""):
            # Trainer says so of every base model that lay in a directory.
            lines = [line.replace(_FROM_SCRATCH, _FROM_A_DIRECTORY) for line in lines]
        lines = [line.replace(_FROM_NOTHING, _FROM_SCRATCH) for line in lines]
        new = "\n".join([*lines, "", RESULTS] if results else lines) + "\n"
        path.write_text(with_what_was_there(new, old), encoding="utf-8")
        if (path.parent / RECORD_FILE).exists():
            write_card(path.parent)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish the model, its tokenizer, `privacy.json` and the card, in one commit.

        Nothing else in the output directory goes up: no logs, arguments, optimizer or generator states, checkpoints.

        Args:
            commit_message, blocking, token, revision: as Trainer's.
            private: whether a new repository is; None for `args.hub_private_repo`.
            kwargs: arguments of `create_model_card`.

        Returns:
            The commit, or its future if not `blocking`; None on all processes but the first.

        Raises:
            ConfigurationError: before the first call of `train()`.
            huggingface_hub.errors.HfHubHTTPError: the hub refused. The saved model is whole; call again.
        """
        if self._plan is None:
            raise ConfigurationError(
                "push_to_hub before train().",
                why="there is no ledger, so nothing is known about the privacy of these weights.",
                fix="train first, or publish without a claim: trainer.model.push_to_hub(...).",
            )
        self._finish_current_push()  # it reads the files that are about to be written
        self._announce_push()
        if self.hub_model_id is None:
            # Older versions of Transformers take it from the arguments only.
            self.init_hf_repo(token=token, **({} if private is None else {"private": private}))
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        tags = kwargs.pop("tags", None) or []
        tags = [tags] if isinstance(tags, str) else list(tags)
        tags += [tag for tag in getattr(self.model, "model_tags", None) or [] if tag not in tags]
        name = kwargs.pop("model_name", None) or str(self.hub_model_id).split("/")[-1]
        self.create_model_card(model_name=name, tags=tags, **kwargs)
        message = commit_message or "End of training"
        return self._upload(message, token=token, revision=revision, run_as_future=not blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))
        if not self.is_world_process_zero() or strategy == "end":
            return
        running = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if running and not self.args.hub_always_push:
            return
        if not (Path(checkpoint_folder) / RECORD_FILE).exists():
            say_once("Checkpoints are in shards, of which none goes up; push_to_hub pushes the whole model.")
            return
        if strategy != "every_save":
            say_once(f"hub_strategy={strategy!r}: the models of checkpoints go up, not what resuming them needs.")
        self._finish_current_push()
        self._announce_push()
        # Not from the checkpoint itself: Trainer deletes old ones, perhaps while they are being sent.
        _copy_model(Path(checkpoint_folder), Path(str(self.args.output_dir)))
        message = f"Training in progress, step {self.state.global_step}"
        folders = [""]
        if strategy == "checkpoint":
            folders.append("last-checkpoint")
        elif strategy == "all_checkpoints":
            folders.append(Path(checkpoint_folder).name)
        jobs = [self._upload(message, path_in_repo=folder, run_as_future=True) for folder in folders]
        for job in jobs:
            job.add_done_callback(_say_if_failed)
        self.push_in_progress = PushInProgress(jobs)  # type: ignore[arg-type, assignment]

    def _announce_push(self) -> None:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)

    def _upload(self, message: str, token: str | None = None, revision: str | None = None, **options: Any) -> Any:
        directory = str(self.args.output_dir)
        _say_where_the_base_model_lies(Path(directory))
        try:
            return upload(
                directory,
                str(self.hub_model_id),
                message=message,
                token=token if token is not None else self.args.hub_token,
                revision=revision if revision is not None else self.args.hub_revision,
                **options,
            )
        except Exception as error:
            error.add_note(f"Nothing is lost: the model, its card and {RECORD_FILE} are in {directory!r}. Push again.")
            raise


def _say_where_the_base_model_lies(directory: Path) -> None:
    try:
        base = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if isinstance(base, str) and Path(base).exists():
        say_once(
            f"PEFT's adapter_config.json names the base model by a place on this machine, {base!r}, which goes up with "
            "it. For a name on the hub set model.peft_config['default'].base_model_name_or_path before training."
        )


def _copy_model(source: Path, target: Path) -> None:
    record = PrivacyRecord.from_json((source / RECORD_FILE).read_bytes())
    with saved_aside(target) as aside:
        for name in [*record.files, CARD_FILE, RECORD_FILE]:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, aside / name)


def _say_if_failed(job: Future[Any]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        ranks.warn(logger, "A push during training failed (%s). Training goes on; push again when it has ended.", error)
