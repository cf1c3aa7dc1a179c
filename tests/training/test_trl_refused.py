"""What TRL's settings, losses and versions do that cannot be clipped example by example is refused by name."""

from __future__ import annotations

import re
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import MixtralConfig, MixtralForCausalLM

from hf_dp.errors import ConfigurationError
from hf_dp.training.behind import table
from hf_dp.training.behind import trl as behind
from hf_dp.training.behind.sft import Sft
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.chats import ROOT, ROWS, TEMPLATE, WORDS, completions, conversations, doubled, make, tokenizer

pytestmark = pytest.mark.usefixtures("checked_once")

trl = pytest.importorskip("trl")


# Whose blocks hold all that comes after the first message.
ALL_MARKED = (
    "{% for m in messages %}{{ ' ' }}{% set said = '<' + m.role + '> ' + m.content + ' <end>' %}"
    "{% if loop.first %}{{ said }}{% else %}{% generation %}{{ said }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant> ' }}{% endif %}"
)
UNMARKED = ALL_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def packed() -> Dataset:
    return Dataset.from_list([{"input_ids": [7, 8, 9, 10], "labels": [7, 8, 9, 10], "seq_lengths": [2, 2]}] * ROWS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing": True}, "packing=True"),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing=True"),
        ({"train_dataset": packed(), "assistant_only_loss": False}, "'seq_lengths'"),
        ({"padding_free": True, "max_length": None}, "padding_free=True"),
        ({"padding_free": True}, "padding_free=True"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"activation_offloading": True}, "activation_offloading=True"),
        ({"model_init_kwargs": {"use_kernels": True}}, "'use_kernels': True"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"compute_loss_func": lambda *_, **__: torch.tensor(0.0)}, "compute_loss_func gives one loss"),
        ({"processing_class": tokenizer(ALL_MARKED)}, "labels of row"),
        ({"processing_class": tokenizer(UNMARKED)}, "assistant_only_loss=True, and "),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_cannot_be_clipped_example_by_example(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path, **options)
    assert words in caught.value.found
    assert caught.value.why
    assert caught.value.fix


def test_rows_that_are_all_cut_before_their_answers(tmp_path: Path) -> None:
    made = {"train_dataset": completions(), "assistant_only_loss": False}
    with pytest.raises(ConfigurationError, match="no row is left, once TRL has cut each to max_length=1") as caught:
        make(tmp_path, max_length=1, **made)
    assert "larger max_length" in caught.value.fix
    make(tmp_path, max_length=64, **made)


def test_a_users_last_word_in_the_loss(tmp_path: Path) -> None:
    data = Dataset.from_list(
        [{"messages": [*row["messages"], {"role": "user", "content": "w1"}]} for row in conversations(turns=1)]
    )
    make(tmp_path, train_dataset=data)
    with pytest.raises(ConfigurationError, match="the assistant's words alone"):
        make(tmp_path, train_dataset=data, processing_class=tokenizer(ALL_MARKED))


def test_a_marked_block_that_ends_in_a_space(tmp_path: Path) -> None:
    """Refused where Transformers marks all that comes after it too, as before 5.24; else its labels are right."""
    spaced = tokenizer(TEMPLATE.replace("' <end>' }}{% endgeneration", "' <end> ' }}{% endgeneration"))
    turns = [{"role": role, "content": "w1"} for role in ("assistant", "user")]
    told: Any = spaced.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    if told["assistant_masks"][-1]:
        with pytest.raises(ConfigurationError, match="labels of row"):
            make(tmp_path, processing_class=spaced)
    else:
        right = make(tmp_path).train_dataset
        assert make(tmp_path, processing_class=spaced).train_dataset["labels"] == right["labels"]


def test_a_loss_of_the_routers_of_a_whole_batch(tmp_path: Path) -> None:
    def experts() -> MixtralForCausalLM:
        config = MixtralConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=2, pad_token_id=0, bos_token_id=None, eos_token_id=2,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    with pytest.raises(ConfigurationError, match=r"(?s)router_aux_loss_coef.*SFTConfig\(router_aux_loss_coef=0\.0"):
        make(tmp_path, model=experts())
    make(tmp_path, model=experts(), router_aux_loss_coef=0.0)


@pytest.mark.slow
def test_a_subclass_with_another_loss_says_so_example_by_example(tmp_path: Path) -> None:
    unsaid, said = doubled(trl.SFTTrainer)
    with pytest.raises(ConfigurationError, match=r"Doubled\.compute_loss gives one loss"):
        make(tmp_path, unsaid)
    make(tmp_path, said, loss_type="dft").train()


def of_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(behind.importlib.metadata, "version", lambda name: version)
    behind._warn_of_a_new_version.cache_clear()


@pytest.mark.slow
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
    assert f"TRL {oldest} to {newest}" in (ROOT / "docs" / "trl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer", "DistillationTrainer"])
def test_trainers_that_sample_answers_are_refused_with_a_loss_of_ones_own_too(name: str) -> None:
    kind = type("Own", (DPTrainerMixin, getattr(trl, name)), {"compute_per_example_loss": lambda *_: None})
    with pytest.raises(ConfigurationError, match=f"{name} behind DPTrainerMixin") as refused:
        table.behind(object.__new__(kind)).refuse(own_loss=True)
    assert "samples and compares" in refused.value.why


def test_a_subclass_of_trls_own_is_another_trainer() -> None:
    """As its experimental trainers are: they learn in other ways."""
    inner = type("GKDTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.gkd", "training_step": None})
    mine = type("Mine", (trl.SFTTrainer,), {"__module__": "mine"})
    assert isinstance(table.behind(object.__new__(inner)), behind.Unknown)
    assert isinstance(table.behind(object.__new__(mine)), Sft)
    with pytest.raises(ConfigurationError, match="GKDTrainer behind DPTrainerMixin"):
        table.behind(object.__new__(inner)).refuse(own_loss=True)
