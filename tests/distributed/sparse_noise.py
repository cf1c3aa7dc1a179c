"""The choice of rows and the noise on them, of several processes: drawn many times, right or wrong in known ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from scipy import special, stats
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp import SparseEmbeddingConfig
from hf_dp.accounting import Ledger
from hf_dp.config.asked import EMBEDDING_ROWS, ROW_COUNTS, asked
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, ContributionSum, TableRows, gumbel_scale
from hf_dp.parts.sparse_embeddings.kept_rows import KeptRows
from hf_dp.per_example import PerExampleGradients, Tables, record
from hf_dp.per_example.batch import Batch
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from tests.distributed.noise import LEVEL
from tests.distributed.tasks import promise

ROWS, REPEATS, EXPECTED, CLIPPING = 24, 400, 10, 0.5
TABLE = "words.weight"
# So many examples touch the first rows, each example one of them; the other rows are touched by none.
COUNTS = [1, 2, 3, 4] * 4
THRESHOLD, SIGMA = 2.0, 1.0
CONFIG = SparseEmbeddingConfig(threshold=THRESHOLD, noise_ratio=1.0)


class Words(nn.Module):
    """A table and a head, in float64, so that counts and gradients have noise of one dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(ROWS, 3), nn.Linear(3, 2)
        self.double()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model.head(model.words(batch["ids"]).sum(1).tanh()), batch["y"], reduction="none")


def gradients_of(model: nn.Module, ids: Sequence[Sequence[int]]) -> PerExampleGradients:
    """Of examples with these ids (B, T)."""
    batch = {"ids": torch.tensor(ids), "y": torch.arange(len(ids)) % 2}
    return record(model, loss, batch, tables=[TABLE])


def share() -> list[list[int]]:
    """The ids of this process's examples."""
    examples = [[row] for row, count in enumerate(COUNTS) for _ in range(count)]
    return examples[ranks.rank() :: ranks.world_size()]


def plan_of(seed: int | None, **changes: Any) -> Plan:
    """Of runs whose draws are secret unless there is a seed."""
    values = {
        "noise_multiplier": SIGMA,
        "clipping_norm": CLIPPING,
        "seed": seed,
        "sparse_embeddings": CONFIG,
        **changes,
    }
    config = promise(**values)
    return Plan.make(config, PoissonBatchSampler.of(100, EXPECTED, Entropy(0)), 1, Entropy(seed), *asked(config, 1))


def drawn(wrong: str | None = None, repeats: int = REPEATS) -> dict[str, Tensor]:
    """Which rows survived (repeats, ROWS), the noise on them (repeats, ROWS, 3), and that on the head (repeats, 8).

    Args:
        wrong: which mistake to make.
        repeats: fewer are enough for a mistake that they show.
    """
    model = Words()
    gradients = gradients_of(model, share())
    tables = Tables.of({TABLE: model.words.weight})
    found: dict[str, list[Tensor]] = {"survived": [], "rows": [], "head": []}
    with mistakes(wrong):
        truth = _truth(model, gradients)
        for repeat in range(repeats):
            plan = plan_of(repeat if wrong == "one stream for both releases" else None)
            deviation = plan.noise_multiplier_of(ROW_COUNTS) * CONFIG.contribution_norm
            chosen = TableRows(tables, None, AdaptiveSelection(ROWS, deviation, THRESHOLD, plan.noise))
            private_gradient(model, lambda _: gradients, [{}], plan, Ledger(), by_rows=chosen)
            grads = {name: p.grad * EXPECTED for name, p in model.named_parameters() if p.grad is not None}
            survived = torch.zeros(ROWS, dtype=torch.bool)
            survived[grads[TABLE].coalesce().indices()[0]] = True
            found["survived"].append(survived)
            found["rows"].append((grads[TABLE].to_dense() - truth[TABLE]) * survived[:, None])
            found["head"].append(torch.cat([(grads[n] - truth[n]).flatten() for n in ("head.weight", "head.bias")]))
    return {name: torch.stack(values) for name, values in found.items()}


def _truth(model: nn.Module, gradients: PerExampleGradients) -> dict[str, Tensor]:
    """The sum over all processes, by hand."""
    total = gradients.weighted_sum((CLIPPING / gradients.squared_norms().sqrt()).clamp_max(1.0))
    for value in total.values():
        ranks.sum_(value)
    return total


@contextmanager
def mistakes(wrong: str | None) -> Iterator[None]:
    """A context in which one is made."""
    noise, release, touched = GaussianNoise.add_, ClippedSum.release, ContributionSum.touched
    select, keyed = AdaptiveSelection._drawn, Entropy.fresh
    what = {"counts": "contribution noise", "gradient": "noise"}.get((wrong or "").rpartition(" ")[2], "nothing")

    def changed_noise(self: GaussianNoise, tensors: Any, deviation: float, step: int, stream: str = "noise") -> None:
        if stream.startswith(what):
            scale = {"no": 0.0, "two": 2 / 3}.get((wrong or "").split()[0], 1.0)
            deviation *= scale
        noise(self, tensors, deviation, step, stream)

    def noise_on_every_rank(self: ClippedSum, source: GaussianNoise, deviation: float, step: int) -> None:
        if ranks.rank():
            noise(GaussianNoise(Entropy(None)), self.gradients.values(), deviation, step)
        release(self, source, deviation, step)

    def noisy_counts_of_every_rank(self: ContributionSum) -> tuple[Tensor, Tensor]:
        rows, counts = touched(self)
        plan = plan_of(None)
        noise(GaussianNoise(plan.entropy), [counts], plan.noise_multiplier_of(ROW_COUNTS), 0)
        return rows, counts

    def counts_of_this_rank(self: ContributionSum) -> tuple[Tensor, Tensor]:
        with mock.patch("hf_dp.ranks.world_size", return_value=1):
            return touched(self)

    def drawn_for_every_rank(self: AdaptiveSelection, rows: Tensor, counts: Tensor, step: int) -> Tensor:
        return torch.cat([select(self, rows, counts, step) for _ in range(ranks.world_size())]).unique()

    def one_stream(self: Entropy, purpose: str, step: int) -> Any:
        return keyed(self, "noise", step)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(GaussianNoise, "add_", changed_noise))
        if wrong == "noise of every rank on the gradient":
            stack.enter_context(mock.patch.object(ClippedSum, "release", noise_on_every_rank))
        elif wrong == "noise of every rank on the counts":
            stack.enter_context(mock.patch.object(ContributionSum, "touched", noisy_counts_of_every_rank))
        elif wrong == "counts of the first rank alone":
            stack.enter_context(mock.patch.object(ContributionSum, "touched", counts_of_this_rank))
        elif wrong == "rows that any rank draws":
            stack.enter_context(mock.patch.object(AdaptiveSelection, "_drawn", drawn_for_every_rank))
        elif wrong == "one stream for both releases":
            stack.enter_context(mock.patch.object(Entropy, "fresh", one_stream))
        yield


def complaints(samples: dict[str, Tensor]) -> list[str]:
    """What is wrong with samples of one choice of rows and one noise on them and on the head."""
    plan, found = plan_of(0), []
    survived, unit = samples["survived"], plan.gradient_noise_multiplier * CLIPPING
    counts = torch.tensor([*COUNTS, *[0] * (ROWS - len(COUNTS))])
    rates = special.ndtr((counts.double() - THRESHOLD).numpy() / plan.noise_multiplier_of(ROW_COUNTS))
    for count in sorted(set(counts.tolist())):
        chosen = survived[:, counts == count]
        test = stats.binomtest(int(chosen.sum()), chosen.numel(), float(rates[counts.tolist().index(count)]))
        if test.pvalue < LEVEL:
            found.append(f"rows touched by {count} survive {test.statistic:.3f} of the time")
    noises = {"rows": samples["rows"][survived].flatten() / unit, "head": samples["head"].flatten() / unit}
    for name, noise in noises.items():
        freedom, squares = noise.numel(), float(noise.square().sum())
        if not stats.chi2.ppf(LEVEL / 2, freedom) < squares < stats.chi2.isf(LEVEL / 2, freedom):
            found.append(f"variance {squares / freedom:.3f} on the {name}")
        if abs(float(noise.mean())) * freedom**0.5 > stats.norm.isf(LEVEL / 2):
            found.append(f"mean {float(noise.mean()):.3f} on the {name}")
    # Rows that seldom survive are left out: so few products are far from normal.
    often = counts >= THRESHOLD
    parts = [survived[:, often].double() - torch.tensor(rates)[often], samples["rows"][:, often].flatten(1)]
    columns = torch.cat([*parts, samples["head"]], dim=1)
    columns = columns / columns.norm(dim=0).clamp_min(1e-12)
    limit = stats.norm.isf(LEVEL / columns.shape[1] ** 2) / len(columns) ** 0.5
    for lag, words in ((0, "in a step"), (1, "from step to step")):
        correlation = (columns[lag:].T @ columns[: len(columns) - lag]).abs()
        worst = float((correlation.fill_diagonal_(0) if lag == 0 else correlation).max())
        if worst > limit:
            found.append(f"correlation {worst:.3f} {words}")
    return found


def rows_without_a_meeting(patched: bool) -> list[list[int]]:
    """The rows that this process would release in some steps; each draws its own if it is `patched`."""
    model = Words()
    gradients = gradients_of(model, share())
    tables, plan = Tables.of({TABLE: model.words.weight}), plan_of(None)
    chosen = TableRows(tables, None, AdaptiveSelection(ROWS, plan.noise_multiplier_of(ROW_COUNTS), 2.0, plan.noise))
    found = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ClippedSum, "release"))
        if patched:
            stack.enter_context(mock.patch("hf_dp.ranks.drawn_by_first", lambda draw: draw()))
        for _ in range(10):
            private_gradient(model, lambda _: gradients, [{}], plan, Ledger(), by_rows=chosen)
            assert chosen.last is not None
            found.append(chosen.last.rows.tolist())
    return found


# --- DP-FEST's top-k ------------------------------------------------------------------------------------------------

CHOICES = 600
# Row j is touched by 2 j + 1 of them, for j < 4, and once for each example, however often it is in it.
TOUCHING = [[0], *[[1]] * 3, *[[2]] * 5, *[[3, 3]] * 7]
FEST = SparseEmbeddingConfig(method="fest", kept_rows=1, budget_share=0.5)


def choosing_plan() -> Plan:
    """Of a run that chooses one row."""
    budget = {"noise_multiplier": None, "target_epsilon": 2.0, "target_delta": 1e-2, "seed": None}
    sampler = PoissonBatchSampler.of(len(TOUCHING), 2, Entropy(0))
    config = promise(**budget, sparse_embeddings=FEST)
    return Plan.make(config, sampler, 1, Entropy(None), *asked(config, 1))


def scale_of(plan: Plan) -> float:
    """Of the Gumbel noise that was paid for."""
    return gumbel_scale(plan.noise_multiplier_of(EMBEDDING_ROWS), 1)


def chosen(wrong: str | None = None) -> list[int]:
    """The row that DP-FEST chooses, many times.

    Args:
        wrong: which mistake to make.
    """
    model, plan, found = Words(), choosing_plan(), []
    known = [gradients_of(model, [ids]) for ids in TOUCHING]

    def examples(rows: Sequence[int]) -> Iterator[Batch]:
        for i in range(len(TOUCHING)) if wrong == "every rank counts all" else rows:
            yield {"i": torch.tensor(i)}

    scale = {"no noise": 1e-9, "two thirds of the noise": scale_of(plan) * 2 / 3}.get(wrong or "", scale_of(plan))
    with ExitStack() as stack:
        stack.enter_context(mock.patch("hf_dp.parts.sparse_embeddings.kept_rows.gumbel_scale", return_value=scale))
        if wrong == "counts of the first rank alone":
            stack.enter_context(mock.patch("hf_dp.ranks.sum_"))
        for _ in range(CHOICES):
            training = KeptRows(Tables.of({TABLE: model.words.weight}), FEST, plan)
            training.begin(None, None)
            training.before_step(0, Ledger(), model, lambda batch: known[int(batch["i"])], examples)
            assert training.kept is not None
            found.append(int(training.kept))
    return found


def choice_p(rows: list[int]) -> float:
    """How likely these are, or less likely ones, if the exponential mechanism drew them from the counts of all."""
    weights = torch.tensor([1, 3, 5, 7, *[0] * (ROWS - 4)]).div(scale_of(choosing_plan())).softmax(0).double()
    expected = torch.cat([weights[4:].sum()[None], weights[:4]])
    observed = torch.tensor([row + 1 if row < 4 else 0 for row in rows]).bincount(minlength=5)
    return float(stats.chisquare(observed.numpy(), (expected / expected.sum() * len(rows)).numpy()).pvalue)
