"""A small tied GPT-2 over characters, trained privately from scratch on one text file cut into passages.

The privacy unit is a passage of `passage_length` characters. The alphabet is public: printable ASCII.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import parse
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, set_seed

from hf_dp import DPTrainer

ALPHABET = string.printable


@dataclass
class RecipeArguments:
    """What the recipe trains on, and the size of its model."""

    text_file: str = field(metadata={"help": "A text file; this is the private data."})
    passage_length: int = 128
    evaluation_share: float = field(default=0.1, metadata={"help": "The last part of the text, held out."})
    width: int = 128
    layers: int = 2
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})


def passages(text: str, recipe: RecipeArguments) -> Dataset:
    """`text` as rows of `passage_length` characters; characters outside the alphabet are left out."""
    length = recipe.passage_length
    ids = torch.tensor([ALPHABET.index(c) for c in text if c in ALPHABET])
    rows = ids[: len(ids) // length * length].view(-1, length)[: recipe.max_examples]
    return Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")


def main() -> None:
    """Trains, then prints evaluation losses, a sample and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    text = Path(recipe.text_file).read_text(encoding="utf-8")
    cut = int(len(text) * (1 - recipe.evaluation_share))
    config = GPT2Config(
        vocab_size=len(ALPHABET), n_positions=recipe.passage_length, n_embd=recipe.width, n_layer=recipe.layers,
        n_head=recipe.width // 32, bos_token_id=0, eos_token_id=0, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    set_seed(arguments.seed)
    model = GPT2LMHeadModel(config)
    trainer = DPTrainer(
        model=model,
        args=arguments,
        train_dataset=passages(text[:cut], recipe),
        eval_dataset=passages(text[cut:], recipe),
        data_collator=default_data_collator,
        privacy=privacy,
    )
    print("evaluation loss before:", trainer.evaluate()["eval_loss"])
    trainer.train()
    print("evaluation loss after:", trainer.evaluate()["eval_loss"])
    prompt = torch.tensor([[ALPHABET.index(c) for c in "ROMEO:\n"]])
    sample = model.generate(prompt, max_new_tokens=80, do_sample=True, temperature=0.8, pad_token_id=0)
    print("".join(ALPHABET[i] for i in sample[0].tolist()))
    print(trainer.privacy_report())
    trainer.save_model()


if __name__ == "__main__":
    main()
