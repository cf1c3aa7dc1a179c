"""DPTrainerMixin in front of TRL's SFTTrainer: the same loss, one example at a time, and no metrics of batches."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from hf_dp import load_report
from tests.training.chats import (
    EXPECTED,
    MICRO,
    TEMPLATE,
    DPSFTTrainer,
    a_model,
    adapter,
    assert_step_is_that_of_single,
    completions,
    conversations,
    from_docs,
    gradients_of_single,
    make,
    tokenizer,
)
from tests.training.workbench import distance, draws, parameters

pytestmark = pytest.mark.usefixtures("checked_once")

trl = pytest.importorskip("trl")

ANSWERS: dict[str, Any] = {
    "answers only": (conversations(), {}),
    "completions only": (completions(), {"assistant_only_loss": False}),
    "cut off": (conversations(), {"max_length": 12}),
    "smoothed": (conversations(), {"label_smoothing_factor": 0.2}),
}


@pytest.mark.parametrize(
    ("data", "options", "peft"),
    [
        pytest.param(
            data,
            options,
            peft,
            marks=[pytest.mark.slow] * ((what, peft) != ("answers only", True)),
            id=f"{what} {peft}",
        )
        for what, (data, options) in ANSWERS.items()
        for peft in (False, True)
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_clipped_sum_is_that_of_single_examples_under_trls_own_loss(
    tmp_path: Path, data: Dataset, options: dict[str, Any], peft: bool
) -> None:
    parts = {"train_dataset": data, "max_steps": 1, **options, **({"peft_config": adapter()} if peft else {})}
    oracle = make(tmp_path / "oracle", trl.SFTTrainer, **copy.deepcopy(parts))
    chosen = draws(7, steps=1, n=len(oracle.train_dataset), expected=EXPECTED)[0]
    assert len(chosen) > MICRO
    single = list(gradients_of_single(oracle, chosen))
    assert_step_is_that_of_single(single, lambda privacy: make(tmp_path, privacy=privacy, **parts))


@pytest.mark.slow
def test_an_examples_loss_is_a_mean_over_its_own_answers_only(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]
    alone = [trainer.compute_per_example_loss(trainer.model, dict(trainer.data_collator([row]))) for row in rows]
    together = trainer.compute_per_example_loss(trainer.model, dict(trainer.data_collator(rows)))
    torch.testing.assert_close(torch.cat(alone), together)
    trls = [trainer.compute_loss(trainer.model, dict(trainer.data_collator([row]))) for row in rows]
    torch.testing.assert_close(torch.stack(trls), together)


def test_labels_are_the_assistants_words_and_the_end_of_each_answer(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    for row, labelled in zip(conversations(), trainer.train_dataset, strict=True):
        answers = [m["content"] + " <end>" for m in row["messages"] if m["role"] == "assistant"]
        kept = [label for label in labelled["labels"] if label != -100]
        assert trainer.processing_class.decode(kept) == " ".join(answers)


@pytest.mark.slow
def test_defaults_a_checkpoint_and_its_resumption(tmp_path: Path) -> None:
    """bf16 and gradient checkpointing are SFTConfig's defaults."""
    options = {"bf16": None, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_dataset": completions(6)}
    options |= {"assistant_only_loss": False, "peft_config": adapter(), "train_dataset": completions()}
    whole = make(tmp_path / "whole", **copy.deepcopy(options))
    whole.train()
    resumed = make(tmp_path / "again", **copy.deepcopy(options))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert distance(parameters(whole.model), parameters(resumed.model)) < 1e-6
    assert resumed.privacy_report().steps == 4
    resumed.save_model(str(tmp_path / "saved"))
    assert load_report(tmp_path / "saved") == resumed.privacy_report()
    assert "## Privacy" in (tmp_path / "saved" / "README.md").read_text(encoding="utf-8")
    assert "eval_loss" in resumed.evaluate()


OF_BATCHES = {"entropy", "mean_token_accuracy", "num_tokens"}


@pytest.mark.slow
def test_trls_metrics_of_training_batches_are_not_logged(tmp_path: Path) -> None:
    found = {}
    for kind in (trl.SFTTrainer, DPSFTTrainer):
        trainer = make(tmp_path, kind, eval_strategy="steps", eval_steps=1, eval_dataset=conversations(5))
        trainer.train()
        found[kind] = trainer.state.log_history
    training = {kind: [entry for entry in log if "loss" in entry] for kind, log in found.items()}
    assert all(entry.keys() >= OF_BATCHES for entry in training[trl.SFTTrainer])
    assert len(training[DPSFTTrainer]) == 2
    assert not any(entry.keys() & OF_BATCHES for entry in found[DPSFTTrainer])
    evaluated = [entry for entry in found[DPSFTTrainer] if "eval_loss" in entry]
    assert all("eval_entropy" in entry and "eval_num_tokens" not in entry for entry in evaluated)


@pytest.mark.slow
def test_nor_are_they_where_somebody_calls_compute_loss(tmp_path: Path) -> None:
    class Curious(DPSFTTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            with torch.no_grad():
                self.compute_loss(model, dict(inputs))
            return super().compute_per_example_loss(model, inputs)

    trainer = make(tmp_path, Curious)
    trainer.train()
    assert not any(entry.keys() & OF_BATCHES for entry in trainer.state.log_history)


# As of many models on the hub: without marks.
UNMARKED = re.sub(r"{% (end)?generation %}", "", TEMPLATE)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "peft", [pytest.param(peft, id="lora" if peft else "full", marks=pytest.mark.slow) for peft in (True, False)]
)
def test_the_snippet_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peft: bool) -> None:
    monkeypatch.chdir(tmp_path)
    # A directory by the name of the model on the hub.
    for part in (a_model(), tokenizer(UNMARKED)):
        part.save_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct")
    # With the columns of that data set.
    rows = [
        {"prompt": row["messages"][0]["content"], "prompt_id": "0", **row, "category": "Chat"}
        for row in conversations(300)
    ]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: Dataset.from_list(rows))
    monkeypatch.setitem(sys.modules, "snippet", type(sys)("snippet"))
    namespace: dict[str, Any] = {"__name__": "snippet"}
    snippet = from_docs("python", "class DPSFTTrainer").replace(
        'SFTConfig("out",', 'SFTConfig("out", use_cpu=True, max_steps=2,'
    )
    snippet = snippet if peft else re.sub(r"^ +peft_config=.*\n", "", snippet, flags=re.M)
    exec(snippet, namespace)
    trainer = namespace["trainer"]
    report = trainer.privacy_report()
    assert (report.steps, report.dataset_size) == (2, 300)
    assert 7.9 < report.epsilon <= 8.0
    for row, labelled in zip(rows, trainer.train_dataset, strict=True):
        kept = [label for label in labelled["labels"] if label != -100]
        assert trainer.processing_class.decode(kept) == row["messages"][-1]["content"] + " <end>"


def test_the_marked_template_in_the_docs_says_what_the_models_own_says(tmp_path: Path) -> None:
    marked = from_docs("jinja", "generation")
    (tmp_path / "marked.jinja").write_text(marked, encoding="utf-8")
    own = tokenizer(SMOLLM2)
    own.add_tokens(["<|im_start|>", "<|im_end|>", "user", "assistant", "system"])
    model = a_model()
    model.resize_token_embeddings(len(own))
    data = conversations()
    system = {"role": "system", "content": "w1 w2"}
    for messages in (data[0]["messages"], [system, *data[1]["messages"]]):
        for prompt in (False, True):
            texts = [
                own.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=prompt)
                for template in (SMOLLM2, marked)
            ]
            assert texts[0] == texts[1]
    parts = {"model": model, "processing_class": own, "train_dataset": data}
    trainer = make(tmp_path, chat_template_path=str(tmp_path / "marked.jinja"), **parts)
    for row, labelled in zip(data, trainer.train_dataset, strict=True):
        answers = [m["content"] + " <|im_end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert own.decode([label for label in labelled["labels"] if label != -100]) == " ".join(answers)
