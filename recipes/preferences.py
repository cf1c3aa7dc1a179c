"""Preferences: a causal language model learns which of two answers to the same prompt is wanted, by TRL's DPOTrainer.

Rows have `prompt`, `chosen` and `rejected`; or they are tables with descriptions (E2E NLG), and the rejected answer is
the description with one value of the table in the place of another. The privacy unit is a row: one pair of answers.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from trl import DPOConfig, DPOTrainer

from common.answers import AnswerData, model_for, to_be_scored, tokenizer_for
from common.arguments import parse
from common.chats import tools_of
from common.data import read_rows
from common.rates import check_batch
from common.results import CONTINUE, Scores, train_and_report
from hf_dp import DPTrainer
from hf_dp.data.files import check_columns
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words
from hf_dp.training.trainer import DPTrainerMixin

# Of E2E's slots, as its authors list them: a list made from the rows would put one row's words into another.
VALUES = {
    "food": ("Chinese", "English", "Fast food", "French", "Indian", "Italian", "Japanese"),
    "area": ("city centre", "riverside"),
    "priceRange": ("cheap", "moderate", "high", "less than £20", "£20-25", "more than £30"),
    "customer rating": ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5"),
}
# In nats: the rounding of sums over an answer, not what was learnt.
_NOTHING = 1e-3


@dataclass(kw_only=True)
class RecipeArguments(AnswerData):
    """What the recipe trains on, and how."""

    model: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        metadata={"help": "A hub name or a directory; scratch: a small random GPT-2 over characters."},
    )
    loss: str = field(default="sigmoid", metadata={"help": "One of DPOConfig's loss_type."})
    beta: float = field(default=0.1, metadata={"help": "How closely the model is held to what it was before."})
    table_column: str = "mr"
    text_column: str = "ref"

    DECIDES_ITSELF: ClassVar[dict[str, str]] = {
        "group_column": "scores are of all test pairs together",
        "max_new_tokens": "no answers are written",
    }


class DPDPOTrainer(DPTrainerMixin, DPOTrainer):
    """A pair of answers is one example."""


def slots(table: str) -> dict[str, str]:
    """The values of a table by their names."""
    return dict(re.findall(r"([^,\[\]]+)\[([^\]]*)\]", table.replace(", ", ",")))


def corrupted(table: str, text: str) -> str | None:
    """`text` with one value of the table replaced by another of that slot, or with two names exchanged; None where it
    names none of them. Chosen by a seed that is the row itself, so that no other row has a part in it."""
    draw, found = random.Random(f"{table} || {text}"), slots(table)

    def named(value: str) -> re.Pattern[str]:
        return re.compile(rf"(?<!\w){re.escape(value)}(?!\w)", re.IGNORECASE)

    wrong = []
    for slot, values in VALUES.items():
        if slot in found and named(found[slot]).search(text):
            other = draw.choice([value for value in values if value != found[slot]])
            wrong.append(named(found[slot]).sub(lambda _, other=other: other, text))
    one, two = found.get("name"), found.get("near")
    if one and two and named(one).search(text) and named(two).search(text):
        either = re.compile(f"{named(one).pattern}|{named(two).pattern}", re.IGNORECASE)
        wrong.append(either.sub(lambda match: one if match[0].lower() == two.lower() else two, text))
    return draw.choice(wrong) if wrong else None


def pairs(name: str, split: str, recipe: RecipeArguments, most: int | None) -> Dataset:
    """Prompts with a chosen and a rejected answer: those of the rows, or made of tables and their descriptions. Chats
    may be without a prompt: it is then what the two have in common.

    A row whose description names no value stays out, for itself. How many stay is n, and public.

    Raises:
        ConfigurationError: none is left, or other columns.
    """
    rows = read_rows(name, split=split, columns=(), max_examples=most)
    if rows and {"chosen", "rejected"} <= rows[0].keys():
        columns = [key for key in ("prompt", "chosen", "rejected") if key in rows[0]]
        check_columns(name, rows, (), columns, fix="correct or take out the row.")
        has_tools = any(row.get("tools") for row in rows)
        is_text = [[isinstance(row[key], str) for key in columns] for row in rows]
        if other := next((i for i, row in enumerate(is_text) if row != is_text[0]), None):
            raise ConfigurationError(
                f"{row_in_words(other)} of {name} has texts where {row_in_words(0)} has messages, or the reverse.",
                why="one way of rendering them is taken for all.",
                fix="write all rows as texts, or all as lists of messages.",
            )
        # As JSON: Arrow would put the fields of one row's tools into those of all others.
        told = [{"tools": json.dumps(tools_of(row))} if has_tools else {} for row in rows]
        return Dataset.from_list(
            [{key: row[key] for key in columns} | more for row, more in zip(rows, told, strict=True)]
        )
    fix = "give rows with prompt, chosen and rejected; or name those of tables with --table_column and --text_column."
    check_columns(name, rows, (recipe.table_column, recipe.text_column), fix=fix)
    tables = ((row[recipe.table_column], row[recipe.text_column]) for row in rows)
    made = [
        {"prompt": f"{table} ||", "chosen": f" {text}", "rejected": f" {wrong}"}
        for table, text in tables
        if (wrong := corrupted(table, text)) is not None
    ]
    if not made:
        raise ConfigurationError(
            f"no description in {name} names a value of its table.",
            why="there is nothing to put in another's place, so there are no pairs.",
            fix="give rows with prompt, chosen and rejected, or tables as E2E NLG has them: food[Italian].",
        )
    print(f"{name}: {len(made)} pairs of {len(rows)} rows")
    return Dataset.from_list(made)


def a_prompt_like(data: Dataset) -> str | list[dict[str, str]]:
    """A public one, of the form that those of the pairs have."""
    given = data[0].get("prompt", data[0]["chosen"])
    if isinstance(given, list):
        return [{"role": "user", "content": "A question."}]
    return "name[Blue Spice], food[Italian] ||" if given.endswith("] ||") else "A question."


_LOSS = "loss of the chosen, nats a token"


@torch.no_grad()
def scored(trainer: Any, data: Dataset) -> Scores:
    """How often the chosen answer is the likelier one, and how often it has gained more than the rejected one; and what
    a token of it costs in itself, since a model that unlearns both may still prefer the right one."""
    likelier, gained, margins, losses = [], [], [], []
    model = trainer.accelerator.unwrap_model(trainer.model)
    model.eval()
    size = trainer.args.per_device_eval_batch_size
    for start in range(0, len(data), size):
        some = trainer.data_collator([data[i] for i in range(start, min(start + size, len(data)))])
        batch = {name: value.to(trainer.args.device) for name, value in some.items()}
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with trainer.compute_loss_context_manager():
            now = model(**inputs, labels=labels, use_cache=False, fused_lm_head=True).log_probs.sum(1).chunk(2)
        if trainer.precompute_ref_logps:  # the model was another one then
            before = batch["ref_chosen_logps"], batch["ref_rejected_logps"]
        else:
            before = trainer.compute_ref_log_probs(model, batch)
        gain = (now[0] - before[0]) - (now[1] - before[1])
        likelier += now[0].gt(now[1]).float().tolist()
        gained += (0.5 * (gain.sign() * gain.abs().gt(_NOTHING) + 1)).tolist()  # a half where neither did
        margins += gain.tolist()
        losses += (-now[0] / labels.ne(-100).sum(1).chunk(2)[0]).tolist()
    measures = {"accuracy": likelier, "share with gain": gained, "gain in nats": margins, _LOSS: losses}
    return Scores({name: sum(values) / len(values) for name, values in measures.items()}, likelier)


def main() -> None:
    """Trains, then prints accuracies of preferences before and after, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    if recipe.method == "full" and arguments.world_size > 1:
        raise ConfigurationError(
            f"--method full in {arguments.world_size} processes.",
            why="the reference is computed beforehand, and TRL's processes find what the first wrote of it only where "
            "the pairs lie in files of their own.",
            fix="train adapters, whose reference is the model without them: --method lora; or in one process.",
        )
    train = pairs(recipe.train_file, "train", recipe, recipe.max_examples)
    check_batch(arguments, privacy, len(train))
    test = pairs(recipe.test_file, "test", recipe, recipe.max_examples)
    test = test.select(to_be_scored(len(test), recipe, arguments.seed))
    set_seed(arguments.seed)
    tokenizer = tokenizer_for(recipe)
    model = model_for(recipe, tokenizer, bf16=arguments.bf16)

    def make(kind: type[Trainer], *, args: TrainingArguments, **others: Any) -> Trainer:
        given = {f.name: getattr(args, f.name) for f in fields(TrainingArguments) if f.init}
        config = DPOConfig(
            **given, loss_type=[recipe.loss], beta=recipe.beta, max_length=recipe.max_length,
            # Full training has no other reference than the model as it is now.
            precompute_ref_log_probs=recipe.method == "full",
            precompute_ref_batch_size=1 if privacy.equal_widths else None,
        )  # fmt: skip
        behind = DPDPOTrainer if kind is DPTrainer else DPOTrainer
        trainer: Trainer = behind(
            train_dataset=train, eval_dataset=test, processing_class=tokenizer, args=config, **others
        )
        if "ref" in getattr(trainer.model, "peft_config", ()):
            # TRL's copy of adapters that are still nothing: it would be computed with, and saved, beside the trained
            # ones. The base without adapters is the same reference.
            trainer.model.delete_adapter("ref")
        kept: Any = trainer.train_dataset
        if len(kept) < len(train):
            print(
                f"{recipe.train_file}: {len(train) - len(kept)} of {len(train)} pairs have prompts of --max_length "
                f"{recipe.max_length} tokens or more, and are left out"
            )
        return trainer

    train_and_report(
        model,
        make,
        lambda trainer: scored(trainer, trainer.eval_dataset),
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", repr(a_prompt_like(train))),
        compare_without_privacy=recipe.compare_without_privacy,
        comparison_learning_rate=recipe.comparison_learning_rate,
        recipe=recipe,
    )


if __name__ == "__main__":
    main()
