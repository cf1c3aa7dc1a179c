"""Where a model was read from: of one that was trained privately before, the promise says on whose data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.hub.earlier import covers, has_all_of
from hf_dp.hub.record import RECORD_FILE, PrivacyRecord
from hf_dp.step.plan import Plan


def refuse_unsaid_origin(model: nn.Module, own: Ledger, saved: object | None, plan: Plan) -> None:
    """Refuses weights that lay beside a record, where the promise does not say whose data that is about.

    Seen are the folders that Transformers reads models, and PEFT base models, from; of an adapter's own folder nothing
    is known, nor of repositories, whose record is not read with the weights.

    Args:
        model: with the weights to begin from.
        own: what its trainer has spent so far.
        saved: of the checkpoint that the trained weights were read from, if any: its training was asked.
        plan: of this training.

    Raises:
        LedgerError: with both ways to say it, also where the record cannot be read.
    """
    if saved is not None or plan.config.other_people:
        return
    for place in sorted(set(_places(model))):
        path = Path(place) / RECORD_FILE
        if not path.is_file():
            continue
        ledger = PrivacyRecord.from_json(path.read_bytes()).ledger
        if covers(plan.earlier, ledger) or has_all_of(own, ledger):
            continue
        which = "does not say whose data that was" if plan.config.after is None else f"says after={plan.config.after!r}"
        raise LedgerError(
            f"the model was read from {place!r}, where a private training of {ledger.steps} steps saved it, and the "
            f"promise of this one {which}.",
            why="for people in both data sets both cost more than this one alone, which is all that its report and its "
            "card would tell.",
            fix=f"give PrivacyConfig(after={place!r}), for one budget of both; or, where nobody is in both, "
            "PrivacyConfig(other_people=True).",
        )


def _places(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        found = [getattr(getattr(module, "config", None), "_name_or_path", None)]
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict):
            found += [getattr(adapter, "base_model_name_or_path", None) for adapter in adapters.values()]
        yield from (place for place in found if isinstance(place, str) and place)
