"""Private text classification as infilling: the label is a masked word, so that the objective is that of pretraining.

Li et al. (2022), "Large Language Models Can Be Strong Differentially Private Learners", section 3.1: with little signal
left by clipping and noise, a task that the pretrained model can nearly do already beats a new head from nothing. Each
text is put into a template, "{text} It was about {mask}.", and the loss is cross-entropy over the labels of what the
masked language model says at the mask.

What a label scores there is the mean, over the tokens of its words, of the model's logits. For labels of one token this
is the usual verbaliser; a mean is the plain extension to labels such as card_payment_fee_charged. It needs no fixed
number of masks, no length correction, and one pass of the model whatever the labels are; it ignores the order of words
and what they have in common with other labels' words, which training must sort out. A mean of logits is the logit of
the mean: the rows of the output embeddings are averaged once for each label, and those rows take the place of the
vocabulary's. They are trained too, apart from the word embeddings that they may be tied to.

What is saved is a masked language model that Transformers loads, in which each label is a word: `<label>` at the end of
the vocabulary has the label's row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from common.arguments import parse
from common.classification import (
    AdaptedClassifier,
    LabelWords,
    adapted,
    apart,
    beginnings,
    by_length,
    check_positions,
    label_words,
)
from common.data import labelled, public_labels
from common.hub_names import pretrained
from common.plain_classifier import TrainingForm, labelled_config
from common.rates import check_batch
from common.results import measured, scored_by_label, train_and_report
from hf_dp.errors import ConfigurationError, UnsupportedModelError

USAGE = """from transformers import pipeline
fill = pipeline("fill-mask", DIRECTORY)
print(fill("TEXT", targets=[f"<{name}>" for name in fill.model.config.id2label.values()]))"""


@dataclass(kw_only=True)
class RecipeArguments(LabelWords, AdaptedClassifier):
    """What the recipe trains on, and how."""

    model: str = field(metadata={"help": "A hub name or a directory with a masked language model and its tokenizer."})
    template: str = field(default="{text} It was about {mask}.", metadata={"help": "Has {text} and {mask} once each."})
    method: Literal["lora", "full"] = field(default="lora", metadata={"help": "What is trained beside the label rows."})


class InfillingForSequenceClassification(TrainingForm):
    """Logits (B, labels) at the mask of each text.

    Args:
        model: gives logits (B, T, labels).
    """

    _supports_sdpa = True

    def __init__(self, model: PreTrainedModel, mask_token_id: int, labels: int) -> None:
        model.config.num_labels = labels
        model.config.problem_type = "single_label_classification"
        super().__init__(model.config)
        self.model, self.mask_token_id = model, mask_token_id

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        """(B, T) ids with one mask in each row."""
        scores = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        at = torch.arange(len(input_ids), device=input_ids.device), input_ids.eq(self.mask_token_id).int().argmax(1)
        logits = scores[at]
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def verbalised(recipe: RecipeArguments, names: list[str]) -> list[str]:
    """The words of each label, as they stand within a sentence."""
    return [f" {words}" for words in label_words(recipe, names)]


def infilled(path: str, split: str, recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> Dataset:
    """Texts in the template as token ids, with label numbers. Long texts are cut, the template is not."""
    columns, mask = labelled(path, split, recipe, names), tokenizer.mask_token
    around = len(tokenizer(recipe.template.format(text="", mask=mask))["input_ids"])
    given = [text.replace(mask, " ") for text in columns.pop("text")]
    texts = beginnings(path, given, tokenizer, recipe.max_length, around)
    filled = [recipe.template.format(text=text, mask=mask) for text in texts]
    return Dataset.from_dict({**tokenizer(filled), **columns})


def build(recipe: RecipeArguments, tokenizer: Any, words: list[str], longest: int = 0) -> nn.Module:
    """The masked language model, with one output row for each label in place of the vocabulary's.

    Args:
        longest: of the texts, in tokens.
    """
    model, loading = pretrained(AutoModelForMaskedLM, recipe.model, output_loading_info=True)
    model.eval()
    check_positions(model, longest)
    if loading["missing_keys"]:
        raise UnsupportedModelError(
            f"{recipe.model} has no trained masked language modelling head.",
            why="without one there is nothing that knows which words fit, and a head from nothing takes its place.",
            fix="use a masked language model, or classify_lora with this encoder.",
        )
    head = model.get_output_embeddings()
    has_bias = getattr(head, "bias", None) is not None
    rows = nn.Linear(head.weight.shape[1], len(words), bias=has_bias)
    with torch.no_grad():
        for number, ids in enumerate(tokenizer(words, add_special_tokens=False)["input_ids"]):
            rows.weight[number] = head.weight[ids].mean(0)
            if has_bias:
                rows.bias[number] = head.bias[ids].mean()
    model.set_submodule(next(name for name, module in model.named_modules() if module is head), rows)
    if has_bias:
        head.bias.requires_grad_(False)  # Some models hold it by a second name; unused, it would collect noise.
    made = InfillingForSequenceClassification(model, tokenizer.mask_token_id, len(words))
    _check(made, tokenizer, len(words))
    if recipe.method == "full":
        return made
    trained = next(name for name, module in made.named_modules() if module is rows)
    return adapted(made, trained, recipe)


@torch.no_grad()
def as_masked_lm(model: Any, recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> PreTrainedModel:
    """The trained model, adapters merged, as the masked language model that it was made of, with labels as words of
    the tokenizer's, which gets them too."""
    trained = (model.merge_and_unload() if hasattr(model, "merge_and_unload") else model).model
    rows = trained.get_output_embeddings()
    of_rows = {name for name, module in trained.named_modules() if module is rows}
    state = {k: v for k, v in trained.state_dict().items() if k.rpartition(".")[0] not in of_rows}
    made: Any = pretrained(AutoModelForMaskedLM, recipe.model)
    size = len(made.get_output_embeddings().weight)
    made.load_state_dict(
        {k: v for k, v in state.items() if v.shape == made.get_parameter_or_buffer(k).shape}, strict=False
    )
    words = [f"<{name}>" for name in names]
    tokenizer.add_tokens(words)
    ids = tokenizer.convert_tokens_to_ids(words)
    made.resize_token_embeddings(max(size, *(i + 1 for i in ids)), mean_resizing=False)
    head = made.get_output_embeddings()
    head.weight[ids] = rows.weight
    if rows.bias is not None:
        head.bias[ids] = rows.bias
    made.config = labelled_config(made.config, names)
    return made.to(rows.weight.device).eval()  # type: ignore[no-any-return]


@torch.no_grad()
def _check(model: nn.Module, tokenizer: Any, labels: int) -> None:
    shape = tuple(model(**tokenizer([tokenizer.mask_token], return_tensors="pt")).logits.shape)
    if shape != (1, labels):
        raise UnsupportedModelError(
            f"{type(model.model).__name__} gives logits {shape} for one text and {labels} labels.",
            why="its head does not score words with its output embeddings alone.",
            fix="use a masked language model whose head does, such as BERT.",
        )


def main() -> None:
    """Trains, then prints test accuracy, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    names = public_labels(recipe)
    tokenizer = pretrained(AutoTokenizer, recipe.model)
    if tokenizer.mask_token is None or any(recipe.template.count(part) != 1 for part in ("{text}", "{mask}")):
        raise ConfigurationError(
            f"template {recipe.template!r} with mask token {tokenizer.mask_token!r}.",
            why="each text needs exactly one mask to fill.",
            fix="write {text} and {mask} once each, and use a masked language model.",
        )
    files = {"train": recipe.train_file, "test": recipe.test_file}
    train, test = (by_length(infilled(path, split, recipe, tokenizer, names)) for split, path in files.items())
    train, test, groups = apart(train, test)
    longest = max(len(ids) for rows in (train, test) for ids in rows["input_ids"])
    check_batch(arguments, privacy, len(train))

    def make(kind: type[Trainer], model: nn.Module, **others: Any) -> Trainer:
        return kind(
            model=model,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda p: measured(("accuracy",), p.predictions.argmax(-1), p.label_ids),
            **others,
        )

    train_and_report(
        build(recipe, tokenizer, verbalised(recipe, names), longest),
        make,
        lambda trainer: scored_by_label(trainer, test),
        arguments,
        privacy,
        groups=groups,
        compare_without_privacy=recipe.compare_without_privacy,
        recipe=recipe,
        plain=lambda model: as_masked_lm(model, recipe, tokenizer, names),
        usage=USAGE.replace("TEXT", recipe.template.format(text="A text.", mask=tokenizer.mask_token)),
    )


if __name__ == "__main__":
    main()
