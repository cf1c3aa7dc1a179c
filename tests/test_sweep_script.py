"""The sweep over architectures: what it says of some, and the page that it writes."""

from __future__ import annotations

import pytest
import torch

from scripts import sweep
from scripts.shrinking import NotMadeError, small_model


@pytest.mark.parametrize(
    ("head", "name", "beginning"),
    [
        ("causal_lm", "opt", "exact"),
        ("causal_lm", "trocr", "exact"),
        ("sequence", "bert", "exact"),
        ("image", "resnet", "exact"),
        ("segmentation", "segformer", "exact"),
        ("causal_lm", "reformer", "not made"),
    ],
)
@pytest.mark.slow
def test_what_is_said_of_one(head: str, name: str, beginning: str) -> None:
    assert sweep.judge_class(name, sweep.classes_of(head)[name], head).startswith(beginning)


@pytest.mark.slow
def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are twice as long as those of single examples."""
    record = sweep.judging.record

    def doubled(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        found = record(model, *args, **kwargs)
        for name, uses in found.factors.items():
            found.factors[name] = [use.scaled(2.0) for use in uses]
        return found

    monkeypatch.setattr(sweep.judging, "record", doubled)
    assert sweep.judge_class("opt", "OPTForCausalLM", "causal_lm").startswith("WRONG")


def test_a_model_that_stays_large_is_not_made() -> None:
    class Large(torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(3000, 3000))

    from transformers import OPTConfig

    with pytest.raises(NotMadeError, match="stays large"):
        small_model(Large, OPTConfig, "causal_lm")


def test_the_page_counts_and_names_them() -> None:
    said = {"a": "exact 2e-16", "b": "refused: it is batch normalisation.", "c": "not made: KeyError", "d": "exact 0"}
    written = sweep.page({"image": said})
    assert "A star" not in written
    assert "| image | 2 | 1 | 1 |" in written
    assert "- **image**: a, d" in written
    assert "- b (image): it is batch normalisation." in written
    told = sweep.page({"causal_lm": {"a": "exact 2e-16", "b": "exact 3e-16 ForMaskedLM"}})
    assert "- **causal_lm**: a, b*\n" in told
    assert 'A star: after `model.loss_type = "ForMaskedLM"`' in told
