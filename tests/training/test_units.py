"""User-level training: units are drawn, their mean gradients are clipped as one, and all that is said counts units."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from hf_dp import DPTrainer, PrivacyConfig, PrivateRun
from hf_dp.accounting import truncated
from hf_dp.data.fingerprint import compare, fingerprint
from hf_dp.errors import ConfigurationError, HfDpError, LedgerError
from hf_dp.hub.verify import verify
from hf_dp.losses import per_example_losses
from hf_dp.randomness import Entropy
from hf_dp.units.rows import UnitRows
from tests.training.workbench import (
    EXPECTED,
    MICRO,
    STEPS,
    Rows,
    Trajectory,
    classifier,
    distance,
    draws,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")

# Of 48 rows: three users with 10, 7 and 5, and 16 or more with one or two.
OWNERS = [f"u{0 if i < 10 else 1 if i < 17 else 2 if i < 22 else i % 17 + 3}" for i in range(48)]
NORM, MOST = 0.5, 3


def owned(owners: list[Any] | None = None, data: Rows | None = None) -> Rows:
    data = rows() if data is None else data
    return [{**row, "user": owner} for row, owner in zip(data, OWNERS if owners is None else owners, strict=True)]


def by_user(**changes: Any) -> PrivacyConfig:
    return private(**{"unit": "user", "max_examples_per_unit": MOST, **changes})


def noiseless(**changes: Any) -> PrivacyConfig:
    return by_user(**{"noise_multiplier": 0.0, "clipping_norm": NORM, **changes})


def oracle(model: nn.Module, data: Rows, collate: Any, expected: int) -> list[dict[str, Tensor]]:
    """The same training in a loop over units and their rows, by plain autograd."""
    units, entropy = UnitRows([row["user"] for row in data], "user", MOST), Entropy(7)
    plain = [{name: value for name, value in row.items() if name != "user"} for row in data]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    points = [parameters(model)]
    for step, drawn in enumerate(draws(7, n=len(units), expected=expected)):
        total = {name: torch.zeros_like(p) for name, p in trained.items()}
        for unit in drawn:
            chosen = units.drawn(unit, step, entropy)
            model.zero_grad()
            loss = sum(per_example_losses(model, collate([plain[row]])).sum() for row in chosen) / len(chosen)
            loss.backward()
            gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
            norm = torch.stack([g.norm() for g in gradient.values()]).norm()
            for name, g in gradient.items():
                total[name] += g * (NORM / norm).clamp(max=1)
        with torch.no_grad():
            for name, p in trained.items():
                p -= 0.1 * total[name] / expected
        points.append(parameters(model))
    return points


@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize(
    ("kind", "micro", "tokens"),
    [
        ("classifier", MICRO, None),
        ("classifier", 7, 12),  # Most users with two rows or more do not fit.
        ("tied, checkpointed", 7, None),
        ("tied, checkpointed", 2, None),  # Nor do those with three.
        ("LoRA", MICRO, None),
        ("LoRA", 1, None),
    ],
)
@pytest.mark.slow
def test_it_is_the_training_of_a_loop_over_users(tmp_path: Path, kind: str, micro: int, tokens: int | None) -> None:
    model, collate = classifier(torch.float64), pad
    if kind != "classifier":
        model, collate = tiny("llama_tied", "causal_lm", num_hidden_layers=1), pad_for_language
    if kind == "LoRA":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
        model = model.double()
        with torch.no_grad():
            for p in (p for name, p in model.named_parameters() if "lora_B" in name):
                p.fill_(0.05)
    accumulation = EXPECTED // micro
    truth = oracle(copy.deepcopy(model), owned(), collate, micro * accumulation)
    trajectory, is_checkpointed = Trajectory(), kind.endswith("checkpointed")
    cap = {"max_tokens_per_micro_batch": tokens}
    parts = {"train_dataset": owned(), "data_collator": collate, "callbacks": [trajectory], **cap}
    options = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    trainer = make(tmp_path, model, noiseless(), parts=parts, gradient_checkpointing=is_checkpointed, **options)
    trainer.train()
    assert len(truth) == len(trajectory.points) == STEPS + 1
    for found, expected in zip(trajectory.points, truth, strict=True):
        assert distance(found, expected) < 1e-6
    assert distance(truth[0], truth[-1]) > 1e-3


def test_users_with_one_row_each_are_examples(tmp_path: Path) -> None:
    found = {}
    for name, privacy, data in (("users", by_user(), owned(list(range(48)))), ("rows", private(), rows())):
        trainer = make(tmp_path / name, privacy=privacy, parts={"train_dataset": data})
        trainer.train()
        found[name] = parameters(trainer.model), trainer.privacy_report().epsilon
    assert same(found["users"][0], found["rows"][0])
    assert found["users"][1] == found["rows"][1]


@pytest.mark.slow  # Sums are compared in tests/units/test_neighbours.py.
@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
def test_one_user_moves_a_step_by_at_most_c(tmp_path: Path) -> None:
    """In place of its rows such as add nothing, or others."""
    owners = ["one"] * 6 + ["two"] * 12  # Both are drawn.

    def step(change: Any) -> dict[str, Tensor]:
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(18)]
        data = [change(row) if owner == "one" else row for row, owner in zip(data, owners, strict=True)]
        model = tiny("llama_tied", "causal_lm", num_hidden_layers=1)
        options = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
        before, privacy = parameters(model), noiseless(max_examples_per_unit=2)
        make(tmp_path, model, privacy, parts={"train_dataset": owned(owners, data)}, **options).train()
        return {name: (value - before[name]) * 2 / 0.1 for name, value in parameters(model).items()}

    full = step(lambda row: row)
    for bound, change in (
        (1, lambda row: {**row, "labels": [-100] * len(row["labels"])}),
        (2, lambda row: {"input_ids": row["input_ids"], "labels": [5] * len(row["labels"])}),
    ):
        other = step(change)
        far = float(torch.stack([(full[name] - other[name]).norm() for name in full]).norm())
        assert 0.1 * NORM < far <= bound * NORM * (1 + 1e-6)


@pytest.mark.slow
def test_what_is_said_counts_users(tmp_path: Path) -> None:
    data = owned()
    trainer = make(tmp_path, privacy=by_user(), parts={"train_dataset": data}, logging_steps=1)
    trainer.train()
    report, n = trainer.privacy_report(), len(set(OWNERS))
    assert report.unit == "all training examples with one value of 'user' together, at most 3 in a step"
    assert (report.dataset_size, report.expected_batch_size) == (n, EXPECTED)
    assert report.sampling_probability == EXPECTED / n
    assert report.delta == pytest.approx(n**-1.1)
    assert f"on average {EXPECTED} of {n}" in str(report)
    trainer.save_model(str(tmp_path / "model"))
    found = verify(tmp_path / "model")
    assert found.consistent, [check for check in found.checks if not check.passed]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "with one value of 'user' together" in card
    assert f"| number of units | {n} |" in card
    assert "A person behind k training examples" not in card


def test_failure_90_no_number_of_a_log_follows_from_how_many_rows_a_user_has(tmp_path: Path) -> None:
    """Trainer logs how many of them it trained on in a second, and in how many seconds."""
    found = []
    for more in (0, 5):
        data = [*owned(), *owned([OWNERS[0]] * more, rows(more))]
        named = {"train_dataset": data}
        trainer = make(tmp_path / f"{more}", privacy=by_user(), parts=named, max_steps=-1, num_train_epochs=1)
        trainer.train()
        log = trainer.state.log_history[-1]
        found += [log["train_samples_per_second"] * log["train_runtime"], trainer.state.max_steps]
        assert trainer.num_examples(trainer.get_eval_dataloader(data)) == len(data)
    assert found == pytest.approx([len(set(OWNERS)), 3] * 2, rel=1e-2)


class Seen(DPTrainer):
    """Knows what its model was given."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self.names = {*getattr(self, "names", ()), *inputs}
        assert "user" not in inputs
        return super().compute_per_example_loss(model, inputs)


def keep_all(examples: Rows) -> dict[str, Any]:
    """As `pad`, with whatever else a row has."""
    others = examples[0].keys() - {"input_ids", "labels"}
    return {**pad(examples), **{name: [row[name] for row in examples] for name in others}}


@pytest.mark.slow
def test_no_model_sees_whose_a_row_is(tmp_path: Path) -> None:
    """Also where all columns are kept, and the collator would hand them on; in evaluation too."""
    data = Dataset.from_list(owned())
    parts = {"train_dataset": data, "eval_dataset": {"some": data, "others": data}, "data_collator": keep_all}
    values: dict[str, Any] = {"remove_unused_columns": False, "eval_strategy": "steps", "max_steps": 1}
    trainer = make(tmp_path, privacy=by_user(), kind=Seen, parts=parts, **values)
    trainer.train()
    assert trainer.evaluate()["eval_some_loss"] > 0
    assert trainer.names == {"input_ids", "attention_mask", "labels"}


@pytest.mark.slow
def test_an_own_loop_trains_as_trainer_does(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=by_user(), parts={"train_dataset": owned()})
    trainer.train()
    model = classifier()
    run = PrivateRun(model, owned(), by_user(), pad, expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert same(parameters(model), parameters(trainer.model))
    assert run.report().to_dict() == trainer.privacy_report().to_dict()


@pytest.mark.slow
def test_resumed_it_goes_on_as_if_there_had_been_no_break(tmp_path: Path) -> None:
    def trainer(name: str, **changes: Any) -> Any:
        values = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, **changes}
        return make(
            tmp_path / name, privacy=changes.pop("privacy", by_user()), parts={"train_dataset": owned()}, **values
        )

    whole = trainer("whole")
    whole.train()
    again = trainer("whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(parameters(again.model), parameters(whole.model))
    assert again.ledger == whole.ledger
    for other in (private(), by_user(max_examples_per_unit=2)):
        with pytest.raises(LedgerError, match="unit"):
            make(tmp_path / "whole", privacy=other, parts={"train_dataset": owned()}, max_steps=5).train(
                resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2")
            )


def test_one_row_that_changes_hands_makes_other_data() -> None:
    """Also where few of many rows are looked at."""
    data = owned([i % 150 for i in range(300)], rows(300))
    others = [{**row, "user": 3} if i == 154 else row for i, row in enumerate(data)]
    assert fingerprint(data, b"k") == fingerprint(others, b"k")
    one, two = (fingerprint(each, b"k", "user") for each in (data, others))
    assert compare(one, fingerprint(data, b"k", "user")) == (False, 0)
    assert compare(one, two)[0]


def test_a_single_user_is_protected_where_delta_is_given(tmp_path: Path) -> None:
    """Who is drawn in each step, and could have been nobody."""
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 1}
    for delta in (None, 0.5):
        with pytest.raises(ConfigurationError, match="a dataset of n=1 units"):
            make(tmp_path, privacy=by_user(target_delta=delta), parts={"train_dataset": owned(["a"] * 48)}, **one)
    trainer = make(tmp_path, privacy=by_user(target_delta=1e-3), parts={"train_dataset": owned(["a"] * 48)}, **one)
    trainer.train()
    report = trainer.privacy_report()
    assert (report.dataset_size, report.sampling_probability, report.delta) == (1, 1.0, 1e-3)
    trainer.save_model()
    assert verify(tmp_path).consistent


def test_trained_again_it_must_be_by_the_same_unit(tmp_path: Path) -> None:
    data = owned(list(range(48)))
    trainer = make(tmp_path, privacy=by_user(), parts={"train_dataset": data}, max_steps=1)
    trainer.train()
    trainer.privacy = private()
    with pytest.raises(LedgerError, match=r"trained again|called again with 48 examples"):
        trainer.train()


@pytest.mark.parametrize(
    ("change", "data", "found"),
    [
        ({}, rows(), "unit='user', and the training dataset"),
        ({}, owned(["a", *[None] * 47]), r"row 1 \(counted from 0\) of the training data has None"),
        ({}, owned(["a"] * 48), "an expected batch of 8 from a training dataset of 1 units"),
        ({"target_delta": 0.3}, owned(), r"delta=0.3 for a dataset of \d\d units"),
    ],
)
def test_what_cannot_be_is_refused_when_the_trainer_is_made(
    tmp_path: Path, change: dict[str, Any], data: Rows, found: str
) -> None:
    with pytest.raises(ConfigurationError, match=found):
        make(tmp_path, privacy=by_user(**change), parts={"train_dataset": data})


class Forgets(DPTrainer):
    """Hands on what models need, and nothing else."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        few = {name: inputs[name] for name in ("micro_batches", "step")}
        return super().training_step(model, few, num_items_in_batch)


def test_a_batch_that_no_longer_says_whose_its_rows_are_is_no_batch_of_examples(tmp_path: Path) -> None:
    with mock.patch("hf_dp.training.trainer.refuse_overrides"):
        trainer = make(tmp_path, privacy=by_user(), kind=Forgets, parts={"train_dataset": owned()})
        with pytest.raises(HfDpError, match="0 say whose their rows are"):
            trainer.train()
    assert not trainer.ledger.entries


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
@pytest.mark.slow
def test_a_cap_counts_users(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=by_user(max_batch_size=9), parts={"train_dataset": owned()})
    trainer.train()
    (event, _, _), *_ = trainer.ledger.entries
    assert (event.dataset_size, event.truncated_batch_size) == (len(set(OWNERS)), 9)


def test_verify_sees_another_unit_than_was_trained_with(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=by_user(), parts={"train_dataset": owned()}, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    text = (tmp_path / "model" / "privacy.json").read_text()
    (tmp_path / "forged").mkdir()
    changes = {"unit": None, "max_examples_per_unit": None}, {"max_examples_per_unit": 2}, {"unit": "author"}
    for change in changes:
        for places in (["config"], ["promise"], ["config", "promise"]):
            record = json.loads(text)
            held = {"config": record["config"], "promise": record["ledger"]["promise"]}
            for place in places:
                held[place].update(change)
            (tmp_path / "forged" / "privacy.json").write_text(json.dumps(record))
            found = {check.name for check in verify(tmp_path / "forged").checks if not check.passed}
            assert "mechanism, config and ledger's promise" in found
