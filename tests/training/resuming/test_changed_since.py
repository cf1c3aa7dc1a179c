"""What is saved beside a record is what its training has left: all of it, whoever has changed it since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from hf_dp.errors import LedgerError
from tests.training.workbench import arguments, classifier, make, pad, private, rows

pytestmark = pytest.mark.usefixtures("checked_once")

_LORA = LoraConfig(r=2, target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS")


def train_plainly(model: Any, path: Path) -> None:
    Trainer(model=model, args=arguments(path, max_steps=1), train_dataset=rows(), data_collator=pad).train()


def plain_body(model: Any, path: Path) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("distilbert"))
    train_plainly(model, path)


def merged_into_the_body(model: Any, path: Path) -> None:
    plain = get_peft_model(model, _LORA)
    train_plainly(plain, path)
    plain.merge_and_unload()


def one_row(model: Any, path: Path) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[5] += 0.01


def statistics(model: Any, path: Path) -> None:
    model.seen += 1


@pytest.mark.parametrize("change", [plain_body, merged_into_the_body, one_row, statistics])
@pytest.mark.slow
def test_failure_71_what_was_frozen_and_is_saved_is_as_it_was(
    tmp_path: Path, change: Callable[[Any, Path], None]
) -> None:
    model: Any = classifier()
    model.register_buffer("seen", torch.zeros(3))
    model.distilbert.requires_grad_(False)
    run = make(tmp_path / "private", model, private(seed=None), max_steps=1)
    run.train()
    run.save_model(str(tmp_path / "before"))
    change(model, tmp_path / "plain")
    with pytest.raises(LedgerError, match="after something else than this training has changed"):
        run.save_model(str(tmp_path / "after"))
    assert not (tmp_path / "after").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("is_alone", [True, False])
def test_failure_71_an_adapter_that_came_since_is_not_saved(tmp_path: Path, is_alone: bool) -> None:
    model: Any = get_peft_model(classifier(), _LORA)
    run = make(tmp_path / "private", model, private(seed=None), max_steps=1)
    run.train()
    model.add_adapter("plain", _LORA)
    model.set_adapter("plain")
    train_plainly(model, tmp_path / "plain")
    if is_alone:
        model.delete_adapter("default")
    with pytest.raises(LedgerError, match=r"(?s)that has got .*lora_A\.plain.*delete_adapter"):
        run.save_model(str(tmp_path / "after"))
    assert not (tmp_path / "after").exists()


@pytest.mark.slow
def test_what_an_adapter_is_merged_into_is_not_saved_with_it(tmp_path: Path) -> None:
    model: Any = get_peft_model(classifier(), _LORA)
    run = make(tmp_path / "private", model, private(seed=None), max_steps=1)
    run.train()
    model.merge_adapter()
    run.save_model(str(tmp_path / "merged"))
    model.unmerge_adapter()
    model.add_adapter("other", _LORA)
    model.delete_adapter("other")
    run.save_model(str(tmp_path / "after"))
    assert (tmp_path / "after" / "adapter_model.safetensors").exists()
