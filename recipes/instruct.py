"""Chat-format supervised fine-tuning: a causal language model learns the assistant's answers, and nothing else.

Rows have `messages` (role and content), or `prompt` and `completion` (text, or messages), and may have `tools`. The
tokenizer's chat template renders them; the loss is on the answers, each up to its end. The privacy unit is a row: one
conversation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jinja2
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
from common.chats import ChatTemplate, Message, rendered, tools_of, use_template
from common.data import read_rows
from common.rates import check_batch
from common.results import CONTINUE, train_and_report
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words


@dataclass(kw_only=True)
class RecipeArguments(AnswerData, ChatTemplate):
    """What the recipe trains on, and how."""

    samples: int = field(default=2, metadata={"help": "How many test prompts to answer at the end, drawn by seed."})


def conversation(row: dict[str, Any]) -> tuple[list[Message], int]:
    """The messages of a row, and how many of them are its prompt, in which no answer is learnt.

    Raises:
        ValueError: it has none, or something else.
    """
    if row.get("messages"):
        messages, first = row["messages"], 0
    elif {"prompt", "completion"} <= row.keys():
        prompt, completion = (
            [{"role": role, "content": row[name]}] if isinstance(row[name], str) else list(row[name])
            for role, name in (("user", "prompt"), ("assistant", "completion"))
        )
        messages, first = prompt + completion, len(prompt)
    else:
        raise ValueError("it has no messages, and no prompt with a completion")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages are a list of objects, each with role and content")
    return messages, first


def encoded(row: dict[str, Any], tokenizer: Any) -> Row:
    """Token ids, with labels on the answers; what follows the last answer is left out."""
    parts = rendered(*conversation(row), tokenizer, tools_of(row))
    ids = [(tokenizer(text, add_special_tokens=False)["input_ids"], is_answer) for text, is_answer in parts]
    return labelled_row(ids)


def read(name: str, split: str, recipe: RecipeArguments) -> list[dict[str, Any]]:
    """Rows with `messages`, or else with `prompt` and `completion`."""
    columns = () if recipe.group_column is None else (recipe.group_column,)
    rows = read_rows(
        name, split=split, columns=(), others=columns if split == "test" else (), max_examples=recipe.max_examples
    )
    if not rows or not ("messages" in rows[0] or {"prompt", "completion"} <= set(rows[0])):
        raise ConfigurationError(
            f"{name} has the columns {', '.join(rows[0]) if rows else '(no rows)'}.",
            why="the recipe reads messages, or prompt and completion.",
            fix='write rows like {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}.',
        )
    return rows


def encode_all(rows: list[dict[str, Any]], name: str, tokenizer: Any, recipe: RecipeArguments) -> list[Row]:
    """All rows, encoded and cut to their length; an error names the row."""

    def each() -> Iterator[Row]:
        for number, row in enumerate(rows):
            try:
                yield encoded(row, tokenizer)
            except ConfigurationError as error:
                which = f"{row_in_words(number)} of {name}"
                raise ConfigurationError(f"{which}: {error.found}", why=error.why, fix=error.fix) from error
            except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{row_in_words(number)} of {name} is no conversation that the chat template can render ({error}).",
                    why="all rows take part, or the sampling probability would be another one.",
                    fix="correct or take out the row; templates differ in the roles and orders they admit.",
                ) from error

    return shortened(each(), name, recipe.max_length)


def answered(trainer: Trainer, tokenizer: Any, rows: list[dict[str, Any]], recipe: RecipeArguments) -> None:
    """Prints greedy answers to some test prompts."""
    for row in random.Random(trainer.args.seed).sample(rows, min(recipe.samples, len(rows))):
        messages, _ = conversation(row)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        asked = {"tools": tools_of(row), "tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages[:last], **asked)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        print(f"{text}\n    {continued(trainer, tokenizer, [ids], recipe.max_new_tokens)[0]}")


def main() -> None:
    """Trains, then prints losses, by group if asked for, the privacy report and some answers."""
    recipe, arguments, privacy = parse(RecipeArguments)
    train, test = (
        read(name, split, recipe) for split, name in (("train", recipe.train_file), ("test", recipe.test_file))
    )
    set_seed(arguments.seed)
    tokenizer = tokenizer_for(recipe)
    use_template(tokenizer, recipe)
    training, held_out = (
        encode_all(rows, name, tokenizer, recipe)
        for rows, name in ((train, recipe.train_file), (test, recipe.test_file))
    )
    training = [training[i] for i in with_an_answer(training, recipe.train_file)]
    kept = with_an_answer(held_out, recipe.test_file)
    kept = [kept[i] for i in to_be_scored(len(kept), recipe, arguments.seed)]
    held_out, test = [held_out[i] for i in kept], [test[i] for i in kept]
    check_batch(arguments, privacy, len(training))
    model, collate = model_for(recipe, tokenizer, bf16=arguments.bf16), DataCollatorForSeq2Seq(tokenizer)

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        return kind(train_dataset=training, data_collator=collate, processing_class=tokenizer, **others)

    trainer = train_and_report(
        model,
        make,
        lambda trainer: scored_answers(trainer, held_out),
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", '[{"role": "user", "content": "A question."}]'),
        groups=None if recipe.group_column is None else [str(row[recipe.group_column]) for row in test],
        compare_without_privacy=recipe.compare_without_privacy,
        comparison_learning_rate=recipe.comparison_learning_rate,
        recipe=recipe,
    )
    answered(trainer, tokenizer, test, recipe)


if __name__ == "__main__":
    main()
