"""A sampling probability of the user's own: add or remove one, and nothing that anybody else sees follows from n."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting.neighbours import ADD_OR_REMOVE, ZERO_OUT
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from tests.training.workbench import EXPECTED, ROWS, STEPS, Trajectory, classifier, distance, make, private, rows

pytestmark = pytest.mark.usefixtures("checked_once")

Q, RATE = 0.2, 0.1
MORE = 43  # examples, of which the last is drawn in one step of this seed
OWN: dict[str, Any] = {"sampling_probability": Q, "target_delta": 1e-5}
GIVEN: dict[str, Any] = {"dataset_size": 40}  # of which Q draws the expected batch


def after(
    path: Path, n: int, privacy: PrivacyConfig, model: nn.Module | None = None, **changes: Any
) -> tuple[Any, Trajectory]:
    """A trainer that has trained on the first n of one list of rows, and saved; and where its weights went."""
    seen = Trajectory()
    trainer = make(
        path, model, privacy=privacy, parts={"train_dataset": rows()[:n], "callbacks": [seen]}, save_strategy="steps",
        save_steps=2, logging_steps=1, learning_rate=RATE, **changes,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer, seen


def published(path: Path) -> dict[str, Any]:
    """All that goes up, but for the digests of the weights."""
    record = json.loads((path / "privacy.json").read_text())
    assert record.pop("files").keys() == {"config.json", "model.safetensors"}
    card = (path / "README.md").read_text()
    return {"privacy.json": record, "card": re.sub(r"record_sha256: \w+", "", card).replace(path.name, "")}


def kept(path: Path) -> dict[str, Any]:
    """What a checkpoint says but for the keyed digests, the weights and what is a function of them."""
    state = json.loads((path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    ledger = state.pop("stateful_callbacks")["PrivacyCallback"]["attributes"]["saved_ledger"]["ledger"]
    exact_or_released = {"grad_norm"}
    logs = [{k: v for k, v in entry.items() if k not in exact_or_released} for entry in state.pop("log_history")]
    return {**state, "ledger": ledger, "logs": logs}


def drawn(trainer: Any) -> list[list[int]]:
    sampler = trainer._plan.sampler
    return [sampler.draw(step) for step in range(STEPS)]


@pytest.mark.few(1)
@pytest.mark.parametrize("own", [OWN, GIVEN], ids=["probability", "size"])
def test_of_two_datasets_that_differ_by_one_row_nothing_differs_but_the_sums(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    config = private(withhold_non_private_logs=True, **own)
    paths = [tmp_path / "one" / "out", tmp_path / "other" / "out"]
    (one, with_it), (other, without) = (after(path, n, config) for path, n in zip(paths, (MORE, MORE - 1), strict=True))
    assert published(paths[0]) == published(paths[1])
    assert kept(paths[0]) == kept(paths[1])
    assert one._plan.mechanism == other._plan.mechanism
    assert one.privacy_report().adjacency == ADD_OR_REMOVE
    assert len(one._plan.sampler) == len(other._plan.sampler) == 5
    assert str(one.privacy_report()) == str(other.privacy_report())
    # Whether the last example is there is independent of all others' draws.
    assert [[i for i in batch if i < MORE - 1] for batch in drawn(one)] == drawn(other)
    assert drawn(one) != drawn(other)
    # One step moves the sum by C at most: the noise is the same, and sums are divided by the same number.
    step = next(i for i, batch in enumerate(drawn(one)) if MORE - 1 in batch)
    assert distance(with_it.points[step], without.points[step]) == 0
    moved = [with_it.points[step + 1][name] - without.points[step + 1][name] for name in with_it.points[0]]
    norm = math.sqrt(sum(float(part.square().sum()) for part in moved)) * EXPECTED / RATE
    assert 0 < norm <= 1 + 1e-3


@pytest.mark.slow
def test_negative_control_where_n_is_public_all_of_it_differs(tmp_path: Path) -> None:
    paths = [tmp_path / "one" / "out", tmp_path / "other" / "out"]
    config = private(noise_multiplier=None, target_epsilon=4.0, accountant="rdp", withhold_non_private_logs=True)
    (one, _), (other, _) = (after(path, n, config) for path, n in zip(paths, (ROWS, ROWS - 1), strict=True))
    plans = one._plan, other._plan
    for what in ("noise_multiplier", "delta"):
        assert len({getattr(plan, what) for plan in plans}) == 2
    assert len({plan.sampler.sampling_probability for plan in plans}) == 2
    assert published(paths[0])["privacy.json"]["report"]["dataset_size"] == ROWS
    for found in (published, kept):
        assert found(paths[0]) != found(paths[1])
    assert (one.privacy_report().adjacency, one.privacy_report().dataset_size) == (ZERO_OUT, ROWS)


@pytest.mark.parametrize(
    "part",
    [
        {"re_attention": ReAttentionConfig()},
        {"sparse_embeddings": SparseEmbeddingConfig(method="adafest+", kept_rows=20)},
    ],
    ids=lambda part: next(iter(part)),
)
@pytest.mark.slow
def test_what_parts_release_does_not_follow_from_n_either(tmp_path: Path, part: dict[str, Any]) -> None:
    config = PrivacyConfig(target_epsilon=50, accountant="rdp", seed=7, withhold_non_private_logs=True, **OWN, **part)
    found = []
    for n in (MORE, MORE - 1):
        trainer, _ = after(tmp_path / str(n) / "out", n, config)
        record = json.loads((tmp_path / str(n) / "out" / "privacy.json").read_text())
        assert len(record.pop("files")) == 3
        assert verify(tmp_path / str(n) / "out").consistent
        found.append((record, trainer._plan.mechanism))
    assert found[0] == found[1]
    assert len(found[0][0]["ledger"]["entries"]) == 2


@pytest.mark.slow
def test_a_second_training_on_other_data_adds_up_and_is_resumed_on_that(tmp_path: Path) -> None:
    config, saves = private(**OWN), {"save_strategy": "steps", "save_steps": 2}
    trainer, _ = after(tmp_path, ROWS, config)
    trainer.train_dataset = rows()[:30]
    trainer.train()
    trainer.save_model()
    found = verify(tmp_path)
    assert (found.consistent, found.report.steps, found.report.dataset_size) == (True, 2 * STEPS, None)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed, other = (make(tmp_path, privacy=config, parts={"train_dataset": rows()[:n]}, **saves) for n in (30, ROWS))
    with pytest.raises(LedgerError, match="is not the data that the checkpoint was trained on"):
        other.train(resume_from_checkpoint=checkpoint)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.ledger.steps == 2 * STEPS


@pytest.mark.slow
def test_an_adapter_is_trained_under_it_too(tmp_path: Path) -> None:
    found = []
    for n in (MORE, MORE - 1):
        lora = LoraConfig(r=2, target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS")
        trainer, _ = after(tmp_path / str(n) / "out", n, private(**OWN), get_peft_model(classifier(), lora))
        record = json.loads((tmp_path / str(n) / "out" / "privacy.json").read_text())
        assert "adapter_model.safetensors" in record.pop("files")
        assert trainer.privacy_report().adjacency == ADD_OR_REMOVE
        found.append(record)
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_record_says_so_and_verifies(tmp_path: Path) -> None:
    trainer, _ = after(tmp_path / "out", ROWS, PrivacyConfig(target_epsilon=3.0, **OWN))
    report = trainer.privacy_report()
    assert (report.adjacency, report.dataset_size, report.sampling_probability) == (ADD_OR_REMOVE, None, Q)
    assert (report.delta, report.expected_batch_size) == (1e-5, EXPECTED)
    assert 2.97 < report.epsilon <= 3.0
    found = verify(tmp_path / "out")
    assert found.private, [check for check in found.checks if not check.passed]
    assert any("How many examples there are is secret" in note for note in found.notes)
    text = (tmp_path / "out" / "README.md").read_text()
    assert 'in the sense of "add or remove one, n secret". Had any single one not been in the data' in text
    assert "| number of units | secret |" in text
    assert "dataset_size: secret" in text
    assert str(ROWS) not in re.sub(r"\w{64}|\d+\.\d+\S*", "", text)
    assert "sums divided by 8" in str(report)


@pytest.mark.parametrize(("n", "q"), [(5, 0.2), (ROWS, 1.0), (ROWS, 0.02)])
@pytest.mark.slow
def test_the_batches_may_be_of_another_mean_size(
    tmp_path: Path, n: int, q: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        trainer, _ = after(tmp_path / "out", n, private(sampling_probability=q, target_delta=1e-5))
    assert trainer.ledger.steps == STEPS
    assert f"sampling_probability={q:g} draws {n * q:.4g} of the {n} examples" in caplog.text
    assert "secret" in caplog.text
    if q == 1:
        assert drawn(trainer) == [list(range(n))] * STEPS
    for file in (tmp_path / "out").rglob("*.*"):
        if file.suffix in (".json", ".md"):
            assert "sampling_probability=" not in file.read_text()


def test_no_warning_where_the_mean_size_is_near(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        after(tmp_path / "out", ROWS, private(**OWN))
    assert "This line tells n" not in caplog.text


def test_what_would_follow_from_n_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="num_train_epochs=2 and no max_steps") as caught:
        make(tmp_path, privacy=private(**OWN), max_steps=-1, num_train_epochs=2)
    assert "in 5 steps each example is drawn once on average" in caught.value.fix
    with pytest.raises(ConfigurationError, match=r"sampling_probability=0.2 without target_delta") as caught:
        PrivacyConfig(target_epsilon=1, sampling_probability=0.2)
    assert "would tell it" in caught.value.why
    # It tells n to nobody but its user.
    with pytest.raises(ConfigurationError, match=f"delta=0.03 for a dataset of {ROWS} training examples"):
        make(tmp_path, privacy=private(**{**OWN, "target_delta": 0.03}))


@pytest.mark.slow
def test_it_resumes_as_it_was_promised_and_no_other_way(tmp_path: Path) -> None:
    whole, _ = after(tmp_path / "whole", ROWS, private(**OWN))
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    again = make(tmp_path / "whole", privacy=private(**OWN), logging_steps=1, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=checkpoint)
    assert again.ledger == whole.ledger
    assert all(torch.equal(p, dict(whole.model.named_parameters())[name]) for name, p in again.model.named_parameters())
    for other, words in (
        (private(**{**OWN, "sampling_probability": 0.25}), "sampling_probability: 0.2 in the ledger, 0.25 now"),
        (private(target_delta=1e-5), "sampling_probability: 0.2 in the ledger, 'absent' now"),
    ):
        with pytest.raises(LedgerError, match=words):
            make(tmp_path / "whole", privacy=other).train(resume_from_checkpoint=checkpoint)
    less = make(tmp_path / "whole", privacy=private(**OWN), parts={"train_dataset": rows()[:-1]})
    with pytest.raises(LedgerError, match="is not the data that the checkpoint was trained on"):
        less.train(resume_from_checkpoint=checkpoint)


@pytest.mark.slow
def test_a_number_in_place_of_n_is_resumed_under_itself_alone(tmp_path: Path) -> None:
    whole, _ = after(tmp_path, ROWS, private(**GIVEN))
    assert (whole._plan.delta, len(whole._plan.sampler)) == (40**-1.1, 5)
    checkpoint = str(tmp_path / "checkpoint-2")
    for other, words in (
        (private(dataset_size=50), "given_dataset_size: 40 in the ledger, 50 now"),
        (private(), "dataset_size: None in the ledger, 48 now"),
        (private(**OWN), "sampling_probability: 'absent' in the ledger, 0.2 now"),
    ):
        with pytest.raises(LedgerError, match=words):
            make(tmp_path, privacy=other).train(resume_from_checkpoint=checkpoint)
    again = make(tmp_path, privacy=private(**GIVEN), logging_steps=1, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=checkpoint)
    assert again.ledger == whole.ledger
