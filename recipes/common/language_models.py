"""Small causal language models from scratch, whose alphabet no text had a part in."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def characters() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character."""
    names = ["<unk>", "<pad>", "<eos>", *string.printable]
    made = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def small_gpt2(tokenizer: Any, *, positions: int, width: int, layers: int) -> GPT2LMHeadModel:
    """One with random weights and without dropout.

    Args:
        width: of the hidden states; a head for each 32 of them.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=positions, n_embd=width, n_layer=layers, n_head=max(1, width // 32),
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)
