"""What a model is made of changes between two steps: it is checked again, before the next one is paid for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import DistilBertModel, TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, PreflightError
from hf_dp.training.engine import Engine
from tests.training.workbench import classifier, make


def centred(module: nn.Module, args: Any, output: Any) -> Any:
    return output - output.mean(0, keepdim=True)


def with_a_hook(model: Any) -> None:
    model.pre_classifier.register_forward_hook(centred)


def with_a_hook_of_all(model: Any) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return centred(module, args, output) if module is model.pre_classifier else None

    nn.modules.module.register_module_forward_hook(hook)


def with_another_module(model: Any) -> None:
    class Centred(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight, self.bias = inner.weight, inner.bias

        def forward(self, x: Any) -> Any:
            return centred(self, (), nn.functional.linear(x, self.weight, self.bias))

    model.pre_classifier = Centred(model.pre_classifier)


def with_another_forward(model: Any) -> None:
    own = model.pre_classifier.forward
    model.pre_classifier.forward = lambda x: centred(model, (), own(x))


def with_another_forward_of_the_class(model: Any) -> None:
    own = type(model.distilbert).forward
    type(model.distilbert).forward = lambda self, *args, **kwargs: _of_the_mean(own(self, *args, **kwargs))


def _of_the_mean(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state - output.last_hidden_state.mean(0, keepdim=True)
    return output


class After(TrainerCallback):
    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change = change

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._change(model)


@pytest.fixture
def no_hooks_of_all() -> Any:
    hooks = nn.modules.module._global_forward_hooks
    before, forward = dict(hooks), DistilBertModel.forward
    yield
    DistilBertModel.forward = forward
    hooks.clear()
    hooks.update(before)


@pytest.mark.checked_anew
@pytest.mark.usefixtures("no_hooks_of_all")
@pytest.mark.parametrize(
    "change",
    [
        with_a_hook,
        with_a_hook_of_all,
        with_another_module,
        with_another_forward,
        with_another_forward_of_the_class,
    ],
)
@pytest.mark.slow
def test_failure_79_what_mixes_examples_from_the_third_step_on_is_refused_before_it(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    trainer = make(tmp_path, parts={"callbacks": [After(change)]})
    with pytest.raises(PreflightError):
        trainer.train()
    assert trainer.ledger.steps == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [nn.Module.bfloat16, lambda model: model.pre_classifier.half()])
def test_failure_89_weights_in_fewer_bits_from_the_third_step_on(change: Callable[[Any], Any], tmp_path: Path) -> None:
    trainer = make(tmp_path, parts={"callbacks": [After(change)]}, optim="sgd")
    with pytest.raises(ConfigurationError, match="another dtype of weights"):
        trainer.train()
    assert trainer.ledger.steps == 2


@pytest.mark.checked_anew
@pytest.mark.slow
def test_a_hook_that_does_no_harm_is_checked_once_and_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked, check = [], Engine.check
    monkeypatch.setattr(Engine, "check", lambda engine: (checked.append(engine), check(engine)))

    def harmless(model: Any) -> None:
        model.pre_classifier.register_forward_hook(lambda module, args, output: output * 2)

    trainer = make(tmp_path, parts={"callbacks": [After(harmless)]})
    trainer.train()
    assert len(checked) == 2
    assert trainer.ledger.steps == 4
    assert "has other modules, forward methods or hooks than were checked" in caplog.text


@pytest.mark.slow
@pytest.mark.checked_anew
def test_a_weight_that_each_pass_keeps_within_bounds_is_trained(tmp_path: Path) -> None:
    """As Gemma 3n does: a write that changes nothing."""
    trainer = make(tmp_path, max_steps=2)
    weight = trainer.model.pre_classifier.weight
    before = weight.detach().clone()

    def keep(module: Any, given: Any) -> None:
        module.weight.data.clamp_(-100, 100)

    trainer.model.pre_classifier.register_forward_pre_hook(keep)
    trainer.train()
    assert trainer.ledger.steps == 2
    assert not weight.equal(before)


@pytest.mark.slow
def test_a_method_that_is_hooked_in_each_step_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], Engine.check
    monkeypatch.setattr(Engine, "check", lambda engine: (checked.append(engine), check(engine)))

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.handle = model.pre_classifier.register_forward_hook(self.seen)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.handle.remove()

        def seen(self, module: nn.Module, args: Any, output: Any) -> None:
            pass

    make(tmp_path, parts={"callbacks": [Watching()]}).train()
    assert len(checked) == 2


@pytest.mark.slow
@pytest.mark.checked_anew
def test_after_a_refusal_in_the_middle_steps_are_asked_what_they_were_asked(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    engine = trainer._run.engine
    memory = engine._checks.memory
    handle = trainer.model.pre_classifier.register_forward_hook(centred)
    with pytest.raises(PreflightError):
        next(engine.micro_batches({"micro_batches": []}), None)
    assert memory is not None
    assert engine._checks.memory is memory
    handle.remove()
    assert next(engine.micro_batches({"micro_batches": []}), None) is None


@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_what_is_unfrozen_later_is_refused_before_its_step_is_paid_for(tmp_path: Path, rows_at_once: int) -> None:
    """In micro-batches of one row too, in which uses need no certificate; what is frozen later stays as it is."""

    def switch(model: Any, to: bool) -> Any:
        class Switches(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                (model.distilbert if to else model.pre_classifier).requires_grad_(to)

        return {"callbacks": [Switches()]}

    settings = {"per_device_train_batch_size": rows_at_once, "max_steps": 2}
    model = classifier()
    model.distilbert.requires_grad_(False)
    trainer = make(tmp_path, model, parts=switch(model, True), **settings)
    with pytest.raises(ConfigurationError, match=r"more trained parameters than .* \(distilbert\.\S+ the first\)"):
        trainer.train()
    assert trainer.ledger.steps == 1
    make(tmp_path / "again", model := classifier(), parts=switch(model, False), **settings).train()


def mixed(batch: Any) -> Any:
    return {**batch, "labels": batch["labels"].roll(1, 0)} if "labels" in batch else batch


class Own(DPTrainer):
    """Which nobody else is of."""


class Tells(TrainerCallback):
    """Gives a trainer, and the arguments of the event, to a change after the second step."""

    trainer: Any = None

    def __init__(self, change: Callable[[Any, Any], None]) -> None:
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.change(self.trainer, kwargs)


def with_another_preparation(trainer: Any, given: Any) -> None:
    own = trainer._prepare_inputs
    trainer._prepare_inputs = lambda inputs: mixed(own(inputs))


def with_another_preparation_of_the_class(trainer: Any, given: Any) -> None:
    own = Own._prepare_inputs
    Own._prepare_inputs = lambda self, inputs: mixed(own(self, inputs))  # type: ignore[method-assign]


def with_another_collator(trainer: Any, given: Any) -> None:
    own = given["train_dataloader"].collate_fn
    given["train_dataloader"].collate_fn = lambda examples: mixed(own(examples))


def with_another_preparation_and_loader(trainer: Any, given: Any) -> None:
    with_another_preparation(trainer, given)
    trainer.get_train_dataloader()


@pytest.mark.parametrize(
    "change",
    [
        with_another_preparation,
        with_another_preparation_of_the_class,
        with_another_collator,
        with_another_preparation_and_loader,
    ],
)
def test_failure_129_what_prepares_batches_is_not_exchanged_between_steps(
    change: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    callback = Tells(change)
    callback.trainer = make(tmp_path, kind=Own, parts={"callbacks": [callback]})
    try:
        with pytest.raises(
            ConfigurationError, match=r"another (_prepare_inputs|collator) than the training began with"
        ):
            callback.trainer.train()
    finally:
        if "_prepare_inputs" in vars(Own):
            del Own._prepare_inputs
    assert callback.trainer.ledger.steps == 2


def mixing_items(trainer: Any) -> Callable[..., Any]:
    """What the class of a trainer may not do, as a method of the object."""

    def take(items: Any, number: int, device: Any) -> Any:
        (item, *_), _ = type(trainer).get_batch_samples(trainer, items, number, device)
        return [{**item, "micro_batches": [mixed(batch) for batch in item["micro_batches"]]}], None

    return take


def mixing_step(trainer: Any) -> Callable[..., Any]:
    def step(model: Any, item: Any, number: Any = None) -> Any:
        item = {**item, "micro_batches": [mixed(batch) for batch in item["micro_batches"]]}
        return type(trainer).training_step(trainer, model, item, number)

    return step


@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize(("name", "other"), [("get_batch_samples", mixing_items), ("training_step", mixing_step)])
def test_methods_of_a_step_are_not_put_on_the_trainer_itself(
    tmp_path: Path, name: str, other: Callable[[Any], Any], in_training: bool
) -> None:
    """Its class is refused with them, and so is an object that has them in its place."""
    callback = Tells(lambda trainer, given: setattr(trainer, name, other(trainer)))
    callback.trainer = make(tmp_path, parts={"callbacks": [callback]} if in_training else None)
    if not in_training:
        setattr(callback.trainer, name, other(callback.trainer))
    with pytest.raises(ConfigurationError, match=f"a {name} of its own"):
        callback.trainer.train()
    assert callback.trainer.ledger.steps == 2 * in_training


@pytest.mark.checked_anew
def test_a_loss_that_a_class_gets_between_steps_is_checked(tmp_path: Path) -> None:
    def change(trainer: Any, given: Any) -> None:
        def losses(self: Any, model: Any, inputs: Any) -> Any:
            found = DPTrainer.compute_per_example_loss(self, model, inputs)
            return found - found.mean() / 2

        Own.compute_per_example_loss = losses  # type: ignore[method-assign]

    callback = Tells(change)
    callback.trainer = make(tmp_path, kind=Own, parts={"callbacks": [callback]})
    try:
        with pytest.raises(PreflightError):
            callback.trainer.train()
    finally:
        del Own.compute_per_example_loss
    assert callback.trainer.ledger.steps == 2
