"""Prompts and answers for causal language models: the loss is on the answer only; its evaluation; generation.

The privacy unit is a row of the training data: one prompt with its answer, or one conversation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, Trainer

from common.arguments import Comparison, TextArguments
from common.base_models import Trained, generating, language_model
from common.data import tell_of_cuts
from common.hub_names import pretrained
from common.language_models import characters, small_gpt2
from common.results import Scores, scored_by_loss
from hf_dp.errors import ConfigurationError

IGNORED = -100
Row = dict[str, list[int]]


@dataclass(kw_only=True)
class AnswerData(TextArguments, Trained, Comparison):
    """Arguments of recipes that train a causal language model on answers."""

    train_file: str = field(
        metadata={"help": "CSV, TSV, JSON, JSON lines or parquet, or a hub data set; this is private."}
    )
    test_file: str = field(metadata={"help": "Of the same form, for what is reported."})
    model: str = field(metadata={"help": "A hub name or a directory; scratch: a small random GPT-2 over characters."})
    method: Literal["full", "lora"] = field(default="lora", metadata={"help": "What is trained."})
    max_length: int = field(default=512, metadata={"help": "In tokens, of prompt and answer; the rest is cut off."})
    max_new_tokens: int = field(default=120, metadata={"help": "Of each generated answer, at most."})
    group_column: str | None = field(
        default=None, metadata={"help": "Report the loss for each of its values in the test data."}
    )
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})
    max_test_examples: int | None = field(
        default=None, metadata={"help": "Score the loss of only so many of the test rows, drawn by seed."}
    )
    width: int = field(default=128, metadata={"help": "Of the model from scratch, as layers is."})
    layers: int = 2


def tokenizer_for(recipe: AnswerData) -> Any:
    """The pretrained one, or that from scratch, whose alphabet is public."""
    recipe.check_method()
    if recipe.model == "scratch":
        if recipe.method == "lora":
            raise ConfigurationError(
                "--method lora with --model scratch.",
                why="an adapter is trained on a pretrained model; this one is random.",
                fix="add --method full.",
            )
        return characters()
    tokenizer = pretrained(AutoTokenizer, recipe.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def model_for(recipe: AnswerData, tokenizer: Any, *, bf16: bool) -> Any:
    """The pretrained one, or one from scratch; with adapters for the method lora.

    Args:
        bf16: what is frozen is kept in 16 bits; what is trained, never.
    """
    if recipe.model == "scratch":
        positions = recipe.max_length + recipe.max_new_tokens
        return small_gpt2(tokenizer, positions=positions, width=recipe.width, layers=recipe.layers)
    return language_model(recipe.model, recipe, bf16=bf16)


def labelled_row(parts: Iterable[tuple[list[int], bool]]) -> Row:
    """Token ids in parts, of which some are answers: labels on those only."""
    ids: list[int] = []
    labels: list[int] = []
    for part, is_answer in parts:
        ids += part
        labels += part if is_answer else [IGNORED] * len(part)
    return {"input_ids": ids, "labels": labels}


def shortened(rows: Iterable[Row], name: str, max_length: int) -> list[Row]:
    """The rows, cut off after so many tokens; says how many are."""
    cut, lengths = [], []
    for row in rows:
        lengths.append(len(row["input_ids"]))
        cut.append({column: values[:max_length] for column, values in row.items()})
    tell_of_cuts(name, lengths, max_length)
    return cut


def with_an_answer(rows: list[Row], name: str) -> list[int]:
    """The indices of rows whose answer was not cut off altogether: the others would teach nothing.

    Each row stays or goes for itself. How many stay is n, and public.

    Raises:
        ConfigurationError: none is left.
    """
    kept = [i for i, row in enumerate(rows) if any(label != IGNORED for label in row["labels"])]
    if not kept:
        raise ConfigurationError(
            f"no row of {name} has a token of an answer.",
            why="there is nothing to learn, or to measure.",
            fix="raise --max_length, or check the columns.",
        )
    if len(kept) < len(rows):
        print(
            f"{name}: {len(rows) - len(kept)} of {len(rows)} rows have no answer, or none within max_length: left out"
        )
    return kept


def to_be_scored(n: int, recipe: AnswerData, seed: int) -> list[int]:
    """Indices, in order, of those of n test rows of which the loss is taken."""
    chosen = n if recipe.max_test_examples is None else min(n, recipe.max_test_examples)
    return sorted(random.Random(seed).sample(range(n), chosen))


def scored_answers(trainer: Trainer, rows: list[Row]) -> Scores:
    """Mean loss of an example, perplexity, and loss of a token of an answer."""
    scores = scored_by_loss(trainer, rows)
    scores.measures["loss per target token"] = math.log(scores.measures["perplexity"])
    return scores


def continued(trainer: Trainer, tokenizer: Any, prompts: list[list[int]], new_tokens: int) -> list[str]:
    """What the model says after each prompt, greedily, up to its end token."""
    said = generated(trainer, tokenizer, prompts, new_tokens)
    return [text.strip() for text in tokenizer.batch_decode(said, skip_special_tokens=True)]


@torch.no_grad()
def generated(
    trainer: Trainer,
    tokenizer: Any,
    prompts: list[list[int]],
    new_tokens: int,
    following: Callable[[list[int]], list[int]] | None = None,
) -> list[list[int]]:
    """The same as token ids, with what pads them to the length of the longest beside them.

    Args:
        following: which tokens may come after those that were said; any, where it is left out.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model.eval()
    said: list[list[int]] = []
    size = trainer.args.per_device_eval_batch_size
    for start in tqdm(range(0, len(prompts), size), desc="generation", disable=trainer.args.disable_tqdm):
        some = {"input_ids": prompts[start : start + size]}
        batch = tokenizer.pad(some, padding_side="left", return_tensors="pt").to(model.device)
        width = batch["input_ids"].shape[1]
        allowed = None if following is None else lambda _, ids, after=width: following(ids[after:].tolist())
        with generating(model):
            out = model.generate(
                **batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id,
                prefix_allowed_tokens_fn=allowed,
            )  # fmt: skip
        said += out[:, width:].tolist()
    return said
