"""Mean pooling as a layer of the encoder, so that a classifier is one that Transformers has and loads by itself.

A layer of BERT whose attention sees all tokens alike and whose values are the hidden states puts their mean beside the
first token's own state, which a factor makes small against it. Its two layer norms normalise, before and after the
origin is subtracted, and its feed-forward part is zero. The class's own dense layer and tanh are the identity, for
numbers so small that tanh does not bend them; the head's weights take all factors in.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from common.hub_names import pretrained
from hf_dp.errors import ConfigurationError, UnsupportedModelError

# How much more the mean counts than the first token's state beside it.
_MEAN = 64.0
# What checkpoints name as their type of model, or adapters as their base: no name that a hub can have.
TRAINING_FORM = "form_for_training of a recipe of hf_dp"
# Tanh is straight to 2e-5 there.
_SMALL = 1 / 128


class TrainingForm(PreTrainedModel):
    """A classifier in the form that trains, whose saved configuration nobody takes for that of a plain model."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        """As Transformers', under a type of model that it refuses to load, where it would make a fresh head."""
        super().save_pretrained(save_directory, **options)
        path = Path(save_directory, "config.json")
        if path.exists():  # one rank writes it
            config = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**config, "model_type": TRAINING_FORM}, indent=2), encoding="utf-8")


def pooled(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, T) to (B, d): the mean over real tokens (and a 64th of the first), of mean 0 and variance 1 over features."""
    hidden = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask.unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return F.layer_norm(_MEAN * mean + hidden[:, 0], mean.shape[-1:])


def seen_from(origin: Tensor, features: Tensor) -> Tensor:
    """(B, d) features as directions of unit length from an origin among them."""
    return F.layer_norm(features - origin, origin.shape) / math.sqrt(len(origin))


@torch.no_grad()
def as_sequence_classification(model: Any, names: Sequence[str]) -> PreTrainedModel:
    """A trained MeanPoolingForSequenceClassification, adapters merged, in the form that Transformers loads.

    Raises:
        AttributeError, ValueError: the encoder is not laid out as BERT.
    """
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    config = labelled_config(model.encoder.config, names)
    config.num_hidden_layers += 1
    made: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    body = made.base_model
    body.load_state_dict(model.encoder.state_dict(), strict=False)
    layer, d = body.encoder.layer[-1], config.hidden_size
    for parameter in layer.parameters():
        parameter.zero_()
    nn.init.eye_(layer.attention.self.value.weight)
    nn.init.eye_(layer.attention.output.dense.weight).mul_(_MEAN)
    nn.init.ones_(layer.attention.output.LayerNorm.weight)
    layer.attention.output.LayerNorm.bias.copy_(-model.origin)
    nn.init.ones_(layer.output.LayerNorm.weight)
    inside = set(body.encoder.modules())
    dense, head = (part for part in made.modules() if isinstance(part, nn.Linear) and part not in inside)
    nn.init.eye_(dense.weight).mul_(_SMALL)
    nn.init.zeros_(dense.bias)
    head.weight.copy_(model.classifier.weight * (model.scale / math.sqrt(d) / _SMALL))
    nn.init.zeros_(head.bias)
    return made.to(model.origin.device).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def take_over(model: Any, directory: str, names: Sequence[str], batch: Mapping[str, Tensor]) -> None:
    """Encoder, origin and head of a classifier that was saved in the plain form.

    What `as_sequence_classification` does, backwards. Where it was read from is noted, so that the promise is asked on
    whose data it was trained.

    Args:
        model: a MeanPoolingForSequenceClassification for these labels, on the same kind of encoder.
        batch: on which both must give the same answers.

    Raises:
        ConfigurationError: there is none, or it is another classifier.
    """
    plain = pretrained(AutoModelForSequenceClassification, directory, dtype=torch.float32).eval()
    try:
        body = plain.base_model
        inside = set(body.encoder.modules())
        *_, head = (part for part in plain.modules() if isinstance(part, nn.Linear) and part not in inside)
        saved = body.state_dict()
        model.encoder.load_state_dict({name: saved[name] for name in model.encoder.state_dict()})
        model.origin.copy_(-body.encoder.layer[-1].attention.output.LayerNorm.bias)
        model.classifier.weight.copy_(head.weight * (math.sqrt(len(model.origin)) * _SMALL / model.scale))
        found, wanted = as_sequence_classification(model, names)(**batch).logits, plain(**batch).logits
        is_same = torch.allclose(found, wanted, atol=1e-3 * float(wanted.abs().max()))
    except (AttributeError, KeyError, RuntimeError, ValueError):
        is_same = False
    if not is_same or plain.config.id2label != dict(enumerate(names)):
        raise ConfigurationError(
            f"--start_from {directory!r} holds no classifier of this recipe on this encoder, with these labels.",
            why="training would begin from something else than what was saved there.",
            fix="give a folder that this recipe wrote, and the encoder and the labels that it was trained with.",
        )
    model.encoder.config._name_or_path = directory


def labelled_config(config: Any, names: Sequence[str]) -> Any:
    """A copy that knows the names of the labels."""
    config = copy.deepcopy(config)
    config.problem_type = "single_label_classification"
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    return config


@torch.no_grad()
def check_plain_form(model: Any, names: Sequence[str], batch: Mapping[str, Tensor]) -> None:
    """That the form that is to be saved gives the same answers, before anything is trained.

    Raises:
        UnsupportedModelError: it does not, or there is none.
    """
    kind = model.encoder.config.model_type
    try:
        found = as_sequence_classification(model, names)(**batch).logits
    except (AttributeError, ValueError) as error:
        raise _without_plain_form(kind, str(error)) from error
    wanted = model.eval()(**batch).logits
    if not torch.allclose(found, wanted, atol=1e-3 * float(wanted.abs().max())):
        raise _without_plain_form(kind, "its class for sequence classification computes something else")


def _without_plain_form(kind: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a classifier on the mean of {kind}'s states has no form that Transformers loads ({found}).",
        why="what is trained would be of no use without this recipe's code.",
        fix="choose an encoder that is laid out as BERT: BERT, RoBERTa, XLM-RoBERTa, CamemBERT and others.",
    )
