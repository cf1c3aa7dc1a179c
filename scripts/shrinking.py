"""Configs of any architecture made small by the names of their sizes, and batches for what they are the heads of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

VOCABULARY = 40
_WIDE = (
    *("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "word_embed_proj_dim", "embedding_size"),
    *("dense_size", "lru_width", "attention_hidden_size"),
)
_DEEP = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers"),
)
_INNER = (
    *("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("ffn_hidden_size", "intermediate_size_mlp"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
)
_LONG = (
    *("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_target_positions"),
    *("max_source_positions", "max_sequence_length"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_THIN = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    *("q_lora_rank", "kv_lora_rank"),
)
#: name of a setting -> what it is in a small model.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(_WIDE, 32),
    **dict.fromkeys(_DEEP, 2),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_LONG, 64),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_THIN, 16),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "mamba_d_head", "mamba_n_heads", "mamba_d_state"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id", "decoder_start_token_id"), 1),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "index_topk": 4,
    "index_head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 8,
    "attention_window_size": 16,
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
# Of models in stages: how many layers each has, and how wide each is, of which the heads are parts.
_STAGES, _WIDTHS, _NARROWEST = ("depths", "encoder_depths"), ("hidden_sizes", "embed_dims", "encoder_hidden_sizes"), 8
#: What is left as the config has it, in turn, until a model comes of it; UNSET: what has no value is given one.
UNSET = "what is unset is set"
LEFT = (
    (),
    ("layer_types",),
    ("head_dim",),
    ("head_dim", "layer_types"),
    ("head_dim", "layer_types", "num_heads"),
    ("layer_types", "num_heads", "mamba_d_head", "mamba_n_heads"),
    ("num_key_value_heads", "layer_types", "hidden_dim"),
    ("num_hidden_layers", "layer_types"),
    (UNSET,),
    (UNSET, "head_dim"),
)
_LARGEST = 8_000_000
#: Of configs and models that names do not make small.
FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


class NotMadeError(ValueError):
    """No small model comes of a config by the names of its settings."""


def _small(config: Any, left: tuple[str, ...]) -> dict[str, Any]:
    given = {name: value for name, value in config.to_dict().items() if value is not None or UNSET in left}
    off = {name: 0.0 for name, value in given.items() if "drop" in name and isinstance(value, float)}

    def fits(name: str, size: Any) -> bool:
        is_alike = given.get(name) is None or isinstance(size, int) == isinstance(given[name], int)
        return name in given and name not in left and is_alike

    stages = {name: [1] * len(given[name]) for name in _STAGES if name not in left and _are_whole(given.get(name))}
    for name in _WIDTHS:
        if name not in left and _are_whole(widths := given.get(name)):
            stages[name] = [width * _NARROWEST // math.gcd(*widths) for width in widths]
    return {**off, **stages, **{name: size for name, size in SIZES.items() if fits(name, size)}}


def _are_whole(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, int) for one in value)


def small_config(kind: type, left: tuple[str, ...]) -> Any:
    """One of this kind with two layers, or one of each type, as narrow as names tell."""
    usual: Any = kind()
    settings, types = _small(usual, left), getattr(usual, "layer_types", None)
    if types and "layer_types" not in left:
        each = list(dict.fromkeys(types))
        settings["layer_types"] = each = each * 2 if len(each) == 1 else each
        settings |= {name: len(each) for name in _DEEP if name in settings}
    for name in getattr(kind, "sub_configs", {}):
        if getattr(usual, name, None) is not None:
            settings[name] = _small(getattr(usual, name), left)
    return kind(**settings)


def small_model(kind: type, config_kind: type, head: str) -> nn.Module:
    """A small model of this kind, in float32, that computes a loss of a batch for `head`.

    Raises:
        NotMadeError: with what went wrong at last.
    """
    reason: Exception = NotMadeError("no config")
    for left in LEFT:
        try:
            torch.manual_seed(0)
            config = small_config(config_kind, left)
            if head == "segmentation":
                config.use_auxiliary_head = False
            model: Any = kind(config)
            if sum(p.numel() for p in model.parameters()) > _LARGEST:
                raise NotMadeError("it stays large")
            for settings in (model.config, model.config.get_text_config()):
                for name in ("pad_token_id", "decoder_start_token_id"):
                    if getattr(settings, name, None) is None:
                        setattr(settings, name, SIZES[name])
            with torch.no_grad():
                loss = model.eval()(**batch_for(head, config, 2)).loss
            if not loss.isfinite():
                raise NotMadeError("its loss is not finite")
            return model
        except FAILURES as error:
            reason = error
    raise NotMadeError(f"{type(reason).__name__}: {reason}".splitlines()[0][:160])


def batch_for(
    head: str, config: Any, size: int, length: int = 12, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Rows that differ, with labels; texts of one length, each with an end."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def ids(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (size, length), generator=generator)

    classes = torch.arange(size) % 2
    side = getattr(config, "image_size", 32)
    height, width = (side, side) if isinstance(side, int) else side
    channels = getattr(config, "num_channels", 3)
    if head == "image":
        return {"pixel_values": draw(size, channels, height, width), "labels": classes}
    if head == "segmentation":
        labels = (draw(size, height, width) > 0).long()
        return {"pixel_values": draw(size, channels, height, width), "labels": labels}
    if head == "video":
        frames = draw(size, getattr(config, "num_frames", 8), channels, height, width)
        return {"pixel_values": frames, "labels": classes}
    if head == "audio":
        return {"input_values": draw(size, 400), "labels": classes}
    text = ids(length)
    batch: dict[str, Any] = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    if head in ("causal_lm", "masked_lm"):
        return {**batch, "labels": text.clone()}
    if head == "seq2seq":
        return {**batch, "labels": ids(7)}
    text[:, -1] = 2
    if head == "token":
        return {**batch, "labels": text % 2}
    if head == "qa":
        return {**batch, "start_positions": classes, "end_positions": classes + 2}
    return {**batch, "labels": classes}
