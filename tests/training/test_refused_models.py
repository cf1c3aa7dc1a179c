"""Models that mix examples, remember data or have nothing to train are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from transformers import DistilBertForSequenceClassification, TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from hf_dp.per_example import preflight
from tests.training.own_loops import begun
from tests.training.refusing import refused
from tests.training.workbench import arguments, classifier, make, pad, private, rows


def with_head(*layers: nn.Module) -> nn.Module:
    model: Any = classifier()
    model.pre_classifier = nn.Sequential(model.pre_classifier, *layers)
    return model


class Blend(nn.Module):
    """A use of a parameter for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fmod(x, self.scale)


class BatchMean(nn.Module):
    """Examples that mix, without any parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class CoinOfLongRows(nn.Module):
    """One coin for all, where there are more positions than in rows that are cut short."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.tensor(0.5)) if self.training and x.shape[1] > 24 else x


@pytest.mark.slow
def test_failure_28_a_coin_that_falls_for_long_rows_alone(tmp_path: Path) -> None:
    model: Any = classifier()
    model.distilbert.embeddings.LayerNorm = nn.Sequential(model.distilbert.embeddings.LayerNorm, CoinOfLongRows())
    words = "one random number moves several examples: bernoulli"
    refused(tmp_path, PreflightError, words, model, at_once=False, parts={"train_dataset": rows(low=30, high=30)})


def test_nothing_to_train(tmp_path: Path) -> None:
    model = classifier().requires_grad_(False)
    refused(tmp_path, UnsupportedModelError, "no trainable parameter", model)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_normalisation(tmp_path: Path, kind: type[nn.Module]) -> None:
    refused(tmp_path, UnsupportedModelError, f"pre_classifier.1 is batch normalisation .{kind.__name__}",
            with_head(kind(24)))  # fmt: skip


def test_a_parameter_without_a_rule(tmp_path: Path) -> None:
    error = refused(tmp_path, UnsupportedModelError, "pre_classifier.1.scale", with_head(Blend()), at_once=False)
    assert "freeze" in error.fix


@pytest.mark.slow
def test_examples_that_mix(tmp_path: Path) -> None:
    refused(tmp_path, PreflightError, "neighbours", with_head(BatchMean()), at_once=False)


def in_fours() -> nn.Module:
    """Takes whole fours of positions, padding or not, and leaves out what is left."""
    model: Any = classifier()
    embed = model.get_input_embeddings().forward

    def whole_fours(ids: Tensor) -> Tensor:
        shown: Tensor = embed(ids) * torch.arange(ids.shape[1]).lt(ids.shape[1] // 4 * 4)[:, None]
        return shown

    model.get_input_embeddings().forward = whole_fours
    return model


@pytest.mark.slow
def test_failure_44_what_is_seen_at_neither_the_shortest_nor_the_longest_length(tmp_path: Path) -> None:
    ends = [*rows(8, low=4, high=4), *rows(8, low=8, high=8)]
    make(tmp_path / "ends", in_fours(), parts={"train_dataset": ends}, max_steps=1).train()
    others = {"train_dataset": [*ends, *rows(8, low=5, high=7)]}
    refused(tmp_path / "others", PreflightError, "longer or shorter", in_fours(), at_once=False, parts=others)


class Remembering(nn.Module):
    """Each example by itself, but a running average of them goes into the saved model, without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def test_buffers_that_remember_the_data(tmp_path: Path) -> None:
    model: Any = with_head(Remembering())
    refused(tmp_path, UnsupportedModelError, "buffer 'pre_classifier.1.mean' changes", model, at_once=False)
    assert not model.pre_classifier[1].mean.any(), "put back as it was"


def test_a_model_in_dataparallel(tmp_path: Path) -> None:
    model = classifier()
    wrapped = nn.DataParallel(model)
    wrapped.config = model.config  # type: ignore[assignment]
    refused(tmp_path, ConfigurationError, "DataParallel", wrapped)


def test_several_devices_would_be_dataparallel(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ConfigurationError, match=r"DataParallel on 2 devices[\s\S]*torchrun"):
        DPTrainer(model=classifier(), args=args, train_dataset=rows(), data_collator=pad, privacy=private())


@pytest.mark.slow
def test_unfreezing_in_the_middle_is_refused_before_the_step_is_paid(tmp_path: Path) -> None:
    class Unfreeze(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                model.requires_grad_(True)

    model: Any = classifier()
    model.distilbert.requires_grad_(False)
    trainer = make(tmp_path, model, parts={"callbacks": [Unfreeze()]})
    with pytest.raises(ConfigurationError, match="more trained parameters than the training began with"):
        trainer.train()
    assert trainer.ledger.steps == trainer.state.global_step == 2


class DoubledForSequenceClassification(DistilBertForSequenceClassification):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output


@pytest.mark.slow
def test_a_model_whose_own_loss_is_another_is_refused(tmp_path: Path) -> None:
    model = DoubledForSequenceClassification(classifier().config)
    refused(tmp_path, UnsupportedModelError, "as its loss of one example", model, at_once=False)


class Unshaped(nn.Module):
    """Knows how many inputs it has when it has met some."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(x)
        return found


def test_what_has_no_shape_yet_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="head.weight has no shape yet") as caught:
        make(tmp_path, Unshaped())
    assert "before" in caught.value.fix
    with pytest.raises(UnsupportedModelError, match="head.weight has no shape yet"):
        preflight(Unshaped(), lambda model, batch: model(batch["x"]).sum(1), {"x": torch.randn(3, 4)})


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_model_that_is_offloaded_in_part_is_refused_by_name(tmp_path: Path, is_trained: bool) -> None:
    model: Any = classifier()
    model.distilbert.transformer.requires_grad_(is_trained)
    places = {"distilbert.transformer": "disk"} | dict.fromkeys(
        ("distilbert.embeddings", "pre_classifier", "classifier", "dropout"), "cpu"
    )
    model = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path / "away", force_hooks=True)
    trainer = make(tmp_path, model, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"transformer\.layer\.0\.\S* is on torch's meta device \(\d+ of \d+"):
        trainer.train()
    assert trainer.ledger.steps == 0


def test_so_is_one_that_was_never_loaded_and_is_moved_first(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = classifier()
    with pytest.raises(ConfigurationError, match=r"is on torch's meta device \((\d+) of \1 parameters are\)"):
        make(tmp_path, model)


def test_so_is_one_in_a_loop_of_ones_own() -> None:
    model: Any = classifier()
    model.pre_classifier.weight = nn.Parameter(model.pre_classifier.weight.to("meta"), requires_grad=False)
    with pytest.raises(ConfigurationError, match="pre_classifier.weight is on torch's meta device"):
        begun(model)
