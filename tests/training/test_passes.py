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
from tests.training.workbench import classifier, distance, make, pad_for_language, parameters, private, rows
from tests.zoo import tiny, with_dropout


def language() -> nn.Module:
    return with_dropout(tiny("gpt2", "causal_lm", torch.float32, n_layer=1))


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dropout, tied": (language, {}, {}),
    "checkpointing": (language, {}, {"gradient_checkpointing": True}),
    "users": (classifier, {"unit": "user", "max_examples_per_unit": 3}, {}),
    "users in pieces": (classifier, {"unit": "user", "max_examples_per_unit": 6}, {"per_device_train_batch_size": 2}),
    "Re-Attention": (classifier, {"re_attention": ReAttentionConfig(token_frequencies="uniform")}, {}),
    "automatic": (classifier, {"clipping": "automatic"}, {}),
}


def trained(path: Path, case: str, number: int, **changes: Any) -> Any:
    build, promise, arguments = CASES[case]
    torch.manual_seed(0)
    data = [{**row, "user": i // 6} for i, row in enumerate(rows())]
    data = data if "unit" in promise else [{k: v for k, v in row.items() if k != "user"} for row in data]
    parts: dict[str, Any] = {"train_dataset": data}
    if build is language:
        parts = {
            "train_dataset": [{"input_ids": row["input_ids"]} for row in data],
            "data_collator": pad_for_language,
        }
    privacy = private(clipping_norm=0.3, passes=number, **promise)
    trainer = make(path, build(), privacy, parts=parts, **{"max_steps": 2, **arguments, **changes})
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "users in pieces" else [pytest.mark.slow]) for case in CASES]
)
def test_weights_are_those_of_one_pass(case: str, tmp_path: Path) -> None:
    one, two = (trained(tmp_path / str(number), case, number) for number in (1, 2))
    assert distance(parameters(one.model), parameters(two.model)) < 1e-6
    assert one.ledger.to_dict() == two.ledger.to_dict()
    assert one.privacy_report().epsilon == two.privacy_report().epsilon


@pytest.mark.usefixtures("checked_once")
def test_where_the_second_pass_is_another_nothing_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other masks of dropout, here."""
    monkeypatch.setattr(passes, "state_to_return_to", lambda: lambda: None)
    model = language()
    before = parameters(model)
    data = [{"input_ids": row["input_ids"]} for row in rows()]
    trainer = make(
        tmp_path,
        model,
        private(passes=2),
        parts={"train_dataset": data, "data_collator": pad_for_language},
        max_steps=1,
    )
    with pytest.raises(UnsupportedModelError, match="others in the second pass"):
        trainer.train()
    assert trainer.ledger.steps == 0
    assert distance(before, parameters(model)) == 0


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_number_of_passes(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = trained(tmp_path / "whole", "automatic", 1, **options)
    trained(tmp_path / "first", "automatic", 1, max_steps=2, **options)
    later = make(
        tmp_path / "first", classifier(), private(clipping_norm=0.3, clipping="automatic", passes=2), max_steps=2
    )
    later.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert distance(parameters(whole.model), parameters(later.model)) < 1e-6


@pytest.mark.parametrize("number", [0, 3, True, 1.0, "2", None])
def test_a_number_of_passes_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(ConfigurationError, match="passes="):
        PrivacyConfig(noise_multiplier=1.0, passes=number)


def test_what_two_passes_do_not_go_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="sparse_embeddings with passes=2"):
        PrivacyConfig(noise_multiplier=1.0, passes=2, sparse_embeddings=SparseEmbeddingConfig(threshold=1.0))
    monkeypatch.setattr(passes, "is_sharded", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="passes=2 with FSDP2"):
        passes.refuse_two_passes(nn.Linear(2, 2))
    monkeypatch.setattr(passes, "is_sharded", lambda model: False)
    passes.refuse_two_passes(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="passes=2 on meta without deterministic algorithms"):
        passes.refuse_two_passes(nn.Linear(2, 2, device="meta"))
