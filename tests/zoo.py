"""Tiny random models of every architecture under test, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

VOCABULARY = 37
_AUTO = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
    "image": AutoModelForImageClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40,
                      "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("llama", _LLAMA_LIKE),
    "llama_tied": ("llama", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "mistral": ("mistral", _LLAMA_LIKE),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 6}),
    "gemma2": ("gemma2", {**_LLAMA_LIKE, "head_dim": 6}),
    "gemma3": ("gemma3_text", {**_LLAMA_LIKE, "head_dim": 6}),
    "phi3": ("phi3", _LLAMA_LIKE),
    "opt": ("opt", {"vocab_size": VOCABULARY, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "max_position_embeddings": 40, "word_embed_proj_dim": 24,
                    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_neox": ("gpt_neox", {**_LLAMA_LIKE}),
    "bert": ("bert", _BERT_LIKE),
    "roberta": ("roberta", {**_BERT_LIKE, "bos_token_id": 1, "eos_token_id": 2}),
    "distilbert": ("distilbert", {"vocab_size": VOCABULARY, "dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4,
                                  "max_position_embeddings": 40, "pad_token_id": 0}),
    "gpt_neo": ("gpt_neo", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_layers": 2, "num_heads": 4,
                            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 40,
                            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gptj": ("gptj", {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40,
                      "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 4, "pad_token_id": 0,
                        "bos_token_id": 1, "eos_token_id": 2}),
    "falcon": ("falcon", {**_LLAMA_LIKE, "new_decoder_architecture": False, "multi_query": True}),
    "gemma": ("gemma", {**_LLAMA_LIKE, "head_dim": 6}),
    "phi": ("phi", {**_LLAMA_LIKE, "hidden_size": 32}),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "smollm3": ("smollm3", _LLAMA_LIKE),
    "granite": ("granite", _LLAMA_LIKE),
    "stablelm": ("stablelm", {**_LLAMA_LIKE, "hidden_size": 32, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", _LLAMA_LIKE),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA_LIKE, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 16}),
    "xlm-roberta": ("xlm-roberta", {**_BERT_LIKE, "bos_token_id": 1, "eos_token_id": 2}),
    "albert": ("albert", {**_BERT_LIKE, "embedding_size": 12}),
    "electra": ("electra", {**_BERT_LIKE, "embedding_size": 12}),
    "deberta-v2": ("deberta-v2", {**_BERT_LIKE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                                  "position_biased_input": False}),
    "modernbert": ("modernbert", {**_BERT_LIKE, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
                                  "eos_token_id": 2}),
    "mpnet": ("mpnet", {**_BERT_LIKE, "bos_token_id": 1, "eos_token_id": 2}),
    "t5": ("t5", {"vocab_size": VOCABULARY, "d_model": 24, "d_ff": 40, "d_kv": 6, "num_layers": 2, "num_heads": 4,
                  "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}),
    "bart": ("bart", {"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
                      "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
                      "decoder_ffn_dim": 40, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1,
                      "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}),
    "vit": ("vit", {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "image_size": 12, "patch_size": 4, "num_channels": 3}),
}  # fmt: skip


def tiny(name: str, head: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A random model in training mode, dropout off, biases and norm weights moved off their initial values."""
    torch.manual_seed(0)
    kind, values = CONFIGS[name]
    labels = {"num_labels": 3} if head in ("sequence", "token", "image") else {}
    config = AutoConfig.for_model(kind, **{**values, **labels, **changes})
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float) and key not in changes:
            setattr(config, key, 0.0)
    model = _AUTO[head].from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not changes:
            module.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype).train()


def text_batch(head: str, size: int = 3, length: int = 7, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random ids, right padding of different lengths, labels for `head`."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if head == "image":
        images = torch.randn(size, 3, 12, 12, generator=generator).to(dtype)
        return {"pixel_values": images, "labels": draw(0, 3, size)}
    ids, mask = draw(3, VOCABULARY, size, length), torch.ones(size, length, dtype=torch.long)
    ids[:, 1] = ids[:, 0]
    for i in range(size):
        kept = length - (i % 3)
        ids[i, kept:], mask[i, kept:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if head in ("causal_lm", "seq2seq"):
        return {**batch, "labels": ids.masked_fill(mask.eq(0), -100)}
    if head == "masked_lm":
        return {**batch, "labels": ids.masked_fill(draw(0, 2, size, length).eq(0) | mask.eq(0), -100)}
    if head == "token":
        return {**batch, "labels": draw(0, 3, size, length).masked_fill(mask.eq(0), -100)}
    if head == "qa":
        return {**batch, "start_positions": draw(0, 3, size), "end_positions": draw(2, 4, size)}
    return {**batch, "labels": draw(0, 3, size)}
