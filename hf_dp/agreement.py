"""Do all ranks have the same, and do the same? Asked before the first step, and at each."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.launched import asked_for_more

logger = logging.getLogger(__name__)

# A float64 holds so many bits of a digest exactly.
_BITS = 48
Intent = Literal["goes on", "ends an epoch", "stops", "saves"]


def agree(facts: Mapping[str, Any]) -> None:
    """Refuses ranks that differ in `facts`. All call it together, and it is raised on all.

    Args:
        facts: by the name that the error gives them; values of plain types.

    Raises:
        ConfigurationError: with the names of what differs, and the ranks that differ from rank 0.
    """
    found = difference(facts)
    if found is not None:
        raise ConfigurationError(
            f"{found}.",
            why="the ranks would add up gradients of different models or data, and epsilon would hold for none.",
            fix="start every rank with the same script, arguments, data (in the same order) and weights.",
        )


def difference(facts: Mapping[str, Any]) -> str | None:
    """What differs between the ranks and on which, or None. Two small all-gathers; only digests are sent."""
    if ranks.world_size() == 1:
        return None
    # Keyed with a secret of this call: a digest of private rows could be tested against guesses.
    key = ranks.secret_from_first(secrets.token_bytes(32))
    names = sorted(facts)
    table = ranks.gathered([_digest(names, key), _digest(dict(facts), key)])
    different = []
    if bool((table[:, 0] == table[0, 0]).all()):
        # The same questions, so that answers can be compared one by one.
        table = ranks.gathered([_digest(facts[name], key) for name in names])
        different = [name for name, column in zip(names, table.T, strict=True) if len(set(column.tolist())) > 1]
    odd = [str(i) for i, row in enumerate(table) if not torch.equal(row, table[0])]
    if not odd:
        return None
    return f"rank {', '.join(odd)} has not the same as rank 0: {', '.join(different) or 'which settings there are'}"


def rate_of(optimizer: Any) -> float:
    """Its learning rates, added up."""
    return float(sum(group.get("lr") or 0 for group in optimizer.param_groups))


def keep_step(step: int, intent: Intent, rate: float = 0.0) -> None:
    """Refuses ranks of which one stops alone, or steps by another rate. All call it together: one small all-gather,
    none where there is one rank.

    Args:
        step: how many steps this rank has made.
        intent: what it does next.
        rate: by which it does so, or did so last; see `rate_of`.

    Raises:
        HfDpError: with what each rank does.
    """
    if ranks.world_size() == 1:
        return
    intents = get_args(Intent)
    table = ranks.gathered([step, intents.index(intent), rate]).tolist()
    if any(row[:2] != table[0][:2] for row in table):
        each = ", ".join(f"rank {i} {intents[int(what)]} after step {int(at)}" for i, (at, what, _) in enumerate(table))
        raise HfDpError(
            f"the ranks do not do the same: {each}.",
            why="a rank that goes on would wait for one that does not, and their steps would be no sum over all ranks.",
            fix="let every rank take the same callbacks and stopping decisions (a metric that all have, not a clock or "
            "a file of one); resume from the last checkpoint.",
        )
    # Ranks on other machines may round a schedule in another way.
    if not all(math.isclose(own, table[0][2], rel_tol=1e-6) for *_, own in table):
        each = ", ".join(f"rank {i} by {own:.6g}" for i, (*_, own) in enumerate(table))
        raise HfDpError(
            f"the optimizers of the ranks step by other learning rates (added up over their groups): {each}.",
            why="their weights drift apart, and each would add up gradients at weights that no other rank has.",
            fix="let callbacks set the same rate on every rank (not on the first alone); resume from a checkpoint of "
            "before.",
        )


def warn_of_drift(values: Mapping[str, str]) -> None:
    """Says it where the ranks hold other weights, or another state of the optimizer. All call it together.

    It is no refusal: other hardware may round otherwise.

    Args:
        values: checksums of both, the same on all ranks but for that.
    """
    if (found := difference({"what is trained, or the optimizer's state": values})) is not None:
        ranks.warn(
            logger,
            "%s. Each rank adds up gradients at weights of its own then, and those of rank 0 are saved: let callbacks "
            "do the same on every rank, not on the first alone.",
            found,
        )


def warn_if_alone() -> None:
    """Says it where accelerate was asked for several processes, and started one without a word."""
    if ranks.world_size() == 1 and asked_for_more():
        ranks.warn(
            logger,
            "This process trains alone, although accelerate seems to have been asked for several: with --cpu it starts "
            "one. Start them with `torchrun --nproc-per-node 2 SCRIPT` (docs/scaling.md).",
        )


def _digest(value: Any, key: bytes) -> int:
    text = json.dumps(value, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), key=key, digest_size=_BITS // 8).digest(), "little")
