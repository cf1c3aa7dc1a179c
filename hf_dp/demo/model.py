"""A small GPT-2 and a tokenizer made from public text only; or a pretrained model with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_dp.errors import ConfigurationError
from hf_dp.places import NOT_KEPT, nowhere

END, PADDING = "<|end|>", "<|padding|>"
_POSITIONS = 64
_VOCABULARY = 1024
_RANK = 8


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token, so that all secrets of one length have equally many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=_VOCABULARY,
            special_tokens=[END, PADDING],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PADDING,
        model_max_length=_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, *, width: int, layers: int) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, without dropout."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=_POSITIONS,
        n_embd=width,
        n_layer=layers,
        n_head=width // 32,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # GPT-2's own gelu in one kernel.
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    # Transformers finds no loss type in this class's name; Trainer would count a predicted token too many per message.
    model.loss_type = "ForCausalLM"
    return model


def adapted(folder: Path) -> tuple[Any, Any]:
    """A pretrained language model, frozen in bf16 under new adapters (LoRA), and its tokenizer.

    Args:
        folder: that `save_pretrained` of both wrote.

    Raises:
        ConfigurationError: it cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        found = f"no language model can be loaded from {str(folder)!r} ({said})"
        raise ConfigurationError(
            f"{nowhere(folder, NOT_KEPT) if isinstance(error, OSError) and not folder.exists() else found}.",
            why="adapters are put on a pretrained model, and none is downloaded.",
            fix="run `make model` in a clone of the repository; or name a folder that holds one with its tokenizer: "
            "--model FOLDER.",
        ) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lora = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora), tokenizer
