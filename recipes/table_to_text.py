"""Descriptions of tables (E2E NLG): a causal language model is given a table and learns to describe it.

The loss is on the description only. The privacy unit is a row: one table with one description.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

from transformers import DataCollatorForSeq2Seq, Trainer, set_seed

from common.answers import (
    AnswerData,
    Row,
    continued,
    labelled_row,
    model_for,
    scored_answers,
    shortened,
    to_be_scored,
    tokenizer_for,
    with_an_answer,
)
from common.arguments import parse
from common.data import naming_columns, read_rows
from common.rates import check_batch
from common.results import CONTINUE, Scores, measured, train_and_report
from hf_dp.errors import ConfigurationError

TABLE = "{table}"
SHOWN = 3  # descriptions, before and after side by side


@dataclass(kw_only=True)
class RecipeArguments(AnswerData):
    """What the recipe trains on, and how."""

    model: str = field(
        default="gpt2", metadata={"help": "A hub name or a directory; scratch: a small random GPT-2 over characters."}
    )
    table_column: str = "mr"
    text_column: str = "ref"
    prompt: str = field(
        default="{table} ||",
        metadata={"help": "What a description follows; for a chat model with the marks of a turn."},
    )
    max_length: int = field(default=384, metadata={"help": "In tokens, of table and description; the rest is cut off."})
    samples: int = field(default=100, metadata={"help": "How many of the test tables to describe, drawn by seed."})


def asked(table: str, recipe: RecipeArguments) -> str:
    """A table, up to where its description begins."""
    return recipe.prompt.replace(TABLE, table)


def a_table_like(table: str) -> str:
    """A public one for the card: E2E's where this is one of them."""
    return "name[Blue Spice], food[Italian]" if table.startswith("name[") else "A table."


def tokens(text: str, tokenizer: Any) -> list[int]:
    """Token ids, without those that mark where a text begins or ends."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encoded(row: dict[str, Any], tokenizer: Any, recipe: RecipeArguments) -> Row:
    """Token ids, with labels on the description and its end."""
    before = asked(row[recipe.table_column], recipe)
    answer = row[recipe.text_column] if before[-1:].isspace() else f" {row[recipe.text_column]}"
    parts = [(tokens(before, tokenizer), False), ([*tokens(answer, tokenizer), tokenizer.eos_token_id], True)]
    return labelled_row(parts)


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
) -> tuple[dict[str, float], dict[str, str]]:
    """BLEU and ROUGE-L against all references of a table, of greedy descriptions of some tables; slot coverage, where
    these have slots.

    With a few of the tables and what is said of them.
    """
    references: dict[str, list[str]] = {}
    for row in rows:
        references.setdefault(row[recipe.table_column], []).append(row[recipe.text_column])
    tables = random.Random(trainer.args.seed).sample(sorted(references), min(recipe.samples, len(references)))
    prompts = [tokens(asked(table, recipe), tokenizer) for table in tables]
    said = continued(trainer, tokenizer, prompts, recipe.max_new_tokens)
    wanted = [references[table] for table in tables]
    measures = measured(("bleu", "rouge_l"), said, wanted) | measured(("slot_coverage",), said, tables)
    return measures, dict(zip(tables[:SHOWN], said, strict=False))


def main() -> None:
    """Trains, then prints losses, BLEU and slot coverage, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    if TABLE not in recipe.prompt:
        raise ConfigurationError(
            f"--prompt {recipe.prompt!r}.",
            why=f"it has no {TABLE}, and all tables would look alike.",
            fix=f"write {TABLE} where the table goes.",
        )
    columns = (recipe.table_column, recipe.text_column)
    train, test = (
        read_rows(
            name, split=split, columns=columns, max_examples=recipe.max_examples, fix=naming_columns(RecipeArguments)
        )
        for split, name in (("train", recipe.train_file), ("test", recipe.test_file))
    )
    set_seed(arguments.seed)
    tokenizer = tokenizer_for(recipe)
    training, held_out = (
        shortened((encoded(row, tokenizer, recipe) for row in part), name, recipe.max_length)
        for part, name in ((train, recipe.train_file), (test, recipe.test_file))
    )
    training = [training[i] for i in with_an_answer(training, recipe.train_file)]
    kept = with_an_answer(held_out, recipe.test_file)
    held_out, test = [held_out[i] for i in kept], [test[i] for i in kept]
    scored = to_be_scored(len(test), recipe, arguments.seed)
    held_out, groups = [held_out[i] for i in scored], grouped([test[i] for i in scored], recipe)
    check_batch(arguments, privacy, len(training))
    model, collate = model_for(recipe, tokenizer, bf16=arguments.bf16), DataCollatorForSeq2Seq(tokenizer)

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        return kind(train_dataset=training, data_collator=collate, processing_class=tokenizer, **others)

    def score(trainer: Trainer) -> Scores:
        scores = scored_answers(trainer, held_out)
        described_well, scores.said = described(trainer, tokenizer, test, recipe)
        scores.measures |= described_well
        return scores

    train_and_report(
        model,
        make,
        score,
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", repr(asked(a_table_like(train[0][recipe.table_column]), recipe))),
        groups=groups,
        compare_without_privacy=recipe.compare_without_privacy,
        comparison_learning_rate=recipe.comparison_learning_rate,
        recipe=recipe,
    )


if __name__ == "__main__":
    main()
