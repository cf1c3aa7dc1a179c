"""Descriptions of tables (E2E NLG): a causal language model is given a table and learns to describe it.

The loss is on the description only. The privacy unit is a row: one table with one description.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import DataCollatorForSeq2Seq, Trainer, set_seed

from common.answers import AnswerData, Row, continued, labelled_row, scored_answers, tokenizer_and_model, with_an_answer
from common.arguments import parse
from common.data import read_rows
from common.results import CONTINUE, Scores, measured, train_and_report
from hf_dp.errors import ConfigurationError


@dataclass(kw_only=True)
class RecipeArguments(AnswerData):
    """What the recipe trains on, and how."""

    model: str = field(
        default="gpt2", metadata={"help": "A hub name or a directory; scratch: a small random GPT-2 over characters."}
    )
    table_column: str = "mr"
    text_column: str = "ref"
    max_length: int = field(default=384, metadata={"help": "In tokens, of table and description; the rest is cut off."})
    samples: int = field(default=100, metadata={"help": "How many of the test tables to describe, drawn by seed."})


def prompt(table: str, tokenizer: Any) -> list[int]:
    """A table, up to where its description begins."""
    ids: list[int] = tokenizer(f"{table} ||", add_special_tokens=False)["input_ids"]
    return ids


def encoded(row: dict[str, Any], tokenizer: Any, recipe: RecipeArguments) -> Row:
    """Token ids, with labels on the description and its end."""
    answer = tokenizer(f" {row[recipe.text_column]}", add_special_tokens=False)["input_ids"]
    parts = [(prompt(row[recipe.table_column], tokenizer), False), ([*answer, tokenizer.eos_token_id], True)]
    return labelled_row(parts, recipe.max_length)


def grouped(rows: list[dict[str, Any]], recipe: RecipeArguments) -> list[str] | None:
    """The group of each row: its value in a column, or in a slot of its table, where "none" has no such slot."""
    name = recipe.group_column
    if name is None:
        return None
    if name in rows[0]:
        return [str(row[name]) for row in rows]
    found = [re.search(rf"\b{re.escape(name)}\[([^\]]*)\]", row[recipe.table_column]) for row in rows]
    if not any(found):
        raise ConfigurationError(
            f"--group_column {name}, which is neither a column of {recipe.test_file} nor a slot of its tables.",
            why="there is nothing to group by.",
            fix=f"name one of {', '.join(rows[0])}, or a slot such as food.",
        )
    return [match[1] if match else "none" for match in found]


def described(
    trainer: Trainer, tokenizer: Any, rows: list[dict[str, Any]], recipe: RecipeArguments
) -> dict[str, float]:
    """BLEU against all references of a table, and slot coverage, of greedy descriptions of some tables."""
    references: dict[str, list[str]] = {}
    for row in rows:
        references.setdefault(row[recipe.table_column], []).append(row[recipe.text_column])
    tables = random.Random(trainer.args.seed).sample(sorted(references), min(recipe.samples, len(references)))
    prompts = [prompt(table, tokenizer) for table in tables]
    said = continued(trainer, tokenizer, prompts, recipe.max_new_tokens)
    print(f"{tables[0]}\n    {said[0]}")
    wanted = [references[table] for table in tables]
    return measured(("bleu",), said, wanted) | measured(("slot_coverage",), said, tables)


def main() -> None:
    """Trains, then prints losses, BLEU and slot coverage, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    columns = (recipe.table_column, recipe.text_column)
    train, test = (
        read_rows(name, split=split, columns=columns, max_examples=recipe.max_examples)
        for split, name in (("train", recipe.train_file), ("test", recipe.test_file))
    )
    set_seed(arguments.seed)
    tokenizer, model = tokenizer_and_model(recipe)
    training, held_out = ([encoded(row, tokenizer, recipe) for row in part] for part in (train, test))
    training = [training[i] for i in with_an_answer(training, recipe.train_file)]
    kept = with_an_answer(held_out, recipe.test_file)
    held_out, test = [held_out[i] for i in kept], [test[i] for i in kept]
    groups = grouped(test, recipe)
    collate = DataCollatorForSeq2Seq(tokenizer)

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        return kind(train_dataset=training, data_collator=collate, processing_class=tokenizer, **others)

    def score(trainer: Trainer) -> Scores:
        scores = scored_answers(trainer, held_out)
        scores.measures |= described(trainer, tokenizer, test, recipe)
        return scores

    train_and_report(
        model,
        make,
        score,
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", repr("name[Blue Spice], food[Italian] ||")),
        groups=groups,
        compare_without_privacy=recipe.compare_without_privacy,
        max_tokens=recipe.max_tokens_per_micro_batch,
    )


if __name__ == "__main__":
    main()
