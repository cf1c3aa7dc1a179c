"""What a row's own mask hides predicts nothing: some attention sees the whole width of a batch there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.data.hidden import without_hidden
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.widths import widths_of
from hf_dp.losses import per_example_losses
from tests.losses.test_own_classes import ReaderForTokenClassification
from tests.zoo import tiny

_IDS = [5, 6, 7, 8, 9, 3]
_LANGUAGE = [("gpt2", "causal_lm"), ("llama", "causal_lm"), ("bert", "masked_lm"), ("bert", "token")]


def eager(name: str, head: str) -> Any:
    model: Any = tiny(name, head, torch.float32)
    model.set_attn_implementation("eager")
    return model


def row(mask: list[int], highest: int = 100) -> dict[str, Tensor]:
    ids = torch.tensor([_IDS])
    return {"input_ids": ids, "attention_mask": torch.tensor([mask]), "labels": ids % highest}


def wider(batch: dict[str, Tensor], positions: int) -> dict[str, Tensor]:
    """As beside a row that is so much longer."""
    fillers = {"labels": -100}
    return {name: F.pad(value, (0, positions), value=fillers.get(name, 0)) for name, value in batch.items()}


def losses_of(model: Any, batch: dict[str, Tensor], *, as_it_is: bool = False) -> Tensor:
    return per_example_losses(model, batch if as_it_is else LeftPadding().completed(model, batch)).detach()


@pytest.mark.parametrize("mask", [[0] * 6, [0, 0, 0, 1, 1, 1]], ids=str)
@pytest.mark.parametrize(("name", "head"), _LANGUAGE)
def test_failure_67_a_loss_follows_from_no_position_that_sees_nothing(name: str, head: str, mask: list[int]) -> None:
    model, own = eager(name, head), row(mask, 3 if head == "token" else 100)
    if name == "gpt2":
        own["position_ids"] = torch.tensor(mask).cumsum(0)[None]
    together = wider(own, 7)
    torch.testing.assert_close(losses_of(model, own), losses_of(model, together))
    if not any(mask):
        assert losses_of(model, own) == 0
        # Which it would.
        before = (losses_of(model, batch, as_it_is=True) for batch in (own, together))
        assert (next(before) - next(before)).abs() > 1e-4


@pytest.mark.parametrize("hides", ["the encoder's", "the decoder's"])
def test_failure_67_a_decoder_of_what_is_hidden(hides: str) -> None:
    """T5 adds to scores where it must not look, by default too."""
    model, own = tiny("t5", "seq2seq", torch.float32), row([0] * 6 if hides == "the encoder's" else [1] * 6)
    if hides == "the decoder's":
        own["decoder_attention_mask"] = torch.tensor([[0, 0, 0, 1, 1, 1]])
    longer = [name for name in own if name.startswith("decoder") or name == "labels"]
    changed = {name: own[name] for name in own if (name in longer) is (hides == "the decoder's")}
    together = {**own, **wider(changed, 7)}
    torch.testing.assert_close(losses_of(model, own), losses_of(model, together))
    before = [losses_of(model, batch, as_it_is=True) for batch in (own, together)]
    assert (before[0] - before[1]).abs() > 1e-4


def test_what_is_shown_keeps_its_labels() -> None:
    for name, head in _LANGUAGE:
        assert without_hidden(eager(name, head), row([1] * 6), None) == {}
    assert without_hidden(eager("gpt2", "causal_lm"), row([1, 1, 1, 1, 0, 0]), None)["labels"].tolist() == [
        [5, 6, 7, 8, 9, -100]
    ]
    assert without_hidden(eager("bert", "masked_lm"), row([1, 1, 1, 1, 0, 0]), None)["labels"].tolist() == [
        [5, 6, 7, 8, -100, -100]
    ]
    assert without_hidden(torch.nn.Linear(1, 1), row([0] * 6), None) == {}


def test_labels_that_mean_something_else_are_kept() -> None:
    """In a loss of one's own, but behind padding on the left, which has always been so; and what cannot be -100."""
    hidden = row([0, 0, 1, 1, 0, 0])
    own = LeftPadding(has_usual_loss=False)
    assert torch.equal(own.completed(eager("bert", "token"), hidden)["labels"], hidden["labels"])
    assert own.completed(eager("llama", "causal_lm"), hidden)["labels"].tolist() == [[5, -100, -100, 8, 9, 3]]
    for dtype in (torch.bool, torch.uint8, torch.float32):
        assert without_hidden(eager("bert", "token"), {**hidden, "labels": hidden["labels"].to(dtype)}, None) == {}


def test_a_long_hole_and_a_row_of_nothing_are_other_widths_than_short_ones() -> None:
    def told(*masks: list[int]) -> dict[int, int]:
        return {axis: n for (_, axis), n in widths_of({"attention_mask": torch.tensor(masks)}).items()}

    assert told([1, 0, 1, 1, 0], [1, 1, 1, 1, 1])[-3] == 1
    assert told([0, 1, 0, 0, 1], [1, 0, 1, 0, 0])[-3] == 2
    assert told([0, 0, 0, 1, 1], [1, 1, 1, 0, 0])[-3] == 0
    assert told([1, 1, 1, 1, 1], [0, 0, 0, 0, 0])[-4] == 0
    assert told([1])[-3] == 0


def test_a_decoder_that_classifies_the_tokens_that_it_reads_has_a_label_for_each() -> None:
    model = ReaderForTokenClassification(tiny("bart", "seq2seq").config)
    ids, mask = torch.randint(3, 40, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids % 2}
    found = without_hidden(model, batch, batch)["labels"]
    assert torch.equal(found, (ids % 2).masked_fill(mask.eq(0), -100))
