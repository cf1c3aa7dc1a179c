"""The parts of sparse embeddings: config, budget, tables, sums of rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting as dp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp import accounting
from hf_dp.config import PrivacyConfig, SparseEmbeddingConfig
from hf_dp.config.asked import ROW_COUNTS, asked
from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows, find_tables
from hf_dp.per_example import RULES, Dense, OneHot, Outer, PerExample, RowSum, Tables, loop, preflight
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.rule import Use
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan

FEST = {"method": "fest", "kept_rows": 10}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"threshold": 3.0, "noise_ratio": 2.0, "tables": ("a", "b"), "learning_rate": 0.1, "optimizer": "sgd"},
        FEST,
        {"method": "adafest+", "row_choice": "public", "public_rows": "rows.json", "threshold": 2.0},
    ],
)
def test_a_config_comes_back_from_json(values: dict[str, Any]) -> None:
    config = PrivacyConfig(target_epsilon=3.0, sparse_embeddings=SparseEmbeddingConfig(**values))
    assert PrivacyConfig.from_json(config.to_json()) == config
    assert PrivacyConfig(**config.to_dict()) == config
    assert config.replace(target_epsilon=4.0).sparse_embeddings == config.sparse_embeddings


@pytest.mark.parametrize(
    "values",
    [
        {"method": "dense"}, {"threshold": 0}, {"threshold": -1.0}, {"threshold": math.inf}, {"threshold": math.nan},
        {"noise_ratio": 0}, {"noise_ratio": 5000.0}, {"noise_ratio": math.nan}, {"contribution_norm": 0.0},
        {"contribution_norm": math.inf}, {"optimizer": "adamw"}, {"learning_rate": -1.0}, {"tables": ()},
        {"kept_rows": 5}, {"budget_share": 0.1}, {"renew_every": 3}, {**FEST, "threshold": 1.0},
        {**FEST, "noise_ratio": 3.0}, {"method": "fest"}, {**FEST, "kept_rows": 0}, {**FEST, "kept_rows": 1.5},
        {**FEST, "kept_rows": True}, {**FEST, "budget_share": 1.0}, {**FEST, "public_rows": "x"},
        {"method": "fest", "row_choice": "public"}, {**FEST, "row_choice": "public", "public_rows": "x"},
        {"method": "fest", "row_choice": "public", "public_rows": "x", "renew_every": 2}, {**FEST, "renew_every": 0},
        {"row_choice": "guessed"},
    ],
)  # fmt: skip
def test_a_setting_out_of_range_or_without_use_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="SparseEmbeddingConfig got"):
        SparseEmbeddingConfig(**values)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="got 'tau', which it does not have"):
        PrivacyConfig(target_epsilon=1.0, sparse_embeddings={"tau": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="sparse_embeddings=3"):
        PrivacyConfig(target_epsilon=1.0, sparse_embeddings=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="share of the target epsilon"):
        PrivacyConfig(noise_multiplier=1.0, sparse_embeddings=SparseEmbeddingConfig(**FEST))


def plan_of(steps: int = 30, **sparse: Any) -> Plan:
    entropy = Entropy(0)
    config = PrivacyConfig(target_epsilon=2.0, clipping_norm=0.5, sparse_embeddings=SparseEmbeddingConfig(**sparse))
    return Plan.make(config, PoissonBatchSampler.of(1000, 50, entropy), steps, entropy, *asked(config, steps))


@pytest.mark.parametrize("ratio", [0.3, 1.0, 5.0])
def test_both_noise_scales_come_from_one_budget(ratio: float) -> None:
    """Epsilon of the two releases, composed by hand: one Gaussian whose precision is the sum of theirs."""
    plan = plan_of(noise_ratio=ratio)
    first, second = plan.noise_multiplier_of(ROW_COUNTS), plan.gradient_noise_multiplier
    # To the last bit as ever: the same noise under the same seed.
    assert first == plan.noise_multiplier * math.hypot(1.0, ratio)
    assert second == first / ratio
    assert first / second == pytest.approx(ratio)
    together = (first**-2 + second**-2) ** -0.5
    by_hand = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(together)), 30)
    spent = accounting.Ledger()
    spent.charge(plan.event, count=30)
    assert spent.epsilon(plan.delta) == pytest.approx(accounting.epsilon(by_hand, plan.delta), rel=1e-9)
    assert 1.99 < spent.epsilon(plan.delta) <= 2.0
    assert plan.noise_standard_deviation == pytest.approx(second * 0.5)
    # Negative control: the two charged by themselves, or one of them forgotten, are other epsilons.
    apart = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(second)), 30)
    assert accounting.epsilon(apart, plan.delta) < 1.99


@pytest.mark.parametrize(
    ("settings", "choices"), [pytest.param(FEST, 1, marks=pytest.mark.slow), ({**FEST, "renew_every": 7}, 5)]
)
def test_choices_of_rows_are_paid_for_from_the_same_budget(settings: dict[str, Any], choices: int) -> None:
    plan = plan_of(**settings)
    (release,) = plan.releases
    assert (release.label, release.times, release.every) == ("embedding rows", choices, settings.get("renew_every"))
    assert plan.gradient_noise_multiplier == plan.noise_multiplier
    ledger = accounting.Ledger()
    ledger.charge(release.event, release.label, choices)
    assert ledger.epsilon(plan.delta) == pytest.approx(0.05 * 2.0, rel=1e-2)
    ledger.charge(plan.event, count=30)
    assert 1.99 < ledger.epsilon(plan.delta) <= 2.0
    report = plan.report(ledger)
    assert report.releases == (accounting.Release("embedding rows", release.event, choices),)
    assert ("embedding rows    released once" if choices == 1 else "released 5 times: Gaussian noise") in str(report)
    assert type(report).from_json(report.to_json()) == report
    again = accounting.Ledger()
    for made in report.releases:
        again.charge(made.event, made.label, made.times)
    again.charge(accounting.step_event(report.noise_multiplier, report.sampling_probability), count=report.steps)
    assert again.epsilon(report.delta) == report.epsilon


def test_a_plan_without_sparse_embeddings_promises_what_it_did() -> None:
    entropy = Entropy(0)
    plan = Plan.make(PrivacyConfig(noise_multiplier=1.0), PoissonBatchSampler.of(100, 10, entropy), 3, entropy)
    assert "sparse_embeddings" not in plan.promise
    assert plan.gradient_noise_multiplier == 1.0
    assert plan.releases == ()


def uses_of(**operations: str) -> list[Use]:
    return [
        Use(operation.removesuffix("!"), name.replace("__", "."), "constant" if "!" in operation else "batch", 2)
        for name, several in operations.items()
        for operation in several.split()
    ]


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.place = nn.Embedding(2000, 2), nn.Embedding(10, 2), nn.Embedding(1500, 2)
        self.head = nn.Linear(2, 2)


FOUND = {"large__weight": "embedding", "small__weight": "embedding", "place__weight": "embedding!"}


def test_large_tables_that_are_only_looked_up_are_found() -> None:
    assert list(find_tables(Features(), uses_of(**FOUND), None)) == ["large.weight"]
    assert list(find_tables(Features(), uses_of(**FOUND), ["small.weight"])) == ["small.weight"]


@pytest.mark.parametrize(
    ("operations", "names", "message"),
    [
        ({**FOUND, "large__weight": "embedding linear"}, None, "also used by linear"),
        (FOUND, ["place.weight"], "same ids for all"),
        (FOUND, ["head.weight"], "not used"),
        (FOUND, ["head.bias"], "no matrix"),
        (FOUND, ["huge.weight"], "no matrix"),
        ({"small__weight": "embedding"}, None, "no trained embedding table"),
    ],
)
def test_other_tables_are_refused(operations: dict[str, str], names: list[str] | None, message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModelError), match=message):
        find_tables(Features(), uses_of(**operations), names)


def test_rows_are_numbered_through_and_split_again() -> None:
    tables = Tables({"a": 4, "b": 3, "c": 5}, {"a": 2, "b": 1, "c": 7})
    assert (tables.rows, tables.coordinates) == (12, 8 + 3 + 35)
    parts = tables.split(torch.tensor([0, 3, 7, 11]))
    assert {name: rows.tolist() for name, rows in parts.items()} == {"a": [0, 3], "b": [], "c": [0, 4]}


def test_a_sum_of_rows_is_that_of_the_whole_table() -> None:
    torch.manual_seed(0)
    table, ids = torch.zeros(9, 4, dtype=torch.float64), torch.tensor([[1, 7, 1], [2, 2, 8]])
    sums, dense = RowSum("t", table), torch.zeros(9, 4, dtype=torch.float64)
    assert sums.coalesced()[0].tolist() == []
    assert not sums.of(torch.tensor([0, 8])).any()
    for weight in (1.0, 0.3):
        use = Outer(OneHot(ids, 9), Dense(torch.randn(2, 3, 4, dtype=torch.float64)), 0.5)
        coefficients = torch.tensor([weight, 2.0], dtype=torch.float64)
        sums.add_(use, coefficients)
        use.add_weighted_(dense, coefficients)
    assert sums.coalesced()[0].tolist() == [1, 2, 7, 8]
    torch.testing.assert_close(sums.of(torch.arange(9)), dense)
    torch.testing.assert_close(sums.of(torch.tensor([0, 2, 8])), dense[[0, 2, 8]])
    with pytest.raises(UnsupportedModelError, match="more than looking up"):
        sums.add_(PerExample(torch.zeros(2, 9, 4)), torch.ones(2))


def test_nothing_can_survive_but_what_is_kept() -> None:
    kept = torch.tensor([2, 5, 6])
    selection = AdaptiveSelection(10, 1.0, 0.01, GaussianNoise(Entropy(0)), kept)
    seen = {
        row
        for step in range(40)
        for row in selection.survivors(torch.tensor([5]), torch.tensor([1.0], dtype=torch.float64), step).rows.tolist()
    }
    assert seen == {2, 5, 6}


def test_without_noise_touched_rows_alone_survive_and_nothing_is_kept_without_a_choice() -> None:
    found = AdaptiveSelection(10**9, 0.0, None, GaussianNoise(Entropy(0))).survivors(
        torch.tensor([3, 999_999_999]), torch.tensor([0.1, 2.0], dtype=torch.float64), 0
    )
    assert (found.rows.tolist(), found.false_positives) == ([3, 999_999_999], 0)
    with pytest.raises(ValueError, match="nothing chooses"):
        TableRows(Tables({"a": 4}, {"a": 2}))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).tanh().mean(1))  # type: ignore[no-any-return]


def square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["ids"]).square().sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("spoil", ["values", "ids"])
def test_preflight_compares_tables_by_their_rows(spoil: str) -> None:
    batch = {"ids": torch.randint(0, 49, (4, 5), generator=torch.Generator().manual_seed(0))}
    names = ["words.weight"]
    assert preflight(Lookup(), square, batch, tables=names)
    rule = RULES[F.embedding]

    def wrong(*arguments: Any) -> Any:
        found, factors = rule.backward(*arguments)
        outer: Any = factors["weight"]
        ids, values = outer.left.ids, outer.right.values
        spoilt = (
            Outer(OneHot(ids, 50), Dense(values * 1.1))
            if spoil == "values"
            else Outer(OneHot(ids + 1, 50), Dense(values))
        )
        return found, {"weight": spoilt}

    rules = {**RULES, F.embedding: replace(rule, backward=wrong)}
    with pytest.raises(PreflightError, match="are off by"):
        preflight(Lookup(), square, batch, tables=names, rules=rules)


def test_the_oracle_gives_the_same_with_and_without_tables() -> None:
    model, batch = Lookup(), {"ids": torch.tensor([[3, 3, 7]])}
    sums, whole = RowSum("words.weight", model.words.weight), loop(model, square, batch)
    rows = loop(model, square, batch, tables=["words.weight"])
    out = rows.zeros(besides=["words.weight"])
    rows.add_weighted_sum_(out, torch.ones(1), {"words.weight": sums})
    assert sums.coalesced()[0].tolist() == [3, 7]
    torch.testing.assert_close(sums.of(torch.arange(50)), whole.weighted_sum(torch.ones(1))["words.weight"])
    torch.testing.assert_close(rows.squared_norms(), whole.squared_norms())
