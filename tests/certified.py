"""Checks before the first step that were made of the same model, loss and examples before are not made again.

For tests of what comes after the checks: `pytestmark = pytest.mark.usefixtures("checked_once")`. In each run the first
test that needs a check has it made, whichever worker that is, or in each worker where a class of the tests is in it; a
refusal is never remembered, so one that a test expects always comes from the check. Checks that change the model are
made each time, and so are those of a loss that is not a trainer's own.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.losses import per_example_losses
from hf_dp.parts.re_attention import installed
from hf_dp.per_example import RULES, preflight
from hf_dp.per_example.checks.padding import check_padding
from hf_dp.per_example.checks.strangers import check_strangers
from hf_dp.per_example.rule import Use
from hf_dp.per_example.sharding import is_sharded

_known: dict[Hashable, Any] = {}
# Of modules and configs, what a first training and a saving leave behind, and what says where they were loaded from.
_OF_NO_OPERATION = {
    *("name_or_path", "_name_or_path", "base_model_name_or_path", "architectures", "transformers_version"),
    *("dtype", "_is_accelerate_prepared"),  # dtypes are those of the parameters
}
_OF_LIBRARIES = ("hf_dp.", "peft.", "torch.", "transformers.", "trl.")
# Where the workers of one run tell each other what they have found; None: each finds out all by itself.
shared: Path | None = None


@contextmanager
def once() -> Iterator[None]:
    """The checks that trainings call are remembered."""
    importlib.import_module("hf_dp.training.trainer")
    callers, found = _of_trainings(len(sys.modules)), 0
    with ExitStack() as patches:
        for check in (preflight, check_padding, check_strangers):
            wrapped = remembering(check)
            for module in callers:
                if getattr(module, check.__name__, None) is check:
                    patches.enter_context(mock.patch.object(module, check.__name__, wrapped))
                    found += 1
        assert found >= 3, "the checks are called from elsewhere, and nothing is remembered"
        yield


@functools.lru_cache(maxsize=1)
def _of_trainings(modules: int) -> list[ModuleType]:
    """Looked for again where there are more or fewer modules: there are thousands."""
    return [m for name, m in list(sys.modules.items()) if name.startswith("hf_dp.training")]


def remembering(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check(model, loss, ...)` that is made once."""

    @functools.wraps(check)
    def remembered(model: nn.Module, *args: Any, **options: Any) -> Any:
        before, given = _structure(model), _told(args, options)
        asked = None if before is None or given is None else (check, before, given)
        known, in_shards = asked in _known, is_sharded(model)
        if in_shards:
            # The check is one that all ranks make together.
            known = bool(ranks.gathered([float(known)]).all())
        if known:
            return _known[asked]
        words = None if shared is None or in_shards else _in_words(asked)
        place = None if shared is None or words is None else shared / _digest(words)
        # Who asks for the same meanwhile waits for it; ranks ask at one time.
        with nullcontext() if place is None else _alone(place):
            if place is not None and place.exists():
                result = pickle.loads(place.read_bytes())
            else:
                result = check(model, *args, **options)
                if asked is None or _structure(model) != before:
                    return result
                if place is not None:
                    own = place.with_suffix(f".{os.getpid()}")
                    own.write_bytes(pickle.dumps(result))
                    own.replace(place)
        _known[asked] = result
        return result

    return remembered


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def _in_words(asked: Any) -> str | None:
    """The same in all processes, and of nothing else; None where a class or function of the tests is in it, of which
    two may have one name."""
    if isinstance(asked, type | FunctionType):
        name = f"{asked.__module__}.{asked.__qualname__}"
        return None if "<locals>" in name or not name.startswith(_OF_LIBRARIES) else name
    if isinstance(asked, Set | tuple) and not isinstance(asked, torch.Size | Use):
        parts = [_in_words(part) for part in asked]
        if None in parts:
            return None
        told = sorted(map(str, parts)) if isinstance(asked, Set) else parts
        return f"{type(asked).__name__}({', '.join(map(str, told))})"
    is_plain = asked is None or isinstance(asked, bool | int | float | str | bytes | torch.dtype | torch.Size | Use)
    return repr(asked) if is_plain else None


def _structure(model: nn.Module) -> Hashable | None:
    """Modules with what is set in them, parameters but for their values, configs, and what stands around; None where a
    forward pass was replaced."""
    if any("forward" in vars(m) for m in model.modules()):
        return None
    modules = [(name, _hooks(m), _plain(vars(m))) for name, m in model.named_modules()]
    numbers: dict[int, int] = {}
    parameters = [
        (name, type(p), p.shape, p.dtype, p.requires_grad, numbers.setdefault(id(p), len(numbers)), _placed(p))
        for name, p in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, b.shape, b.dtype) for name, b in model.named_buffers()]
    attention = installed(model)
    noise = None if attention is None else (attention.config, [(n, e.shape) for n, e in attention.errors.items()])
    around = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), ranks.world_size())
    config = getattr(model, "config", None)
    settings = (
        *(_settings(config), getattr(config, "_attn_implementation", None)),
        {name: _settings(adapter) for name, adapter in getattr(model, "peft_config", {}).items()},
    )
    # Classes themselves, since those of two tests may have one name.
    return tuple(map(type, model.modules())), repr((modules, parameters, buffers, noise, around, settings))


def _hooks(module: nn.Module) -> list[str]:
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    return [getattr(hook, "__qualname__", type(hook).__name__) for kind in hooks for hook in kind.values()]


def _plain(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What is a number or a word."""
    known = {n: v for n, v in values.items() if n not in _OF_NO_OPERATION and (n, v) != ("_use_kernels", False)}
    return [(n, v) for n, v in sorted(known.items()) if v is None or isinstance(v, bool | int | float | str)]


def _settings(config: Any) -> Any:
    """Of a model or an adapter, in an order that is the same in all processes."""
    if not hasattr(config, "to_dict"):
        return config
    told = {name: value for name, value in config.to_dict().items() if name not in _OF_NO_OPERATION}
    classes = told.get("num_labels", len(told.get("id2label", ())))
    if told.get("problem_type") == "single_label_classification" and classes > 1:
        # What a first pass with labels that are whole numbers sets, and the labels are told as well.
        told["problem_type"] = None
    return {n: sorted(v, key=repr) if isinstance(v, set) else v for n, v in sorted(told.items())}


def _placed(p: Tensor) -> Any:
    return (p.placements, p.device_mesh) if isinstance(p, DTensor) else p.device


def _told(args: tuple[Any, ...], options: Mapping[str, Any]) -> Hashable | None:
    """Loss, examples and options as values; None for a loss whose likeness is not known."""
    told: list[Hashable] = [tuple(sorted(options.get("tables", ())))]
    if (certificate := options.get("certificate")) is not None:
        told.append((certificate, certificate.read))
    loss, examples, *collate = args
    trainer = getattr(loss, "__self__", None)
    if options.get("rules", RULES) is not RULES:
        return None
    if loss is per_example_losses:
        told.append(loss)
    elif not hasattr(trainer, "compute_per_example_loss") or "compute_per_example_loss" in vars(trainer):
        return None
    else:
        given = trainer.args
        kind = getattr(given, "loss_type", None)  # of TRL
        told.append((type(trainer), kind, given.label_smoothing_factor, given.bf16, given.fp16))
    if collate:
        told += [_content(collate[0](rows)) for rows in (list(examples), *([row] for row in examples))]
    return (*told, _content(examples))


def _content(examples: Any) -> Hashable:
    """A batch, or rows that no collator has seen."""
    if isinstance(examples, Mapping):
        return tuple((name, _content(value)) for name, value in sorted(examples.items()))
    if isinstance(examples, Tensor):
        return examples.dtype, examples.shape, hashlib.sha256(repr(examples.tolist()).encode()).digest()
    return tuple(map(_content, examples)) if isinstance(examples, list | tuple) else repr(examples)
