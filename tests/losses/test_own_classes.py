"""A class of one's own: its loss is known by its name, or by what it says of itself, and is held against its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import BertForSequenceClassification

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses.kinds import loss_kind
from hf_dp.losses.own import check_own_loss
from hf_dp.losses.per_example import per_example_losses
from tests.zoo import text_batch, tiny


class Judge(BertForSequenceClassification):
    """With a name that says nothing of its loss."""

    weight = 1.0

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
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
