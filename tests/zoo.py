"""Tiny random models of every architecture, head and adapter under test, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from hf_dp.losses import per_example_losses
from hf_dp.per_example.batch import LossFunction
from tests.architectures import AUTO, CLASSIFIER, CONFIGS, FROZEN, IMAGE_TOKEN, SEVERAL_IMAGES, UNTIED, VOCABULARY


def pooled_losses(model: Any, batch: Any) -> Tensor:
    """A loss of one's own: how far each text's embedding is from a number."""
    pooled = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).pooler_output
    return (pooled - batch["labels"][:, None]).square().mean(1)


def loss_of(head: str) -> LossFunction:
    return pooled_losses if head == "text" else per_example_losses


_LABELS: dict[str, dict[str, Any]] = {
    **{head: {"num_labels": 3} for head in ("sequence", "token", "image", "video")},
    "multi_label": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 1, "problem_type": "regression"},
}


def tiny(name: str, head: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A random model in training mode, dropout off, biases and norm weights moved off their initial values.

    LayerDrop and SpecAugment are as in the family's default config; preflight switches them off.
    """
    torch.manual_seed(0)
    kind, values = CONFIGS[name]
    config = AutoConfig.for_model(kind, **{**values, **_LABELS.get(head, {}), **changes})
    for key in vars(config):
        is_dropout = "drop" in key and not key.endswith("layerdrop")
        if is_dropout and isinstance(getattr(config, key), float) and key not in changes:
            setattr(config, key, 0.0)
    model = AUTO[head].from_config(config)
    # Transformers sorts tokens by expert unless told otherwise.
    if name.endswith("batched"):
        model.set_experts_implementation("batched_mm")
    if name.endswith("in a loop"):
        model.set_experts_implementation("eager")
    model = model.text_model if head == "text" else model
    if name in UNTIED and (output := model.get_output_embeddings()) is not None:
        output.weight = nn.Parameter(output.weight.detach().clone())
    for key, p in model.named_parameters():
        p.requires_grad_(name not in FROZEN or FROZEN[name] not in key)
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
    if head == "video":
        frames = torch.randn(size, 4, 3, 8, 8, generator=generator).to(dtype)
        return {"pixel_values": frames, "labels": draw(0, 3, size)}
    ids, mask = draw(3, VOCABULARY, size, length), torch.ones(size, length, dtype=torch.long)
    ids[:, 1] = ids[:, 0]
    for i in range(size):
        kept = length - (i % 3)
        ids[i, kept:], mask[i, kept:] = 0, 0
        if head in CLASSIFIER:
            # Encoder-decoders classify what stands at the one end of text that each example must have.
            ids[i, kept - 1] = 2
    batch = {"input_ids": ids, "attention_mask": mask}
    if head == "choice":
        pair = {name: torch.stack([values, values.roll(1, 1)], 1) for name, values in batch.items()}
        return {**pair, "labels": draw(0, 2, size)}
    labels = ids.masked_fill(mask.eq(0), -100)
    if head == "speech":
        return {"input_features": torch.randn(size, 8, 12, generator=generator).to(dtype), "labels": labels}
    if head == "ctc":
        sound = torch.randn(size, 67, generator=generator).to(dtype)
        mask = (torch.arange(67) < 67 - 10 * (torch.arange(size)[:, None] % 3)).long()
        return {"input_values": sound * mask, "attention_mask": mask, "labels": ids[:, :3] % 7 + 3}
    if head in ("causal_lm", "seq2seq"):
        return {**batch, "labels": labels}
    if head == "masked_lm":
        return {**batch, "labels": ids.masked_fill(draw(0, 2, size, length).eq(0) | mask.eq(0), -100)}
    if head == "token":
        return {**batch, "labels": draw(0, 3, size, length).masked_fill(mask.eq(0), -100)}
    if head == "qa":
        return {**batch, "start_positions": draw(0, 3, size), "end_positions": draw(2, 4, size)}
    if head == "multi_label":
        return {**batch, "labels": draw(0, 2, size, 3).to(dtype)}
    if head in ("regression", "text"):
        return {**batch, "labels": torch.randn(size, generator=generator).to(dtype)}
    return {**batch, "labels": draw(0, 3, size)}


def image_text_batch(
    name: str, size: int = 3, length: int = 7, dtype: torch.dtype = torch.float64, images: int = 2
) -> dict[str, Tensor]:
    """Texts that begin with the tokens of an image, or of so many `images` where the family takes several.

    Image tokens have labels too, but for PaliGemma's: the prefix, which sees itself whole, has none.
    """
    batch = text_batch("causal_lm", size, length, dtype)
    shape, slots = ((size, images), images) if name in SEVERAL_IMAGES else ((size,), 4)
    ids, labels = batch["input_ids"], batch["labels"]
    ids[ids.eq(IMAGE_TOKEN)] = IMAGE_TOKEN + 1
    ids[:, :slots] = IMAGE_TOKEN
    batch["labels"] = ids.where(labels.ne(-100), -100)
    batch["pixel_values"] = torch.randn(*shape, 3, 8, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    if name == "paligemma":
        batch["token_type_ids"] = (torch.arange(length) >= slots).long().expand(size, -1).contiguous()
        batch["labels"] = batch["labels"].masked_fill(batch["token_type_ids"].eq(0), -100)
    return batch


def batches_of(name: str, head: str) -> Callable[[int, int, torch.dtype], dict[str, Tensor]]:
    """Batches for this architecture with this head, of so many examples and positions."""
    return functools.partial(image_text_batch, name) if head == "image_text" else functools.partial(text_batch, head)


_LORA: dict[str, Any] = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.0}
_ALL = {**_LORA, "target_modules": "all-linear"}
_QUERY = {**_LORA, "target_modules": ["q_proj"]}
_PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
# Each method: architecture, kind of PEFT config, its settings.
ADAPTERS: dict[str, tuple[str, type[peft.PeftConfig], dict[str, Any]]] = {
    "LoRA": ("llama", peft.LoraConfig, _ALL),
    "LoRA on Conv1D": ("gpt2", peft.LoraConfig, {**_LORA, "target_modules": ["c_attn", "c_proj", "c_fc"],
                                                 "fan_in_fan_out": True}),
    "LoRA on an embedding": ("llama", peft.LoraConfig, {**_LORA, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA on a tied embedding": ("gpt2", peft.LoraConfig, {**_LORA, "target_modules": ["wte"]}),
    "LoRA on attention beside experts (mixtral)": (
        "mixtral, experts and router frozen", peft.LoraConfig, {**_LORA, "target_modules": ["q_proj", "v_proj"]}),
    "LoRA on attention beside experts (qwen3_moe)": (
        "qwen3_moe, experts and router frozen", peft.LoraConfig, {**_LORA, "target_modules": ["q_proj", "v_proj"]}),
    "LoRA over a bf16 base": ("llama", peft.LoraConfig, _ALL),
    "LoRA on Conv1D over a bf16 base": (
        "gpt2", peft.LoraConfig, {**_LORA, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "LoRA, bias='lora_only'": ("bert", peft.LoraConfig, {**_LORA, "target_modules": ["query", "value"],
                                                         "bias": "lora_only"}),
    "rsLoRA": ("llama", peft.LoraConfig, {**_ALL, "use_rslora": True}),
    "DoRA": ("llama", peft.LoraConfig, {**_ALL, "use_dora": True}),
    "DoRA on Conv1D": ("gpt2", peft.LoraConfig, {**_LORA, "target_modules": ["c_attn", "c_proj"], "use_dora": True,
                                                 "fan_in_fan_out": True}),
    "DoRA on an embedding": ("llama", peft.LoraConfig, {**_LORA, "target_modules": ["embed_tokens"],
                                                        "use_dora": True}),
    "modules_to_save, untied head": ("llama", peft.LoraConfig, {**_QUERY, "modules_to_save": ["lm_head"]}),
    "modules_to_save, embedding and untied head": (
        "llama", peft.LoraConfig, {**_QUERY, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "modules_to_save, tied": ("llama_tied", peft.LoraConfig, {**_QUERY, "modules_to_save": ["embed_tokens"],
                                                              "ensure_weight_tying": True}),
    "trainable_token_indices, untied": ("llama", peft.LoraConfig, {**_QUERY, "trainable_token_indices": [3, 4, 9]}),
    "trainable_token_indices, tied": ("llama_tied", peft.LoraConfig, {**_QUERY, "trainable_token_indices": [3, 4, 9]}),
    "trainable tokens": ("llama_tied", peft.TrainableTokensConfig, {"token_indices": [3, 4, 9]}),
    "IA3": ("llama", peft.IA3Config, {"target_modules": ["k_proj", "v_proj", "down_proj"],
                                      "feedforward_modules": ["down_proj"]}),
    "AdaLoRA": ("llama", peft.AdaLoraConfig, {"init_r": 3, "target_r": 2, "lora_alpha": 6, "total_step": 10,
                                              "target_modules": ["q_proj", "v_proj"]}),
    "LoHa": ("llama", peft.LoHaConfig, {"r": 3, "alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "LoKr": ("llama", peft.LoKrConfig, {"r": 3, "alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "OFT": ("llama", peft.OFTConfig, {"oft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "OFT, exact, one block for all": ("llama", peft.OFTConfig, {
        "oft_block_size": 4, "use_cayley_neumann": False, "block_share": True, "target_modules": ["q_proj", "v_proj"]}),
    "OFT, constrained": ("llama", peft.OFTConfig, {"oft_block_size": 4, "coft": True,
                                                   "target_modules": ["q_proj", "v_proj"]}),
    "FourierFT": ("llama", peft.FourierFTConfig, {"n_frequency": 7, "target_modules": ["q_proj", "v_proj"]}),
    "WaveFT": ("llama", peft.WaveFTConfig, {"n_frequency": 7, "target_modules": ["q_proj", "v_proj"]}),
    "SHiRA": ("llama", peft.ShiraConfig, {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "FRoD": ("llama", peft.FrodConfig, {"target_modules": ["q_proj", "v_proj"]}),
    "RandLora": ("llama", peft.RandLoraConfig, {"r": 3, "randlora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}),
    "UniLoRA": ("llama", peft.UniLoraConfig, {"r": 3, "theta_d_length": 20, "target_modules": ["q_proj", "v_proj"]}),
    "GraLoRA": ("llama", peft.GraloraConfig, {"r": 4, "alpha": 6, "gralora_k": 2, "hybrid_r": 2,
                                              "target_modules": ["q_proj", "v_proj"]}),
    "C3A": ("llama", peft.C3AConfig, {"block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "BOFT": ("llama", peft.BOFTConfig, {"boft_block_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "HRA": ("llama", peft.HRAConfig, {"r": 2, "target_modules": ["q_proj", "v_proj"]}),
    "RoAd": ("llama", peft.RoadConfig, {"group_size": 4, "target_modules": ["q_proj", "v_proj"]}),
    "VBLoRA": ("llama", peft.VBLoRAConfig, {"r": 2, "num_vectors": 5, "vector_length": 4, "topk": 2,
                                           "target_modules": ["q_proj", "v_proj"]}),
    "VeRA": ("llama", peft.VeraConfig, {"r": 3, "target_modules": ["q_proj", "o_proj"]}),
    "LN tuning": ("llama", peft.LNTuningConfig, {}),
    "prompt tuning": ("gpt2", peft.PromptTuningConfig, _PROMPT),
    "prefix tuning": ("gpt2", peft.PrefixTuningConfig, _PROMPT),
    "prefix tuning, projected": ("llama", peft.PrefixTuningConfig, {**_PROMPT, "prefix_projection": True,
                                                                  "encoder_hidden_size": 12}),
    "p-tuning": ("gpt2", peft.PromptEncoderConfig, {**_PROMPT, "encoder_hidden_size": 12}),
    "p-tuning, LSTM": ("gpt2", peft.PromptEncoderConfig, {**_PROMPT, "encoder_hidden_size": 12,
                                                          "encoder_reparameterization_type": "LSTM"}),
}  # fmt: skip


def adapter_head(method: str) -> str:
    return "masked_lm" if ADAPTERS[method][0] == "bert" else "causal_lm"


def has_bf16_base(method: str) -> bool:
    return "bf16" in method


def adapted(method: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """A tiny model with an adapter that is off its initial values, dropout off.

    Args:
        dtype: of everything; where the base is meant to be in bf16, of the adapter alone.
        changes: of the base's config.
    """
    name, kind, options = ADAPTERS[method]
    base = tiny(name, adapter_head(method), torch.bfloat16 if has_bf16_base(method) else dtype, **changes)
    model: nn.Module = peft.get_peft_model(base, kind(**options))
    for p in model.parameters():
        if p.requires_grad or not has_bf16_base(method):
            p.data = p.data.to(dtype)
        if p.requires_grad:
            p.data.add_(0.1 * torch.randn_like(p))
    return model.train()


def with_dropout(model: nn.Module, probability: float = 0.3) -> nn.Module:
    """`model` with dropout wherever it has a place for it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = probability
    return model


def margin_losses(model: Any, batch: Any) -> Tensor:
    """A loss of one's own for language models: how far the likeliest token is above the next."""
    best = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.topk(2).values
    margins = torch.tanh(best[..., 0] - best[..., 1]) * batch["attention_mask"]
    return margins.sum(1) / batch["attention_mask"].sum(1)
