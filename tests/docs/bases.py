"""What the tutorials load from the hub, tiny and random, and with how little of everything they are run here."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.hub.server import Hub
from tests.training.workbench import a_chat_tokenizer, a_tokenizer
from tests.zoo import tiny

LANGUAGE_MODEL, ENCODER = "HuggingFaceTB/SmolLM2-135M-Instruct", "sentence-transformers/all-MiniLM-L6-v2"
QUICK = {
    "README": {"num_train_epochs=10": "num_train_epochs=1"},
    "tutorial": {
        "max_steps=16": "max_steps=3",
        "letters(4000,": "letters(200,",
        "max_new_tokens=40": "max_new_tokens=9",
    },
    "classifier": {"max_steps=30": "max_steps=3", "dataset(2000,": "dataset(600,", "dataset(200,": "dataset(20,"},
}


def quickly(page: str, text: str) -> str:
    """The text of a page with less of everything."""
    for whole, part in QUICK[page].items():
        assert whole in text, whole
        text = text.replace(whole, part)
    return text


def publish_bases(hub: Hub, page: str, text: str, folder: Path) -> None:
    """Puts on the hub what a page starts from, with a tokenizer for the words of its text; README has a model."""
    if page == "README":
        return
    if page == "tutorial":
        tokenizer = a_chat_tokenizer([text])
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 1}
        size = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_hidden_layers": 1}
        model, name = tiny("llama", "causal_lm", torch.float32, **size, **ids), LANGUAGE_MODEL
    else:
        tokenizer = a_tokenizer(set(re.findall(r"\w+", text)))
        size = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
        model, name = tiny("bert", "sequence", torch.float32, **size).base_model, ENCODER
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    hub.publish(name, folder)
