"""Descriptions of tables (E2E NLG): a causal language model is told a table and learns to describe it, privately.

The loss is on the description only. The privacy unit is a row: one table with one description.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import evaluate
from answers import (
    answer_losses,
    continued,
    dataset,
    per_token,
    read,
    row,
    show,
    tokenizer_and_model,
    with_lora,
)
from arguments import parse
from datasets import Dataset
from groups import report_by_group
from transformers import DataCollatorForSeq2Seq, set_seed

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError

METRICS = Path(__file__).with_name("metrics")


@dataclass
class RecipeArguments:
    """What the recipe trains on, and how."""

    train_data: str = field(metadata={"help": "CSV, JSON or JSONL file or a hub dataset; this is the private data."})
    test_data: str = field(metadata={"help": "The same for evaluation; rows with one table are its references."})
    model: str = field(
        default="gpt2",
        metadata={"help": "A hub name or a directory; 'scratch' for a small random GPT-2 over characters."},
    )
    method: Literal["full", "lora"] = field(default="full", metadata={"help": "What is trained."})
    lora_rank: int = 8
    train_split: str = field(default="train", metadata={"help": "Of a hub dataset."})
    test_split: str = field(default="test", metadata={"help": "Of a hub dataset."})
    table_column: str = "mr"
    text_column: str = "ref"
    max_length: int = field(default=384, metadata={"help": "In tokens, of table and description together."})
    samples: int = field(default=100, metadata={"help": "How many of the test tables to describe at the end."})
    max_new_tokens: int = 120
    group_column: str | None = field(
        default=None, metadata={"help": "A column of the test data, or a slot of the tables, to report losses by."}
    )
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})
    width: int = field(default=128, metadata={"help": "Of the model from scratch."})
    layers: int = field(default=2, metadata={"help": "Of the model from scratch."})


def rows(data: Dataset, tokenizer: Any, recipe: RecipeArguments) -> list[dict[str, list[int]]]:
    """Token ids with labels on the description and the end token."""
    return [
        row([(prompt(table, tokenizer), False), (answer(text, tokenizer), True)], recipe.max_length)
        for table, text in zip(data[recipe.table_column], data[recipe.text_column], strict=True)
    ]


def prompt(table: str, tokenizer: Any) -> list[int]:
    """A table, up to where its description begins."""
    return list(tokenizer(f"{table} ||", add_special_tokens=False)["input_ids"])


def answer(text: str, tokenizer: Any) -> list[int]:
    """A description and its end."""
    return [*tokenizer(f" {text}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def groups(data: Dataset, recipe: RecipeArguments) -> list[str]:
    """The group of each row: its value in a column, or in a slot of its table."""
    assert recipe.group_column is not None
    if recipe.group_column in data.column_names:
        return [str(value) for value in data[recipe.group_column]]
    slot = re.compile(rf"\b{re.escape(recipe.group_column)}\[([^\]]*)\]")
    found = [slot.search(table) for table in data[recipe.table_column]]
    if not any(found):
        raise ConfigurationError(
            f"group_column={recipe.group_column!r}.",
            why="it is neither a column of the test data nor a slot of a table.",
            fix=f"choose one of the columns {', '.join(data.column_names)}, or a slot.",
        )
    return [match[1] if match else "none" for match in found]


def described(
    model: Any, tokenizer: Any, test: Dataset, recipe: RecipeArguments, seed: int, size: int
) -> dict[str, float]:
    """BLEU against all references of a table, and slot coverage, of greedy descriptions of some test tables."""
    references: dict[str, list[str]] = {}
    for table, text in zip(test[recipe.table_column], test[recipe.text_column], strict=True):
        references.setdefault(table, []).append(text)
    tables = random.Random(seed).sample(list(references), min(recipe.samples, len(references)))
    said = continued(model, tokenizer, [prompt(t, tokenizer) for t in tables], size, recipe.max_new_tokens)
    for table, text in list(zip(tables, said, strict=True))[:3]:
        print(f"{table}\n    {text}")
    bleu, coverage = (evaluate.load(str(METRICS / f"{name}.py")) for name in ("bleu", "slot_coverage"))
    wanted = [references[table] for table in tables]
    return {
        **bleu.compute(predictions=said, references=wanted),
        **coverage.compute(predictions=said, references=tables),
    }


def main() -> None:
    """Trains, then prints losses, BLEU and slot coverage, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    set_seed(arguments.seed)
    tokenizer, model = tokenizer_and_model(recipe.model, recipe.width, recipe.layers, recipe.max_length)
    model = with_lora(model, recipe.lora_rank) if recipe.method == "lora" else model
    train_data, test_data = (
        read(source, split, recipe.max_examples)
        for source, split in ((recipe.train_data, recipe.train_split), (recipe.test_data, recipe.test_split))
    )
    by = None if recipe.group_column is None else groups(test_data, recipe)
    test = dataset(rows(test_data, tokenizer, recipe), "test")
    collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    trainer = DPTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset(rows(train_data, tokenizer, recipe), "training"),
        data_collator=collate,
        processing_class=tokenizer,
        privacy=privacy,
    )
    size = arguments.per_device_eval_batch_size
    results = {}
    for when in ("before", "after"):
        if when == "after":
            trainer.train()
        losses = answer_losses(model, test, collate, size)
        results[when] = {"loss per target token": per_token(losses)}
    results["after"] |= described(model, tokenizer, test_data, recipe, arguments.seed, size)
    show("Test data", results)
    print(trainer.privacy_report())
    trainer.save_model()
    if by is not None:
        report_by_group(
            losses[:, 0].tolist(), by, measure="loss", larger_is_better=False, directory=Path(arguments.output_dir)
        )


if __name__ == "__main__":
    main()
