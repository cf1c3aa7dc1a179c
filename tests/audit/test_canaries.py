"""Canaries are units of the data that a coin puts in, and what attacks compute of them tells which were."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp.audit import plant, random_labels, random_texts, random_tokens
from hf_dp.audit.public import of_torch, public_seeds, usual_noises, without_known_noise
from hf_dp.audit.scores import by_gradient, by_loss
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import unchanged_global_state

RNG = np.random.default_rng(0)


def data(n: int = 5, **columns: list[object]) -> Dataset:
    return Dataset.from_dict({"input_ids": [[1, 2]] * n, "labels": [[1, 2]] * n, **columns})


def test_a_canary_is_there_or_nothing_is_in_its_place_and_n_does_not_tell() -> None:
    rows = random_tokens(200, 3, 50, RNG)
    planted = plant(data(), rows)
    assert len(planted.dataset) == 205
    assert planted.dataset[:5] == data()[:5]
    assert 60 < planted.included.sum() < 140
    for place, row, included in zip(planted.places, rows, planted.included, strict=True):
        found = planted.dataset[int(place)]
        assert found["input_ids"] == row["input_ids"]
        assert found["labels"] == (row["labels"] if included else [-100] * 3)
    inside, outside = planted.split(np.arange(200))
    assert sorted([*inside, *outside]) == list(range(200))
    assert set(inside) == set(np.flatnonzero(planted.included))


def test_coins_follow_from_no_seed_and_copies_have_one_each() -> None:
    rows, known = random_tokens(1, 3, 50, RNG) * 100, []
    for _ in range(2):
        np.random.seed(0)
        torch.manual_seed(0)
        known.append(plant(data(), rows).included)
    assert not np.array_equal(*known)
    assert 0 < known[0].sum() < 100


def test_canaries_of_units_have_units_of_their_own() -> None:
    users = data(user=["a", "a", "b", "c", "d"])
    rows = [{**row, "user": f"new {i}"} for i, row in enumerate(random_tokens(3, 2, 50, RNG))]
    planted = plant(users, rows, unit="user", nothing=lambda row: {**row, "labels": [-100, -100], "user": "nobody"})
    assert planted.dataset["user"][5:] == ["new 0", "new 1", "new 2"]
    for wrong in ("a", "new 1"):
        with pytest.raises(ConfigurationError, match="share a value of 'user'"):
            plant(users, [*rows[1:], {**rows[0], "user": wrong}], unit="user")


def test_what_would_be_told_from_the_data_or_is_nothing_to_plant_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"1 canaries with input_ids, for a dataset with input_ids, labels"):
        plant(data(), [{"input_ids": [1]}])
    with pytest.raises(ConfigurationError, match="0 canaries with nothing"):
        plant(data(), [])
    with pytest.raises(ConfigurationError, match="a canary without labels"):
        plant(data().remove_columns("labels"), [{"input_ids": [1]}])


@pytest.mark.parametrize("label", [0.5, [0.0, 1.0], True, "positive", ["a"], None])
def test_a_label_that_a_loss_may_count_is_not_taken_for_one_that_none_counts(label: object) -> None:
    dataset = Dataset.from_list([{"labels": label, "x": 0}] * 3)
    with pytest.raises(ConfigurationError, match=r"a canary whose labels are (?s:.)*nothing="):
        plant(dataset, [{"labels": label, "x": 1}])
    planted = plant(dataset, [{"labels": label, "x": 1}] * 20, nothing=lambda row: {**row, "x": 0})
    assert planted.dataset["x"][3:] == planted.included.tolist()


CLASSES = ClassLabel(names=["x", "y"])


@pytest.mark.parametrize(
    ("feature", "label", "out"),
    [(CLASSES, 1, -100), (List(CLASSES), np.array([0, 1]), [-100, -100]), (Value("uint8"), np.int64(1), -100)],
)
def test_labels_of_types_without_minus_100_are_cast(feature: Any, label: Any, out: object) -> None:
    features = Features({"label": feature, "x": Value("int64")})
    dataset = Dataset.from_list([{"label": label, "x": 0}] * 3, features=features)
    planted = plant(dataset, [{"label": label, "x": 1}] * 20)
    kept = np.asarray(label).tolist()
    assert planted.dataset["label"] == [kept] * 3 + [kept if there else out for there in planted.included]


def test_what_a_column_does_not_take_is_refused_whatever_a_coin_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dp.audit.canaries.coins", lambda number: np.ones(number, dtype=bool))
    with pytest.raises(ValueError, match="-100"):
        plant(
            Dataset.from_dict({"kind": [0]}, features=Features({"kind": CLASSES})),
            [{"kind": 1}],
            nothing=lambda row: {"kind": -100},
        )


def test_a_number_for_a_column_of_numbers_that_are_not_whole_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"a canary whose labels are 1\.0"):
        plant(Dataset.from_dict({"labels": [0.5]}), [{"labels": 1}])


def test_labels_tokens_and_texts_are_drawn() -> None:
    assert set(random_labels([{"label": 0, "text": "a"}], [3], RNG)[0].items()) == {("label", 3), ("text", "a")}
    labelled = random_labels([{"labels": 0, "text": "a"}] * 300, [3, 4, 5], RNG)
    assert {row["labels"] for row in labelled} == {3, 4, 5}
    assert {row["text"] for row in labelled} == {"a"}
    assert len({tuple(row["input_ids"]) for row in random_tokens(20, 8, 50, RNG)}) == 20
    texts = random_texts(20, 9, RNG)
    assert len(set(texts)) == 20
    assert {len(text) for text in texts} == {9}


def test_the_columns_that_a_slice_of_a_dataset_is_are_no_rows() -> None:
    data = Dataset.from_dict({"labels": [0, 1, 2], "text": ["a", "b", "c"]})
    with pytest.raises(ConfigurationError, match=r"keys labels, text[\s\S]*list\(data\)"):
        random_labels(data[:2], [3], RNG)
    assert random_labels(data.select(range(2)), [3], RNG) == random_labels(list(data)[:2], [3], RNG)


def test_loss_and_gradient_tell_what_was_learnt() -> None:
    torch.manual_seed(0)
    before, after = nn.Linear(40, 1, bias=False), nn.Linear(40, 1, bias=False)
    x = torch.eye(40)
    learnt = torch.arange(40) % 2 == 0
    after.load_state_dict({"weight": before.weight.detach() - 0.1 * learnt[None]})

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"])[:, 0]

    moved = {"weight": (before.weight - after.weight).detach()}
    of_one = [{"x": row[None]} for row in x]
    for scores in (by_loss(before, after, loss, [{"x": x}]), by_gradient(before, moved, loss, of_one)):
        assert torch.equal(scores > 0.05, learnt)


def test_seeds_are_found_where_they_stand_and_nothing_is_run(tmp_path: Path) -> None:
    torch.save(TrainingArguments(str(tmp_path), seed=271828, use_cpu=True), tmp_path / "training_args.bin")
    (tmp_path / "README.md").write_text("- seed: 314159, not v1.77 nor model-b99999x\n")
    found = public_seeds(tmp_path)
    assert {271828, 314159, 42} <= set(found)
    assert not {77, 99999} & set(found)
    with zipfile.ZipFile(tmp_path / "training_args.bin", "w") as archive:
        archive.writestr("a/data.pkl", b"cos\nsystem\n(S'touch spoilt'\ntRJ\x05\x00\x00\x00.")
    assert 271828 not in public_seeds(tmp_path)
    assert not Path("spoilt").exists()


def test_noise_of_a_known_seed_comes_off_and_none_that_is_secret() -> None:
    sums = {"a": torch.ones(1000), "b": torch.zeros(3, 5)}
    noise = of_torch(sums, 10.0, 4)
    released = {name: value + noise(4711)[name] for name, value in sums.items()}
    rest, seed = without_known_noise(released, [1, 2, 4711, 4712], [noise])
    assert seed == 4711
    assert all(torch.allclose(rest[name], value, atol=1e-4) for name, value in sums.items())
    rest, seed = without_known_noise(released, [1, 2, 4712], [noise])
    assert seed is None
    assert all(torch.equal(rest[name], value) for name, value in released.items())


def _from_one_stream_of_numpy(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    generator = np.random.default_rng(4711)
    for _ in range(steps):
        for value in like.values():
            value += torch.as_tensor(generator.normal(0.0, deviation, size=value.shape), dtype=torch.float32)


def _from_numpy_in_float32(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    generator = np.random.default_rng(4711)
    for _ in range(steps):
        for value in like.values():
            value += deviation * torch.from_numpy(generator.standard_normal(value.shape, np.float32))


def _from_the_global_stream_of_numpy(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    np.random.seed(4711)
    for _ in range(steps):
        for value in like.values():
            value += torch.as_tensor(deviation * np.random.randn(*value.shape), dtype=torch.float32)


def _anew_in_each_step(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(4711 + step)
        for value in like.values():
            value += torch.normal(0.0, deviation, value.shape)


def _anew_for_each_parameter(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    for _ in range(steps):
        for value in like.values():
            value += deviation * torch.randn(value.shape, generator=torch.Generator().manual_seed(4711))


def _all_at_once(like: dict[str, Tensor], deviation: float, steps: int) -> None:
    generator = torch.Generator().manual_seed(4711)
    for _ in range(steps):
        flat = torch.randn(sum(value.numel() for value in like.values()), generator=generator) * deviation
        for value, part in zip(like.values(), flat.split([value.numel() for value in like.values()]), strict=True):
            value += part.view(value.shape)


@pytest.mark.parametrize(
    "add",
    [
        _from_one_stream_of_numpy, _from_numpy_in_float32, _from_the_global_stream_of_numpy, _anew_in_each_step,
        _anew_for_each_parameter, _all_at_once,
    ],
)  # fmt: skip
def test_noise_comes_off_whichever_usual_generator_made_it(add: Any) -> None:
    sums = {"a": torch.ones(1000), "b": torch.zeros(3, 5)}
    released = {name: value.clone() for name, value in sums.items()}
    with unchanged_global_state():
        add(released, 10.0, 4)
    rest, seed = without_known_noise(released, [1, 4711, 4712], usual_noises(released, 10.0, 4))
    assert seed == 4711
    assert all(torch.allclose(rest[name], value, atol=1e-4) for name, value in sums.items())
