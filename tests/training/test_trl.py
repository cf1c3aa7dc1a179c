"""DPTrainerMixin in front of TRL's SFTTrainer: the same loss, one example at a time, and what is refused by name."""

from __future__ import annotations

import copy
import random
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from hf_dp import PrivacyConfig, load_report
from hf_dp.errors import ConfigurationError
from hf_dp.training.behind import trl as behind
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.workbench import distance, draws, parameters, private

pytestmark = pytest.mark.usefixtures("checked_once")

trl = pytest.importorskip("trl")

ROOT = Path(__file__).resolve().parents[2]
ROWS, MICRO, EXPECTED = 40, 3, 9
WORDS = ["[PAD]", "[UNK]", "</s>", "<system>", "<user>", "<assistant>", "<end>", *(f"w{i}" for i in range(30))]
# An answer, its end included, is between the marks.
TEMPLATE = (
    "{% for m in messages %}{{ ' <' + m.role + '> ' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <end>' }}{% endgeneration %}"
    "{% else %}{{ m.content + ' <end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant> ' }}{% endif %}"
)


class DPSFTTrainer(DPTrainerMixin, trl.SFTTrainer):
    pass


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **names)


def said(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS[7:], k=draw.randint(1, 6)))


def conversations(n: int = ROWS, turns: int = 2) -> Dataset:
    """Of one to `turns` turns: a message of the user and an answer each."""
    draw = random.Random(0)
    rows = []
    for _ in range(n):
        roles = ["user", "assistant"] * draw.randint(1, turns)
        rows.append({"messages": [{"role": role, "content": said(draw)} for role in roles]})
    return Dataset.from_list(rows)


def completions(n: int = ROWS) -> Dataset:
    draw = random.Random(0)
    return Dataset.from_list([{"prompt": said(draw), "completion": " " + said(draw)} for _ in range(n)])


def a_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // MICRO, "max_steps": 2,
        "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "weight_decay": 0.0, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "assistant_only_loss": True,
    }  # fmt: skip
    return trl.SFTConfig(str(path), **{**values, **changes})


def make(path: Path, kind: Any = DPSFTTrainer, privacy: PrivacyConfig | None = None, **parts: Any) -> Any:
    """A trainer of `kind`; `parts` are the trainer's arguments or SFTConfig's."""
    own = ("model", "train_dataset", "eval_dataset", "processing_class", "peft_config", "compute_loss_func")
    given = {name: parts.pop(name) for name in own if name in parts}
    if issubclass(kind, DPTrainerMixin):
        given["privacy"] = privacy or private()
    values = {"model": a_model(), "train_dataset": conversations(), "processing_class": tokenizer(), **given}
    return kind(args=settings(path, **parts), **values)


def adapter() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


ANSWERS: dict[str, Any] = {
    "answers only": (conversations(), {}),
    "completions only": (completions(), {"assistant_only_loss": False}),
    "cut off": (conversations(), {"max_length": 12}),
    "smoothed": (conversations(), {"label_smoothing_factor": 0.2}),
}
USUAL = {("answers only", True), ("completions only", False), ("smoothed", False)}


# --- the private step -----------------------------------------------------------------------------------------------


def gradients_of_single_examples(trainer: Any, chosen: list[int]) -> Iterator[dict[str, Tensor]]:
    """TRL's own loss and torch's own backward, on batches of one."""
    for i in chosen:
        trainer.model.zero_grad()
        row = trainer.train_dataset[i]
        batch = trainer.data_collator([{name: row[name] for name in ("input_ids", "labels")}])
        trainer.compute_loss(trainer.model, dict(batch)).backward()
        yield {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("data", "options", "peft"),
    [
        pytest.param(data, options, peft, marks=[] if (what, peft) in USUAL else pytest.mark.slow, id=f"{what} {peft}")
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
    oracle.model.train()
    chosen = draws(7, steps=1, n=len(oracle.train_dataset), expected=EXPECTED)[0]
    assert len(chosen) > MICRO
    single = list(gradients_of_single_examples(oracle, chosen))
    norms = [float(torch.stack([g.norm() for g in one.values()]).norm()) for one in single]
    bound = sorted(norms)[len(norms) // 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        privacy = private(noise_multiplier=0, clipping_norm=bound)
    trainer = make(tmp_path, privacy=privacy, **parts)
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    assert min(norms) < bound < max(norms)
    for name in single[0]:
        total = sum(min(1.0, bound / norm) * one[name] for one, norm in zip(single, norms, strict=True))
        torch.testing.assert_close((before[name] - after[name]) * EXPECTED, total, rtol=1e-4, atol=1e-4)


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


# --- metrics --------------------------------------------------------------------------------------------------------

OF_BATCHES = {"entropy", "mean_token_accuracy", "num_tokens"}


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


def test_nor_are_they_where_somebody_calls_compute_loss(tmp_path: Path) -> None:
    class Curious(DPSFTTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            with torch.no_grad():
                self.compute_loss(model, dict(inputs))
            return super().compute_per_example_loss(model, inputs)

    trainer = make(tmp_path, Curious)
    trainer.train()
    assert not any(entry.keys() & OF_BATCHES for entry in trainer.state.log_history)


# --- refusals -------------------------------------------------------------------------------------------------------


def packed() -> Dataset:
    return Dataset.from_list([{"input_ids": [7, 8, 9, 10], "labels": [7, 8, 9, 10], "seq_lengths": [2, 2]}] * ROWS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing": True}, "packing=True"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing=True"),
        ({"train_dataset": packed(), "assistant_only_loss": False}, "'seq_lengths'"),
        ({"padding_free": True, "max_length": None}, "padding_free=True"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"activation_offloading": True}, "activation_offloading=True"),
        ({"model_init_kwargs": {"use_kernels": True}}, "'use_kernels': True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"compute_loss_func": lambda *_, **__: torch.tensor(0.0)}, "compute_loss_func gives one loss"),
        (
            {"processing_class": tokenizer(TEMPLATE.replace("' <end>' }}{% endg", "' <end> ' }}{% endg"))},
            "labels of row",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_cannot_be_clipped_example_by_example(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path, **options)
    assert words in caught.value.found
    assert caught.value.why
    assert caught.value.fix


def test_a_users_last_word_in_the_loss(tmp_path: Path) -> None:
    template = TEMPLATE.replace("' <end>' }}{% endgeneration", "' <end> ' }}{% endgeneration")
    data = Dataset.from_list(
        [{"messages": [*row["messages"], {"role": "user", "content": "w1"}]} for row in conversations(turns=1)]
    )
    make(tmp_path, train_dataset=data)
    with pytest.raises(ConfigurationError, match="the assistant's words alone"):
        make(tmp_path, train_dataset=data, processing_class=tokenizer(template))


def test_a_loss_of_the_routers_of_a_whole_batch(tmp_path: Path) -> None:
    def experts() -> MixtralForCausalLM:
        config = MixtralConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, pad_token_id=0, bos_token_id=None, eos_token_id=2,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    with pytest.raises(ConfigurationError, match="router_aux_loss_coef"):
        make(tmp_path, model=experts())
    make(tmp_path, model=experts(), router_aux_loss_coef=0.0)


def test_a_subclass_with_another_loss_says_so_example_by_example(tmp_path: Path) -> None:
    class Doubled(trl.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Private(DPTrainerMixin, Doubled):
        pass

    with pytest.raises(ConfigurationError, match=r"Doubled\.compute_loss gives one loss"):
        make(tmp_path, Private)

    class Known(DPSFTTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return 2 * super().compute_per_example_loss(model, inputs)

    make(tmp_path, Known, loss_type="dft").train()


def of_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(behind.importlib.metadata, "version", lambda name: version)
    behind._warn_of_a_new_version.cache_clear()


@pytest.mark.parametrize(
    "version", ["1.17.0.dev0", *(pytest.param(newer, marks=pytest.mark.slow) for newer in ("1.100.0", "2.0rc1"))]
)
def test_a_newer_version_than_the_tested_ones_trains_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    of_version(monkeypatch, version)
    with pytest.warns(UserWarning, match=rf"TRL {re.escape(version)} behind DPTrainerMixin was not tested"):
        make(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="TRL")
        make(tmp_path).train()


@pytest.mark.parametrize("version", ["1.14.2", "0.29.1", "1.9.0"])
def test_a_version_with_which_training_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    of_version(monkeypatch, version)
    with pytest.raises(ConfigurationError, match=rf"TRL {re.escape(version)} behind DPTrainerMixin\."):
        make(tmp_path)


@pytest.mark.parametrize("part", ["padding_free", "_metrics"])
def test_a_part_that_a_newer_version_no_longer_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    class Without(trl.SFTTrainer):
        def __getattribute__(self, name: str) -> Any:
            if name == part and sys._getframe(1).f_globals["__name__"].startswith("hf_dp.training.behind."):
                raise AttributeError(name)
            return super().__getattribute__(name)

    class Private(DPTrainerMixin, Without):
        pass

    with pytest.raises(ConfigurationError, match=rf"behind DPTrainerMixin \({part}\)"):
        make(tmp_path, Private)


def test_the_tested_versions_are_those_of_the_project_and_its_constraints() -> None:
    def pinned(name: str) -> str:
        (version,) = re.findall(r"^trl==(\d+\.\d+)\.", (ROOT / name).read_text(encoding="utf-8"), re.M)
        return version

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    oldest, newest = ("{}.{}".format(*version) for version in (behind.OLDEST, behind.NEWEST))
    assert project["project"]["optional-dependencies"]["trl"] == [f"trl>={oldest},<2"]
    assert (pinned("constraints-oldest.txt"), pinned("constraints.txt")) == (oldest, newest)
    assert f"TRL {oldest} to {newest}" in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


# --- the documents --------------------------------------------------------------------------------------------------

# As of many models on the hub: without marks.
UNMARKED = re.sub(r"{% (end)?generation %}", "", TEMPLATE)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def from_docs(language: str, word: str) -> str:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (snippet,) = [text for text in re.findall(rf"^```{language}\n(.*?)^```$", page, re.M | re.S) if word in text]
    return snippet


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
