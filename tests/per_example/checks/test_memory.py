"""What a model keeps of its examples: each way to write it down is refused, and caches are not."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.memory import unchanged_buffers, unchanged_weights
from hf_dp.per_example.checks.state import unchanged_state
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, private, rows
from tests.zoo import tiny

FEATURES = 4


class Plain(nn.Module):
    """A classifier whose passes keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Frozen(Plain):
    """A running mean in a parameter that is not trained, written past torch's counts."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(0.1 * x.mean(0))
        return super().forward(x)


class Started(Plain):
    """A trained parameter that the first rows begin (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.has_begun = nn.Parameter(torch.zeros(FEATURES)), 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            self.place.data.copy_(-x.mean(0))
            self.has_begun = 1
        return super().forward(x + self.place)


class Freezing(Plain):
    """What is trained follows from the first rows."""

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().max()) > 1:
            self.first.weight.requires_grad_(False)
        return super().forward(x)


class Late(Plain):
    """A parameter that comes with the first pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(x.mean(0).detach(), requires_grad=False)
        return super().forward(x)


class LateBuffer(Plain):
    """A buffer that comes with the first pass."""

    def forward(self, x: Tensor) -> Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", x.mean(0).detach())
        return super().forward(x)


class Extra(Plain):
    """State that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"mean": torch.zeros(FEATURES)}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["mean"] = x.mean(0).detach()
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return self.kept["mean"]

    def set_extra_state(self, state: Tensor) -> None:
        self.kept["mean"] = state


class Largest(Plain):
    """A buffer that only what is larger than all before changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return super().forward(x)


class Slow(Plain):
    """A number that is not saved and hardly moves, by which all that follows is divided."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.999995 * self.scale + 5e-6 * float(x.detach().abs().max())
        return super().forward(x) / self.scale


class Opposite(Plain):
    """A number of which twice and one more is itself, in a tuple, that one of two batches leaves alone."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if self.kept is None else self.kept[0]
        if float(x.detach().sum()) > 0:
            self.kept = (-1.0,)
        return super().forward(x) * scale


class Unsaved(Plain):
    """A buffer that is not saved, begun by the first rows, by which all that follows is moved."""

    def forward(self, x: Tensor) -> Tensor:
        if "first_rows" not in self._buffers:
            self.register_buffer("first_rows", x.detach().mean(0), persistent=False)
        return super().forward(x - self.first_rows)


class Cache(Plain):
    """What follows from shapes, and what nothing is computed from: for later passes both are nothing."""

    positions = 0

    def forward(self, x: Tensor) -> Tensor:
        self.positions = max(self.positions, len(x))
        self.register_buffer("places", torch.arange(self.positions), persistent=False)
        self.seen = x.detach().mean()
        return super().forward(x)


class TwoNames(Plain):
    """One tensor for two unsaved buffers, from the first pass on (Transformers' dynamic rotary positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("used", torch.ones(FEATURES), persistent=False)
        self.register_buffer("original", torch.ones(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("used", self.original if len(x) < 4 else 2 * self.original, persistent=False)
        return super().forward(x * self.used)


def batch(size: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(seed))


def memory_of(model: nn.Module) -> Memory:
    return Memory(model, lambda x: model(x).sum(1))


@pytest.mark.parametrize("kind", [Frozen, Started, Late, Extra])
def test_what_is_written_into_what_is_saved_is_refused(kind: type[Plain]) -> None:
    model = kind()
    name = {Frozen: "mean", Started: "place", Late: "late", Extra: "_extra_state"}[kind]  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match=f"'{name}' changes when examples pass"), unchanged_weights(model):
        model(batch(3, 0))


def test_failure_136_what_is_trained_does_not_follow_from_the_first_rows() -> None:
    model = Freezing()
    with (
        pytest.raises(UnsupportedModelError, match=r"change whether 'first\.weight' is trained"),
        unchanged_weights(model),
    ):
        model(batch(3, 0, scale=10))
    assert model.first.weight.requires_grad


@pytest.mark.parametrize("first", ["refused", "another error"])
@pytest.mark.parametrize("kind", [Started, Late, Extra])
def test_failure_51_what_was_written_is_refused_as_long_as_it_is_there(kind: type[Plain], first: str) -> None:
    model = kind()
    with pytest.raises((UnsupportedModelError, IndexError)), unchanged_weights(model):  # noqa: PT012
        model(batch(3, 0))
        if first == "another error":
            raise IndexError("of a row that is corrected then")
    # Whoever runs the cell again, puts it into another model or copies it, adds nothing to it.
    for again in (model, nn.ModuleDict({"base": model}), copy.deepcopy(model)):
        with pytest.raises(UnsupportedModelError, match="was written"), unchanged_weights(again):
            pass
    anew = kind()
    with pytest.raises(UnsupportedModelError, match="changes when examples pass"), unchanged_weights(anew):
        anew(batch(3, 1))


@pytest.mark.parametrize("what", ["frozen", "config", "extra state"])
def test_failure_51_what_a_step_has_written_is_refused_in_the_next_training(what: str) -> None:
    model: Any = Extra()
    model.config = types.SimpleNamespace(largest=0.0)
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="was written to while"), unchanged_buffers(model):  # noqa: PT012
        if what == "frozen":
            with torch.no_grad():
                model.frozen += 11
        elif what == "config":
            model.config.largest = 11.0
        else:
            model.kept["mean"] = torch.full((FEATURES,), 11.0)
    with (
        pytest.raises(UnsupportedModelError, match=f"{what.replace(' ', '_')}.* was written"),
        unchanged_weights(model),
    ):
        pass


class _Forwarding(nn.Linear):
    def __getattr__(self, name: str) -> Any:
        return vars(self)["behind"] if name == "config" else super().__getattr__(name)


class _ByProperty(nn.Linear):
    config = property(lambda self: vars(self)["behind"])


@pytest.mark.parametrize("kind", [_Forwarding, _ByProperty])
def test_a_configuration_that_a_class_gives_is_looked_at_too(kind: type[nn.Module]) -> None:
    model: Any = nn.Sequential(kind(FEATURES, 1))
    vars(model[0])["behind"] = types.SimpleNamespace(largest=0.0)
    with pytest.raises(UnsupportedModelError, match="largest.* was written to while"), unchanged_buffers(model):
        model[0].config.largest = 7.0


def test_a_buffer_that_comes_with_the_first_pass_is_refused_and_goes() -> None:
    model = LateBuffer()
    with pytest.raises(UnsupportedModelError, match="buffer 'late' changes"), unchanged_state(model):
        model(batch(3, 0))
    assert "late" not in model.state_dict()


@pytest.mark.parametrize("kind", [Plain, Cache])
def test_what_keeps_nothing_is_not_refused(kind: type[Plain]) -> None:
    model = kind()
    with unchanged_weights(model), unchanged_buffers(model), unchanged_state(model):
        model(batch(3, 0))
    memory_of(model).refuse(batch(1, 0), batch(1, 1), batch(2, 2))


def test_two_buffers_that_become_one_tensor_are_put_back() -> None:
    model = TwoNames()
    for size in (2, 5, 2):
        with unchanged_state(model):
            model(batch(size, 0))
            with unchanged_state(model):
                model(batch(7 - size, 0))
        assert model.used.tolist() == model.original.tolist() == [1.0] * FEATURES


def test_what_one_row_alone_changes_is_refused_in_its_step() -> None:
    model = Largest()
    for check in (unchanged_weights, unchanged_state, unchanged_buffers):
        with check(model):
            model(batch(3, 0))
    with pytest.raises(UnsupportedModelError, match="buffer 'largest' changes"), unchanged_buffers(model):
        model(batch(3, 0, scale=100))
    assert float(model.largest) == 10
    with pytest.raises(KeyboardInterrupt), unchanged_buffers(model):  # noqa: PT012
        model(batch(3, 0, scale=100))
        raise KeyboardInterrupt
    assert float(model.largest) == 10


def test_failure_43_a_memory_that_hardly_moves_is_refused_by_its_name() -> None:
    model = Slow()
    with pytest.raises(UnsupportedModelError, match="scale keeps something of the examples"):
        memory_of(model).refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    assert model.scale == 1


@pytest.mark.parametrize("registered", [True, False])
def test_a_configuration_that_is_a_module_is_looked_at_like_any(registered: bool) -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [nn.Identity()]
            self.held[0].mode = "never"  # type: ignore[assignment]
            if registered:
                self.inner = self.held[0]

        @property
        def config(self) -> nn.Module:
            return self.held[0]

    model = Configured()
    with pytest.raises(UnsupportedModelError, match=r"mode from 'never' to 'seen'"), unchanged_state(model):
        model.config.mode = "seen"  # type: ignore[assignment]
    assert model.config.mode == "never"


def test_hooks_that_transformers_puts_in_once_are_no_switch() -> None:
    model, ids = tiny("llama", "causal_lm"), torch.arange(4)[None]
    hooks = []
    for _ in range(2):
        with unchanged_state(model):
            model(ids, output_hidden_states=True)
        hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
    assert hooks[0] == hooks[1] > 0


@pytest.mark.parametrize(("kind", "name"), [(Opposite, "kept"), (Unsaved, "first_rows")])
def test_a_memory_in_whatever_form_is_refused(kind: type[Plain], name: str) -> None:
    one, other = batch(1, 0).abs(), -batch(1, 1).abs()
    for first, second in ((one, other), (other, one)):
        model = kind()
        with pytest.raises(UnsupportedModelError, match=f"^{name} keeps something"):
            memory_of(model).refuse(first, second, batch(2, 2))


@pytest.mark.parametrize(
    "what", ["a buffer that was none", "a new buffer", "extra state", "config", "frozen", "last.bias"]
)
def test_what_is_written_in_a_step_is_refused(what: str) -> None:
    model: Any = Extra()
    model.config = types.SimpleNamespace(largest=0.0)
    model.register_buffer("none_yet", None)
    model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    name = {"a buffer that was none": "none_yet", "a new buffer": "new", "extra state": "_extra_state"}.get(what, what)
    with pytest.raises(UnsupportedModelError, match=name), unchanged_buffers(model):  # noqa: PT012
        if what == "a buffer that was none":
            model.none_yet = torch.ones(2)
        elif what == "a new buffer":
            model.register_buffer("new", torch.ones(2))
        elif what == "extra state":
            model(batch(3, 0))
        elif what == "config":
            model.config.largest = 7.0
        else:
            with torch.no_grad():
                model.get_parameter(what).add_(1)
    assert model.none_yet is None
    assert "new" not in model._buffers


@pytest.mark.parametrize("what", ["number", "list"])
def test_a_configuration_that_remembers_is_refused(tmp_path: Path, what: str) -> None:
    model: Any = classifier()
    model.config.seen, embed = 0 if what == "number" else [], model.get_input_embeddings().forward

    def remembering(ids: Tensor) -> Tensor:
        if what == "number":
            model.config.seen += int(ids.sum())
        else:
            model.config.seen.append(int(ids[0, 0]))
        return embed(ids)

    model.get_input_embeddings().forward = remembering
    refused(tmp_path, UnsupportedModelError, r"change config\.seen\.", model, at_once=False)
    assert model.config.seen in (0, [])


@pytest.mark.slow
def test_failure_42_what_one_row_that_no_check_saw_writes_into_a_saved_buffer_is_refused(tmp_path: Path) -> None:
    model: Any = classifier()
    model.register_buffer("widest", torch.tensor(10.0))
    embed, rare = model.get_input_embeddings().forward, torch.tensor(rows()[29]["input_ids"][:2])

    def keeping(ids: Tensor) -> Tensor:
        model.widest.copy_(torch.maximum(model.widest, 777.0 * ids[:, :2].eq(rare).all(1).any()))
        return embed(ids)

    model.get_input_embeddings().forward = keeping
    run = make(tmp_path, model, private(), max_steps=30)
    with pytest.raises(UnsupportedModelError, match="buffer 'widest' changes"):
        run.train()
    assert 0 < run.ledger.steps < 30, "seen in the step that drew it"
    assert float(model.widest) == 10
