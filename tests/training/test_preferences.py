"""DPTrainerMixin in front of TRL's trainers on pairs: a pair is one example, clipped as one, with its own loss."""

from __future__ import annotations

import copy
import random
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import dp_accounting as dp
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor

from hf_dp import PrivacyConfig, load_report
from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.losses import PREFERENCE_LOSSES
from hf_dp.training.resuming.resume import note_trained_by
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.answers import (
    EXPECTED,
    MICRO,
    ROWS,
    DPDPOTrainer,
    DPRewardTrainer,
    make,
    moved,
    pairs,
    references,
)
from tests.training.chats import (
    a_model,
    adapter,
    assert_step_is_that_of_single,
    from_docs,
    gradients_of_single,
    said,
    tokenizer,
)
from tests.training.workbench import distance, draws, parameters

pytestmark = pytest.mark.usefixtures("checked_once")

trl = pytest.importorskip("trl")


def assert_step_is_that_of_single_pairs(path: Path, kinds: tuple[Any, Any], **parts: Any) -> None:
    """The private step without noise, and the sum of the clipped gradients of single pairs under TRL's own loss."""
    of_trl, of_ours = kinds
    oracle = make(path / "oracle", of_trl, **copy.deepcopy(parts))
    moved(oracle.model)
    drawn = draws(7, steps=1, n=ROWS, expected=EXPECTED)[0]
    assert len(drawn) > MICRO
    single = list(gradients_of_single(oracle, drawn))

    def made(privacy: PrivacyConfig) -> Any:
        trainer = make(path, of_ours, privacy, **parts)
        moved(trainer.model)
        return trainer

    assert assert_step_is_that_of_single(single, made).privacy_report().dataset_size == ROWS


@pytest.mark.parametrize(
    ("loss", "peft"),
    [
        pytest.param("sigmoid", False, marks=pytest.mark.slow),
        pytest.param("hinge", True, marks=pytest.mark.slow),
        ("ipo", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sigmoid", True), ("hinge", False), ("ipo", False))
        ),
    ],
)
def test_the_clipped_sum_is_that_of_single_pairs_under_trls_own_loss(tmp_path: Path, loss: str, peft: bool) -> None:
    parts = {"loss_type": loss, "beta": 0.1, **({"peft_config": adapter()} if peft else {})}
    assert_step_is_that_of_single_pairs(tmp_path, (trl.DPOTrainer, DPDPOTrainer), **parts)


@pytest.mark.few(8)
@pytest.mark.parametrize("loss", sorted(PREFERENCE_LOSSES))
def test_every_loss_of_a_pair_is_trls_loss_of_that_pair(losses_of: Any, loss: str) -> None:
    ours, trls = losses_of(loss, [1.0])
    torch.testing.assert_close(ours, trls, rtol=1e-5, atol=1e-6)
    assert len(set(trls.tolist())) > 3


def test_losses_that_are_added_up(losses_of: Any) -> None:
    torch.testing.assert_close(*losses_of(["sigmoid", "sft", "apo_zero"], [0.8, 0.3, 1.0]), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ours of five pairs together, and TRL's of each by itself."""
    trainer = make(tmp_path_factory.mktemp("losses"), beta=0.2, label_smoothing=0.1)
    model = moved(trainer.model)
    rows = [trainer.train_dataset[i] for i in range(5)]

    def found(names: Any, weights: list[float]) -> tuple[Tensor, Tensor]:
        trainer.loss_types, trainer.loss_weights = [names] if isinstance(names, str) else names, weights
        together = trainer._behind.collator(trainer.data_collator)(rows)
        with torch.no_grad():
            ours = trainer.compute_per_example_loss(model, together)
            trls = [trainer.compute_loss(model, dict(trainer.data_collator([row]))) for row in rows]
        return ours, torch.stack(trls)

    return found


@pytest.mark.parametrize(
    "kind",
    [
        "adapter switched off",
        "copy of an adapter",
        "a model of its own",
        "a model of its own, beforehand",
    ],
)
@pytest.mark.slow
def test_each_kind_of_reference(tmp_path: Path, kind: str) -> None:
    parts = references()[kind]
    assert_step_is_that_of_single_pairs(tmp_path, (trl.DPOTrainer, DPDPOTrainer), beta=0.5, **parts)


@pytest.mark.slow
def test_rewards(tmp_path: Path) -> None:
    kinds = (trl.RewardTrainer, DPRewardTrainer)
    margins = pairs().add_column("margin", [0.1 * i for i in range(ROWS)])
    assert_step_is_that_of_single_pairs(tmp_path, kinds, center_rewards_coefficient=0.1, train_dataset=margins)


@pytest.mark.slow
def test_a_checkpoint_its_resumption_and_evaluation(tmp_path: Path) -> None:
    """bf16 and gradient checkpointing are DPOConfig's defaults."""
    options = {"bf16": None, "gradient_checkpointing": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= {"eval_dataset": pairs(6), "peft_config": adapter(), "precompute_ref_log_probs": False}
    whole = make(tmp_path / "whole", **copy.deepcopy(options))
    whole.train()
    resumed = make(tmp_path / "again", **copy.deepcopy(options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert distance(parameters(whole.model), parameters(resumed.model)) < 1e-6
    assert resumed.privacy_report().steps == 4
    resumed.save_model(str(tmp_path / "saved"))
    assert load_report(tmp_path / "saved") == resumed.privacy_report()
    assert 0 <= resumed.evaluate()["eval_rewards/accuracies"] <= 1
    training = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert len(training) == 4
    assert not any(name.startswith(("rewards", "logps", "logits")) for entry in training for name in entry)


@pytest.mark.slow
def test_the_snippet_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A directory by the name of the model on the hub.
    for part in (a_model(), tokenizer()):
        part.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    draw, rows = random.Random(0), []
    # With the columns of that data set: both answers behind the same prompt.
    for _ in range(150):
        prompt = {"role": "user", "content": said(draw)}
        answers = [[prompt, {"role": "assistant", "content": said(draw)}] for _ in range(2)]
        rows.append({"chosen": answers[0], "rejected": answers[1], "score_chosen": 7.0, "score_rejected": 4.0})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: Dataset.from_list(rows))
    monkeypatch.setitem(sys.modules, "snippet", type(sys)("snippet"))
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(
        from_docs("python", "class DPDPOTrainer").replace('DPOConfig("out",', 'DPOConfig("out", use_cpu=True,'),
        namespace,
    )
    report = namespace["trainer"].privacy_report()
    assert report.dataset_size == 150
    assert 7.9 < report.epsilon <= 8.0


@pytest.mark.slow
def test_a_users_pairs_are_clipped_together(tmp_path: Path) -> None:
    data = pairs(16).add_column("user", [f"u{i % 8}" for i in range(16)])
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    oracle = make(tmp_path / "oracle", trl.DPOTrainer, train_dataset=data, **parts)
    moved(oracle.model)
    single = list(gradients_of_single(oracle, range(16)))
    means = [{name: (g + single[i + 8][name]) / 2 for name, g in one.items()} for i, one in enumerate(single[:8])]

    def made(privacy: PrivacyConfig) -> Any:
        trainer = make(tmp_path, privacy=privacy, train_dataset=data, **parts)
        moved(trainer.model)
        return trainer

    # All users are in the step: the expected batch is as large as their number.
    trainer = assert_step_is_that_of_single(means, made, 8, unit="user", max_examples_per_unit=2)
    assert trainer.privacy_report().dataset_size == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_supervised_fine_tuning_and_preferences_under_one_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in (a_model(), tokenizer()):
        part.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    namespace: dict[str, Any] = {
        "DPSFTTrainer": type("DPSFTTrainer", (DPTrainerMixin, trl.SFTTrainer), {}), "DPDPOTrainer": DPDPOTrainer,
        **{kind.__name__: kind for kind in (trl.SFTConfig, trl.DPOConfig, LoraConfig, PrivacyConfig)},
        "conversations": pairs(300).remove_columns("rejected").rename_column("chosen", "completion"),
        "pairs": pairs(200),
    }  # fmt: skip
    snippet = from_docs("python", "AutoPeftModelForCausalLM")
    exec(re.sub(r'"out/(sft|dpo)", ', r'"out/\1", use_cpu=True, max_steps=1, bf16=False, ', snippet), namespace)
    report = namespace["dpo"].privacy_report()
    assert 7.9 < report.epsilon <= 8.0
    assert report.earlier[0].startswith("sft: epsilon 4 at delta")
    assert report.dataset_size == 200


def test_whose_data_the_reference_was_trained_on_is_asked(tmp_path: Path) -> None:
    reference = a_model()
    reference.config._name_or_path = str(tmp_path)
    (tmp_path / "privacy.json").write_text("{")
    with pytest.raises(LedgerError, match=r"the model was read from .*cannot be read"):
        make(tmp_path / "new", ref_model=reference).train()
    spent = Ledger({"dataset_size": 40})
    spent.charge(dp.GaussianDpEvent(1.0))
    note_trained_by(reference, Path, spent)
    with pytest.raises(LedgerError, match="another private training has trained this model before"):
        make(tmp_path / "new", ref_model=reference).train()


@pytest.mark.slow
def test_whose_data_a_copied_reference_was_trained_on_is_asked(tmp_path: Path) -> None:
    first = make(tmp_path / "first")
    first.train()
    with pytest.raises(LedgerError, match="weights that another private training in this process has left"):
        make(tmp_path / "new", ref_model=copy.deepcopy(first.model)).train()
