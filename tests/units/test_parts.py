"""What parts release besides counts units: in each sum and count one unit stands once, whatever rows it has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import DrawnUnits, PoissonDataLoader, RankSampler
from hf_dp.parts.output_bias import labels
from hf_dp.parts.sparse_embeddings.contributions import ContributionSum
from hf_dp.parts.token_frequencies import release_token_frequencies, token_ids
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.units.rows import UnitRows
from tests.architectures import VOCABULARY
from tests.training.workbench import (
    EXPECTED,
    MICRO,
    Clicks,
    Recommender,
    classifier,
    clicks,
    distance,
    make,
    pad,
    parameters,
    rows,
    stack,
)

pytestmark = pytest.mark.usefixtures("checked_once")

MOST = 3
OWNERS = [0] * 25 + [1] * 10 + [2 + i % 13 for i in range(25)]


def by_user(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(target_epsilon=8.0, seed=5, unit="user", max_examples_per_unit=MOST, **changes)


def owned(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "user": owner} for row, owner in zip(data, OWNERS, strict=True)]


def used(step: int) -> list[list[int]]:
    """The rows of each unit in one step, or in what is released beside the steps (-1)."""
    units = UnitRows(OWNERS, "user", MOST)
    return [units.drawn(unit, step, Entropy(5)) for unit in range(len(units))]


def recommended(path: Path, sparse: SparseEmbeddingConfig, micro: int = MICRO) -> Any:
    parts = {"train_dataset": owned(clicks(60)), "data_collator": stack}
    cut = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": EXPECTED // micro}
    options = {"kind": Clicks, "parts": parts, "remove_unused_columns": False, "max_steps": 3, **cut}
    return make(path, Recommender(), by_user(sparse_embeddings=sparse), **options)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [MICRO, 2], ids=["whole", "in pieces"])
def test_the_choice_of_rows_counts_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int) -> None:
    import hf_dp.parts.sparse_embeddings.kept_rows as kept_rows

    seen, choose = [], kept_rows.noisy_top_k
    monkeypatch.setattr(kept_rows, "noisy_top_k", lambda counts, *rest: (seen.append(counts), choose(counts, *rest))[1])
    recommended(tmp_path, SparseEmbeddingConfig(method="fest", kept_rows=20), micro).train()
    (counts,) = seen
    data, truth = clicks(60), torch.zeros_like(counts)
    for chosen in used(-1):
        for offset, column in ((0, 0), (3000, 1)):
            for item in {data[row]["features"][column] for row in chosen}:
                truth[offset + item] += 1
    assert torch.equal(counts, truth)
    assert counts.max() < len(set(OWNERS))


@pytest.mark.slow
def test_the_counts_and_sums_of_a_step_are_the_same_for_units_in_pieces(tmp_path: Path) -> None:
    """DP-AdaFEST, with noise: the same rows survive, and move alike."""
    found = []
    for micro in (MICRO, 1):
        trainer = recommended(tmp_path, SparseEmbeddingConfig(threshold=1.0), micro)
        trainer.train()
        found.append(parameters(trainer.model))
    assert distance(*found) < 1e-6
    assert distance(found[0], parameters(Recommender())) > 1e-3


def test_the_counts_of_a_step_hold_one_unit_at_their_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    add = ContributionSum.add

    def watched(self: ContributionSum, gradients: Any, every: Tensor) -> None:
        for place in range(gradients.batch_size):
            alone = ContributionSum(self._tables, self._norm)
            add(alone, gradients, torch.arange(gradients.batch_size) == place)
            rows, counts = alone.touched()
            seen.append((len(rows), float(counts.norm()) / self._norm))
        add(self, gradients, every)

    monkeypatch.setattr(ContributionSum, "add", watched)
    trainer = recommended(tmp_path, SparseEmbeddingConfig(threshold=1.0))
    trainer.train()
    assert max(rows for rows, _ in seen) > 2  # More than one row of the data touches.
    assert all(norm <= 1 + 1e-9 for _, norm in seen)
    assert trainer.privacy_report().dataset_size == len(set(OWNERS))


@pytest.mark.slow
def test_token_frequencies_count_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_dp.parts.token_frequencies as frequencies

    seen: list[list[Tensor]] = []
    release = frequencies.release_token_frequencies

    def watched(examples: Any, *rest: Any) -> Tensor:
        seen.append(list(examples))
        return release(seen[-1], *rest)

    monkeypatch.setattr(frequencies, "release_token_frequencies", watched)
    data, privacy = rows(60), by_user(re_attention=ReAttentionConfig())
    trainer = make(
        tmp_path, classifier(), privacy, parts={"train_dataset": owned(data), "data_collator": pad}, max_steps=1
    )
    trainer.train()
    ids = [[token for row in chosen for token in data[row]["input_ids"]] for chosen in used(-1)]
    assert [part.tolist() for part in seen[0]] == ids
    assert sum(entry[1] for entry in trainer.ledger.entries) == 2


def counted(owners: list[int], data: list[dict[str, Any]], kind: str, by_rows: bool = False) -> Tensor:
    """What is counted for a release, before its noise, by one training."""
    units, entropy, seen = UnitRows(owners, "user", MOST), Entropy(5), []
    n = len(data) if by_rows else len(units)
    sampler = PoissonBatchSampler.of(n, 1, entropy)
    share = RankSampler(sampler, 0, 1, None if by_rows else DrawnUnits(units, entropy))
    loader = PoissonDataLoader(data, batch_sampler=share, collate_fn=LogicalBatchCollator(4, pad, reproducible=True))
    model: Any = SimpleNamespace(config=None)
    read = {"tokens": lambda: token_ids(loader, model), "labels": lambda: labels(loader)}[kind]
    noise = SimpleNamespace(add_=lambda sums, *_: seen.append(sums[0].clone()), deviation=lambda sigma, c: sigma * c)
    release = SimpleNamespace(event=None, label=kind, noise_multiplier=1.0)
    plan: Any = SimpleNamespace(release_to_make=lambda *of: release, sampler=sampler, noise=noise)
    release_token_frequencies(read(), VOCABULARY, 1.5, plan, mock.Mock())
    return seen[0]


@pytest.mark.parametrize("kind", ["tokens", "labels"])
@pytest.mark.parametrize("its_rows", [1, 2, 9])
def test_all_rows_of_a_unit_move_counts_that_are_released_by_at_most_their_bound(kind: str, its_rows: int) -> None:
    owners = [0, 1, 1, 2, 2, 2, 2, *[3] * its_rows]
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"][::-1]} for row in rows(len(owners), low=6)]
    others = owners.index(3)
    moved = counted(owners, data, kind) - counted(owners[:others], data[:others], kind)
    # The oracle: each token that it has, once; in the rows that are drawn for what is no step.
    drawn = UnitRows(owners, "user", MOST).drawn(3, -1, Entropy(5))
    ids = sorted({token for row in drawn for token in data[row]["input_ids"]})
    assert len(drawn) == min(MOST, its_rows)
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[ids] = 1.5 / len(ids) ** 0.5
    assert torch.allclose(moved, expected)
    assert float(moved.norm()) <= 1.5 * (1 + 1e-12)
    # Negative control: its rows by themselves.
    if its_rows > MOST:
        apart = counted(owners, data, kind, by_rows=True) - counted(owners[:others], data[:others], kind, by_rows=True)
        assert float(apart.norm()) > 2 * 1.5
