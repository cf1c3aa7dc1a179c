"""Trainings in two passes: the same weights and ledger as in one, and nothing is released where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.per_example import passes
from hf_dp.training import checks, engine
from tests.training.workbench import classifier, distance, make, pad_for_language, parameters, private, rows
from tests.zoo import adapted, tiny, with_dropout

pytestmark = pytest.mark.usefixtures("checked_once")


def language() -> nn.Module:
    return with_dropout(tiny("gpt2", "causal_lm", torch.float32, n_layer=1))


def lora() -> nn.Module:
    return adapted("LoRA", torch.float32)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dropout, tied": (language, {}, {}),
    "checkpointing": (language, {}, {"gradient_checkpointing": True}),
    "LoRA, bf16": (lora, {}, {"bf16": True}),
    "users": (classifier, {"unit": "user", "max_examples_per_unit": 3}, {}),
    "users in pieces": (classifier, {"unit": "user", "max_examples_per_unit": 6}, {"per_device_train_batch_size": 2}),
    "Re-Attention": (classifier, {"re_attention": ReAttentionConfig(token_frequencies="uniform")}, {}),
    "rows that survive": (classifier, {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)}, {}),
    "rows that are kept": (
        classifier, {"noise_multiplier": None, "target_epsilon": 8.0,
                     "sparse_embeddings": SparseEmbeddingConfig(method="fest", kept_rows=9)}, {},
    ),
    "automatic, truncated": (classifier, {"clipping": "automatic", "max_batch_size": 9}, {}),
}  # fmt: skip


def trained(path: Path, case: str, number: int, **changes: Any) -> Any:
    build, promise, arguments = CASES[case]
    torch.manual_seed(0)
    data = [{**row, "user": i // 6} for i, row in enumerate(rows())]
    data = data if "unit" in promise else [{k: v for k, v in row.items() if k != "user"} for row in data]
    parts: dict[str, Any] = {"train_dataset": data}
    if build is not classifier:
        parts = {
            "train_dataset": [{"input_ids": row["input_ids"]} for row in data],
            "data_collator": pad_for_language,
        }
    privacy = private(**{"clipping_norm": 0.3, **promise, "passes": number})
    trainer = make(path, build(), privacy, parts=parts, **{"max_steps": 2, **arguments, **changes})
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "users in pieces" else [pytest.mark.slow]) for case in CASES]
)
def test_weights_are_those_of_one_pass(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, which is that of the seed."""
    made: list[Any] = []
    two_passes = engine.record_in_two_passes
    monkeypatch.setattr(
        engine, "record_in_two_passes", lambda *given, **more: made.append(1) or two_passes(*given, **more)
    )
    one = trained(tmp_path / "1", case, 1)
    assert not made
    two = trained(tmp_path / "2", case, 2)
    assert made
    assert distance(parameters(one.model), parameters(two.model)) < (1e-4 if "bf16" in case else 1e-6)
    assert one.ledger.to_dict() == two.ledger.to_dict()
    assert one.privacy_report() == two.privacy_report()


def other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "state_to_return_to", lambda: lambda: None)


def longer_in_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """By far less than losses show."""
    usual = passes.TakenWatch._keep

    def keep(self: Any, name: str, factors: Any) -> None:
        usual(self, name, factors if self.joined else factors.scaled(1 + 1e-6))

    monkeypatch.setattr(passes.TakenWatch, "_keep", keep)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sabotage", "when"),
    [
        (other_masks, "in the check"),
        (longer_in_the_second, "in a step"),
        pytest.param(other_masks, "in a step", marks=pytest.mark.slow),
        pytest.param(longer_in_the_second, "in the check", marks=pytest.mark.slow),
    ],
)
def test_where_the_second_pass_is_another_nothing_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Any, when: str
) -> None:
    model = language()
    before = parameters(model)
    data = [{"input_ids": row["input_ids"]} for row in rows()]
    parts = {"train_dataset": data, "data_collator": pad_for_language}
    trainer = make(tmp_path, model, private(passes=2), parts=parts, max_steps=1)
    if when == "in the check":
        sabotage(monkeypatch)
    else:
        usual = checks.check_two_passes

        def check(*given: Any, **more: Any) -> None:
            usual(*given, **more)
            sabotage(monkeypatch)

        monkeypatch.setattr(checks, "check_two_passes", check)
    with pytest.raises(UnsupportedModelError, match="examples whose gradients were others when"):
        trainer.train()
    assert trainer.ledger.steps == 0
    assert distance(before, parameters(model)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later"), [(1, 2), (2, 1)])
def test_a_checkpoint_goes_on_in_another_number_of_passes(tmp_path: Path, first: int, later: int) -> None:
    options, case = {"save_strategy": "steps", "save_steps": 1}, "automatic, truncated"
    whole = trained(tmp_path / "whole", case, 1, **options)
    trained(tmp_path / "first", case, first, **options)
    privacy = private(clipping_norm=0.3, **{**CASES[case][1], "passes": later})
    resumed = make(tmp_path / "first", classifier(), privacy, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert distance(parameters(whole.model), parameters(resumed.model)) < 1e-6


@pytest.mark.parametrize("number", [0, 3, True, 1.0, "2", None])
def test_a_number_of_passes_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="passes="):
        PrivacyConfig(noise_multiplier=1.0, passes=number)
