"""The sparse step against a dense reference of the same algorithm, under the same noise."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig, SparseEmbeddingConfig
from hf_dp.config.asked import ROW_COUNTS, asked
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows
from hf_dp.per_example import Tables, loop, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.randomness import Entropy, bernoulli
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import _in_buffers
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient

ROWS, OTHERS, WIDTH, EXPECTED = 40, 7, 5, 10
TABLES = ("words.weight", "kinds.weight")


class Model(nn.Module):
    """Two tables, one of them used twice and scaled, with padding; dense position embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.kinds = nn.Embedding(OTHERS, WIDTH)
        self.positions = nn.Embedding(12, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1])[None]
        hidden = self.words(ids) + self.positions(place) + self.kinds(kinds)[:, None]
        hidden = hidden + F.embedding(ids.flip(1), self.words.weight * 0.5, padding_idx=0).tanh()
        logits: Tensor = self.head((hidden.tanh() * ids.ne(0).unsqueeze(2)).mean(1))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["kinds"]), batch["y"], reduction="none") * batch["scale"]


def batch_of(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    # A long tail, so that some rows are touched by many.
    ids = (torch.rand(size, 6, generator=generator) ** 3 * (ROWS - 1)).long() + 1
    for i in range(size):
        ids[i, 1 + i % 6 :] = 0
    return {
        "ids": ids,
        "kinds": torch.randint(0, OTHERS, (size,), generator=generator),
        "y": torch.randint(0, 3, (size,), generator=generator),
        "scale": torch.linspace(0.1, 20, size, dtype=torch.float64),
    }


def plan_of(**sparse: Any) -> Plan:
    entropy = Entropy(5)
    config = PrivacyConfig(
        noise_multiplier=0.4, clipping_norm=0.7, seed=5, sparse_embeddings=SparseEmbeddingConfig(**sparse)
    )
    return Plan.make(config, PoissonBatchSampler.of(100, EXPECTED, entropy), 5, entropy, *asked(config, 5))


def rows_of(model: Model, plan: Plan, kept: Tensor | None = None) -> TableRows:
    tables = Tables.of({name: p for name, p in model.named_parameters() if name in TABLES})
    sparse = plan.config.sparse_embeddings
    assert sparse is not None
    selection = None
    if sparse.adapts:
        deviation = plan.noise_multiplier_of(ROW_COUNTS) * sparse.contribution_norm
        selection = AdaptiveSelection(tables.rows, deviation, sparse.threshold, plan.noise, kept)
    return TableRows(tables, kept, selection, sparse.contribution_norm)


def sparse_step(
    model: Model, plan: Plan, rows: TableRows, micro_batches: list[Batch], ledger: Ledger | None = None
) -> dict[str, Tensor]:
    private_gradient(
        model,
        lambda b: rows.restricted(record(model, loss, b, tables=TABLES)),
        micro_batches,
        plan,
        ledger or Ledger(),
        by_rows=rows,
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def dense_step(model: Model, plan: Plan, batch: Batch | None, kept: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """The algorithm as the paper has it, on whole tables; the noise that the sparse step drew is drawn again."""
    sparse = plan.config.sparse_embeddings
    assert sparse is not None
    total_rows = ROWS + OTHERS
    allowed = torch.ones(total_rows, dtype=torch.bool)
    if kept is not None:
        allowed = torch.zeros(total_rows, dtype=torch.bool)
        allowed[kept] = True
    masks = dict(zip(TABLES, (allowed[:ROWS, None], allowed[ROWS:, None]), strict=True))
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    counts = torch.zeros(total_rows, dtype=torch.float64)
    touched_by_any = torch.zeros(total_rows, dtype=torch.bool)
    for i in range(0 if batch is None else len(batch["y"])):
        gradient = loop(model, loss, take(batch or {}, [i])).weighted_sum(torch.ones(1))
        gradient = {n: g * masks[n] if n in masks else g for n, g in gradient.items()}
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        for name, g in gradient.items():
            sums[name] += g * (plan.clipping.sensitivity / norm).clamp_max(1)
        touched = torch.cat([gradient[name].ne(0).any(1) for name in TABLES])
        counts += touched / max(1.0, float(touched.sum()) ** 0.5 / sparse.contribution_norm)
        touched_by_any |= touched
    if not sparse.adapts:
        survive = allowed
    else:
        deviation = plan.noise_multiplier_of(ROW_COUNTS) * sparse.contribution_norm
        selection = AdaptiveSelection(total_rows, deviation, sparse.threshold, plan.noise, kept)
        m = counts[touched_by_any].clone()
        selection._noise.add_([m], deviation, 0, "contribution noise")
        survive = torch.zeros(total_rows, dtype=torch.bool)
        survive[touched_by_any] = m >= selection.threshold
        free = (allowed & ~touched_by_any).nonzero().squeeze(1)
        generator = plan.noise.generator("false positives", 0)
        survive[free[bernoulli(generator, len(free), selection.false_positive_rate)]] = True
    dense = [name for name in parameters if name not in TABLES]
    chosen = {TABLES[0]: survive[:ROWS], TABLES[1]: survive[ROWS:]}
    # Laid out as in the step, whose noise is drawn for whole buffers.
    parts = [{n: sums[n] for n in dense}, {n: sums[n][chosen[n]] for n in TABLES}]
    laid_out = [_in_buffers(part) for part in parts]
    plan.noise.add_([buffer for _, buffers in laid_out for buffer in buffers], plan.noise_standard_deviation, 0)
    for part, (noise, _) in zip(parts, laid_out, strict=True):
        for name, values in part.items():
            sums[name] = torch.zeros_like(sums[name])
            sums[name][chosen.get(name, ...)] = values + noise[name]
    return {name: value / EXPECTED for name, value in sums.items()}, survive


KEPT = torch.tensor([1, 2, 3, 4, 5, 6, 9, 12, 20, 33, 40, 41, 44])
SETTINGS = [
    ({"threshold": 1.0}, None),
    ({"threshold": 0.4, "contribution_norm": 3.0, "noise_ratio": 0.5}, None),
    ({}, None),
    ({"method": "fest", "row_choice": "public", "public_rows": "-"}, KEPT),
    ({"method": "adafest+", "row_choice": "public", "public_rows": "-", "threshold": 0.5}, KEPT),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("settings", "kept"), SETTINGS)
@pytest.mark.parametrize("split", [[11], [1] * 11, [4, 7], []])
def test_the_sparse_step_is_the_dense_algorithm(settings: dict[str, Any], kept: Tensor | None, split: list[int]):
    model, batch, plan = Model(), batch_of(11), plan_of(**settings)
    edges = [0, *torch.tensor(split).cumsum(0).tolist()] if split else [0]
    parts = [take(batch, range(low, high)) for low, high in pairwise(edges)]
    rows = rows_of(model, plan, kept)
    found = sparse_step(model, plan, rows, parts)
    expected, survive = dense_step(model, plan, batch if split else None, kept)
    for name, value in expected.items():
        assert found[name].is_sparse == (name in TABLES)
        torch.testing.assert_close(found[name].to_dense(), value, rtol=1e-9, atol=1e-12)
    assert rows.last is not None
    assert rows.last.rows.tolist() == survive.nonzero().squeeze(1).tolist()
    stored = torch.cat([found[TABLES[0]].indices()[0], found[TABLES[1]].indices()[0] + ROWS])
    assert stored.tolist() == rows.last.rows.tolist()


def test_negative_control_the_reference_without_clipping_the_counts_disagrees():
    model, batch, plan = Model(), batch_of(11), plan_of(threshold=1.0)
    rows = rows_of(model, plan)
    sparse_step(model, plan, rows, [batch])
    assert plan.config.sparse_embeddings is not None
    unclipped = SparseEmbeddingConfig(threshold=1.0, contribution_norm=100.0)
    object.__setattr__(plan.config, "sparse_embeddings", unclipped)
    _, survive = dense_step(model, plan, batch, None)
    assert rows.last is not None
    assert rows.last.rows.tolist() != survive.nonzero().squeeze(1).tolist()


def test_an_example_that_is_not_finite_is_in_neither_release():
    model, batch = Model(), batch_of(11)
    bad = {**batch, "scale": batch["scale"].clone()}
    bad["scale"][3] = float("nan")
    found = []
    for given in (bad, take(batch, [0, 1, 2, *range(4, 11)])):
        plan = plan_of(threshold=1.0)
        found.append(sparse_step(model, plan, rows_of(model, plan), [given]))
    for name, value in found[0].items():
        torch.testing.assert_close(value.to_dense(), found[1][name].to_dense(), rtol=1e-9, atol=1e-12)


class Masked(nn.Module):
    """Padding without padding_idx: only the mask says what is real."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        real = ids.ne(0).unsqueeze(2)
        logits: Tensor = self.head((self.words(ids).tanh() * real).sum(1) / real.sum(1))
        return logits


@pytest.mark.parametrize("padding", [0, 1, 9])
def test_padding_is_in_no_release_whatever_its_length(padding: int):
    """How far an example is padded depends on its neighbours: counted, it would move by all of them."""
    model, batch = Masked(), batch_of(5)
    tables = Tables.of({"words.weight": model.words.weight})
    batch = {**batch, "ids": F.pad(batch["ids"], (0, padding)), "scale": batch["scale"].float()}
    examples, touched = tables.touched(record(model, loss, batch, tables=["words.weight"]).factors)
    expected = [(i, j) for i in range(5) for j in sorted(set(batch["ids"][i].tolist()) - {0})]
    assert list(zip(examples.tolist(), touched.tolist(), strict=True)) == expected
