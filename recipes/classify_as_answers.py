"""Private text classification by a chat model: the user's turn is the text, the assistant's the label in words.

So the objective is what the model was tuned for, and its vocabulary the head: nothing begins at random, which is what
Li et al. (2022), "Large Language Models Can Be Strong Differentially Private Learners", section 3.1, ask of a private
start. The privacy unit is a row.

The labels are public. Asked for one, the model may say nothing else: at each token it takes the likeliest of those with
which some label goes on, so that an answer is always one of the list, after as many passes as it has tokens. The loss
is minus the log-probability of the label under just that rule: what cannot be said takes no part of the clipping norm.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import jinja2
from transformers import DataCollatorForSeq2Seq, Trainer, set_seed

from common.answers import IGNORED, AnswerData, Row, generated, model_for, to_be_scored, tokenizer_for
from common.arguments import parse
from common.chats import ChatTemplate, Message, rendered, use_template
from common.choices import Choices, choosing, continuations
from common.classification import LabelWords, beginnings, label_words
from common.data import labelled, public_labels
from common.rates import check_batch
from common.results import Scores, measured, train_and_report
from hf_dp.errors import ConfigurationError

# As it was trained: what is no label was not learnt not to be said.
CHOOSE = """from transformers import pipeline
answer = pipeline("text-generation", DIRECTORY, tokenizer=DIRECTORY, max_new_tokens=20)
prompt, tokenizer = PROMPT, answer.tokenizer
labels = tokenizer(LABELS, add_special_tokens=False)["input_ids"]
start = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
def allowed(_, ids):
    said = ids[start:].tolist()
    return [i[len(said)] for i in labels if i[: len(said)] == said != i] or [tokenizer.eos_token_id]
print(answer(prompt, prefix_allowed_tokens_fn=allowed))"""
SHOWN = 3  # questions with their answers, before and after side by side


@dataclass(kw_only=True)
class RecipeArguments(LabelWords, AnswerData, ChatTemplate):
    """What the recipe trains on, and how."""

    system: str | None = field(
        default=None,
        metadata={"help": "What the system's turn says, which is public; by default what the template has there."},
    )
    max_test_examples: int | None = field(
        default=None, metadata={"help": "Score only so many of the test rows, drawn by seed."}
    )

    DECIDES_ITSELF: ClassVar[dict[str, str]] = {"max_new_tokens": "an answer is as long as its label"}


def asked(text: str, recipe: RecipeArguments) -> list[Message]:
    """The turns before the answer."""
    system = [] if recipe.system is None else [{"role": "system", "content": recipe.system}]
    return [*system, {"role": "user", "content": text}]


def answers(words: list[str], tokenizer: Any, recipe: RecipeArguments) -> list[list[int]]:
    """What the assistant says for each label, to the end of its turn, as token ids.

    Raises:
        ConfigurationError: the template cannot render it, or one answer begins with another.
    """
    said = []
    for text in words:
        turns = [*asked("A text.", recipe), {"role": "assistant", "content": text}]
        try:
            parts = rendered(turns, 0, tokenizer)
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigurationError(
                f"the chat template cannot render a text with its label ({error}).",
                why="the model is asked and answers as it was tuned to.",
                fix="leave out --system, or give another template: --chat_template FILE.",
            ) from error
        said.append(tokenizer(parts[-1][0], add_special_tokens=False)["input_ids"])
    in_order = sorted(range(len(said)), key=said.__getitem__)
    for one, other in pairwise(in_order):
        if said[other][: len(said[one])] == said[one]:
            raise ConfigurationError(
                f"the answer {words[other]!r} begins as all of {words[one]!r} does.",
                why="where an answer ends must tell which one it is.",
                fix="give a template that ends each turn with a token of its own, or other words: --verbaliser_file.",
            )
    return said


def after(said: list[list[int]], end: int) -> Callable[[list[int]], list[int]]:
    """With which tokens the beginning of some answer goes on; a whole one with `end`."""
    following = continuations(said)
    return lambda ids: following.get(tuple(ids), [end])


@dataclass(frozen=True)
class Questions:
    """Rows of a file: each one's text, cut where it is too long; as tokens up to its answer; its label; its group."""

    texts: list[str]
    prompts: list[list[int]]
    labels: list[int]
    groups: list[str] | None

    def of(self, chosen: list[int]) -> Questions:
        """Some of the rows."""
        groups = None if self.groups is None else [self.groups[i] for i in chosen]
        return Questions(*([values[i] for i in chosen] for values in (self.texts, self.prompts, self.labels)), groups)

    def by_length(self) -> Questions:
        """The shortest first: batches in order then hold little padding."""
        return self.of(sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i])))


def read(name: str, split: str, recipe: RecipeArguments, tokenizer: Any, names: list[str], longest: int) -> Questions:
    """The rows of a file; texts are cut where prompt and answer would be longer than `max_length`.

    Args:
        longest: tokens of an answer.

    Raises:
        ConfigurationError: nothing would be left of a text.
    """
    columns = labelled(name, split, recipe, names)

    def prompt(text: str) -> list[int]:
        before = tokenizer.apply_chat_template(asked(text, recipe), tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(before, add_special_tokens=False)["input_ids"]
        return ids

    texts = beginnings(name, columns["text"], tokenizer, recipe.max_length, len(prompt("")) + longest)
    return Questions(texts, [prompt(text) for text in texts], columns["labels"], columns.get("group"))


def example(prompt: list[int], answer: list[int]) -> Row:
    """Token ids, with labels on the answer."""
    return {"input_ids": [*prompt, *answer], "labels": [*[IGNORED] * len(prompt), *answer]}


def chosen(trainer: Trainer, tokenizer: Any, prompts: list[list[int]], said: list[list[int]]) -> list[int]:
    """The number of the label that the model answers each prompt with."""
    following = after(said, tokenizer.eos_token_id)
    found = generated(trainer, tokenizer, prompts, max(map(len, said)), following)
    return [next(i for i, ids in enumerate(said) if given[: len(ids)] == ids) for given in found]


def main() -> None:
    """Trains, then prints test accuracy, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    names = public_labels(recipe)
    words = label_words(recipe, names)
    set_seed(arguments.seed)
    tokenizer = tokenizer_for(recipe)
    use_template(tokenizer, recipe)
    said = answers(words, tokenizer, recipe)
    files = {"train": recipe.train_file, "test": recipe.test_file}
    longest = max(map(len, said))
    train, test = (read(path, split, recipe, tokenizer, names, longest) for split, path in files.items())
    check_batch(arguments, privacy, len(train.labels))
    model = model_for(recipe, tokenizer, bf16=arguments.bf16)
    test = test.of(to_be_scored(len(test.labels), recipe, arguments.seed)).by_length()
    rows = [example(prompt, said[label]) for prompt, label in zip(train.prompts, train.labels, strict=True)]
    shown = random.Random(arguments.seed).sample(range(len(test.texts)), min(SHOWN, len(test.texts)))

    choices = Choices.between(said)

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        collate = DataCollatorForSeq2Seq(tokenizer)
        return choosing(kind, choices)(train_dataset=rows, data_collator=collate, processing_class=tokenizer, **others)

    def score(trainer: Trainer) -> Scores:
        found = chosen(trainer, tokenizer, test.prompts, said)
        hits = [float(one == other) for one, other in zip(found, test.labels, strict=True)]
        answered = {test.texts[i]: words[found[i]] for i in shown}
        return Scores(measured(("accuracy", "macro_f1"), found, test.labels), hits, said=answered)

    train_and_report(
        model,
        make,
        score,
        arguments,
        privacy,
        usage=CHOOSE.replace("PROMPT", repr(asked("A text.", recipe))).replace(
            "LABELS", repr(tokenizer.batch_decode(said))
        ),
        groups=test.groups,
        compare_without_privacy=recipe.compare_without_privacy,
        comparison_learning_rate=recipe.comparison_learning_rate,
        recipe=recipe,
    )


if __name__ == "__main__":
    main()
