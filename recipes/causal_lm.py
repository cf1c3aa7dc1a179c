"""A causal language model on text: a pretrained one (LoRA or all of it), or a small GPT-2 over characters from scratch.

A text file is cut into passages of `passage_length` tokens, and the privacy unit is a passage. In a file with columns,
or a data set on the hub, it is a row, cut off after as many tokens. From scratch a token is a character of a public
alphabet, printable ASCII.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Trainer, set_seed

from common.arguments import Comparison, TextArguments, parse
from common.base_models import Trained, language_model
from common.data import naming_columns, read_rows, tell_of_cuts
from common.hub_names import pretrained
from common.language_models import characters, small_gpt2
from common.rates import check_batch
from common.results import CONTINUE, Scores, scored_by_loss, train_and_report
from hf_dp.data.files import WITH_COLUMNS, read_text
from hf_dp.errors import ConfigurationError

Rows = list[dict[str, list[int]]]
# On cards, where no row may stand.
A_PROMPT = "Once upon a time"


@dataclass(kw_only=True)
class RecipeArguments(TextArguments, Trained, Comparison):
    """What the recipe trains on, and its model."""

    text_file: str = field(
        metadata={
            "help": "A text file, CSV, JSON lines or parquet with a text column, or a hub data set; this is private."
        }
    )
    text_column: str = "text"
    group_column: str | None = field(
        default=None, metadata={"help": "Report the loss for each of its values in the held-out rows."}
    )
    evaluation_share: float = field(default=0.1, metadata={"help": "The last part of the text or rows, held out."})
    model: str | None = field(
        default=None, metadata={"help": "A hub name or a directory; by default a small GPT-2 from scratch."}
    )
    passage_length: int = 128
    width: int = field(default=128, metadata={"help": "Of the model from scratch, as layers is."})
    layers: int = 2
    prompt: str | None = field(
        default=None,
        metadata={
            "help": "What the sample at the end begins with, named on the card too; by default as a held-out row does."
        },
    )
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})


def read(recipe: RecipeArguments, encode: Callable[[str], list[int]]) -> tuple[Rows, Rows, list[str] | None]:
    """Training rows, held-out rows, and the groups of these."""
    path, length, groups = Path(recipe.text_file), recipe.passage_length, None
    if path.suffix == ".txt" or (path.is_file() and path.suffix not in WITH_COLUMNS):
        if recipe.group_column:
            raise ConfigurationError(
                f"--group_column {recipe.group_column} with the text file {path}.",
                why="a text file has no columns, so its passages have no groups.",
                fix="give a CSV file or JSON lines with a text column and this one, or leave the option out.",
            )
        text = read_text(path).replace("\r\n", "\n")
        cut = int(len(text) * (1 - recipe.evaluation_share))
        encoded = encode(text[:cut]), encode(text[cut:])
        parts = [[ids[i : i + length] for i in range(0, len(ids) - length + 1, length)] for ids in encoded]
    else:
        others = (recipe.group_column,) if recipe.group_column else ()
        fix = naming_columns(RecipeArguments)
        rows = read_rows(recipe.text_file, split="train", columns=(recipe.text_column,), others=others, fix=fix)
        cut = int(len(rows) * (1 - recipe.evaluation_share))
        both = (part[: recipe.max_examples] for part in (rows[:cut], rows[cut:]))
        whole = [[encode(row[recipe.text_column]) for row in part] for part in both]
        tell_of_cuts(recipe.text_file, (len(ids) for part in whole for ids in part), length, "--passage_length")
        parts = [[ids[:length] for ids in part] for part in whole]
        if recipe.group_column:
            groups = [str(row[recipe.group_column]) for row in rows[cut:]][: recipe.max_examples]
    train, held_out = ([{"input_ids": ids} for ids in part[: recipe.max_examples]] for part in parts)
    if empty := sum(not row["input_ids"] for row in train + held_out):
        raise ConfigurationError(
            f"{empty} rows of {recipe.text_file} have no tokens.",
            why="there is nothing to learn from them, and a model cannot read them.",
            fix="take them out.",
        )
    return train, held_out, groups


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    """Padded on the right; padding is masked and has no label."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(filler: int, values: Callable[[list[int]], list[int]]) -> torch.Tensor:
        return torch.tensor([values(row["input_ids"]) + [filler] * (longest - len(row["input_ids"])) for row in rows])

    masks = padded(0, lambda ids: [1] * len(ids))
    return {"input_ids": padded(0, list), "attention_mask": masks, "labels": padded(-100, list)}


def build(recipe: RecipeArguments, *, bf16: bool) -> Any:
    """The model before training; `bf16` keeps what is frozen below adapters in 16 bits."""
    if recipe.model is None:
        return small_gpt2(characters(), positions=recipe.passage_length, width=recipe.width, layers=recipe.layers)
    return language_model(recipe.model, recipe, bf16=bf16)


def scored(trainer: Trainer, rows: Rows, tokenizer: Any) -> Scores:
    """Mean loss of an example, perplexity, and the same loss shared out among the characters that it is of."""
    scores = scored_by_loss(trainer, rows)
    predicted = [row["input_ids"][1:] for row in rows]
    characters_in_all = sum(len(tokenizer.decode(ids, skip_special_tokens=True)) for ids in predicted)
    in_all = math.log(scores.measures["perplexity"]) * sum(map(len, predicted))
    each = in_all / max(1, characters_in_all)
    scores.measures |= {"loss per character": each, "perplexity of a character": math.exp(min(700, each))}
    return scores


def beginning(recipe: RecipeArguments, tokenizer: Any, rows: Rows) -> list[int]:
    """Token ids of what the sample begins with: the prompt, or the first quarter of one of the rows."""
    if recipe.prompt is not None:
        ids: list[int] = tokenizer.encode(recipe.prompt)
        return ids
    first = rows[0]["input_ids"]
    return first[: max(1, len(first) // 4)]


def main() -> None:
    """Trains, then prints loss and perplexity, by group if asked for, the privacy report and a sample."""
    recipe, arguments, privacy = parse(RecipeArguments)
    recipe.check_method()
    if recipe.model is None and recipe.method == "lora":
        raise ConfigurationError(
            "--method lora without a model.",
            why="an adapter is trained on a pretrained model; there is none.",
            fix="name one with --model, or leave the method out.",
        )
    tokenizer = characters() if recipe.model is None else pretrained(AutoTokenizer, recipe.model)
    train, held_out, groups = read(recipe, tokenizer.encode)
    check_batch(arguments, privacy, len(train))
    set_seed(arguments.seed)

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        return kind(
            train_dataset=train, eval_dataset=held_out, processing_class=tokenizer, data_collator=collate, **others
        )

    trainer = train_and_report(
        build(recipe, bf16=arguments.bf16),
        make,
        lambda trainer: scored(trainer, held_out, tokenizer),
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", repr(A_PROMPT if recipe.prompt is None else recipe.prompt)),
        groups=groups,
        compare_without_privacy=recipe.compare_without_privacy,
        comparison_learning_rate=recipe.comparison_learning_rate,
        recipe=recipe,
    )
    prompt = torch.tensor([beginning(recipe, tokenizer, held_out)], device=trainer.args.device)
    room = getattr(trainer.model.config, "max_position_embeddings", 1024) - prompt.shape[1]
    sample = trainer.model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=min(80, room), do_sample=True,
        temperature=0.8, pad_token_id=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    print(tokenizer.decode(sample[0].tolist()))


if __name__ == "__main__":
    main()
