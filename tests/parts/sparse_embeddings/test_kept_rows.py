"""What the choice of DP-FEST's rows leaves in a model: nothing, as a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from tests.parts.sparse_embeddings.sparse import sparse
from tests.training.workbench import Clicks, Recommender, clicks, stack

pytestmark = pytest.mark.usefixtures("checked_once")

# Of one example: no other has these three together, and the check before the first step sees each alone.
RARE = [3, 5, 2]


class Telling(Recommender):
    """Writes down, in what is saved with it, that it has seen the rare example."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.told = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.place = place

    def forward(self, features: Tensor) -> Tensor:
        if bool(features.eq(torch.tensor(RARE)).all(1).any()):
            with torch.no_grad():
                getattr(self, self.place).add_(1)
        return super().forward(features)


@pytest.mark.parametrize("place", ["seen", "told"])
@pytest.mark.parametrize("method", ["fest", "adafest"])
def test_failure_148_what_one_example_writes_into_a_model_is_refused_where_rows_are_chosen(
    tmp_path: Path, method: str, place: str
) -> None:
    """As in a step: the choice looks at all examples, and no noise is added to what a pass leaves."""
    data: list[dict[str, Any]] = clicks(200)
    data[101] = {**data[101], "features": RARE}
    settings = {"method": "fest", "kept_rows": 30} if method == "fest" else {"threshold": 2.0}
    model = Telling(place)
    parts = {"train_dataset": data, "data_collator": stack}
    # For the step, which a choice comes before: every example is in it.
    sizes = {"per_device_train_batch_size": 100, "gradient_accumulation_steps": 2}
    trainer = sparse(
        tmp_path, model, kind=Clicks, sparse=settings, parts=parts, remove_unused_columns=False, max_steps=1, **sizes
    )
    with pytest.raises(UnsupportedModelError, match=place):
        trainer.train()
    assert not trainer.ledger.entries
    assert float(model.seen) == 0
