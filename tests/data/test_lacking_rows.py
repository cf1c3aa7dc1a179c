"""What a row lacks may not be taken from the rows beside it, whether or not a row that is looked at lacks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.lacking_rows import follows_from_others
from hf_dp.data.mixing_collator import check_collator
from hf_dp.errors import ConfigurationError, PreflightError

Rows = list[dict[str, Any]]


def plain(rows: Rows) -> dict[str, Tensor]:
    x = torch.stack([torch.as_tensor(row["x"], dtype=torch.float32) for row in rows])
    return {"x": x, "labels": torch.tensor([int(row["labels"]) for row in rows])}


def with_zeros(rows: Rows) -> dict[str, Tensor]:
    batch = plain(rows)
    return {**batch, "x": batch["x"].nan_to_num(0), "labels": batch["labels"].clamp(min=0)}


def with_means(rows: Rows) -> dict[str, Tensor]:
    batch = plain(rows)
    x = batch["x"]
    return {**batch, "x": torch.where(x.isnan(), x.nanmean(0).nan_to_num(0), x)}


def with_the_row_before(rows: Rows) -> dict[str, Tensor]:
    batch = plain(rows)
    for before, x in zip(batch["x"], batch["x"][1:], strict=False):
        x.copy_(torch.where(x.isnan(), before, x))
    return batch


def with_the_most_frequent_label(rows: Rows) -> dict[str, Tensor]:
    batch = plain(rows)
    labels = batch["labels"]
    most = labels[labels >= 0].mode().values if (labels >= 0).any() else labels.new_zeros(())
    return {**batch, "labels": torch.where(labels < 0, most, labels)}


def with_noise(collate: Callable[[Rows], dict[str, Tensor]]) -> Callable[[Rows], dict[str, Tensor]]:
    def noisy(rows: Rows) -> dict[str, Tensor]:
        batch = collate(rows)
        return {**batch, "x": batch["x"] + 0.1 * torch.randn(batch["x"].shape)}

    return noisy


def made(kind: Callable[[Any], Any] = list) -> Rows:
    return [{"x": kind([0.1 * i + 0.3, 0.2 * i, -0.3]), "labels": i % 2} for i in range(4)]


FILLED = [with_means, with_the_row_before, with_the_most_frequent_label]


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
@pytest.mark.parametrize("collate", FILLED)
def test_failure_117_what_few_rows_lack_is_taken_from_others(
    collate: Callable[[Rows], dict[str, Tensor]], kind: Callable[[Any], Any]
) -> None:
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, collate), made(kind))
    check_collator(LogicalBatchCollator(4, with_zeros), made(kind))


def test_failure_117_also_of_a_collator_that_draws() -> None:
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, with_noise(with_means)), made())
    check_collator(LogicalBatchCollator(4, with_noise(with_zeros)), made())


def test_failure_117_also_where_a_row_that_columns_tell_of_lacks_a_part() -> None:
    def where_one_is_missing(rows: Rows) -> dict[str, Tensor]:
        x = plain(rows)["x"]
        return {"x": torch.where(x.isnan() & x.isnan().sum(1, keepdim=True).eq(1), x.nanmean(0), x)}

    lacking = {"x": [math.nan, 0.1, 0.2], "labels": 0}
    check_collator(LogicalBatchCollator(4, where_one_is_missing), made())
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, where_one_is_missing), made(), [lacking])


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_failure_118_a_row_without_a_label_decides_what_the_others_become(kind: Callable[[Any], Any]) -> None:
    def scaled_among_the_labelled(rows: Rows) -> dict[str, Tensor]:
        batch = plain(rows)
        labelled = batch["labels"].ge(0)
        return {**batch, "x": batch["x"] * len(labelled) / labelled.sum().clamp(min=1)}

    rows = [{**row, "labels": kind(row["labels"]) if kind is not list else row["labels"]} for row in made()]
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, scaled_among_the_labelled), rows)


def test_a_collator_may_change_rows_in_place() -> None:
    def longer(rows: Rows) -> dict[str, Tensor]:
        for row in rows:
            row["x"].append(2.0)
        return plain(rows)

    def scaled(rows: Rows) -> dict[str, Tensor]:
        for row in rows:
            row["x"].div_(255)
        return plain(rows)

    check_collator(LogicalBatchCollator(4, longer), made())
    check_collator(LogicalBatchCollator(4, scaled), made(torch.tensor))


def test_what_cannot_be_collated_tells_nothing() -> None:
    def strict(rows: Rows) -> dict[str, Tensor]:
        assert all(row["labels"] in (0, 1) for row in rows)
        return plain(rows)

    assert not follows_from_others({"x": [0.0] * 3, "labels": 7}, made(), strict, draws=False)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def filled(x: Tensor) -> Tensor:
    """What few rows write as -999 becomes the mean of the others."""
    lacks = x == -999
    return torch.where(lacks, torch.where(lacks, 0.0, x).sum(0) / (~lacks).sum(0).clamp(min=1), x)


def filled_beforehand(rows: Rows) -> dict[str, Tensor]:
    return {**(batch := plain(rows)), "x": filled(batch["x"])}


def usual(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def filled_in_the_loss(model: Any, batch: Any) -> Tensor:
    return usual(model, {**batch, "x": filled(batch["x"])})


def zeros_in_the_loss(model: Any, batch: Any) -> Tensor:
    return usual(model, {**batch, "x": torch.where(batch["x"] == -999, 0.0, batch["x"])})


def begun(collate: Any, loss: Any) -> PrivateRun:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=generator), "labels": i % 2} for i in range(400)]
    data[201]["x"][1] = -999.0  # type: ignore[index]
    privacy = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3)
    model = Small()
    run = PrivateRun(
        model, data, privacy, collate, expected_batch_size=8, micro_batch_size=4, steps=1, loss=loss
    )  # fmt: skip
    run.begin(torch.optim.SGD(model.parameters(), lr=0.1))
    return run


def test_failure_117_what_one_row_writes_as_a_number_beyond_all_others() -> None:
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        begun(filled_beforehand, usual)
    with pytest.raises(PreflightError, match="an example's gradient follows from what is beside it"):
        begun(plain, filled_in_the_loss)
    assert begun(plain, zeros_in_the_loss).ledger.steps == 0
