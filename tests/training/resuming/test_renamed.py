"""Models whose files have other names than the model, as their own `save_pretrained` writes them, are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import default_data_collator

from hf_dp.training.resuming.own_checkpoints import read_into, write_model
from hf_dp.training.resuming.renamed import read_renamed
from tests.training.workbench import make, parameters, private, same
from tests.zoo import text_batch, tiny

pytestmark = pytest.mark.usefixtures("checked_once")


def images(size: int = 12) -> list[dict[str, Tensor]]:
    batch = text_batch("image", size, dtype=torch.float32)
    return [{name: values[i] for name, values in batch.items()} for i in range(size)]


def vit() -> Any:
    return tiny("vit", "image", torch.float32, num_hidden_layers=1)


def changed(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return model


@pytest.mark.parametrize(
    ("name", "head"), [("vit", "image"), ("mixtral, experts batched", "causal_lm"), ("gpt2", "causal_lm")]
)
@pytest.mark.parametrize("shard", ["50GB", pytest.param("10KB", marks=pytest.mark.slow)])
def test_they_are_read_as_they_were_written(tmp_path: Path, name: str, head: str, shard: str) -> None:
    written, read = tiny(name, head, torch.float32), changed(tiny(name, head, torch.float32))
    written.save_pretrained(tmp_path, max_shard_size=shard)  # type: ignore[operator]
    state = torch.get_rng_state()
    assert read_renamed(tmp_path, read) == (name != "gpt2")
    assert torch.equal(torch.get_rng_state(), state)
    if name != "gpt2":
        assert same(parameters(read), parameters(written))


def test_in_16_bits_what_is_longer_stays_so(tmp_path: Path) -> None:
    def mixed() -> Any:
        model: Any = tiny("vit", "image", torch.bfloat16)
        model.classifier.float()
        with torch.no_grad():
            model.classifier.weight.add_(2.0**-20)
        return model

    written, read = mixed(), changed(mixed())
    write_model(tmp_path, written)
    assert read_renamed(tmp_path, read)
    assert same(parameters(read), parameters(written))


def test_what_is_not_saved_stays_as_it_is(tmp_path: Path) -> None:
    written, read = vit(), changed(vit())
    written._keys_to_ignore_on_save = {"vit.embeddings.cls_token"}
    write_model(tmp_path, written)
    kept = read.vit.embeddings.cls_token.detach().clone()
    assert read_renamed(tmp_path, read)
    assert torch.equal(read.vit.embeddings.cls_token, kept)
    assert torch.equal(read.classifier.weight, written.classifier.weight)


def test_what_has_no_files_of_its_own_is_left(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert not read_renamed(tmp_path, model)
    write_model(tmp_path, model)
    assert not read_renamed(tmp_path, nn.Linear(2, 2))


@pytest.mark.parametrize("layer", ["full_attention", "a layer of its own"])
@pytest.mark.slow
def test_a_training_goes_on_with_them(tmp_path: Path, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Trainer, which knows no kind of layer but the usual ones, cannot read the config."""

    def training() -> Any:
        parts, model = {"train_dataset": images(), "data_collator": default_data_collator}, vit()
        monkeypatch.setattr(type(model.config), "validate", lambda self: None)
        model.config.layer_types = [layer]
        return make(tmp_path, model, private(), parts=parts, max_steps=2, save_strategy="steps", save_steps=1)

    whole = training()
    whole.train()
    resumed = training()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(parameters(resumed.model), parameters(whole.model))
    assert resumed.ledger == whole.ledger


@pytest.mark.slow
def test_the_best_of_them_is_read_at_the_end(tmp_path: Path) -> None:
    parts = {"train_dataset": images(), "eval_dataset": images(4), "data_collator": default_data_collator}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e3}
    trainer = make(
        tmp_path, vit(), private(), parts=parts, max_steps=2, save_strategy="steps", save_steps=1,
        metric_for_best_model="loss", greater_is_better=False, **best,
    )  # fmt: skip
    trainer.train()
    kept: Any = vit()
    assert read_renamed(Path(trainer.state.best_model_checkpoint), kept)
    assert same(parameters(trainer.model), parameters(kept))


def test_a_loop_of_ones_own_reads_them(tmp_path: Path) -> None:
    written, read = vit(), changed(vit())
    write_model(tmp_path, written)
    read_into(tmp_path, read, torch.optim.SGD(read.parameters(), 0.1), None)
    assert same(parameters(read), parameters(written))
