"""Sizes that mean nothing: refused before anything is spent, noticed after a step, or warned of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Adafactor, TrainerCallback

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.planning.proposal import Candidate, candidate
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.magnitudes import Magnitudes
from hf_dp.step.plan import Plan
from hf_dp.training.resuming import output_lock
from tests.training.own_loops import a_run
from tests.training.workbench import classifier, make, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS = "The noise drowns the gradient"
OF_OTHER_BATCHES = "Larger batches have less in each step too, but not much less in all steps together, for the same"


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"noise_multiplier": 1e100}, torch.float32),
        ({"noise_multiplier": 1e10, "clipping_norm": 1e15}, torch.float32),
        ({"noise_multiplier": 1e-100}, torch.float32),
        ({"noise_multiplier": 1.0, "clipping_norm": 1e6}, torch.float16),
    ],
)
def test_noise_that_numbers_cannot_hold_is_refused_before_it_is_paid_for(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    model = classifier(dtype)
    before = parameters(model)
    trainer = make(tmp_path, model, private(**changes))
    with pytest.raises(ConfigurationError, match="noise with standard deviation") as caught:
        trainer.train()
    assert "1.0 is the usual start" in caught.value.fix
    assert not trainer.ledger.entries
    assert same(before, parameters(model))


@pytest.mark.parametrize(("dtype", "times"), [(torch.float16, 1), (torch.bfloat16, 0), (torch.float32, 0)])
@pytest.mark.slow
def test_trained_weights_in_float16_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, times: int
) -> None:
    make(tmp_path, classifier(dtype), private(noise_multiplier=1.0), max_steps=1).train()
    assert sum("Trained weights are in float16" in message for message in caplog.messages) == times


@pytest.mark.parametrize(("optim", "rate"), [("sgd", 1e10), ("adamw_torch", 1e10), ("sgd", 1e25)])
def test_weights_that_are_lost_stop_the_training(tmp_path: Path, optim: str, rate: float) -> None:
    trainer = make(tmp_path, optim=optim, learning_rate=rate)
    with pytest.raises(ConfigurationError, match=r"learning_rate=1e\+\d\d the trained weights are of size"):
        trainer.train()
    assert trainer.ledger.steps == 1


@pytest.mark.parametrize(
    ("optim", "rate", "schedule", "times"),
    [
        ("sgd", 1e-12, "constant", 1),
        ("adamw_torch", 1e-12, "linear", 1),
        ("adamw_torch", 0.0, "constant", 1),
        ("adamw_torch", 1e-5, "constant_with_warmup", 0),
        ("sgd", 1e-3, "linear", 0),
    ],
)
def test_steps_that_move_nothing_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optim: str, rate: float, schedule: str, times: int
) -> None:
    options = {"warmup_steps": 1000} if schedule == "constant_with_warmup" else {}
    make(
        tmp_path, privacy=private(noise_multiplier=1.0), optim=optim, learning_rate=rate, lr_scheduler_type=schedule,
        **options,
    ).train()  # fmt: skip
    assert sum("hardly any trained weight is another" in message for message in caplog.messages) == times


class WithoutRate(torch.optim.Optimizer):
    """Moves weights by a rate that is in none of its groups."""

    def __init__(self, params: Any, by: float) -> None:
        self.by = by
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.by * p.grad)


@pytest.mark.parametrize(
    ("make_optimizer", "times"),
    [
        (lambda p: Adafactor(p, relative_step=True, warmup_init=True), 0),
        (lambda p: WithoutRate(p, 1e-2), 0),
        (lambda p: WithoutRate(p, 1e-14), 1),
    ],
)
def test_optimizers_that_are_given_no_rate_go_on(make_optimizer: Any, times: int, caplog: Any) -> None:
    model = classifier()
    run = a_run(model, private(noise_multiplier=1.0), steps=5)
    run.begin(optimizer := make_optimizer(model.parameters()))
    for item in run.batches():
        run.step(item)
        optimizer.step()
    assert run.global_step == 5
    said = "hardly any trained weight is another than before (the rate that the optimizer chose)"
    assert sum(said in message for message in caplog.messages) == times


def test_an_optimizer_without_a_rate_stops_where_weights_are_lost() -> None:
    model = classifier()
    run = a_run(model, private(noise_multiplier=1.0), steps=5)
    run.begin(optimizer := WithoutRate(model.parameters(), 1e30))
    run.step(next(iter(run.batches())))
    with pytest.raises(
        ConfigurationError, match="with the rate that the optimizer chose the trained weights are of size"
    ):
        optimizer.step()


def test_weights_that_a_callback_makes_infinite_stop_the_training(tmp_path: Path) -> None:
    class Spoils(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                with torch.no_grad():
                    model.classifier.bias.fill_(float("nan"))

    trainer = make(tmp_path, parts={"callbacks": [Spoils()]})
    with pytest.raises(ConfigurationError, match="of size nan"):
        trainer.train()
    assert trainer.ledger.steps == 3


def test_a_large_rate_that_learns_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path, privacy=private(clipping_norm=1e-3), learning_rate=1000.0).train()


@pytest.mark.slow
def test_stock_arguments_are_warned_of_and_large_batches_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    privacy = private(noise_multiplier=None, target_epsilon=1.0)
    stock = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3, "max_steps": -1}
    make(tmp_path, classifier(dim=96, hidden_dim=192), privacy, parts={"train_dataset": rows(160)}, **stock).train()
    (record,) = [record for record in caplog.records if WORDS in record.message]
    assert "at most about 1." in record.message
    assert OF_OTHER_BATCHES in record.message
    caplog.clear()
    make(tmp_path).train()
    assert WORDS not in caplog.text


def test_the_plan_that_is_named_is_of_this_promise_or_of_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budget = private(noise_multiplier=None, target_epsilon=0.5, target_delta=1e-5)
    make(tmp_path, privacy=budget, max_steps=2).train()
    assert OF_OTHER_BATCHES in caplog.text
    caplog.clear()
    make(tmp_path, privacy=budget, max_steps=1).train()
    assert "(LoRA) have less of it." in caplog.text
    assert "Larger batches" not in caplog.text
    caplog.clear()
    make(tmp_path, privacy=private(noise_multiplier=50.0), max_steps=1).train()
    assert "hf-dp plan says which batch has the least for the same compute." in caplog.text


def test_larger_batches_have_less_noise_in_each_step_and_not_much_less_in_all() -> None:
    """The warning once said of 8 at a time, 60 times, of 160 that batches of another size have no less of it."""

    def noise(batch: int) -> Candidate:
        return candidate(batch, dataset_size=160, examples=480, target_epsilon=1.0, target_delta=0.00377)

    small, large = noise(8), noise(48)
    assert large.noise_of_a_step() < 0.4 * small.noise_of_a_step()
    assert large.noise_of_the_run() > 0.7 * small.noise_of_the_run()


def test_a_second_training_in_one_output_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE", 0.1)
    other = make(tmp_path)

    class Starts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(ConfigurationError, match="another training writes into output_dir"):
                other.train()

    make(tmp_path, parts={"callbacks": [Starts()]}, max_steps=1).train()
    assert not other.ledger.entries
    other.train()
    assert other.ledger.steps


def test_the_hint_at_a_larger_batch_does_not_tell_a_secret_n(caplog: pytest.LogCaptureFixture) -> None:
    entropy = Entropy(None)
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5, sampling_probability=0.01)
    sampler = PoissonBatchSampler.of(450, 4, entropy, sampling_probability=0.01)
    Magnitudes(Plan.make(config, sampler, 100, entropy), torch.nn.Linear(200, 200))
    (said,) = caplog.messages
    assert WORDS in said
    assert said.endswith("hf-dp plan says which batch has the least for the same compute.")
    assert "450" not in said


@pytest.mark.parametrize(("n", "batch", "epochs"), [(10_000, 8, 3), (2_000, 1, 0.5)])
def test_the_plan_that_is_named_has_less_noise(
    caplog: pytest.LogCaptureFixture, n: int, batch: int, epochs: float
) -> None:
    entropy, config = Entropy(None), PrivacyConfig(target_epsilon=8.0, target_delta=1e-5)
    sampler = PoissonBatchSampler.of(n, batch, entropy)
    plan = Plan.make(config, sampler, round(epochs * n / batch), entropy)
    Magnitudes(plan, torch.nn.Linear(1000, 1000))
    (said,) = caplog.messages
    found = re.search(rf"\. (\d+) at once, (\d+) times, .*: hf-dp plan --n {n} --epochs {max(1, epochs):g} --eps", said)
    assert found is not None
    proposed, steps = map(int, found.groups())
    assert proposed * steps <= max(1.0, epochs) * n
    other = PoissonBatchSampler.of(n, proposed, entropy)
    least = Plan.make(config, other, steps, entropy).noise_standard_deviation / proposed
    assert least <= 0.7 * plan.noise_standard_deviation / batch


def test_no_plan_is_named_for_fewer_rows_than_steps(caplog: pytest.LogCaptureFixture) -> None:
    entropy, config = Entropy(None), PrivacyConfig(target_epsilon=8.0, target_delta=1e-2)
    Magnitudes(Plan.make(config, PoissonBatchSampler.of(5, 1, entropy), 5, entropy), torch.nn.Linear(1000, 1000))
    assert caplog.messages[-1].endswith("fewer trained parameters (LoRA) have less of it.")


@pytest.mark.parametrize(
    ("n", "promise", "said"),
    [
        (3, {}, "delta is 0.299: with up to that probability nothing of what epsilon says need hold."),
        (65, {}, "delta is 0.0102: "),
        (66, {}, None),
        (3, {"target_delta": 1e-5}, None),
        (3, {"seed": 1}, None),
    ],
)
def test_a_delta_that_leaves_little_is_warned_of_where_something_is_promised(
    n: int, promise: dict[str, Any], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    entropy = Entropy(promise.get("seed"))
    config = PrivacyConfig(noise_multiplier=1.0, **promise)
    Magnitudes(Plan.make(config, PoissonBatchSampler.of(n, 2, entropy), 2, entropy), torch.nn.Linear(2, 2))
    assert len(caplog.messages) == (said is not None)
    assert said is None or (caplog.messages[0].startswith(said) and "where n is below 66" in caplog.messages[0])
