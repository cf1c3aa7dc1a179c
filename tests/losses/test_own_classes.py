"""A class of one's own: its loss is known by its name, what it says or what it inherits, and held against its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import (
    BartForConditionalGeneration,
    BertForSequenceClassification,
    BertPreTrainedModel,
    DistilBertForSequenceClassification,
    DistilBertPreTrainedModel,
)

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses.kinds import loss_kind
from hf_dp.losses.own import check_own_loss
from hf_dp.losses.per_example import per_example_losses
from tests.training.own_loops import a_run
from tests.training.refusing import refused
from tests.training.workbench import classifier, make
from tests.zoo import text_batch, tiny


class Judge(BertPreTrainedModel):
    """With a name, and a class that it is made of, that say nothing of its loss."""

    weight = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.judge = BertForSequenceClassification(config)

    def forward(self, labels: Any = None, **inputs: Any) -> Any:
        found = self.judge(**inputs)
        if labels is not None:
            found.loss = self.weight * F.cross_entropy(found.logits, labels)
        return found


def test_a_class_of_ones_own_says_which_loss_it_has_and_is_held_to_it() -> None:
    torch.manual_seed(0)
    model, batch = Judge(tiny("bert", "sequence").config).eval(), text_batch("sequence")
    with pytest.raises(UnsupportedModelError, match=r"Judge .* no known per-example loss") as caught:
        loss_kind(model)
    assert "model.loss_type = 'ForSequenceClassification'" in str(caught.value)
    model.loss_type = "ForSequenceClassification"
    assert loss_kind(model) == "classification"
    check_own_loss(model, batch)
    wanted = F.cross_entropy(model(**{k: v for k, v in batch.items() if k != "labels"}).logits, batch["labels"])
    assert torch.allclose(per_example_losses(model, batch).mean(), wanted)
    model.weight = 2.0
    with pytest.raises(UnsupportedModelError, match="as its loss of one example"):
        check_own_loss(model, batch)


@pytest.mark.parametrize("kind", ["DetrForObjectDetection", "CLIPModel", "ViTMAEForPreTraining", "BertModel"])
def test_of_a_task_of_another_kind_no_loss_of_a_head_is_proposed_and_it_is_refused_at_once(kind: str) -> None:
    model = type(kind, (nn.Linear,), {"config": object()})(3, 3)
    with pytest.raises(UnsupportedModelError, match=rf"{kind} .* no known per-example loss") as caught:
        loss_kind(model)
    assert "model.loss_type" not in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="no known per-example loss"):
        a_run(model)


def test_a_trainer_of_what_has_no_known_loss_is_refused_when_it_is_made(tmp_path: Path) -> None:
    model = Judge(tiny("bert", "sequence").config)
    refused(tmp_path, UnsupportedModelError, "no known per-example loss", model)
    make(tmp_path, model, parts={"train_dataset": None})  # to evaluate


class Returning(DistilBertPreTrainedModel):
    """What it returns is no output of Transformers: a dictionary or a tuple, as Trainer takes them too."""

    def __init__(self, config: Any, returned: str) -> None:
        super().__init__(config)
        self.judge, self.returned = DistilBertForSequenceClassification(config), returned
        self.loss_type = "ForSequenceClassification"

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        logits = self.judge(input_ids, attention_mask).logits
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.returned == "nothing of use":
            return {"scores": logits, "loss": loss}
        if self.returned == "a dictionary":
            return {"loss": loss, "logits": logits}
        return (loss, logits) if loss is not None or self.returned == "a tuple with None" else (logits,)


@pytest.mark.parametrize("returned", ["a dictionary", "a tuple", "a tuple with None"])
@pytest.mark.slow
def test_a_dictionary_and_a_tuple_are_read_as_trainer_reads_them(tmp_path: Path, returned: str) -> None:
    run = make(tmp_path, Returning(classifier().config, returned))
    run.train()
    assert run.ledger.steps == 4


def test_a_model_without_logits_is_told_so() -> None:
    model = Returning(tiny("distilbert", "sequence").config, "nothing of use").eval()
    with pytest.raises(UnsupportedModelError, match=r"^Returning returns no logits, but loss, scores\.") as caught:
        per_example_losses(model, text_batch("sequence"))
    assert "'logits'" in caught.value.fix


class PlainForSequenceClassification(nn.Module):
    """Named, and saying, as if it were one of Transformers'; without a config of theirs."""

    loss_type = "ForSequenceClassification"


class Plain(nn.Module):
    loss_type = "ForCausalLM"


@pytest.mark.parametrize("kind", [PlainForSequenceClassification, Plain, nn.Linear])
def test_a_module_without_a_config_is_not_told_to_name_a_head(kind: Any) -> None:
    """How many labels there are, and of what kind, stands in the config alone: with a name it failed on each row."""
    with pytest.raises(UnsupportedModelError, match=rf"{kind.__name__} .* no known per-example loss") as caught:
        loss_kind(kind(3, 3) if kind is nn.Linear else kind())
    assert "loss_type" not in caught.value.fix
    assert 'reduction="none"' in caught.value.fix


class Mine(DistilBertForSequenceClassification):
    """With more to it, and the loss that it inherits."""

    is_weighted = False

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        found = super().forward(input_ids, attention_mask, labels=labels)
        if self.is_weighted and labels is not None:
            found.loss = 2 * found.loss
        return found


def test_a_class_made_of_one_of_transformers_has_its_loss() -> None:
    model: Any = Mine(tiny("distilbert", "sequence").config)
    assert loss_kind(model) == "classification"
    fully_sharded = type("FSDPMine", (FSDPModule, Mine), {})
    model.__class__ = fully_sharded
    assert loss_kind(model) == "classification"
    model.loss_type = "ForTokenClassification"
    assert loss_kind(model) == "token", "what is said of a model goes before what it inherits"


@pytest.mark.slow
def test_a_class_made_of_one_of_transformers_trains_by_its_own_loss_alone(tmp_path: Path) -> None:
    run = make(tmp_path / "its", Mine(classifier().config))
    run.train()
    assert run.ledger.steps == 4
    model = Mine(classifier().config)
    model.is_weighted = True
    refused(tmp_path, UnsupportedModelError, "^Mine returns .* as its loss of one example", model, at_once=False)


class ReaderForTokenClassification(BartForConditionalGeneration):
    """As T5Gemma 2's: its decoder reads the text once more, and tells a class of each token."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, decoder_input_ids: Any = None) -> Any:
        read = self.prepare_decoder_input_ids_from_labels(input_ids) if decoder_input_ids is None else decoder_input_ids
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=read)
        if labels is not None:
            found.loss = F.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
        return found


def test_a_decoder_that_classifies_the_tokens_that_it_reads_is_fed_no_labels() -> None:
    model = ReaderForTokenClassification(tiny("bart", "seq2seq").config).eval()
    batch = text_batch("token")
    own = torch.stack([model(**{name: values[i : i + 1] for name, values in batch.items()}).loss for i in range(3)])
    assert torch.allclose(per_example_losses(model, batch), own, rtol=1e-5)
    check_own_loss(model, batch)
