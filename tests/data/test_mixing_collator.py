"""Collators that mix rows, or choose once for all rows, are refused; those that mask each row by itself are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.mixing_collator import check_collator
from hf_dp.errors import ConfigurationError

Rows = list[dict[str, Any]]


def images() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 2} for i in range(3)]


def texts() -> Rows:
    return [{"input_ids": list(range(5, 5 + n)), "labels": n % 2} for n in (4, 9, 13)]


def stacked(rows: Rows) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.nn.functional.one_hot(torch.tensor([row.pop("labels") for row in rows]), 2).float(),
    }


def padded(rows: Rows) -> dict[str, Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}


def mixed(batch: dict[str, Tensor], share: Any, partner: Tensor) -> dict[str, Tensor]:
    return {name: share * value + (1 - share) * value[partner] for name, value in batch.items()}


def mixup(rows: Rows) -> dict[str, Tensor]:
    share = torch.distributions.Beta(0.2, 0.2).sample()
    return mixed(stacked(rows), share, torch.randperm(len(rows)))


def mixup_by_numpy_now_and_then(rows: Rows) -> dict[str, Tensor]:
    partner = torch.from_numpy(np.random.permutation(len(rows)))
    return mixed(stacked(rows), np.random.beta(1, 1), partner) if np.random.rand() < 0.5 else stacked(rows)


def mixup_of_python(rows: Rows) -> dict[str, Tensor]:
    partner = random.sample(range(len(rows)), len(rows))
    return mixed(stacked(rows), random.betavariate(1, 1), torch.tensor(partner))


def rolled_mixup(rows: Rows) -> dict[str, Tensor]:
    """As torchvision's."""
    return mixed(stacked(rows), torch.rand([]), torch.arange(len(rows)).roll(1))


def cutmix(rows: Rows) -> dict[str, Tensor]:
    batch, partner = stacked(rows), torch.randperm(len(rows))
    left = int(torch.randint(0, 6, ()))
    batch["pixel_values"][:, :, left : left + 2] = batch["pixel_values"][partner][:, :, left : left + 2]
    return batch


def neighbours_averaged(rows: Rows) -> dict[str, Tensor]:
    return mixed(stacked(rows), 0.9, torch.arange(len(rows)) ^ 1)


def standardised(rows: Rows) -> dict[str, Tensor]:
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"] - batch["pixel_values"].mean()}


def masked_and_mixed(rows: Rows) -> dict[str, Tensor]:
    batch = padded(rows)
    swapped = torch.where(torch.rand(batch["input_ids"].shape) < 0.3, batch["input_ids"].flip(0), batch["input_ids"])
    return {"input_ids": swapped}


def flipped(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each row by itself."""
    rows = [row.flip(-1) if torch.rand([]) < 0.5 else row for row in batch["pixel_values"]]
    return {**batch, "pixel_values": torch.stack(rows)}


def divided_by_the_loudest(rows: Rows) -> dict[str, Tensor]:
    batch = stacked(rows)
    return flipped({**batch, "pixel_values": batch["pixel_values"] / batch["pixel_values"].abs().amax()})


def class_averaged(rows: Rows) -> dict[str, Tensor]:
    batch = stacked(rows)
    is_same = batch["labels"] @ batch["labels"].T
    means = torch.einsum("ij,j...->i...", is_same / is_same.sum(1, keepdim=True), batch["pixel_values"])
    return flipped({**batch, "pixel_values": (batch["pixel_values"] + means) / 2})


def seeded_anew(rows: Rows) -> dict[str, Tensor]:
    batch = padded(rows)
    hidden = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(1)) < 0.5
    return {"input_ids": batch["input_ids"].masked_fill(hidden, 1)}


def seeded_for_all(rows: Rows) -> dict[str, Tensor]:
    torch.manual_seed(1)
    batch = padded(rows)
    return {"input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.5, 1)}


def every_other_row(rows: Rows) -> dict[str, Tensor]:
    batch = padded(rows)
    batch["input_ids"][1::2, 0] = 1
    return batch


@pytest.mark.parametrize("collate", [seeded_anew, seeded_for_all, every_other_row])
def test_failure_29_a_row_that_depends_on_its_place_is_refused(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{collate.__name__} makes another row of an example at another place"
    ):
        check_collator(LogicalBatchCollator(4, collate), texts())


@pytest.mark.parametrize("loudest", range(3))
@pytest.mark.parametrize("collate", [divided_by_the_loudest, class_averaged])
def test_failure_29_an_example_that_stays_as_it_is_where_others_do_not(
    collate: Callable[[Rows], dict[str, Tensor]], loudest: int
) -> None:
    rows = images()
    rows[loudest]["pixel_values"] *= 50
    # The first and the last of another class.
    for row, label in zip(rows, (0, 0, 1), strict=True):
        row["labels"] = label
    with pytest.raises(ConfigurationError, match="gives an example another row"):
        check_collator(LogicalBatchCollator(4, collate), rows)


@pytest.mark.parametrize(
    "collate",
    [
        mixup, mixup_by_numpy_now_and_then, mixup_of_python, rolled_mixup, cutmix, neighbours_averaged, standardised,
        masked_and_mixed,
    ],
)  # fmt: skip
def test_failure_29_collators_that_mix_rows_are_refused_by_name(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    rows = texts() if collate is masked_and_mixed else images()
    with pytest.raises(ConfigurationError, match=f"{collate.__name__} gives an example another row"):
        check_collator(LogicalBatchCollator(4, collate), rows)


def test_failure_29_mixing_is_seen_where_the_first_and_the_last_row_are_alike() -> None:
    """In all, or in what is mixed alone."""
    one, two, *_ = ({"pixel_values": row["pixel_values"]} for row in images())
    three = {"pixel_values": one["pixel_values"], "extra": 3.0}

    def mixes(rows: Rows) -> dict[str, Tensor]:
        batch = {"pixel_values": torch.stack([row["pixel_values"] for row in rows])}
        extra = {"extra": torch.tensor([row.get("extra", 0.0) for row in rows])}
        return mixed(batch, torch.rand([]), torch.randperm(len(rows))) | extra

    for rows in ([one, two, one], [one, two, three]):
        with pytest.raises(
            ConfigurationError, match="mixes gives an example another row when other examples are beside"
        ):
            check_collator(LogicalBatchCollator(4, mixes), rows)


def cropped_alike(rows: Rows) -> dict[str, Tensor]:
    left = random.randrange(4)
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"][:, :, left : left + 4]}


def cropped_each(rows: Rows) -> dict[str, Tensor]:
    batch = stacked(rows)
    crops = [image[:, left : left + 4] for image in batch["pixel_values"] for left in [random.randrange(4)]]
    return {**batch, "pixel_values": torch.stack(crops)}


def flipped_alike(rows: Rows) -> dict[str, Tensor]:
    batch = stacked(rows)
    return {**batch, "pixel_values": batch["pixel_values"].flip(3)} if np.random.rand() < 0.5 else batch


@pytest.mark.parametrize("collate", [cropped_alike, flipped_alike])
def test_failure_29_one_choice_for_all_rows_is_refused(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    with pytest.raises(ConfigurationError, match=f"{collate.__name__} makes one random choice for all rows"):
        check_collator(LogicalBatchCollator(4, collate), images())


def flipped_then_seeded(rows: Rows) -> dict[str, Tensor]:
    """And a part that is to be the same each time."""
    ids = padded(rows)["input_ids"].clone()
    for values in ids:
        values[:4] = values[:4].flip(0) if torch.rand(()) < 0.5 else values[:4]
        values[0] = torch.randint(50, (), generator=torch.manual_seed(0))
    return {"input_ids": ids}


def cropped_then_seeded(rows: Rows) -> dict[str, Tensor]:
    batch, crops = stacked(rows), []
    for i, image in enumerate(batch["pixel_values"]):
        left = np.random.randint(4)
        crops.append(image[:, left : left + 4])
        np.random.seed(i)
    return {**batch, "pixel_values": torch.stack(crops)}


@pytest.mark.parametrize("collate", [flipped_then_seeded, cropped_then_seeded])
def test_failure_109_seeds_between_the_rows_are_refused(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    rows = texts() if collate is flipped_then_seeded else images()
    with pytest.raises(ConfigurationError, match=f"{collate.__name__} seeds a global generator"):
        check_collator(LogicalBatchCollator(4, collate), rows)


def seeded_then_masked(rows: Rows) -> dict[str, Tensor]:
    """What is seeded for each row is drawn after it; by another generator it is masked."""
    ids = padded(rows)["input_ids"].clone()
    for row, values in zip(rows, ids, strict=True):
        random.seed(len(row["input_ids"]))
        values[random.randrange(4)] = 4
        values[:4] = torch.where(torch.rand(4) < 0.3, 3, values[:4])
    return {"input_ids": ids}


def masked(rows: Rows) -> dict[str, Tensor]:
    ids = padded(rows)["input_ids"]
    is_masked = torch.bernoulli(torch.full(ids.shape, 0.15)).bool() & ids.ne(0)
    words = torch.randint(5, 20, ids.shape)
    return {"input_ids": torch.where(is_masked, words, ids), "labels": ids.masked_fill(~is_masked, -100)}


def masked_beside_a_class(rows: Rows) -> dict[str, Tensor]:
    return {"input_ids": masked(rows)["input_ids"], "labels": torch.tensor([row["labels"] for row in rows])}


def whole_words_masked(rows: Rows) -> dict[str, Tensor]:
    """Row by row, as many draws as words; and only then others for all."""
    ids = padded(rows)["input_ids"].clone()
    for row, values in zip(rows, ids, strict=True):
        order = list(range(len(row["input_ids"])))
        random.shuffle(order)
        values[order[: len(order) // 3]] = 3
    return {"input_ids": torch.where(ids.eq(3) & (torch.rand(ids.shape) < 0.1), 4, ids)}


def spans_masked(rows: Rows) -> dict[str, Tensor]:
    ids = padded(rows)["input_ids"].clone()
    for values in ids:
        start = 0
        while start < len(values):
            length = int(torch.randint(1, 4, ()))
            values[start : start + length] = 3
            start += length + int(torch.randint(1, 5, ()))
    return {"input_ids": ids}


def masked_by_width(rows: Rows, share: float = 0.3, side: str = "right") -> dict[str, Tensor]:
    """As many tokens of each row as are a share of the longest."""
    ids = padded(rows)["input_ids"]
    labels = torch.full_like(ids, -100)
    for row, values, found in zip(rows, ids, labels, strict=True):
        n = len(row["input_ids"])
        chosen = torch.rand(16)[:n].argsort()[: int(share * len(values))]
        found[chosen], values[chosen] = values[chosen], 3
        if side == "left":
            values[:], found[:] = values.roll(len(values) - n), found.roll(len(values) - n)
    return {"input_ids": ids, "labels": labels}


def masked_by_width_on_the_left(rows: Rows) -> dict[str, Tensor]:
    return masked_by_width(rows, side="left")


def noisy_by_the_loudest(rows: Rows) -> dict[str, Tensor]:
    sounds = [torch.tensor(row["input_ids"]).float() for row in rows]
    loudest = max(float(sound.max()) for sound in sounds)
    noisy = [(sound + 0.01 * torch.randn(32)[: len(sound)]) / loudest for sound in sounds]
    return {"input_values": torch.nn.utils.rnn.pad_sequence(noisy, batch_first=True)}


@pytest.mark.few(2)
@pytest.mark.parametrize("collate", [masked_by_width, masked_by_width_on_the_left, noisy_by_the_loudest])
def test_failure_29_what_depends_on_how_far_a_row_is_padded(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    with pytest.raises(ConfigurationError, match="chooses otherwise for an example when a longer one is beside it"):
        check_collator(LogicalBatchCollator(4, collate), texts())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "collate",
    [
        padded, stacked, cropped_each, masked, masked_beside_a_class, whole_words_masked, spans_masked,
        seeded_then_masked,
    ],
)  # fmt: skip
def test_rows_that_are_made_one_by_one_are_accepted(collate: Callable[[Rows], dict[str, Tensor]]) -> None:
    rows = images() if collate in (stacked, cropped_each) else texts()
    state = (torch.get_rng_state(), random.getstate())
    check_collator(LogicalBatchCollator(4, collate), rows)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
    assert all("labels" in row for row in rows)


def test_a_generator_of_ones_own_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)

    def seeded(rows: Rows) -> dict[str, Tensor]:
        ids = padded(rows)["input_ids"]
        return {"input_ids": torch.where(torch.rand(ids.shape, generator=generator) < 0.2, 3, ids)}

    with pytest.raises(ConfigurationError, match="seeded draws other numbers under the same global random state"):
        check_collator(LogicalBatchCollator(4, seeded), texts())


@pytest.mark.few(2)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_failure_29_a_share_of_the_rows_that_is_drawn_for_all_together(share: float) -> None:
    def dropped(rows: Rows) -> dict[str, Tensor]:
        batch = stacked(rows)
        batch["labels"][torch.randperm(len(rows))[: round(share * len(rows))]] = 0
        return batch

    def dropped_one_by_one(rows: Rows) -> dict[str, Tensor]:
        batch = stacked(rows)
        batch["labels"][torch.rand(len(rows)) < share] = 0
        return batch

    with pytest.raises(ConfigurationError, match="changes the same number of rows in each batch"):
        check_collator(LogicalBatchCollator(4, dropped), images())
    check_collator(LogicalBatchCollator(4, dropped_one_by_one), images())


def pictures(rows: Rows) -> dict[str, Tensor]:
    batch = {
        "x": torch.stack([torch.as_tensor(row["x"]) for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }
    return batch


def scaled_by_the_largest(rows: Rows) -> dict[str, Tensor]:
    batch = pictures(rows)
    return {**batch, "x": batch["x"] / 255 if batch["x"].max() > 1 else batch["x"]}


def without_what_is_missing(rows: Rows) -> dict[str, Tensor]:
    batch = pictures(rows)
    return {**batch, "x": batch["x"].where(batch["x"].isfinite().all(0), 0)}


def weighted_by_the_batch(rows: Rows) -> dict[str, Tensor]:
    batch = pictures(rows)
    return {**batch, "weights": torch.where(batch["labels"].eq(0), 1.0 + batch["labels"].sum(), 1.0)}


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
@pytest.mark.parametrize("collate", [scaled_by_the_largest, without_what_is_missing, weighted_by_the_batch])
def test_failure_73_what_few_rows_hold_decides_for_a_whole_batch(
    collate: Callable[[Rows], dict[str, Tensor]], kind: Callable[[Any], Any]
) -> None:
    made = [{"x": kind([0.1 * i, 0.2, 0.3]), "labels": 0} for i in range(3)]
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, collate), made)
    check_collator(LogicalBatchCollator(4, pictures), made)


@pytest.mark.parametrize("kind", [tuple, list])
def test_failure_73_also_where_columns_have_places_and_no_names(kind: Callable[[Any], Any]) -> None:
    def named(rows: list[Any]) -> Rows:
        return [{"x": x, "labels": label} for x, label in rows]

    made = [kind([[0.1 * i, 0.2, 0.3], 0]) for i in range(3)]
    with pytest.raises(ConfigurationError, match="another row when other examples are beside it"):
        check_collator(LogicalBatchCollator(4, lambda rows: weighted_by_the_batch(named(rows))), made)
    check_collator(LogicalBatchCollator(4, lambda rows: pictures(named(rows))), made)


def test_what_a_collator_keeps_by_the_number_of_a_row_is_that_rows() -> None:
    known: dict[int, Any] = {}

    def cached(rows: Rows) -> dict[str, Tensor]:
        assert all(row["labels"] in (0, 1) for row in rows), "a collator may refuse what is strange"
        return pictures([{**row, "x": known.setdefault(row["number"], row["x"])} for row in rows])

    made = [{"x": [0.1 * i, 0.2], "labels": 0, "number": i} for i in range(3)]
    check_collator(LogicalBatchCollator(4, cached), made)
    assert known == {i: row["x"] for i, row in enumerate(made)}
