"""A labelled corpus to share: a language model learns labelled texts privately, and new texts are sampled from it.

The privacy unit is one text with its label. The names of the labels are public; each text is learnt after its label's
name, and a text with a wanted label is sampled by writing that name first. How often each label is sampled is uniform
or public, never counted. What is sampled depends on the private texts through the private model alone, so that the
corpus keeps the model's guarantee (post-processing) at any size; no sample is dropped for what the private texts look
like.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    set_seed,
)

from common.arguments import parse
from common.base_models import Trained, generating, language_model
from common.best_draws import best_draws
from common.classification import by_length
from common.corpus_quality import encoded_by, judge
from common.data import LabelledData, labelled, public_labels, tell_of_cuts
from common.hub_names import pretrained
from common.labelled_texts import (
    Texts,
    check_corpus_directory,
    counts,
    refuse_choosing_by,
    share,
    shares,
    stays_private,
)
from common.language_models import small_gpt2
from common.rates import check_batch
from common.results import CONTINUE, scored_by_loss, train_and_report
from hf_dp.errors import ConfigurationError

END, PADDING = "<|end|>", "<|padding|>"


@dataclass(kw_only=True)
class RecipeArguments(LabelledData, Trained):
    """What is learnt, and what is sampled."""

    model: str | None = field(
        default=None, metadata={"help": "A hub name or a directory; left out: a small GPT-2 from scratch."}
    )
    prompt: str = field(
        default="{label}", metadata={"help": "The line before each text; a pretrained model follows one in words."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "From scratch: a public tokenizer (hub name or directory); left out: bytes."}
    )
    width: int = 128
    layers: int = 2
    samples: int = field(default=5000, metadata={"help": "Size of the corpus. It costs no privacy."})
    draws: int = field(
        default=1,
        metadata={
            "help": "Sample so many times as many, and keep those that the encoder takes for their label by name."
        },
    )
    label_frequencies: str | None = field(
        default=None, metadata={"help": "JSON of public shares by label, not counted in private data; or uniform."}
    )
    temperature: float = 1.0
    top_p: float = 0.95
    corpus_format: Literal["jsonl", "csv"] = "jsonl"
    encoder: str | None = field(
        default=None, metadata={"help": "Judge with a classifier on this encoder; left out: on a bag of words."}
    )
    max_test_examples: int | None = field(
        default=None, metadata={"help": "Measure the loss on so many of the test texts, evenly spread; left out: all."}
    )
    compared: int = field(default=1000, metadata={"help": "Samples, and held-out texts, in the near-copy check."})

    def __post_init__(self) -> None:
        self.encoder = self.encoder or None  # an empty flag takes it out of a YAML file
        least = {"samples": 1, "draws": 1, "compared": 1, "max_length": 2, "width": 1, "layers": 1, "lora_rank": 1}
        wrong = [f"{name}={getattr(self, name)}" for name, low in least.items() if getattr(self, name) < low]
        wrong += [f"temperature={self.temperature}"] * (not 0 < self.temperature < math.inf)
        wrong += [f"top_p={self.top_p}"] * (not 0 < self.top_p <= 1)
        if wrong:
            raise ConfigurationError(
                f"{', '.join(wrong)}.", why="nothing could be sampled.", fix="give a larger number; top_p is at most 1."
            )
        if self.prompt.count("{label}") != 1:
            raise ConfigurationError(
                f"prompt {self.prompt!r} does not say {{label}} once.",
                why="a text is learnt, and sampled, after the name of its label.",
                fix='write a line such as "A customer of a bank asks about {label}:".',
            )
        if self.draws > 1 and self.encoder is None:
            raise ConfigurationError(
                f"draws={self.draws}, and no encoder.",
                why="an encoder says which of the texts that were sampled are closest to their label's name.",
                fix="name a public one with --encoder, or leave draws out.",
            )
        if self.method == "lora" and self.model is None:
            raise ConfigurationError(
                "method=lora, and no model.", why="adapters to random weights learn little.", fix="name a model."
            )


def prompt(name: str, recipe: RecipeArguments) -> str:
    """What stands before a text with this label."""
    return recipe.prompt.replace("{label}", name.replace("_", " ")) + "\n"


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token: an alphabet that no text had a part in."""
    alphabet = {END: 0, PADDING: 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        alphabet[letter] = len(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING)


def build(recipe: RecipeArguments, names: Sequence[str], *, bf16: bool) -> tuple[Any, Any]:
    """The model and its tokenizer. From scratch, each label is one token."""
    if recipe.model is not None:
        tokenizer = pretrained(AutoTokenizer, recipe.model)
        model = language_model(recipe.model, recipe, bf16=bf16)
    else:
        tokenizer = bytes_tokenizer() if recipe.tokenizer is None else pretrained(AutoTokenizer, recipe.tokenizer)
        tokenizer.add_special_tokens({"eos_token": tokenizer.eos_token or END})
        tokenizer.add_tokens([AddedToken(prompt(name, recipe), normalized=False, special=True) for name in names])
        model = small_gpt2(tokenizer, positions=recipe.max_length + 1, width=recipe.width, layers=recipe.layers)
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"the tokenizer of {recipe.model!r} has no end of text.",
            why="a sampled text would not end.",
            fix="use a model whose tokenizer has an eos_token.",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def prompts(tokenizer: Any, names: Sequence[str], recipe: RecipeArguments) -> list[list[int]]:
    """The token ids before a text of each label, the same in training and in sampling."""
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    start = [tokenizer.bos_token_id] if begins else []
    return [start + tokenizer(prompt(name, recipe), add_special_tokens=False)["input_ids"] for name in names]


def rows(name: str, texts: Texts, tokenizer: Any, before: Sequence[list[int]], max_length: int) -> Dataset:
    """Label and text of a file's rows as token ids; only the text is to be predicted."""
    encoded = tokenizer(texts.texts, add_special_tokens=False, verbose=False)["input_ids"]
    tell_of_cuts(name, (len(ids) + 1 for ids in encoded), max_length)
    made: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for ids, label in zip(encoded, texts.labels, strict=True):
        ids = [*ids, tokenizer.eos_token_id][:max_length]
        made["input_ids"].append(before[label] + ids)
        made["labels"].append([-100] * len(before[label]) + ids)
    made["attention_mask"] = [[1] * len(ids) for ids in made["input_ids"]]
    return Dataset.from_dict(made)


@torch.no_grad()
def sampled_corpus(
    model: Any,
    tokenizer: Any,
    before: Sequence[list[int]],
    wanted: Sequence[int],
    recipe: RecipeArguments,
    at_once: int,
) -> Texts:
    """As many texts of each label as are wanted, shuffled; blank ones are drawn again, but for a model that writes
    little else.

    Labels whose prompts are equally long share batches, without padding.
    """
    model.eval()
    left = [label for label, count in enumerate(wanted) for _ in range(count)]
    widths = [len(ids) for ids in before]
    pairs: list[tuple[str, int]] = []
    blank: Counter[int] = Counter()
    bar = tqdm(total=len(left), desc="texts sampled")
    while left:
        left.sort(key=widths.__getitem__)
        width, alike = next(groupby(left, key=widths.__getitem__))
        now = list(islice(alike, at_once))
        left = left[len(now) :]
        ids = torch.tensor([before[label] for label in now], device=model.device)
        with generating(model):
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=recipe.temperature,
                top_p=recipe.top_p, top_k=0, max_new_tokens=recipe.max_length, pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
        texts = tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        for text, label in zip((text.strip() for text in texts), now, strict=True):
            if text or blank[label] >= wanted[label]:
                pairs.append((text, label))
                bar.update()
            else:
                blank[label] += 1
                left.append(label)
    random.Random(0).shuffle(pairs)
    return Texts([text for text, _ in pairs], [label for _, label in pairs])


def main() -> None:
    """Trains, shares a corpus, and then judges it."""
    recipe, arguments, privacy = parse(RecipeArguments)
    recipe.check_method()
    names = public_labels(recipe)
    files = {"train": recipe.train_file, "test": recipe.test_file}
    found = {split: labelled(path, split, recipe, names) for split, path in files.items()}
    train, test = (Texts(found[split]["text"], found[split]["labels"]) for split in files)
    check_batch(arguments, privacy, len(train.texts))
    # As many as the texts that are learnt, where only a few are.
    wanted = counts(shares(recipe.label_frequencies, names), min(recipe.samples, recipe.max_examples or recipe.samples))
    output = Path(str(arguments.output_dir))
    is_private = stays_private(privacy)
    if recipe.draws > 1:
        refuse_choosing_by(recipe.encoder, privacy)
    directory = output / ("corpus" if is_private else "corpus_not_private")
    check_corpus_directory(directory)
    features = None if recipe.encoder is None else encoded_by(recipe.encoder)
    set_seed(arguments.seed)
    model, tokenizer = build(recipe, names, bf16=arguments.bf16)
    before = prompts(tokenizer, names, recipe)
    learnt, held_out = (
        rows(files[split], texts, tokenizer, before, recipe.max_length)
        for split, texts in (("train", train), ("test", test))
    )
    learnt = by_length(learnt)
    few = min(recipe.max_test_examples or len(held_out), len(held_out))
    scored = [i * len(held_out) // few for i in range(few)]
    held_out, groups = held_out.select(scored), found["test"].get("group")

    def make(kind: type[Trainer], **others: Any) -> Trainer:
        collate = DataCollatorForSeq2Seq(tokenizer)
        return kind(
            train_dataset=learnt, eval_dataset=held_out, processing_class=tokenizer, data_collator=collate, **others
        )

    trainer = train_and_report(
        model,
        make,
        lambda trainer: scored_by_loss(trainer, held_out),
        arguments,
        privacy,
        usage=CONTINUE.replace("PROMPT", repr(prompt(names[0], recipe))),
        groups=None if groups is None else [groups[i] for i in scored],
        compare_without_privacy=recipe.compare_without_privacy,
        recipe=recipe,
    )
    if not trainer.is_world_process_zero():
        return
    # How often training drew from the generator depends on its batches.
    set_seed(arguments.seed)
    many = [recipe.draws * count for count in wanted]
    corpus = sampled_corpus(model, tokenizer, before, many, recipe, arguments.per_device_eval_batch_size)
    if recipe.draws > 1 and features is not None:
        corpus = best_draws(corpus, wanted, names, features)
    how = f"temperature {recipe.temperature:g}, top p {recipe.top_p:g}, at most {recipe.max_length} tokens, label "
    how += "frequencies " + ("uniform" if recipe.label_frequencies is None else "public")
    if recipe.draws > 1:
        how += f", one of {recipe.draws} kept by an encoder that was taken to be public, and the names of the labels"
    share(corpus, names, directory, output, recipe.corpus_format, how)
    print(
        f"{len(corpus.texts)} texts in {directory}" + ", which may be shared as it is" * is_private + "; for example:"
    )
    for text, label in list(zip(corpus.texts, corpus.labels, strict=True))[:5]:
        print(f"  {names[label]}: {' '.join(text.split())}")
    # Only now, when nothing can be chosen by it any more.
    quality = judge(corpus, train, test, names, output, features=features, compared=recipe.compared)
    trainer.save_metrics("quality", quality, combined=False)


if __name__ == "__main__":
    main()
