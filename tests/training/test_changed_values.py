"""Losses are what was checked: what is switched off stays off, and what changes between steps is checked anew."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, PreflightError
from tests import zoo
from tests.training.own_loops import a_run
from tests.training.workbench import make, pad_for_language, private, rows


def rate_of(holder: Any) -> float:
    return float(holder.param_groups[0]["lr"] if hasattr(holder, "param_groups") else holder.learning_rate)


class Settings:
    weight = 0.0


SETTINGS = argparse.Namespace(weight=0.0)


class Before(TrainerCallback):  # type: ignore[misc]
    """Does something before each step, to which it gives the model and the number of steps before."""

    def __init__(self, work: Callable[[Any, int], None]) -> None:
        self.work = work

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.work(model, state.global_step)


class Switched(nn.Module):
    """Ids (B, T) to one of three classes; with `mix`, features less their mean over the batch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(40, 5), nn.Linear(5, 3)
        self.place, self.drop, self.mix = nn.Parameter(torch.randn(5)), nn.Dropout(dropout), 0.0

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.tanh(self.table(ids).mean(1) + self.drop(self.place))
        return self.out(h - self.mix * h.mean(0))  # type: ignore[no-any-return]


class Trainer(DPTrainer):
    """Its loss may have a part that is all of the batch's, which `weight` gives."""

    weight: Callable[[Any], float] = staticmethod(lambda trainer: 0.0)

    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        logits = model(inputs["input_ids"])
        mixed = logits.detach().mean(0).square().sum() * logits.square().sum(1)
        return F.cross_entropy(logits, inputs["labels"], reduction="none") + type(self).weight(self) * mixed


def data() -> list[dict[str, Any]]:
    return [{"input_ids": torch.arange(i, i + 6) % 40, "labels": i % 3} for i in range(40)]


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.stack([e["input_ids"] for e in examples]),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


def trainer(path: Path, model: nn.Module, kind: type[DPTrainer] = Trainer, **changes: Any) -> Any:
    parts = {"train_dataset": data(), "data_collator": collate}
    return make(path, model, kind=kind, parts=parts, **{"max_steps": 3, "remove_unused_columns": False, **changes})


# --- what is switched off stays off -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["attribute", "dropout"])
def test_failure_95_what_the_check_switched_off_is_off_in_every_step(tmp_path: Path, place: str) -> None:
    seen: list[float] = []
    if place == "attribute":
        model: Any = zoo.tiny("opt", "causal_lm", torch.float32, layerdrop=0.5)
        ids = [{"input_ids": row["input_ids"]} for row in rows()]
        parts = {"train_dataset": ids, "data_collator": pad_for_language}
        run = make(tmp_path, model, parts=parts, max_steps=2)
        model.model.decoder.layers[0].register_forward_pre_hook(lambda *_: seen.append(model.model.decoder.layerdrop))
    else:
        model = Switched(dropout=0.3)
        run = trainer(tmp_path, model)
        model.drop.register_forward_pre_hook(lambda *_: seen.append(model.drop.p))
    run.train()
    # The check itself begins with them on.
    assert 0.0 in seen
    assert set(seen[seen.index(0.0) :]) == {0.0}
    assert (model.model.decoder.layerdrop if place == "attribute" else model.drop.p) == 0.0


def test_failure_95_in_a_loop_of_ones_own() -> None:
    model = Switched(dropout=0.3)
    run = a_run(model, private(), dataset=data(), collate=collate, steps=2, loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    assert model.drop.p == 0.0
    for batch in run.batches():
        run.step(batch)
        assert model.drop.p == 0.0
        optimizer.step()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")


def test_what_a_callback_switches_on_again_is_refused_before_it_is_paid_for(tmp_path: Path) -> None:
    def on_again(model: Any, step: int) -> None:
        model.drop.p = 0.3 if step == 1 else 0.0

    run = trainer(tmp_path, Switched(dropout=0.3))
    run.add_callback(Before(on_again))
    with pytest.raises(ConfigurationError, match="was switched off for private training"):
        run.train()
    assert run.ledger.steps == 1


# --- what changes between steps -----------------------------------------------------------------------------------


def set_flag(model: Any, step: int) -> None:
    model.mix = float(step > 0)


def set_dropout(model: Any, step: int) -> None:
    model.drop.p = 0.3 * (step > 0)


def test_failure_96_a_flag_that_is_set_after_the_first_step_is_checked_before_the_second(tmp_path: Path) -> None:
    run = trainer(tmp_path, Switched())
    run.add_callback(Before(set_flag))
    with pytest.raises(PreflightError, match="neighbours"):
        run.train()
    assert run.ledger.steps == 1


def test_failure_96_a_mask_for_all_that_comes_later_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Switched()
    run = trainer(tmp_path, model)
    run.add_callback(Before(lambda model, step: set_dropout(model, step) if step == 1 else None))
    run.train()
    assert model.drop.p == 0.0
    assert "is made again" in caplog.text
    assert "Switched off for private training: drop.p=0.3" in caplog.text


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda trainer: trainer.state.global_step / 10, id="by the number of the step"),
        pytest.param(lambda trainer: float((trainer.state.epoch or 0) > 0.1), id="from an epoch on"),
        pytest.param(lambda trainer: 1 - rate_of(trainer.optimizer) / rate_of(trainer.args), id="by the rate"),
        pytest.param(lambda trainer: Settings.weight, id="by a class of settings"),
        pytest.param(lambda trainer: SETTINGS.weight, id="by settings of the file"),
        pytest.param(lambda trainer: getattr(trainer, "alpha", 0.0), id="by an attribute of the trainer"),
        pytest.param(lambda trainer: trainer.args.dataloader_num_workers * 0.0 + trainer.args.warmup_steps, id="args"),
    ],
)
def test_failure_96_a_term_that_grows_from_nothing_is_checked_when_it_is_there(tmp_path: Path, weight: Any) -> None:
    class Growing(Trainer):
        pass

    Growing.weight = staticmethod(weight)
    run = trainer(tmp_path, Switched(), kind=Growing, lr_scheduler_type="linear")

    def grow(model: Any, step: int) -> None:
        run.alpha = 0.1 * step
        run.args.warmup_steps = Settings.weight = SETTINGS.weight = 0.1 * step

    run.add_callback(Before(grow))
    try:
        with pytest.raises(PreflightError):
            run.train()
    finally:
        Settings.weight = SETTINGS.weight = 0.0
    assert run.ledger.steps == 1


def test_failure_96_a_threshold_is_seen_when_it_is_crossed(tmp_path: Path) -> None:
    """Also after steps in which nothing came of what was read."""

    class Later(Trainer):
        weight = staticmethod(lambda trainer: float(trainer.state.global_step >= 3))

    run = trainer(tmp_path, Switched(), kind=Later, max_steps=5)
    with pytest.raises(PreflightError):
        run.train()
    assert run.ledger.steps == 3


def less_their_mean(h: Tensor) -> Tensor:
    return h - h.mean(0)


@pytest.mark.parametrize("what", ["function", "module", "buffer"])
def test_failure_96_what_is_exchanged_or_written(tmp_path: Path, what: str) -> None:
    class Exchanged(Switched):
        def __init__(self) -> None:
            super().__init__()
            self.between: Any = torch.tanh
            self.register_buffer("share", torch.zeros(()))

        def forward(self, ids: Tensor) -> Tensor:
            h = torch.tanh(self.table(ids).mean(1) + self.place)
            return self.out(self.between(h) - self.share * h.mean(0))  # type: ignore[no-any-return]

    def change(model: Any, step: int) -> None:
        if step and what == "buffer":
            model.share.fill_(1)
        elif step:
            model.between = less_their_mean if what == "function" else Centred()

    run = trainer(tmp_path, Exchanged())
    run.add_callback(Before(change))
    with pytest.raises((ConfigurationError, PreflightError)):
        run.train()
    assert run.ledger.steps == 1


def test_failure_100_a_module_that_a_model_leaves_in_eval_mode_at_first(tmp_path: Path) -> None:
    """As norms are, that are frozen for some steps: no loss reads what decides about it."""

    class Centring(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return less_their_mean(h) if self.training else h

    class Thawing(Switched):
        def __init__(self) -> None:
            super().__init__()
            self.between, self.is_frozen = Centring(), True

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.between.train(mode and not self.is_frozen)
            return self

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.between(torch.tanh(self.table(ids).mean(1) + self.place)))  # type: ignore[no-any-return]

    run = trainer(tmp_path, Thawing())
    run.add_callback(Before(lambda model, step: setattr(model, "is_frozen", step < 1)))
    with pytest.raises(PreflightError, match="neighbours"):
        run.train()
    assert run.ledger.steps == 1


class Centred:
    """Of another class, which holds nothing."""

    def __call__(self, h: Tensor) -> Tensor:
        return less_their_mean(h)


def test_failure_95_a_small_rate_that_comes_later_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = zoo.tiny("opt", "causal_lm", torch.float32, num_hidden_layers=1)
    ids = [{"input_ids": row["input_ids"]} for row in rows()]
    run = make(tmp_path, model, parts={"train_dataset": ids, "data_collator": pad_for_language}, max_steps=2)

    def later(model: Any, step: int) -> None:
        if step == 1:
            model.model.decoder.layerdrop = 0.02

    run.add_callback(Before(later))
    run.train()
    assert model.model.decoder.layerdrop == 0.0
    assert "Switched off for private training: layerdrop=0.02" in caplog.text


def test_failure_96_in_a_loop_of_ones_own() -> None:
    model = Switched()
    run = a_run(model, private(), dataset=data(), collate=collate, steps=2, loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    batches = run.batches()
    run.step(next(batches))
    optimizer.step()
    model.mix = 1.0
    with pytest.raises(PreflightError, match="neighbours"):
        run.step(next(batches))
    assert run.ledger.steps == 1


class Keeping(Switched):
    """Keeps what it has computed of its weights where it reads it again in the same pass."""

    def __init__(self, keep: Callable[[Any, Tensor], None], kept: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.keep, self.kept, self.held, self.several = keep, kept, argparse.Namespace(), dict[str, Tensor]()
        self.register_buffer("of_weights", None, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.keep(self, self.place.tanh() / self.place.norm())
        return self.out(torch.tanh(self.table(ids).mean(1) + self.kept(self)))  # type: ignore[no-any-return]


KEPT: dict[str, Callable[[], nn.Module]] = {
    "in an attribute": lambda: Keeping(lambda m, w: setattr(m, "last", w), lambda m: m.last),
    "in a list": lambda: Keeping(lambda m, w: setattr(m, "last", [w]), lambda m: m.last[0]),
    "in a dict": lambda: Keeping(lambda m, w: m.several.update(last=w), lambda m: m.several["last"]),
    "in an object": lambda: Keeping(lambda m, w: setattr(m.held, "last", w), lambda m: m.held.last),
    "in a buffer": lambda: Keeping(lambda m, w: setattr(m, "of_weights", w), lambda m: m.of_weights),
    "of the weights themselves": lambda: Keeping(lambda m, w: setattr(m, "last", m.place[None].T), lambda m: m.last.T),
    "by a hook of torch": lambda: hooked(Switched()),
}


def hooked(model: Any) -> nn.Module:
    with pytest.warns(FutureWarning, match="deprecated"):
        model.out = torch.nn.utils.weight_norm(model.out)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", KEPT)
def test_what_a_model_keeps_of_its_weights_is_none_of_the_next_step(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = KEPT[place]()
    run = a_run(model, private(), dataset=data(), collate=collate, steps=3, loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.ledger.steps == 3
    assert "is made again" not in caplog.text


def test_what_no_loss_follows_from_may_change_and_nothing_is_checked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, Switched())

    def count(model: Any, step: int) -> None:
        model.calls, run.alpha, model.notes = step, 0.1 * step, {"last": [step]}

    run.add_callback(Before(count))
    run.train()
    assert run.ledger.steps == 3
    assert "is made again" not in caplog.text


def test_a_schedule_that_mixes_nothing_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Annealed(Trainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
            return (1 + self.state.global_step) * super().compute_per_example_loss(model, inputs)

    run = trainer(tmp_path, Switched(), kind=Annealed)
    run.train()
    assert run.ledger.steps == 3
    assert caplog.text.count("is made again") == 2
