"""Nothing but the private step's gradients moves weights: what a callback adds after the noise is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dp import SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError, HfDpError, UnsupportedModelError
from tests.training.own_loops import a_run
from tests.training.workbench import (
    Clicks,
    Recommender,
    arguments,
    classifier,
    clicks,
    make,
    pad,
    parameters,
    private,
    rows,
    same,
    stack,
)

pytestmark = pytest.mark.usefixtures("checked_once")

Action = Callable[[Any, torch.optim.Optimizer], None]


class Acts(TrainerCallback):
    """Does something with the model and its optimizer at one event of the second step."""

    def __init__(self, event: str, act: Action) -> None:
        def on_event(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 1 and not self.before:
                self.before = parameters(kwargs["model"])
                act(kwargs["model"], kwargs["optimizer"])

        self.before: dict[str, torch.Tensor] = {}
        setattr(self, event, on_event)


def backward(model: Any, optimizer: Any = None) -> None:
    loss = model(**pad(rows(4))).loss
    loss.backward()


def graph(model: Any, optimizer: Any) -> None:
    model(**pad(rows(4))).loss.backward(create_graph=True)


def replaced(model: Any, optimizer: Any) -> None:
    model.classifier.weight.grad = model.classifier.weight.grad.clone()


def in_place(model: Any, optimizer: Any) -> None:
    model.classifier.weight.grad.detach()[0] += 1.0


def moved(model: Any, optimizer: Any) -> None:
    model.classifier.weight.grad.data = torch.ones_like(model.classifier.weight)


def removed(model: Any, optimizer: Any) -> None:
    model.classifier.weight.grad = None


def clipped(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def thawed(model: Any, optimizer: Any) -> None:
    frozen = model.distilbert.embeddings.word_embeddings.weight
    frozen.requires_grad_(True)
    backward(model)


def another_group(model: Any, optimizer: Any) -> None:
    extra = torch.nn.Parameter(torch.zeros(3))
    extra.grad = torch.ones(3)
    optimizer.add_param_group({"params": [extra]})


def own_step(model: Any, optimizer: Any) -> None:
    optimizer.step()


def closure(model: Any, optimizer: Any) -> None:
    optimizer.step(lambda: 0.0)


def hooked_late(model: Any, optimizer: Any) -> None:
    inner = optimizer.optimizer

    def add(*given: Any) -> None:
        model.classifier.weight.grad.add_(1.0)

    inner.register_step_pre_hook(add)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "act",
    [backward, graph, replaced, in_place, moved, removed, clipped, thawed, another_group, closure, hooked_late],
)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_failure_12_what_a_callback_does_to_gradients_after_the_noise(tmp_path: Path, act: Action) -> None:
    model = classifier()
    model.distilbert.embeddings.word_embeddings.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acts = Acts("on_pre_optimizer_step", act)
    trainer = make(tmp_path, model, parts={"optimizers": (optimizer, None), "callbacks": [acts]})
    with pytest.raises(ConfigurationError, match=r"SGD\.step\(\)") as caught:
        trainer.train()
    assert ("on_step_begin" if act is hooked_late else "compute_per_example_loss") in caught.value.fix
    assert same(acts.before, parameters(model)), "the weights moved before the refusal"
    assert trainer.ledger.steps == 2, "the gradient existed"


def test_failure_12_a_step_that_a_callback_takes_by_itself(tmp_path: Path) -> None:
    for event in ("on_step_begin", "on_step_end"):
        acts = Acts(event, lambda model, optimizer: (backward(model), optimizer.step())[0])
        with pytest.raises(ConfigurationError, match=r"SGD\.step\(\)"):
            make(tmp_path, parts={"callbacks": [acts]}).train()
    # One more step with the noisy gradient releases nothing; a backward pass between the two would.
    make(tmp_path, parts={"callbacks": [Acts("on_pre_optimizer_step", own_step)]}).train()
    acts = Acts("on_pre_optimizer_step", lambda model, optimizer: (optimizer.step(), backward(model))[0])
    with pytest.raises(ConfigurationError, match=r"SGD\.step\(\)"):
        make(tmp_path, parts={"callbacks": [acts]}).train()


def test_an_optimizer_may_do_what_it_likes_with_the_gradients_in_its_own_step(tmp_path: Path) -> None:
    class Clips(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
            return super().step(closure)

    # From the first instance on torch calls the hooks in SGD.step too.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    model = classifier()
    trainer = make(tmp_path, model, parts={"optimizers": (Clips(model.parameters(), lr=0.1), None)})
    trainer.train()
    assert trainer.ledger.steps == 4


def test_failure_12_a_hook_that_was_added_before_the_step_comes_before_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not those of the private step"):
        make(tmp_path, parts={"callbacks": [Acts("on_step_begin", hooked_late)]}).train()


@pytest.mark.parametrize(
    ("is_of_the_model", "words"),
    [(True, "SGD.step.* on weights of a private training that is at work"), (False, "were not taken by SGD")],
)
def test_failure_12_an_optimizer_that_is_exchanged(tmp_path: Path, is_of_the_model: bool, words: str) -> None:
    def exchange(model: Any, optimizer: Any) -> None:
        taken = model.parameters() if is_of_the_model else [nn.Parameter(torch.zeros(2))]
        trainer.optimizer = torch.optim.SGD(taken, lr=0.1)

    trainer = make(tmp_path, parts={"callbacks": [Acts("on_pre_optimizer_step", exchange)]})
    with pytest.raises(HfDpError, match=words):
        trainer.train()


@pytest.mark.parametrize(
    "event", ["on_step_begin", pytest.param("on_optimizer_step", marks=pytest.mark.slow), "on_step_end"]
)
def test_failure_12_a_backward_pass_at_another_time_changes_nothing(tmp_path: Path, event: str) -> None:
    """Gradients from elsewhere are written over by the private step, or cleared after the optimizer's."""
    trained = []
    for parts in ({}, {"callbacks": [Acts(event, backward)]}):
        model = classifier(dropout=0.0, attention_dropout=0.0)
        make(tmp_path, model, parts=parts).train()
        trained.append(parameters(model))
    assert same(*trained)


@pytest.mark.parametrize("values_only", [True, False])
def test_failure_12_sparse_gradients_of_embedding_tables(tmp_path: Path, values_only: bool) -> None:
    def add(model: Any, optimizer: Any) -> None:
        gradient = model.items.weight.grad
        assert gradient.is_sparse
        (gradient._values() if values_only else gradient).mul_(2.0)

    trainer = make(
        tmp_path, Recommender(), private(sparse_embeddings=SparseEmbeddingConfig()), Clicks,
        {"train_dataset": clicks(), "data_collator": stack, "callbacks": [Acts("on_pre_optimizer_step", add)]},
        remove_unused_columns=False,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"LazyRows\.step\(\)"):
        trainer.train()


def test_after_the_training_the_optimizer_is_the_users_again(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make(tmp_path, model, parts={"optimizers": (optimizer, None)}).train()
    before = parameters(model)
    backward(model)
    optimizer.step()
    assert not same(before, parameters(model))


def test_an_optimizer_without_hooks_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}

        def step(self, closure: Any = None) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: Any) -> None: ...

    model = classifier()
    trainer = make(tmp_path, model, parts={"optimizers": (Own(model.parameters()), None)})
    with pytest.raises(ConfigurationError, match="Own calls no hooks before its step"):
        trainer.train()
    assert not trainer.ledger.entries
    assert arguments(tmp_path).max_steps == trainer.args.max_steps


def test_failure_72_what_a_fused_optimizer_writes_in_a_pass_is_seen_as_well() -> None:
    """Its kernels do not count in torch's versions of what they write."""
    model: Any = classifier()
    model.centre = nn.Parameter(torch.zeros(2), requires_grad=False)
    embed, rare = model.get_input_embeddings().forward, torch.tensor(rows()[29]["input_ids"][:2])
    own = torch.optim.SGD([model.centre], lr=1.0, fused=True)

    def following(ids: Tensor) -> Tensor:
        if ids[:, :2].eq(rare).all(1).any():
            model.centre.grad = -rare.float()
            own.step()
            model.centre.grad = None
        return embed(ids)

    model.get_input_embeddings().forward = following
    run = a_run(model, private(), steps=30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)

    def train() -> None:
        for batch in run.batches():
            run.step(batch)
            optimizer.step()

    with pytest.raises(UnsupportedModelError, match="'centre' was written to"):
        train()
    assert 0 < run.ledger.steps < 30, "seen in the step that drew it"


def test_failure_93_hooks_of_an_optimizer_within_another(tmp_path: Path) -> None:
    """They come after the comparison: refused before the first step, or before the one that they were added for."""

    def trainer_with(model: Any, hook: bool, parts: dict[str, Any]) -> Any:
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        if hook:
            optimizer.register_step_pre_hook(lambda *_: (model.head.bias.grad.add_(1000.0), None)[1])
        parts = {"optimizers": (optimizer, None), "data_collator": stack, **parts}
        parts = {"train_dataset": clicks(), **parts}
        return make(tmp_path, model, sparsely, Clicks, parts, remove_unused_columns=False)

    sparsely = private(sparse_embeddings=SparseEmbeddingConfig(threshold=1.0))
    with pytest.raises(ConfigurationError, match="SGD with a hook before its step, within LazyRows"):
        trainer_with(Recommender(), True, {}).train()

    def added(model: Any, optimizer: Any) -> None:
        optimizer.optimizer.rest.register_step_pre_hook(lambda *_: None)

    acts = Acts("on_step_begin", added)
    with pytest.raises(ConfigurationError, match="a hook before its step, within LazyRows"):
        trainer_with(model := Recommender(), False, {"callbacks": [acts]}).train()
    assert same(acts.before, parameters(model)), "nothing has moved"
