"""Do all ranks train the same model on the same data with the same promise? Asked before the first step."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import platform
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp import __version__
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.fingerprint import fingerprint
from hf_dp.launched import asked_for_more

logger = logging.getLogger(__name__)

# What may differ from rank to rank: who it is, and where it writes.
_OWN = {"local_rank", "output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "log_level_replica"}
# What computes the draws, the gradients and the epsilon.
_LIBRARIES = ("accelerate", "dp-accounting", "numpy", "peft", "torch", "transformers")
# A float64 holds so many bits of a digest exactly.
_BITS = 48
_CHUNK = 1 << 22
Intent = Literal["goes on", "ends an epoch", "stops"]


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


def keep_step(step: int, intent: Intent) -> None:
    """Refuses ranks of which one stops alone. All call it together: one small all-gather, none where there is one rank.

    Args:
        step: how many steps this rank has made.
        intent: what it does next.

    Raises:
        HfDpError: with what each rank does.
    """
    if ranks.world_size() == 1:
        return
    intents = get_args(Intent)
    table = ranks.gathered([step, intents.index(intent)]).tolist()
    if any(row != table[0] for row in table):
        each = ", ".join(f"rank {i} {intents[int(what)]} after step {int(at)}" for i, (at, what) in enumerate(table))
        raise HfDpError(
            f"the ranks do not do the same: {each}.",
            why="a rank that goes on would wait for one that does not, and their steps would be no sum over all ranks.",
            fix="let every rank take the same callbacks and stopping decisions (a metric that all have, not a clock or "
            "a file of one); resume from the last checkpoint.",
        )


def warn_if_alone() -> None:
    """Says it where accelerate was asked for several processes, and started one without a word."""
    if ranks.world_size() == 1 and asked_for_more():
        ranks.warn(
            logger,
            "This process trains alone, although accelerate seems to have been asked for several: with --cpu it starts "
            "one. Start them with `torchrun --nproc-per-node 2 SCRIPT` (docs/scaling.md).",
        )


def described_data(dataset: Any) -> dict[str, Any]:
    """Size and content of the training data, for `agree`; of the content what two looks at a row find the same."""
    if ranks.world_size() == 1:
        return {}
    key = ranks.secret_from_first(secrets.token_bytes(32))
    return {"the length of train_dataset": len(dataset), "the content of train_dataset": fingerprint(dataset, key)}


def described_arguments(args: Any) -> dict[str, Any]:
    """`TrainingArguments`, but for what each rank has of its own."""
    return {
        f"TrainingArguments.{name}": _plain(value)
        for name, value in vars(args).items()
        if name not in _OWN and not name.startswith("_")
    }


def described_setup(accelerator: Any) -> dict[str, Any]:
    """What computes: the versions, and what of the environment and of accelerate's config changes results."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return {
        "the versions of the libraries": {
            "python": platform.python_version(),
            "hf_dp": __version__,
            **{name: version(name) for name in _LIBRARIES},
        },
        "torch's settings": [
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        ],
        "accelerate's settings": [
            str(accelerator.distributed_type),
            str(accelerator.mixed_precision),
            None if plugin is None else _plain(vars(plugin)),
        ],
    }


def described_optimizer(optimizer: Any) -> dict[str, Any]:
    """Its type, and the settings of its groups."""
    groups = [
        {"params": len(group["params"]), **{name: _plain(v) for name, v in group.items() if name != "params"}}
        for group in optimizer.param_groups
    ]
    return {"the optimizer": [type(getattr(optimizer, "optimizer", optimizer)).__name__, groups]}


def described_model(model: nn.Module) -> dict[str, Any]:
    """Names, shapes, dtypes, ties and what is trained."""
    return {
        "the model's parameters": [
            (name, list(p.shape), str(p.dtype), p.requires_grad)
            for name, p in model.named_parameters(remove_duplicate=False)
        ]
    }


def described_values(model: nn.Module) -> dict[str, Any]:
    """A checksum of what every rank holds whole; the same on every device."""
    if ranks.world_size() == 1:
        return {}
    wholes = [p.detach() for p in model.parameters() if not isinstance(p, DTensor)]
    return {"the model's weights": [checksum(p) for p in wholes]}


def checksum(values: Tensor) -> list[int]:
    """Of the bits: their sum, and their sum weighted by place, in wrapping 64-bit integers."""
    plain = weighted = 0
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    for start, part in enumerate(values.contiguous().view(-1).view(integers).split(_CHUNK)):
        bits = part.long()
        places = torch.arange(1, len(bits) + 1, device=bits.device)
        plain += int(bits.sum())
        weighted += (start + 1) * int((bits * places).sum())
    return [plain, weighted]


def _plain(value: Any) -> Any:
    """What JSON can say of `value`, the same in every process: of an object that it cannot say, the type alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (enum.Enum, torch.dtype)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(item)) for item in value)
    return type(value).__name__


def _digest(value: Any, key: bytes) -> int:
    text = json.dumps(value, sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), key=key, digest_size=_BITS // 8).digest(), "little")
