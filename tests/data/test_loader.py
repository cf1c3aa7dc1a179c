"""Poisson batches: keyed by step, at most once per unit, possibly empty, and collated row by row."""

from __future__ import annotations

import pickle
import tracemalloc
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import PoissonDataLoader, RankSampler
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import Entropy, bernoulli
from hf_dp.sampling.poisson import PoissonBatchSampler


def rows(examples: list[Any]) -> dict[str, torch.Tensor]:
    assert examples, "an empty list reached the user's collator"
    return {"x": torch.as_tensor([float(each) for each in examples])}


def loader_of(
    sampler: PoissonBatchSampler, dataset: Any = None, micro: int = 4, collate: Any = rows, **options: Any
) -> PoissonDataLoader:
    dataset = list(range(sampler.dataset_size)) if dataset is None else dataset
    return PoissonDataLoader(dataset, batch_sampler=sampler, collate_fn=LogicalBatchCollator(micro, collate), **options)


def indices_of(item: dict[str, Any]) -> list[int]:
    """The examples of one item of a loader over `list(range(n))`."""
    return [int(x) for micro in item["micro_batches"] for x in micro["x"]]


class TestSampler:
    def test_probability_and_length(self):
        sampler = PoissonBatchSampler.of(1000, 30, Entropy(0))
        assert sampler.sampling_probability == 30 / 1000
        assert len(sampler) == 34
        assert len(list(sampler)) == 34
        assert len(PoissonBatchSampler.of(1000, 30, Entropy(0), steps_per_epoch=5)) == 5

    def test_draws_are_keyed_by_step(self):
        sampler = PoissonBatchSampler.of(1000, 100, Entropy(0))
        backwards = [sampler.draw(step) for step in reversed(range(10))]
        assert list(sampler) == backwards[::-1]
        assert list(PoissonBatchSampler.of(1000, 100, Entropy(0))) == backwards[::-1]
        assert len({tuple(batch) for batch in backwards}) == 10

    def test_epochs_are_different_steps(self):
        sampler = PoissonBatchSampler.of(1000, 100, Entropy(0))
        sampler.set_epoch(3)
        third = list(sampler)
        assert third == [sampler.draw(step) for step in range(30, 40)]
        sampler.set_epoch(3)
        assert list(sampler) == third

    def test_without_set_epoch_the_next_iteration_is_the_next_epoch(self):
        sampler = PoissonBatchSampler.of(1000, 100, Entropy(0))
        assert list(sampler) + list(sampler) == [sampler.draw(step) for step in range(20)]

    def test_set_epoch_leaves_a_running_iterator_alone(self):
        sampler = PoissonBatchSampler.of(1000, 100, Entropy(0))
        running = iter(sampler)
        first = next(running)
        sampler.set_epoch(5)
        assert [first, *running] == [sampler.draw(step) for step in range(10)]

    def test_an_iterator_that_is_never_used_costs_nothing(self):
        sampler = PoissonBatchSampler.of(1000, 100, Entropy(0))
        iter(sampler)
        assert list(sampler) == [sampler.draw(step) for step in range(10)]

    def test_failure_8_each_unit_enters_a_step_at_most_once(self):
        sampler = PoissonBatchSampler.of(50, 40, Entropy(0))
        for step in range(200):
            batch = sampler.draw(step)
            assert batch == sorted(set(batch))
            assert all(0 <= index < 50 for index in batch)

    @pytest.mark.parametrize("n", [1, 2, 1000])
    def test_probability_one_draws_everything(self, n):
        assert PoissonBatchSampler.of(n, n, Entropy(0)).draw(0) == list(range(n))

    @pytest.mark.parametrize(("n", "q"), [(100_000_000, 1e-5), (2**40, 1e-10), (2**50, 1e-12), (10, 1e-300)])
    def test_a_tiny_probability_does_not_overflow(self, n, q):
        batch = bernoulli(Entropy(0).generator("test", 0), n, q)
        assert all(0 <= index < n for index in batch)
        assert batch == sorted(set(batch))
        assert abs(len(batch) - n * q) <= 6 * (n * q) ** 0.5

    def test_many_short_gaps_still_reach_the_end(self):
        class Ones:
            def geometric(self, q: float, size: int) -> np.ndarray:
                return np.ones(size, dtype=np.int64)

        assert bernoulli(Ones(), 1000, 0.01) == list(range(1000))  # type: ignore[arg-type]

    def test_a_hundred_million_examples_take_the_memory_of_a_batch(self):
        sampler = PoissonBatchSampler.of(100_000_000, 1024, Entropy(0))
        tracemalloc.start()
        try:
            sizes = [len(sampler.draw(step)) for step in range(20)]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 500_000
        assert all(800 < size < 1300 for size in sizes)
        assert max(sampler.draw(0)) > 90_000_000

    def test_known_seeds_have_no_influence_on_sampling(self):
        seen = []
        for _ in range(2):
            torch.manual_seed(42)
            np.random.seed(42)
            seen.append(PoissonBatchSampler.of(10_000, 1000, Entropy(None)).draw(0))
        assert seen[0] != seen[1]

    @pytest.mark.parametrize(
        ("n", "expected", "steps", "message"),
        [
            (0, 1, None, "dataset of 0 examples"),
            (10, 11, None, "expected batch of 11 from a training dataset of 10"),
            (10, 0, None, "expected batch size of 0"),
            (10, -4, None, "expected batch size of -4"),
            (10, 5, 0, "steps_per_epoch=0"),
        ],
    )
    def test_refusals(self, n, expected, steps, message):
        with pytest.raises(ConfigurationError, match=f"(?s){message}.*Why this is refused.*What to do"):
            PoissonBatchSampler.of(n, expected, Entropy(0), steps)


class TestLoader:
    def test_an_item_is_a_logical_batch_in_micro_batches(self):
        sampler = PoissonBatchSampler.of(100, 20, Entropy(0))
        items = list(loader_of(sampler))
        assert [indices_of(item) for item in items] == [sampler.draw(step) for step in range(5)]
        for item in items:
            sizes = [len(micro["x"]) for micro in item["micro_batches"]]
            assert all(size == 4 for size in sizes[:-1])
            assert all(1 <= size <= 4 for size in sizes)

    def test_failure_8_the_draw_does_not_depend_on_the_micro_batch_size(self):
        loaders = [loader_of(PoissonBatchSampler.of(60, 20, Entropy(0)), micro=micro) for micro in (1, 3, 64)]
        seen = [[indices_of(item) for item in loader] for loader in loaders]
        assert seen[0] == seen[1] == seen[2]

    def test_set_epoch_is_forwarded(self):
        sampler = PoissonBatchSampler.of(100, 20, Entropy(0))
        loader = loader_of(sampler)
        loader.set_epoch(2)
        assert [indices_of(item) for item in loader] == [sampler.draw(step) for step in range(10, 15)]

    @pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_workers_that_prefetch_see_the_same_draws(self, context):
        sampler = PoissonBatchSampler.of(100, 20, Entropy(0))
        loader = loader_of(sampler, num_workers=1, multiprocessing_context=context, persistent_workers=True)
        for epoch in (1, 0) if context == "fork" else (1,):
            loader.set_epoch(epoch)
            expected = [sampler.draw(step) for step in range(5 * epoch, 5 * epoch + 5)]
            assert [indices_of(item) for item in loader] == expected

    @pytest.mark.parametrize("skipped", [1, 3, 4])
    def test_failure_21_a_resumed_epoch_goes_on_with_its_own_draws(self, skipped):
        """As Trainer does it: skip, then set the epoch on the sampler below the skipping one."""
        sampler = PoissonBatchSampler.of(100, 20, Entropy(0))
        resumed = skip_first_batches(loader_of(sampler), skipped)
        assert not hasattr(resumed, "set_epoch")
        resumed.batch_sampler.batch_sampler.set_epoch(2)
        assert len(resumed) == 5 - skipped
        assert [indices_of(item) for item in resumed] == [sampler.draw(step) for step in range(10 + skipped, 15)]

    def test_failure_5_empty_batches_are_real_batches(self):
        sampler = PoissonBatchSampler.of(10, 1, Entropy(0), steps_per_epoch=100)
        items = list(loader_of(sampler))
        assert len(items) == 100
        empty = [item for item in items if not item["micro_batches"]]
        assert 20 < len(empty) < 55
        assert all(item == {"micro_batches": []} for item in empty)

    def test_failure_5_empty_batches_reach_no_transform_of_a_hugging_face_dataset(self):
        datasets = pytest.importorskip("datasets")

        def transform(batch: dict[str, list[int]]) -> dict[str, list[torch.Tensor]]:
            return {"x": list(torch.stack([torch.tensor(float(x)) for x in batch["x"]]))}

        plain = datasets.Dataset.from_dict({"x": list(range(10))})
        for dataset in (plain, plain.with_format("torch"), plain.with_transform(transform)):
            sampler = PoissonBatchSampler.of(10, 1, Entropy(0), steps_per_epoch=30)
            items = list(loader_of(sampler, dataset, collate=lambda examples: rows([each["x"] for each in examples])))
            assert [indices_of(item) for item in items] == [sampler.draw(step) for step in range(30)]
            assert any(not item["micro_batches"] for item in items)

    def test_a_transform_sees_each_example_by_itself(self):
        datasets = pytest.importorskip("datasets")

        def mixing(batch: dict[str, list[int]]) -> dict[str, list[int]]:
            return {"x": [max(batch["x"])] * len(batch["x"])}

        mixed = datasets.Dataset.from_dict({"x": list(range(10))}).with_transform(mixing)
        for dataset in (mixed, Subset(mixed, range(10)), ConcatDataset([Subset(mixed, range(10))])):
            sampler = PoissonBatchSampler.of(10, 5, Entropy(0))
            items = list(loader_of(sampler, dataset, collate=lambda examples: rows([each["x"] for each in examples])))
            assert [indices_of(item) for item in items] == [sampler.draw(0), sampler.draw(1)]

    def test_datasets_without_batched_reads(self):
        sampler = PoissonBatchSampler.of(10, 5, Entropy(0))
        dataset = TensorDataset(torch.arange(10))
        items = list(loader_of(sampler, dataset, collate=lambda examples: {"x": default_collate(examples)[0]}))
        assert [indices_of(item) for item in items] == [sampler.draw(0), sampler.draw(1)]

    def test_a_dataset_of_another_size_is_refused(self):
        with pytest.raises(ConfigurationError, match=r"(?s)9 examples with a sampler for 10.*What to do"):
            loader_of(PoissonBatchSampler.of(10, 5, Entropy(0)), list(range(9)))


class DataCollatorWithFlattening:
    """Has the name of the one in transformers."""

    def __call__(self, examples: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([examples])}


class Renamed(DataCollatorWithFlattening):
    pass


class Around:
    def __init__(self, data_collator: Any) -> None:
        self.data_collator = data_collator


class PaddingFree:
    padding_free = True


class TestCollator:
    def test_empty_is_never_shown_to_the_users_collator(self):
        assert LogicalBatchCollator(2, rows)([]) == {"micro_batches": []}

    def test_is_picklable(self):
        collator = pickle.loads(pickle.dumps(LogicalBatchCollator(2, rows)))
        assert indices_of(collator([1, 2, 3])) == [1, 2, 3]

    def test_other_mappings_and_values_pass_through(self):
        batch = UserDict({"x": torch.zeros(2, 5), "y": torch.zeros(2), "task": None, "count": 3, "names": ["a", "b"]})
        assert LogicalBatchCollator(2, lambda examples: batch)([0, 1])["micro_batches"] == [batch]

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            ({"input_ids": torch.zeros(1, 30)}, r"'input_ids' of shape \(1, 30\) for 2 examples"),
            (
                {"pixel_values": torch.zeros(3, 3, 8, 8)},
                r"'pixel_values' of shape(?=.*images of an example)",
            ),
            ({"x": torch.zeros(2, 3), "position_ids": torch.zeros(1, 3)}, r"'position_ids' of shape \(1, 3\)"),
            ({"x": torch.zeros(2), "num_items_in_batch": torch.tensor(9)}, "single number 'num_items_in_batch' for 2"),
            ({"x": torch.zeros(0)}, r"'x' of shape \(0,\)"),
            ({"x": np.zeros(2), "y": None}, r"no torch tensor, only \['x', 'y'\]"),
            ({}, "no torch tensor"),
            (torch.zeros(2), "returned Tensor, not a mapping"),
            ((torch.zeros(2),), "returned tuple, not a mapping"),
            (None, "returned NoneType, not a mapping"),
        ],
    )
    def test_refusals(self, returned, message):
        with pytest.raises(ConfigurationError, match=f"(?s){message}.*Why this is refused.*What to do"):
            LogicalBatchCollator(2, lambda examples: returned)([0, 1])

    @pytest.mark.parametrize("micro", [1, 8])
    @pytest.mark.parametrize(
        "collate", [DataCollatorWithFlattening(), Renamed(), Around(Renamed()), PaddingFree(), Around(PaddingFree())]
    )
    def test_failure_22_padding_free_collators_are_refused_at_once(self, collate, micro):
        with pytest.raises(ConfigurationError, match=r"(?s)puts several examples in one row.*What to do"):
            LogicalBatchCollator(micro, collate)

    def test_failure_22_the_collator_of_transformers_is_refused(self):
        transformers = pytest.importorskip("transformers")
        with pytest.raises(ConfigurationError, match="DataCollatorWithFlattening puts several"):
            LogicalBatchCollator(1, transformers.DataCollatorWithFlattening())

    def test_a_micro_batch_holds_something(self):
        with pytest.raises(ConfigurationError, match="per_device_train_batch_size"):
            LogicalBatchCollator(0, rows)


class Augmented:
    """A dataset that changes its rows at random, as image augmentation does."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(2), "labels": torch.tensor(index)}


@pytest.mark.parametrize("reproducible", [False, True])
def test_random_transforms_of_the_data_follow_the_public_seed_only_under_a_privacy_seed(reproducible):
    def rows() -> torch.Tensor:
        torch.manual_seed(1)
        loader = PoissonDataLoader(
            Augmented(),
            batch_sampler=PoissonBatchSampler.of(6, 6, Entropy(0)),
            collate_fn=LogicalBatchCollator(6, torch.utils.data.default_collate, reproducible=reproducible),
        )
        return next(iter(loader))["micro_batches"][0]["x"]

    assert torch.equal(rows(), rows()) == reproducible


def test_failure_102_what_a_collator_seeds_is_secret_again_in_the_next_micro_batch():
    seen = []

    def collate(examples):
        seen.append(float(torch.rand(())))
        torch.manual_seed(0)
        return {"x": torch.tensor([e["x"] for e in examples])}

    LogicalBatchCollator(1, collate)([{"x": i} for i in range(4)])
    assert len(set(seen)) == 4


def test_failure_109_what_a_row_seeds_is_secret_again_for_the_next_row():
    class Seeding(Augmented):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.rand(2), "same": torch.rand((), generator=torch.manual_seed(0))}

    loader = loader_of(PoissonBatchSampler.of(6, 6, Entropy(0)), Seeding(), 6, default_collate)
    batch = next(iter(loader))["micro_batches"][0]
    assert len(batch["x"].unique()) == 12 > len(batch["same"].unique())


class TestRanks:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_failure_7_every_example_is_on_one_rank(self, world_size):
        whole = PoissonBatchSampler.of(60, 6, Entropy(1))
        ranks = [RankSampler(whole, rank, world_size) for rank in range(world_size)]
        for step in range(30):
            drawn = whole.draw(step)
            shares = [rank.share(drawn) for rank in ranks]
            assert sorted(i for share in shares for i in share) == drawn
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            assert world_size > 1 or shares == [drawn]

    @pytest.mark.parametrize("of_others", [1, 3])
    def test_failure_6_a_rank_that_lacks_micro_batches_computes_on_the_first_row(self, monkeypatch, of_others):
        def collate(few):
            return {"x": torch.tensor([row.pop("x") for row in few])}

        class Rows:
            def __len__(self):
                return 10

            def __getitem__(self, index):
                return {"x": [index]}

        loader = loader_of(PoissonBatchSampler.of(10, 2, Entropy(0)), Rows(), 2, collate)
        monkeypatch.setattr("hf_dp.ranks.most", lambda mine: max(mine, of_others))
        item = loader.collate_fn([{"x": [3]}])
        assert [part["x"].tolist() for part in item["micro_batches"]] == [[[3]]]
        assert [part["x"].tolist() for part in loader.dummies(item)] == [[[0]]] * (of_others - 1)


def test_what_is_no_function_is_no_collator() -> None:
    with pytest.raises(ConfigurationError, match="a collator that is None"):
        LogicalBatchCollator(4, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [list.pop, lambda data: data.append(20)])
def test_data_of_another_length_than_the_plan_is_drawn_from_no_more(change: Callable[[list[Any]], Any]) -> None:
    data = list(range(20))
    batches = iter(loader_of(PoissonBatchSampler.of(20, 10, Entropy(0)), data))
    next(batches)
    change(data)
    with pytest.raises(ConfigurationError, match="had 20 rows when its sampling was planned, and has (19|21) now"):
        next(batches)


@pytest.mark.parametrize("error", [OSError("gone"), IndexError("beyond the end")])
def test_a_row_that_cannot_be_read_is_named_and_its_error_stays(error: Exception) -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise error

    sampler = PoissonBatchSampler.of(20, 10, Entropy(0))
    with pytest.raises(type(error)) as caught:
        next(iter(loader_of(sampler, Broken(range(20)))))
    assert caught.value is error
    assert any("of the training data" in note for note in error.__notes__)
