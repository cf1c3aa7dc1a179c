"""Between the micro-batches of a step nothing waits for the device, but what waits in an ordinary step as well."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

from hf_dp import ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.data import hidden, left_padding
from hf_dp.losses import per_example_losses
from hf_dp.per_example import ieee, preflight, record
from hf_dp.per_example.checks import kept
from hf_dp.per_example.checks.reads import AsRead
from hf_dp.step import private_gradient
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.training.engine import Engine
from tests.training.workbench import arguments, classifier, make, pad_for_language, private, rows
from tests.zoo import adapted, batches_of, tiny

# Whose results the host must know, or whose shapes follow from what tensors hold.
_WAITING = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "bincount", "unique"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
}
_BY_MASKS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# What no dispatcher sees on a CPU.
_READ = {getattr(Tensor, name) for name in ("tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "item")}


class Waits:
    """Counts what would wait for a device, were it one."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.is_open = True

    def note(self, name: str) -> None:
        if self.is_open:
            self.found[name] += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        # What is read inside of norms and sums is seen here as well.
        with mock.patch.object(ieee, "_beneath", nullcontext), _Read(self), _Dispatched(self):
            yield

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        before, self.is_open = self.is_open, False
        yield
        self.is_open = before


class WaitsOfCuda(Waits):
    """As torch itself tells them."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        # Not that this way of finding them is new, which is said once.
        self.found.update("synchronising call" for one in told if "called a synchronizing" in str(one.message))

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        yield
        torch.cuda.set_sync_debug_mode(before)


class _Dispatched(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _BY_MASKS and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        # A scalar in place of a tensor would be moved to the device.
        by_scalar = name == "where" and len({a.dim() > 0 for a in args[1:]} | {True}) > 1
        if name in _WAITING or by_mask or by_scalar:
            self._waits.note(name)
        return func(*args, **(kwargs or {}))


class _Read(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ:
            self._waits.note(func.__name__)
        return func(*args, **(kwargs or {}))


def untied() -> nn.Module:
    return tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1)


def with_lora() -> nn.Module:
    adapters = LoraConfig(r=2, target_modules="all-linear")
    made: nn.Module = get_peft_model(untied(), adapters)  # type: ignore[arg-type]
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied": (lambda: tiny("gpt2", "causal_lm", torch.float32, n_layer=1), {}),
    "untied": (untied, {}),
    "LoRA": (with_lora, {}),
    "sparse": (classifier, {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)}),
    "re-attention": (classifier, {"re_attention": ReAttentionConfig(token_frequencies="uniform")}),
    "users": (classifier, {"unit": "user", "max_examples_per_unit": 3}),
}
_FAST = ("tied", "LoRA", "sparse")
TWICE = {"users in two passes": (classifier, {"unit": "user", "max_examples_per_unit": 3, "passes": 2})}


def data(n: int, of_language: bool) -> list[dict[str, Any]]:
    made = rows(n)
    return [{"input_ids": row["input_ids"]} for row in made] if of_language else made


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device whose answers have to be waited for."""
    monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())


@pytest.mark.parametrize(
    "x",
    [lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.where(x > 0, 0.0), Tensor.unique],
)
def test_what_would_wait_is_counted(x: Callable[[Tensor], object]) -> None:
    waits = Waits()
    with waits.counted():
        torch.ones(3).where(torch.ones(3) > 0, torch.zeros(3))[torch.tensor([1])].sum()
        assert not waits.found
        x(torch.ones(3))
    assert waits.found


@pytest.mark.few(1)
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in _FAST else [pytest.mark.slow]) for kind in MODELS]
)
def test_nothing_is_asked_of_the_device_before_the_logical_batch_ends(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ordinary = waits_of_a_training(kind, tmp_path, monkeypatch, Waits())
    assert not found - ordinary


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", TWICE)
def test_two_passes_ask_no_more_than_two_ordinary_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ordinary = waits_of_a_training(kind, tmp_path, monkeypatch, Waits())
    assert not found - ordinary - ordinary


# Whether pictures are in their places; how many each example has. Relative positions are replaced by a scalar.
READ = {"__bool__": 1, "_local_scalar_dense": 1}
RECORDED: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, torch.dtype], Any], dict[str, int]]] = {
    "experts": (
        lambda: tiny("mixtral, experts batched", "causal_lm", torch.float32),
        batches_of("mixtral", "causal_lm"),
        {},
    ),
    "trainable tokens": (lambda: adapted("trainable tokens", torch.float32), batches_of("llama", "causal_lm"), {}),
    # Random numbers are looked at, which lie on the CPU.
    "C3A": (lambda: adapted("C3A", torch.float32), batches_of("llama", "causal_lm"), {"equal": 4}),
    "t5": (lambda: tiny("t5", "seq2seq", torch.float32), batches_of("t5", "seq2seq"), {"where": 8}),
    "one picture": (lambda: tiny("llava", "image_text", torch.float32), batches_of("llava", "image_text"), READ),
    "pictures": (
        lambda: tiny("smolvlm", "image_text", torch.float32),
        batches_of("smolvlm", "image_text"),
        # Whose each is, once it was taken into its text.
        {**READ, "tolist": 1, "equal": 8, "nonzero": 2, "_local_scalar_dense": 14, "repeat_interleave": 1},
    ),
}


@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.slow
def test_what_a_recording_asks_of_the_device_beside_an_ordinary_pass(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batches, known = RECORDED[kind]
    model, batch, ordinary, found = build(), batches(5, 7, torch.float32), Waits(), Waits()
    certificate = preflight(model, per_example_losses, batch)
    monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())
    with ordinary.counted():
        per_example_losses(model, batch).sum().backward()
    model.zero_grad()
    total = ClippedSum(model, Flat(FlatClipping(norm=1.0)))
    with found.counted():
        total.add(record(model, per_example_losses, batch, certificate=certificate))
    assert found.found - ordinary.found == Counter(known)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_waits_for_a_gpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ordinary = waits_of_a_training(kind, tmp_path, monkeypatch, WaitsOfCuda())
    assert not found - ordinary


def waits_of_a_training(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch, waits: Waits
) -> tuple[Counter[str], Counter[str]]:
    """Of its micro-batches, and of an ordinary Trainer's on the same."""
    (build, promise), on_cpu = {**MODELS, **TWICE}[kind], not isinstance(waits, WaitsOfCuda)
    model, window = build(), ExitStack()
    recorded: list[dict[str, Tensor]] = []
    collated: list[Tensor | None] = []

    class Sum(ClippedSum):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            window.enter_context(waits.counted())

        def meet(self, step: int) -> None:
            window.close()
            super().meet(step)

    def noted(engine: Engine, micro_batch: Any) -> Any:
        recorded.append({name: value.clone() for name, value in micro_batch.batch.items()})
        return recorded_by(engine, micro_batch)

    def moved(trainer: Any, inputs: Any) -> Any:
        collated.append(inputs.get("attention_mask"))
        # As any trainer moves its batches; the ordinary one here gets those that were moved.
        with waits.not_counted():
            return {name: value.clone() for name, value in prepared(trainer, inputs).items()}

    def asked(question: Callable[[Tensor], bool], mask: Tensor) -> bool:
        # What is asked of a batch before it is moved is asked of the host.
        with nullcontext() if all(mask is not one for one in collated) else waits.not_counted():
            return question(mask)

    def compared(one: Any, other: Any) -> bool:
        # After the last micro-batch.
        with waits.not_counted():
            return same(one, other)

    def outside(what: Callable[[Any], Any]) -> Callable[[Any], Any]:
        # Before the first one, and after the last.
        def done(read: Any) -> Any:
            with waits.not_counted():
                return what(read)

        return done

    recorded_by, prepared, same = Engine.record, Trainer._prepare_inputs, kept.same
    is_padded, shows_all = left_padding._is_padded, hidden._shows_all
    monkeypatch.setattr(private_gradient, "ClippedSum", Sum)
    monkeypatch.setattr(AsRead, "changed", outside(AsRead.changed))
    monkeypatch.setattr(AsRead, "note", outside(AsRead.note))
    monkeypatch.setattr(Engine, "record", noted)
    monkeypatch.setattr(kept, "same", compared)
    monkeypatch.setattr(Trainer, "_prepare_inputs", moved)
    monkeypatch.setattr(left_padding, "_is_padded", functools.partial(asked, is_padded))
    monkeypatch.setattr(hidden, "_shows_all", functools.partial(asked, shows_all))

    of_language, ordinary = not isinstance(model, type(classifier())), copy.deepcopy(model)
    given = data(48, of_language)
    parts = {"train_dataset": given, **({"data_collator": pad_for_language} if of_language else {})}
    if "unit" in promise:
        for number, row in enumerate(given):
            row["user"] = number // 4
    make(path, model, private(**promise), parts=parts, max_steps=2, use_cpu=on_cpu).train()
    assert len(recorded) > 2
    found, waits.found = waits.found, Counter()

    plain = Trainer(ordinary, arguments(path, use_cpu=on_cpu))  # type: ignore[arg-type]
    plain.current_gradient_accumulation_steps = 1
    with waits.counted():
        for batch in recorded:
            plain.training_step(ordinary, batch)
    return found, waits.found
