"""What calls of a collator leave in a tokenizer is not saved with the model: it may follow from private rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_dp import PrivateRun
from hf_dp.training.tokenizer_settings import note_tokenizers, tokenizers_as_given
from tests.training.workbench import a_tokenizer, classifier, make, private

WORDS = list("abcdefghi")
TEXTS = [{"text": " ".join(WORDS[: 2 + i % 7]), "labels": i % 3} for i in range(24)]


class Pads:
    """To the longest of the rows, by a number."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(len(example["text"].split()) for example in examples)
        options = {"padding": "max_length", "truncation": True, "max_length": longest, "return_tensors": "pt"}
        found = self.tokenizer([example["text"] for example in examples], **options)
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}


def saved(folder: Path) -> tuple[Any, Any]:
    found = json.loads((folder / "tokenizer.json").read_text())
    return found["truncation"], found["padding"]


@pytest.mark.parametrize("is_processing_class", [True, False])
def test_failure_152_the_length_of_a_private_row_is_not_saved_with_the_tokenizer(
    tmp_path: Path, is_processing_class: bool
) -> None:
    collator = Pads(a_tokenizer(set(WORDS)))
    parts = {"train_dataset": TEXTS, "data_collator": collator}
    parts |= {"processing_class": collator.tokenizer} if is_processing_class else {}
    trainer = make(tmp_path, parts=parts, remove_unused_columns=False, max_steps=1, save_strategy="steps", save_steps=1)
    for _ in range(2):  # a second training finds what the first has left
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    assert collator.tokenizer.backend_tokenizer.padding["length"], "left by the last call"
    assert saved(tmp_path / "saved") == saved(tmp_path / "checkpoint-1") == (None, None)


def test_failure_152_nor_by_a_loop_of_ones_own(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(set(WORDS))
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes: dict[str, Any] = {"expected_batch_size": 8, "micro_batch_size": 4, "steps": 1}
    run = PrivateRun(model, TEXTS, private(), Pads(tokenizer), tokenizer=tokenizer, output_dir=tmp_path, **sizes)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        run.save_checkpoint()
    run.save(tmp_path / "saved")
    assert saved(tmp_path / "saved") == saved(tmp_path / "checkpoint-1") == (None, None)


def test_what_was_set_before_is_saved_and_what_a_call_set_is_there_again() -> None:
    tokenizer = a_tokenizer(set(WORDS))
    tokenizer(["a b"], truncation=True, max_length=5, padding="max_length")
    note_tokenizers(None, Pads(tokenizer))
    tokenizer(["a b c"], padding=True, pad_to_multiple_of=4)
    backend = tokenizer.backend_tokenizer
    left = backend.truncation, backend.padding
    with tokenizers_as_given(tokenizer, None):
        assert (backend.truncation["max_length"], backend.padding["length"]) == (5, 5)
    assert (backend.truncation, backend.padding) == left
    assert left[0] is None
    assert left[1]["pad_to_multiple_of"] == 4


def test_failure_152_nor_are_further_tokenizers_of_a_processor() -> None:
    tokenizer = a_tokenizer(set(WORDS))
    processor = SimpleNamespace(image_processor=None, tokenizer=a_tokenizer(set(WORDS)), qformer_tokenizer=tokenizer)
    note_tokenizers(processor)
    tokenizer(["a b"], truncation=True, max_length=5, padding="max_length")
    with tokenizers_as_given(processor):
        assert (tokenizer.backend_tokenizer.truncation, tokenizer.backend_tokenizer.padding) == (None, None)
