"""Where a model was read from: of one that was trained privately before, the promise says on whose data."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import CONFIG_NAME

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config.after import places_of
from hf_dp.errors import LedgerError
from hf_dp.hub.earlier import has_all_of, records
from hf_dp.hub.record import FORMAT, RECORD_FILE, PrivacyRecord, sha256_of_record
from hf_dp.hub.saved import broken_off
from hf_dp.step.plan import Plan
from hf_dp.step.written import stepped_by

logger = logging.getLogger(__name__)

_FROM_DATA = {"eva", "corda", "lora_ga"}
# What LoRA begins with as nothing, by init_lora_weights and in the names of parameters: of an embedding it is the other
# matrix, and of AdaLoRA what stands between the two.
_FROM_NOTHING, _NOTHING_YET = {"true", "gaussian", "eva"}, {"lora_B", "lora_embedding_A"}
_NOTHING_YET_IN_ADALORA = {"lora_E"}
_OTHERS = "where nobody is in both, PrivacyConfig(other_people=True)"


def refuse_unsaid_origin(model: nn.Module, own: Ledger, saved: object | None, plan: Plan) -> None:
    """Refuses weights that lay beside a record, where the promise does not say whose data that is about.

    Seen are the folders that Transformers reads models, and PEFT base models, from; of an adapter's own folder nothing
    is known, nor of repositories, whose record is not read with the weights.

    Args:
        model: with the weights to begin from, or another one that gradients follow from.
        own: what its trainer has spent so far.
        saved: of the checkpoint that the trained weights were read from, if any: of these its training was asked.
        plan: of this training.

    Raises:
        LedgerError: with both ways to say it, also where the record cannot be read.
    """
    if plan.config.other_people:
        return
    names = sorted(set(_places(model, frozen_alone=saved is not None)))
    for named, place in [(name, place) for name in names for place in _with_records(name)]:
        if not os.path.isfile(os.path.join(place, RECORD_FILE)):
            _refuse_broken_off(place, own)
            continue
        if _is_no_record(text := Path(place, RECORD_FILE).read_bytes()):
            continue
        ledger = _ledger_of(text, place)
        digest = sha256_of_record(text)
        is_own = has_all_of(own, ledger) and _was_written_of(own, digest)
        if is_own or _is_charged(digest, plan):
            continue
        which = "does not say whose data that was" if plan.config.after is None else f"says after={plan.config.after!r}"
        after = [*places_of(plan.config.after), place] if plan.config.after else place
        apart = f" Of one from another folder in {named!r}, read it by that folder's path, without subfolder=."
        raise LedgerError(
            f"the model was read from {place!r}, where a private training of {ledger.steps} steps saved it, and the "
            f"promise of this one {which}.",
            why="for people in both data sets both cost more than this one alone, which is all that its report and its "
            "card would tell.",
            fix=f"give PrivacyConfig(after={after!r}), for one budget of both; or, {_OTHERS}. Resume with the model as "
            "the first run read it. Of a model that was made from the config there, and none of its weights, set "
            f"model.config._name_or_path to ''.{'' if place == named else apart}",
        )


def warn_of_origin(model: nn.Module, tokenizer: Any, own: Ledger, plan: Plan) -> None:
    """Says of weights that were trained without privacy in this process, of adapters that begin from data or were
    trained already, of a model from a folder that is gone, and of a tokenizer that lay beside a record which the
    promise does not name, that private data may be in the weights.

    Args:
        model: that will be trained.
        tokenizer: of the model, or its processor; None if there is none.
        own: what its trainer has spent so far.
        plan: of this training.
    """
    _warn_of_steps_before(model)
    _warn_of_fitted(model)
    _warn_of_trained_adapters(model, own, plan)
    _warn_of_gone(model, plan)
    place = getattr(getattr(tokenizer, "tokenizer", tokenizer), "name_or_path", None)
    path = os.path.join(place, RECORD_FILE) if isinstance(place, str) and place else ""
    if plan.config.other_people or not os.path.isfile(path) or _is_no_record(text := Path(path).read_bytes()):
        return
    if (digest := sha256_of_record(text)) not in own.written and not _is_charged(digest, plan):
        ranks.warn(
            logger,
            "The tokenizer was read from %r, where a private training saved it. Whether its adapters are in this "
            "model, as they are or merged, cannot be seen. If they are, and people are in both data sets, give "
            "PrivacyConfig(after=...) with that folder, for one budget of both: epsilon is without it now. Where "
            "nobody is in both, PrivacyConfig(other_people=True).", place,
        )  # fmt: skip


def _warn_of_steps_before(model: nn.Module) -> None:
    found = ((name, stepped_by(p)) for name, p in model.named_parameters())
    if (first := next(((name, by) for name, by in found if by is not None), None)) is not None:
        ranks.warn(
            logger,
            "%s was trained before in this process, by %s and not by hf_dp. What that saw is in the weights, and "
            "epsilon is without it. If it was private (a baseline on the same rows, say), begin from a "
            "model that is loaded anew, or from a copy that was made before.", *first,
        )  # fmt: skip


def _warn_of_fitted(model: nn.Module) -> None:
    kinds = {
        str(getattr(adapter, "init_lora_weights", None)).lower()
        for module in model.modules()
        if isinstance(adapters := getattr(module, "peft_config", None), dict)
        for adapter in adapters.values()
    }
    if found := sorted(kinds & _FROM_DATA):
        ranks.warn(
            logger,
            "The adapters begin from what init_lora_weights=%r computes of data. Of private rows it is in the weights "
            "without noise, and epsilon is without it: compute it of public ones, or leave init_lora_weights out.",
            found[0],
        )


def _warn_of_trained_adapters(model: nn.Module, own: Ledger, plan: Plan) -> None:
    """Of LoRA that was made in this process, what is added to the model is zero until it is trained."""
    if own.steps or plan.config.after or plan.config.other_people:
        return
    begun = {
        name: _NOTHING_YET_IN_ADALORA if getattr(adapter, "peft_type", None) == "ADALORA" else _NOTHING_YET
        for module in model.modules()
        if isinstance(adapters := getattr(module, "peft_config", None), dict)
        for name, adapter in adapters.items()
        if str(getattr(adapter, "init_lora_weights", None)).lower() in _FROM_NOTHING
    }
    for name, p in model.named_parameters() if begun else ():
        words = {*name.split(".")}
        is_told = any(words & begun[adapter] for adapter in words & begun.keys())
        if not is_told or type(p.data) is not Tensor or p.is_meta or stepped_by(p):
            continue
        if bool(p.detach().any()):
            ranks.warn(
                logger,
                "An adapter in this model was trained before (%s is not zero), and where it was read from cannot be "
                "seen. If a private training made it, and people are in both data sets, epsilon is without that one: "
                "give PrivacyConfig(after=...) with its folder, for one budget of both. Where nobody is in both, "
                "PrivacyConfig(other_people=True).", name,
            )  # fmt: skip
            return


def _warn_of_gone(model: nn.Module, plan: Plan) -> None:
    """Of names that can be no repository's."""
    found = {place for module in model.modules() if isinstance(place := _read_from(module), str)}
    gone = [place for place in found if (os.path.isabs(place) or place.startswith(".")) and not os.path.isdir(place)]
    if gone and not (plan.config.other_people or plan.config.after):
        ranks.warn(
            logger,
            "The model was read from %r, where no folder is any more. If a private training saved it there, and people "
            "are in both data sets, epsilon is without that one: put the folder back, and give "
            "PrivacyConfig(after=...) with it. Where nobody is in both, PrivacyConfig(other_people=True).", min(gone),
        )  # fmt: skip


def places_with_records(model: nn.Module) -> list[str]:
    """The folders that a model was read from where a private training has saved one."""
    return sorted({place for name in set(_places(model, frozen_alone=False)) for place in _with_records(name)})


def _is_charged(digest: str, plan: Plan) -> bool:
    return any(sha256_of_record(one) == digest for one in records(plan.earlier))


def covers(earlier: tuple[str, ...], ledger: Ledger, steps: int | None = None) -> bool:
    """Whether all that a ledger of this process says was spent is in a record that was saved of it, and is `earlier` or
    the record of a training before that. Two trainings with one promise are two.

    Args:
        steps: of weights that were left before all was spent, by then.
    """
    return any(
        _was_written_of(ledger, sha256_of_record(one))
        and (
            has_all_of(saved := PrivacyRecord.from_json(one).ledger, ledger)
            or (steps is not None and saved.steps >= steps)
        )
        for one in records(earlier)
    )


def _was_written_of(ledger: Ledger, digest: str) -> bool:
    # The first rank writes, and what it refuses is refused.
    return digest in ledger.written or ranks.rank() != 0


def _ledger_of(text: bytes, place: str) -> Ledger:
    try:
        return PrivacyRecord.from_json(text).ledger
    except LedgerError as error:
        raise LedgerError(
            f"the model was read from {place!r}, and what a private training spent on it cannot be read there: "
            f"{error.found}",
            why="for people in both data sets both cost more than this one alone.",
            fix=f"put back its {RECORD_FILE} as it was saved, and give PrivacyConfig(after={place!r}); or, {_OTHERS}.",
        ) from error


def _refuse_broken_off(place: str, own: Ledger) -> None:
    """Refuses weights that a save has put there which was killed before their record was beside them."""
    text = broken_off(place)
    if text is None or has_all_of(own, ledger := PrivacyRecord.from_json(text).ledger):
        return
    raise LedgerError(
        f"the model was read from {place!r}, where a private training of {ledger.steps} steps was saving it, and was "
        f"broken off before {RECORD_FILE} was there.",
        why="for people in both data sets both cost more than this one alone, which is all that its report and its "
        "card would tell.",
        fix="go on from a checkpoint of that training and save it again, and give PrivacyConfig(after=...) with that "
        f"folder; or, {_OTHERS}.",
    )


def _is_no_record(text: bytes) -> bool:
    """Of whole JSON that says of itself that it is something else; what cannot be read may be a record."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not isinstance(values, dict) or values.get("format") != FORMAT


def _with_records(place: str) -> list[str]:
    """A folder with a record that a model of this name may have been read from, by `subfolder` too."""
    # Of names that no file can have too it says no more than that there is none.
    if os.path.isfile(os.path.join(place, RECORD_FILE)) or (os.path.isdir(place) and broken_off(place)):
        return [place]
    if not os.path.isdir(place) or os.path.isfile(os.path.join(place, CONFIG_NAME)):
        return []
    below = sorted(Path(place).glob(f"*/{RECORD_FILE}")) + sorted(Path(place).glob(f"*/*/{RECORD_FILE}"))
    return [str(record.parent) for record in below]


def _read_from(module: nn.Module) -> Any:
    return getattr(getattr(module, "config", None), "_name_or_path", None)


def _places(model: nn.Module, *, frozen_alone: bool) -> Iterator[str]:
    for module in model.modules():
        found = [_read_from(module)]
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict):
            found += [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
        places = [place for place in found if isinstance(place, str) and place]
        if places and not (frozen_alone and all(p.requires_grad for p in module.parameters())):
            yield from places
