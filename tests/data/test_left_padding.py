"""Language models padded on the left are exact: an example is trained as it would be alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.data.left_padding import LeftPadding
from tests.training.workbench import EXPECTED, Rows, draws, exact, make, pad_for_language, parameters, rows
from tests.zoo import adapted, tiny, with_dropout


def left(examples: Rows) -> dict[str, Tensor]:
    return pad_for_language(examples, side="left")


def one_long() -> Rows:
    data, at_the_start = rows(80, low=8, high=8), {i * 79 // 31 for i in range(32)}
    data[next(i for i in draws(7, n=80)[0] if i not in at_the_start)]["input_ids"] = list(range(3, 33))
    return data


def sum_over_single_rows(model: nn.Module, data: Rows) -> dict[str, Tensor]:
    """Of the gradients of the model's own loss."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in data:
        model.zero_grad()
        ids = torch.tensor([row["input_ids"]])
        model(input_ids=ids, labels=ids).loss.backward()
        for name, p in model.named_parameters():
            total[name] += 0 if p.grad is None else p.grad
    model.zero_grad()
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        pytest.param(name, known, marks=[pytest.mark.slow] * ((name, known) != ("gpt2", False)))
        for name in ("gpt2", "gpt_neo", "opt", "llama", "bloom")
        for known in (True, False)
    ],
)
def test_failure_30_one_long_row_among_short_ones(tmp_path: Path, name: str, is_known: bool) -> None:
    data, model = one_long(), tiny(name, "causal_lm", torch.float32)
    drawn = [data[i] for i in draws(7, n=80)[0]]
    assert {len(row["input_ids"]) for row in drawn} == {8, 30}
    before, truth = parameters(model), sum_over_single_rows(model, drawn)
    parts = {"train_dataset": data, "data_collator": left}
    if not is_known:  # before it is drawn
        parts = {"train_dataset": [(row,) for row in data], "data_collator": lambda few: left([row for (row,) in few])}
    make(tmp_path, model, exact(), parts=parts, max_steps=1).train()
    for name, p in model.named_parameters():
        step = (before[name] - p.detach()) * EXPECTED / 0.1
        assert (step - truth[name]).norm() <= 1e-3 * max(1e-2, truth[name].norm()), name


def test_evaluation_gives_the_same_loss_for_any_padding(tmp_path: Path) -> None:
    model = tiny("gpt2", "causal_lm", torch.float32)
    short, long = rows(8, low=8, high=8), [{"input_ids": list(range(3, 33))}]
    parts = {"train_dataset": one_long(), "data_collator": left}
    found = []
    for data in (short, short + long):
        trainer = make(tmp_path, model, parts={**parts, "eval_dataset": data}, per_device_eval_batch_size=16)
        trainer.label_names = ["labels"]
        output = trainer.predict(data)
        logits, labels = torch.tensor(output.predictions)[:8], torch.tensor(output.label_ids)[:8]
        found.append(
            [float(nn.functional.cross_entropy(a[-8:-1], b[-7:])) for a, b in zip(logits, labels, strict=True)]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def padded(**extra: Any) -> dict[str, Any]:
    return {**left([{"input_ids": [5, 6, 7]}, {"input_ids": [3, 4, 5, 6, 8]}]), **extra}


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "gpt_neox"])
def test_models_that_count_columns_get_positions(name: str) -> None:
    completion, model = LeftPadding(), with_dropout(tiny(name, "causal_lm", torch.bfloat16))
    state = torch.get_rng_state()
    batch = completion.completed(model, padded())
    assert completion.counts_columns is (name != "gpt_neox")
    if completion.counts_columns:
        assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 6, 7], [3, 4, 5, 6, 8]]
    assert model.training
    assert torch.equal(state, torch.get_rng_state())


def test_all_other_batches_take_the_same_path() -> None:
    completion, model = LeftPadding(), tiny("gpt2", "causal_lm")
    whole = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    assert completion.completed(model, whole) is whole
    completion.completed(model, padded())
    assert completion.completed(model, whole)["position_ids"].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    "mask",
    [[1, 1, 0, 1, 1], [0, 1, 1, 0, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_failure_57_what_a_row_gets_follows_from_it_alone(name: str, mask: list[int]) -> None:
    """A hole in its mask (padding and the end of a text may be one token) is no padding that another row has made, nor
    is it other positions once a batch was padded."""
    model = tiny(name, "causal_lm")
    row = {"input_ids": torch.arange(3, 8)[None], "attention_mask": torch.tensor([mask])}
    row["labels"] = row["input_ids"].clone()
    padding = left([{"input_ids": [5, 6, 7]}, {"input_ids": [3, 4, 5, 6, 8]}])
    both = {key: torch.cat([value, padding[key]]) for key, value in row.items()}
    completion = LeftPadding()
    alone = completion.completed(model, row)
    beside = completion.completed(model, both)
    later = completion.completed(model, row)
    columns = torch.arange(5)[None]
    for found in (beside, later):
        assert found["labels"][:1].tolist() == alone["labels"].tolist()
        assert found.get("position_ids", columns)[:1].tolist() == alone.get("position_ids", columns).tolist()
    is_padded = not mask[0] and any(mask)
    # What is hidden predicts nothing.
    assert alone["labels"].tolist() == [[3, *(i if seen else -100 for i, seen in zip(range(4, 8), mask, strict=False))]]
    assert ("position_ids" in alone) == (is_padded and name == "gpt2")


@pytest.mark.parametrize(("name", "head"), [("roberta", "masked_lm"), ("opt", "causal_lm"), ("t5", "seq2seq")])
def test_models_that_count_tokens_themselves_are_left_alone(name: str, head: str) -> None:
    completion, batch = LeftPadding(), padded()
    found = completion.completed(tiny(name, head), batch)
    assert not completion.counts_columns
    assert "position_ids" not in found
    assert found["labels"].tolist()[0][2] == (-100 if name == "opt" else 5)


def test_positions_that_are_given_are_kept() -> None:
    given = torch.arange(5).repeat(2, 1)
    assert LeftPadding().completed(tiny("gpt2", "causal_lm"), padded(position_ids=given))["position_ids"] is given
    assert LeftPadding().completed(adapted("LoRA on Conv1D"), padded())["position_ids"].shape == (2, 5)
