"""Configs of any architecture made small by the names of their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from scripts.batches import VOCABULARY, batch_for
from scripts.rarer_sizes import AS_IT_IS, RARER, TRIED

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
    "mamba_chunk_size": 4,
    "attention_window": 4,
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
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError),
    *(ValueError, StrictDataclassError),
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


def _by_heads(given: Mapping[str, Any]) -> dict[str, Any]:
    """Widths of models in stages that have a number of heads for each: narrow, and whole numbers of heads."""
    heads = next((given[name] for name in _HEADS if _are_whole(given.get(name))), None)
    width = given.get("embed_dim")
    if heads is None or width is None:
        return {}
    narrow = heads[0] * _NARROWEST if isinstance(width, int) else [one * _NARROWEST for one in heads]
    return {"embed_dim": narrow, "hidden_size": AS_IT_IS}


def _smaller(config: Any, left: tuple[str, ...], tried: Mapping[str, Any]) -> dict[str, Any]:
    """The same by rarer names too, and with what is tried, where the config has such a setting."""
    given = config.to_dict()
    rarer = {name: size for name, size in RARER.items() if name in given}
    pairs = {"attention_types": [[kinds, 1] for kinds, _ in given.get("attention_types") or ()]}
    depth = {"depth": list(range(1, len(given["depth"]) + 1))} if _are_whole(given.get("depth")) else {}
    channels = [name for name, value in given.items() if name.startswith("st") and name.endswith("_channels")]
    channels = [name for name in channels if _are_whole(given[name])]
    narrow = {
        name: [n // 16 if n > 16 else n for n in given[name]] for name in channels and (*channels, "hidden_sizes")
    }
    chosen = {name: size for name, size in tried.items() if name in given}
    settings = {**_small(config, left), **rarer, **_by_heads(given), **(pairs if pairs["attention_types"] else {})}
    settings |= {**depth, **narrow, **chosen}
    return {name: size for name, size in settings.items() if size is not AS_IT_IS and not _is_fixed(config, name)}


def _is_fixed(config: Any, name: str) -> bool:
    held = getattr(type(config), config.attribute_map.get(name, name), None)
    return isinstance(held, property) and held.fset is None


def small_config(kind: type, left: tuple[str, ...], tried: Mapping[str, Any] | None = None) -> Any:
    """One of this kind with two layers, or one of each type, as narrow as names tell."""
    usual: Any = kind()

    def made_small(config: Any) -> dict[str, Any]:
        settings = _small(config, left) if tried is None else _smaller(config, left, tried)
        for name in getattr(type(config), "sub_configs", {}) if tried is not None or config is usual else ():
            if name not in (tried or ()) and hasattr(part := getattr(config, name, None), "to_dict"):
                settings[name] = {**made_small(part), **({} if tried is None else {"model_type": part.model_type})}
        return settings

    settings, types = made_small(usual), getattr(usual, "layer_types", None)
    if types and "layer_types" not in left and not (tried is not None and _is_fixed(usual, "layer_types")):
        each = list(dict.fromkeys((tried or {}).get("layer_types", types)))
        settings["layer_types"] = each = each * 2 if len(each) == 1 else each
        settings |= {name: len(each) for name in _DEEP if name in settings}
    return kind(**settings)


def small_model(kind: type, config_kind: type, head: str) -> nn.Module:
    """A small model of this kind, in float32, that computes a loss of a batch for `head`.

    Raises:
        NotMadeError: with what went wrong at last.
    """
    reason: Exception = NotMadeError("no config")
    for left, tried in (*((left, None) for left in LEFT), *TRIED):
        try:
            torch.manual_seed(0)
            config = small_config(config_kind, left, tried)
            if head == "segmentation":
                config.use_auxiliary_head = (tried or {}).get("use_auxiliary_head", False)
            model: Any = kind(config)
            if sum(p.numel() for p in model.parameters()) > _LARGEST:
                raise NotMadeError("it stays large")
            for settings in (model.config, model.config.get_text_config()):
                for name in ("pad_token_id", "decoder_start_token_id"):
                    if getattr(settings, name, None) is None:
                        setattr(settings, name, SIZES[name])
            with torch.no_grad():
                loss = model.eval()(**batch_for(head, model, 2)).loss
            if not loss.isfinite():
                raise NotMadeError("its loss is not finite")
            return model
        except FAILURES as error:
            reason = error
    raise NotMadeError(f"{type(reason).__name__}: {reason}".splitlines()[0][:160]) from reason
