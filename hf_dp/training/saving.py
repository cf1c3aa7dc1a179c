"""What is promised of weights as they are saved: the record and the card that lie beside them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import RECORD_FILE, PrivacyRecord, left_out, model_files, write_card
from hf_dp.hub.card import privacy_section
from hf_dp.hub.record import sha256_of_record, sha256_of_text
from hf_dp.step.alone import refuse_other_buffers
from hf_dp.step.plan import Plan
from hf_dp.training.adapters import has_adapters, states_of_adapters
from hf_dp.training.resuming.copies import refuse_moved, were_left
from hf_dp.training.resuming.origin import places_with_records
from hf_dp.training.resuming.resume import has_changed_since

logger = logging.getLogger(__name__)


def claim(plan: Plan, ledger: Ledger) -> PrivacyRecord:
    """What is promised of the weights as they are now. It takes longer than writing them, and so comes first."""
    report, saved = plan.report(ledger), datetime.now(UTC).date().isoformat()
    card = sha256_of_text(privacy_section(report, ledger, plan.config, saved=saved))
    return PrivacyRecord(
        report=report, config=plan.config, mechanism=plan.mechanism, ledger=ledger, files={}, card_sha256=card,
        earlier=plan.earlier, saved=saved,
    )  # fmt: skip


def write_claim(folder: Path, title: str, record: PrivacyRecord, model: Any) -> None:
    """Writes `privacy.json` and the card of the model in a folder of `saved_aside`, if there is one.

    Args:
        title: of a new card.
        record: a `claim`, of these weights.
        model: that was saved, which may know what it was made from.
    """
    if names := model_files(folder):
        _say_what_is_left_out(left_out(folder))
        record = record.with_files(folder, names)
        (folder / RECORD_FILE).write_text(text := record.to_json(), encoding="utf-8")
        record.ledger.written.add(sha256_of_record(text))
        write_card(folder, title, record, getattr(getattr(model, "config", None), "_name_or_path", None))


def refuse_unloaded(model: Any) -> None:
    """Refuses a model of PEFT without its adapter: nothing of what was trained would be saved.

    Raises:
        ConfigurationError: with what to save in its place.
    """
    states = states_of_adapters(model)
    if states is not None and not any(states):
        raise ConfigurationError(
            "the adapter was taken out of the model (merge_and_unload(), unload()).",
            why="what is saved of a PEFT model is its adapter: a record would stand beside nothing that was trained.",
            fix="save what merge_and_unload() returned: trainer.model = trainer.model.merge_and_unload(), or "
            "trainer.model = trainer.model.get_base_model() where that was done before.",
        )


def refuse_unclaimed(model: Any, trainer: object) -> None:
    """Refuses to save, with a claim of what `trainer` spent or without one, weights that came of something else since,
    or are not there.

    Raises:
        ConfigurationError: as of `refuse_unloaded`, or of `refuse_other_buffers`.
        LedgerError: those of a checkpoint that was read and then refused, or another trainer's of the same model, also
            of one without privacy.
    """
    refuse_unloaded(model)
    refuse_other_buffers(model)
    if any(p.requires_grad and has_changed_since(p, trainer) for p in model.parameters()):
        raise LedgerError(
            "the weights of this model were trained privately elsewhere since this training: read from a checkpoint "
            "that was refused, or by another trainer that holds the model.",
            why="the ledger of this one is without them, so a record would leave out what those cost, if there is one.",
            fix="save with the trainer that made them; or load what this training saved into a new model.",
        )
    refuse_moved(model, trainer, "saving", is_saved=True)


def can_save_itself(model: Any) -> bool:
    """Whether Trainer leaves it to the model how it is saved; of others it writes the state."""
    return isinstance(model, PreTrainedModel) or has_adapters(model)


def with_each_once(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as one safetensors file can hold it: what has several names under the first, and nothing in part.

    Trainer gives a state to safetensors as it is, which refuses tied weights when steps have been paid for. The names
    that stay are those that `safetensors.torch.save_model` keeps, so that its `load_model` finds them.
    """
    kept: dict[Any, str] = {}
    out, storages = dict[str, Any](), set[int]()
    for name in sorted(state):
        value = state[name]
        if not isinstance(value, Tensor) or not value.numel() or value.is_meta:
            out[name] = value
            continue
        place = value.untyped_storage().data_ptr()
        if kept.setdefault((place, value.storage_offset(), value.shape, value.stride(), value.dtype), name) != name:
            continue
        is_part = place in storages or value.untyped_storage().nbytes() != value.numel() * value.element_size()
        out[name] = value.clone(memory_format=torch.contiguous_format) if is_part else value.contiguous()
        storages.add(place)
    return out


def warn_of_no_record(model: Any) -> None:
    """Says that a trainer which has trained nothing saves weights that a private training made, and no record."""
    if states_of_adapters(model) is not None:
        return
    places = [repr(place) for place in places_with_records(model)]
    if places or were_left(model):
        ranks.warn(
            logger,
            "Saved without a record: this trainer has not trained, and the weights came from %s. Whoever trains them "
            "on from here is not asked for what they cost people who are in both data sets. Save them with the trainer "
            "that trained them, or copy the folder that it saved.",
            places[0] if places else "a private training in this process",
        )


@functools.cache
def say_once(message: str) -> None:
    """A warning that is said once in this process."""
    ranks.warn(logger, message)


def _say_what_is_left_out(names: list[str]) -> None:
    if names:
        say_once(
            f"Saved with the model, but never published, as such files could hold private data: {', '.join(names)}. "
            "If the tokenizer or the processor needs one of them to be loaded, it does not load from the hub: let it "
            "save its vocabulary as .json, or as a .txt with 'vocab' or 'merges' in its name."
        )
