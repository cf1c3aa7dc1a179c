"""Several private trainings on the same people: one ledger, one budget, and a record that tells of all."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import dp_accounting as dp
import pytest
from dp_accounting import pld
from torch import nn, optim
from transformers import AutoModelForSequenceClassification

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.accounting import default_delta
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.figures import upper
from hf_dp.hub import load_report, open_source, verify
from hf_dp.hub.earlier import trainings
from hf_dp.training.progress import opening
from tests.training.workbench import EXPECTED, MICRO, ROWS, STEPS, classifier, make, pad, rows, trained

pytestmark = pytest.mark.usefixtures("checked_once")
FEWER = 40


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training, saved."""
    folder = tmp_path_factory.mktemp("trained") / "first"
    trained(folder, privacy=given(noise_multiplier=1.0)).save_model()
    return folder


@pytest.fixture(scope="module")
def second(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One after it, on fewer rows, saved, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("trained") / "second"
    trainer = going_on(folder, first, given(after=first), save_steps=2)
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.mark.slow
def test_the_opening_says_that_earlier_trainings_are_included(second: Any) -> None:
    assert opening(second._run.plan)[0].endswith(" for one training example, the earlier trainings included.")


def read(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder)
    return model


def going_on(folder: Path, before: Path, privacy: PrivacyConfig, save_steps: int = 0) -> Any:
    saves = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {}
    return make(folder, model=read(before), privacy=privacy, parts={"train_dataset": rows(FEWER)}, **saves)


def given(**changes: Any) -> PrivacyConfig:
    """Nothing to calibrate."""
    return PrivacyConfig(**{"noise_multiplier": 2.0, "accountant": "rdp", **changes})


def by_hand(parts: list[tuple[float, float]], delta: float) -> float:
    """Epsilon of trainings of (sampling probability, noise multiplier), by dp_accounting alone."""
    accountant = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-3)
    for q, sigma in parts:
        accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), STEPS)
    return float(accountant.get_epsilon(delta))


@pytest.mark.slow
def test_epsilon_is_of_both_together(first: Path, second: Any) -> None:
    report, before = second.privacy_report(), load_report(first)
    assert report.delta == default_delta(ROWS) < default_delta(FEWER)  # of the larger data
    parts = [(EXPECTED / ROWS, 1.0), (EXPECTED / FEWER, 2.0)]
    assert (before.noise_multiplier, report.noise_multiplier, report.steps) == (1.0, 2.0, STEPS)
    assert second.ledger.epsilon(report.delta) == pytest.approx(by_hand(parts, report.delta), rel=5e-3)
    # The control: of the second alone, as it was told before, and of the first.
    assert max(by_hand([part], report.delta) for part in parts) < 0.95 * second.ledger.epsilon(report.delta)
    assert report.epsilon > before.epsilon


@pytest.mark.slow
def test_the_record_the_card_and_the_report_tell_of_both(second: Any, first: Path) -> None:
    folder = Path(second.args.output_dir)
    assert verify(folder).private
    record = open_source(folder).record()
    assert json.loads(record.earlier[0]) == json.loads((first / "privacy.json").read_text())
    assert record.config.after == "first"
    assert [label for _, _, label in record.ledger.entries] == ["earlier 1, training step", "training step"]
    card, told = (folder / "README.md").read_text(), " ".join(str(record.report).split())
    assert "**Trained before on the same people.** Epsilon is of several trainings together, for whoever has" in card
    assert f"| earlier 1, training step | {STEPS} | Gaussian noise" in card
    assert "at most one unit in the data of each" in told
    assert told.count(hashlib.sha256((first / "privacy.json").read_bytes()).hexdigest()) == 1
    spent = upper(load_report(first).epsilon, 4)
    assert f"- first: epsilon {spent} at delta 0.0142 when it had ended, of 48 units (one training example, " in told


@pytest.mark.slow
def test_a_checkpoint_goes_on_after_the_same_training_alone(second: Any, first: Path, tmp_path: Path) -> None:
    checkpoint = f"{second.args.output_dir}/checkpoint-2"
    moved = shutil.copytree(first, tmp_path / "moved")
    again = going_on(tmp_path / "again", moved, given(after=moved))
    again.train(resume_from_checkpoint=checkpoint)
    assert again.ledger == second.ledger
    for privacy in (given(), given(after=checkpoint)):
        other = going_on(tmp_path / "other", first, privacy)
        with pytest.raises(LedgerError, match="the ledger belongs to another run: .*earlier: .* in the ledger"):
            other.train(resume_from_checkpoint=checkpoint)


@pytest.mark.slow
def test_three_in_a_row_and_in_a_loop_of_ones_own(second: Any, tmp_path: Path) -> None:
    folder = second.args.output_dir
    model = read(folder)
    run = PrivateRun(
        model, rows(), given(after=folder), pad, expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=1
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    run.save(tmp_path / "third")
    assert verify(tmp_path / "third").private
    assert [label for _, _, label in run.ledger.entries] == [
        "earlier 1, training step", "earlier 2, training step", "training step"
    ]  # fmt: skip
    assert [one.split(":")[0] for one in run.report().earlier] == ["first", Path(folder).name]


@pytest.mark.slow
def test_trainings_that_were_apart_share_one_budget_and_what_came_before_both_is_counted_once(
    first: Path, second: Any, tmp_path: Path
) -> None:
    apart = going_on(tmp_path / "apart", first, given(after=first), save_steps=0)
    apart.train()
    apart.save_model()
    joined = [Path(second.args.output_dir), tmp_path / "apart"]
    last = going_on(tmp_path / "last", joined[0], given(after=joined))
    last.train()
    last.save_model()
    assert verify(tmp_path / "last").private
    assert [label.split(",")[0] for _, _, label in last.ledger.entries] == [
        "earlier 1", "earlier 2", "earlier 3", "training step"
    ]  # fmt: skip
    report = last.privacy_report()
    assert [one.split(":")[0] for one in report.earlier] == ["first", "second", "apart"]
    parts = [(EXPECTED / ROWS, 1.0), *[(EXPECTED / FEWER, 2.0)] * 3]
    assert last.ledger.epsilon(report.delta) == pytest.approx(by_hand(parts, report.delta), rel=5e-3)
    # The control: of one of the two alone less is told.
    assert by_hand(parts[1:], report.delta) < 0.95 * last.ledger.epsilon(report.delta)
    values = json.loads((tmp_path / "last" / "privacy.json").read_text())
    assert values["config"]["after"] == ["second", "apart"]
    # Each of the two stands there whole, and is checked.
    values["earlier"][1]["ledger"]["entries"][-1]["count"] -= 1
    (tmp_path / "last" / "privacy.json").write_text(json.dumps(values))
    assert not verify(tmp_path / "last").consistent


def test_one_record_is_one_training_where_its_weights_say_so(first: Path, second: Any) -> None:
    text = (Path(second.args.output_dir) / "privacy.json").read_text()
    other = json.loads(text)
    other["files"]["model.safetensors"] = "0" * 64  # one more, of other noise
    found = trainings(("out/a", "b", "a"), (text, json.dumps(other), text))
    assert [one.name for one in found] == ["first", "a", "b"]
    assert [made.label for one in found for made in one.releases] == [f"earlier {i}, training step" for i in (1, 2, 3)]
    # A training that is named, and comes before another one: by the name that is given here.
    before = (first / "privacy.json").read_text()
    assert [one.name for one in trainings(("b", "moved"), (text, before))] == ["moved", "b"]
    # Of texts alone the same record could be of two trainings.
    of_texts = {**json.loads(before), "files": {"corpus.jsonl": "0" * 64}}
    assert [one.name for one in trainings(("a", "b"), (json.dumps(of_texts),) * 2)] == ["a", "b"]
    # Of weights it is one, which has one name.
    with pytest.raises(ConfigurationError, match="a and b are one training"):
        trainings(("out/a", "b"), (before,) * 2)
    assert [one.name for one in trainings(("x/a", "y/a"), (before,) * 2)] == ["a"]
    with pytest.raises(ConfigurationError, match="those of 2 earlier trainings, and a config with 1 in after"):
        trainings("a", (text, before))


def test_a_budget_that_is_spent_is_refused_before_anything_else(first: Path, tmp_path: Path) -> None:
    for budget in ({"target_epsilon": 1.0, "accountant": "rdp"}, {"target_tpr": 0.02}):
        trainer = going_on(tmp_path, first, PrivacyConfig(**budget, after=first))
        with pytest.raises(BudgetExceededError, match="on the same people .* was spent before"):
            trainer.train()
        assert not trainer.ledger.entries


@pytest.mark.slow
def test_a_model_that_was_trained_privately_says_on_whose_data(first: Path, tmp_path: Path) -> None:
    silent = going_on(tmp_path, first, given())
    with pytest.raises(LedgerError, match="the model was read from .* does not say whose data that was") as refusal:
        silent.train()
    assert f"PrivacyConfig(after={str(first)!r})" in str(refusal.value)
    assert not silent.ledger.entries
    others = going_on(tmp_path, first, given(other_people=True))
    others.train()
    others.save_model(str(tmp_path / "others"))
    assert others.privacy_report().earlier == ()
    assert "**The model before.** It was trained with" in (tmp_path / "others" / "README.md").read_text()
    assert verify(tmp_path / "others").private
    third = tmp_path / "third"
    with pytest.raises(ConfigurationError, match="a training after one with other_people=True, which does not say it"):
        going_on(third, tmp_path / "others", given(after=tmp_path / "others"))
    besides = going_on(third, tmp_path / "others", given(after=tmp_path / "others", other_people=True))
    besides.train()
    besides.save_model()
    assert "**Trained before on the same people.**" in (card := (third / "README.md").read_text())
    assert "**The model before.** Besides those trainings it was trained" in card
    assert verify(third).private


@pytest.mark.slow
def test_a_model_that_another_trainer_holds_says_on_whose_data(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", privacy=given(), max_steps=1)
    one.save_model()
    for privacy in (given(), given(after=tmp_path / "one")):
        two = make(tmp_path / "two", model=one.model, privacy=privacy, max_steps=1)
        if privacy.after is None:
            with pytest.raises(LedgerError, match=r"another private training .*(.|\n)*PrivacyConfig\(after=\.\.\.\)"):
                two.train()
        else:
            two.train()
    two.save_model()
    with pytest.raises(LedgerError, match="by another trainer that holds the model"):
        one.save_model()
    assert two.ledger.entries == tuple(
        (one.ledger.entries[0][0], 1, label) for label in ("earlier 1, training step", "training step")
    )
    # What was spent since it was saved is not in its record.
    two.ledger.charge(*two.ledger.entries[0][:1])
    late = make(tmp_path / "late", model=one.model, privacy=given(after=tmp_path / "one"), max_steps=1)
    with pytest.raises(LedgerError, match="another private training has trained this model before: 2 private steps"):
        late.train()


@pytest.mark.slow
def test_a_seed_before_is_no_secret_after(tmp_path: Path) -> None:
    trained(tmp_path / "one", privacy=given(seed=3), max_steps=1).save_model()
    two = make(tmp_path / "two", privacy=given(after=tmp_path / "one"), max_steps=1)
    two.train()
    assert not two.privacy_report().private


def test_what_is_spoilt_or_not_hidden_alike_is_refused(first: Path, tmp_path: Path) -> None:
    folder = Path(tmp_path / "spoilt")
    folder.mkdir()
    for file in first.glob("*.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    make(tmp_path, privacy=given(after=folder))  # as it is
    with pytest.raises(ConfigurationError, match="delta=0.022 for a dataset of 48 units of the training before"):
        make(tmp_path, privacy=given(after=folder, target_delta=0.022), parts={"train_dataset": rows(FEWER)})
    users = {"unit": "user", "max_examples_per_unit": 2}
    data = [{**row, "user": f"u{i % 20}"} for i, row in enumerate(rows())]
    with pytest.raises(
        ConfigurationError, match="a training with the unit \"all training examples with one value of 'user'"
    ):
        make(tmp_path, privacy=given(after=folder, **users), parts={"train_dataset": data}, remove_unused_columns=False)
    for after in (folder, [first, folder]):
        with pytest.raises(ConfigurationError, match="output_dir=.* with after="):
            make(folder, privacy=given(after=after))
    with (
        mock.patch("hf_dp.hub.verify.LARGEST_EARLIER", 100),
        pytest.raises(ConfigurationError, match=r"after=.*, where records lie of [\s\S]*beyond 100 of them"),
    ):
        make(tmp_path, privacy=given(after=folder))
    with pytest.raises(ConfigurationError, match="n public in both or secret in both"):
        make(tmp_path, privacy=given(after=folder, dataset_size=50))
    values = json.loads((folder / "privacy.json").read_text())
    values["ledger"]["entries"][0]["count"] = 1
    (folder / "privacy.json").write_text(json.dumps(values))
    with pytest.raises(LedgerError, match="after=.* does not verify: epsilon"):
        make(tmp_path, privacy=given(after=folder))
    with pytest.raises(LedgerError, match=r"there is no privacy\.json"):
        make(tmp_path, privacy=given(after=tmp_path))


@pytest.mark.parametrize("how", ["deepcopy", "state dict", "data"])
@pytest.mark.slow
def test_a_copy_of_what_was_trained_says_on_whose_data(tmp_path: Path, how: str) -> None:
    one = trained(tmp_path / "one", privacy=given(), max_steps=1)
    one.save_model()

    def copied() -> Any:
        if how == "deepcopy":
            return copy.deepcopy(one.model)
        model = classifier()
        if how == "state dict":
            model.load_state_dict(one.model.state_dict())
        else:
            for own, other in zip(model.parameters(), one.model.parameters(), strict=True):
                own.data = other.data.clone()
        return model

    two = make(tmp_path / "two", model=copied(), privacy=given(), max_steps=1)
    with pytest.raises(LedgerError, match="weights that another private training in this process has left, after 1"):
        two.train()
    assert not two.ledger.entries
    copied_before = copied()
    one.train()  # What is spent later is not in the weights that were saved.
    going_on(tmp_path / "three", tmp_path / "one", given(after=tmp_path / "one")).train()
    make(tmp_path / "others", model=copied_before, privacy=given(other_people=True), max_steps=1).train()
