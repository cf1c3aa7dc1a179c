"""What is saved of models that Trainer, or the model's own library, would not save: found when steps are paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dp import DPTrainer, PrivateRun
from hf_dp.errors import LedgerError
from hf_dp.hub import verify
from tests.architectures import VOCABULARY
from tests.training.own_loops import begun
from tests.training.workbench import classifier, make, pad_for_language, parameters, private, rows, same
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


class Tied(nn.Module):
    """A model of one's own, by two names for its table; other parameters are seen from the side, or are a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.shift = nn.Parameter(torch.zeros(4))
        both = torch.arange(8.0)
        self.register_buffer("both", both)
        self.register_buffer("part", both[:4])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.table(ids) @ self.turned.t() + self.shift + self.part) @ self.turned
        logits: Tensor = self.head(hidden)
        return logits


def losses(model: nn.Module, batch: Any) -> Tensor:
    labels = batch["labels"][:, 1:]
    each = F.cross_entropy(model(batch["input_ids"])[:, :-1].transpose(1, 2), labels, reduction="none")
    return each.sum(1) / (labels != -100).sum(1)


class OwnTrainer(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        return losses(model, inputs)


def trainer_of(path: Path, model: nn.Module, **changes: Any) -> Any:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "remove_unused_columns": False, **changes}
    parts = {"data_collator": pad_for_language}
    return make(path, model, kind=OwnTrainer if isinstance(model, Tied) else DPTrainer, parts=parts, **changes)


def mixed() -> Any:
    """Of adapters of two kinds, on a model whose head is its embedding: PEFT saves none such."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama_tied", "causal_lm", torch.float32), lora, mixed=True)
    model.add_adapter("other", peft.LoHaConfig(r=2, target_modules=["k_proj"], init_weights=False))
    model.set_adapter(["default", "other"])
    return model


@pytest.mark.parametrize("made", [Tied, mixed])
def test_weights_that_share_memory_are_saved_and_gone_on_from(tmp_path: Path, made: Any) -> None:
    trainer = trainer_of(tmp_path, model := made())
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert verify(tmp_path / "saved").consistent
    fresh = made()
    left, unknown = fresh.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"), strict=False)
    assert len(left) == 1  # the table's other name
    assert not unknown
    assert same(parameters(fresh), parameters(model))
    again = trainer_of(tmp_path, resumed := made())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(parameters(resumed), parameters(model))


def test_the_best_of_them_is_read(tmp_path: Path) -> None:
    class Falling(OwnTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = {"eval_loss": float(self.state.global_step)}  # the first is the best
            self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    model = Tied()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    data = {"data_collator": pad_for_language, "eval_dataset": rows(8, seed=3)}
    trainer = make(
        tmp_path, model, kind=Falling, parts=data, max_steps=2, save_steps=1, remove_unused_columns=False, **best
    )
    trainer.train()
    first = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert all(torch.equal(first[name], value) for name, value in parameters(model).items() if name in first)


@pytest.mark.parametrize("made", [Tied, mixed])
def test_a_loop_of_ones_own_saves_them_too(tmp_path: Path, made: Any) -> None:
    def run_of(model: nn.Module, resume: bool = False) -> PrivateRun:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        sizes = {"expected_batch_size": 8, "micro_batch_size": 4, "steps": 2}
        own: dict[str, Any] = {"loss": losses} if isinstance(model, Tied) else {}
        run = PrivateRun(model, rows(), private(), pad_for_language, output_dir=tmp_path, **sizes, **own)
        run.begin(optimizer, resume_from_checkpoint=tmp_path / "checkpoint-1" if resume else None)
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            run.save_checkpoint()
        return run

    run_of(model := made()).save(tmp_path / "saved")
    run_of(resumed := made(), resume=True)
    assert same(parameters(resumed), parameters(model))
    fresh = made()
    fresh.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"), strict=False)
    assert same(parameters(fresh), parameters(model))


def test_what_is_tied_is_there_once_as_safetensors_reads_it(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    for one in (model, fresh):
        del one.part  # of parts safetensors reads nothing
        one.register_buffer("part", torch.zeros(4))
    trainer_of(tmp_path, model).save_model(str(tmp_path / "saved"))
    load_model(fresh, tmp_path / "saved" / "model.safetensors")
    assert same(parameters(fresh), parameters(model))


@pytest.mark.parametrize("loop", ["trainer", "own"])
def test_failure_143_another_model_in_the_place_of_the_trained_one_is_not_saved_in_the_middle(
    tmp_path: Path, loop: str
) -> None:
    """At the end of a training it is held against what that has left."""
    other, seen = classifier(), list[int]()

    def save(holder: Any, save_there: Any) -> None:
        own, holder.model = holder.model, other
        with pytest.raises(LedgerError, match="of a model that is not the one that is trained"):
            save_there(str(tmp_path / "other"))
        holder.model = own
        save_there(str(tmp_path / "own"))
        seen.append(1)

    class Saving(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            save(trainer, trainer.save_model)

    if loop == "trainer":
        trainer = make(tmp_path, parts={"callbacks": [Saving()]}, max_steps=1)
        trainer.train()
    else:
        run, optimizer, _ = begun(classifier(), steps=2)
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            save(run, run.save)
    assert seen
    assert not (tmp_path / "other").exists()
    assert verify(tmp_path / "own").consistent


@pytest.mark.parametrize("spelt", ["relative", "with a link"])
def test_a_push_that_is_being_sent_is_waited_for_however_its_folder_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelt: str
) -> None:
    """What it sends would be of two saves."""
    monkeypatch.chdir(tmp_path)
    trainer = make(tmp_path / "out", max_steps=1)
    trainer.train()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    waited: list[str] = []
    monkeypatch.setattr(trainer, "_finish_current_push", lambda: waited.append("waited"))
    trainer.save_model("elsewhere")
    assert not waited
    trainer.save_model("out" if spelt == "relative" else str(tmp_path / "link"))
    assert waited
