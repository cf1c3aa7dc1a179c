"""Settings of the rarer architectures, tried in turn where the usual names of sizes make no small model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AS_IT_IS = object()
#: name of a setting -> what it is in a small model, where a config has it.
RARER: Mapping[str, Any] = {
    **dict.fromkeys(("emb_dim", "entity_emb_size", "d_latents", "pred_hidden_size", "qk_channels", "v_channels"), 32),
    **dict.fromkeys(("src_vocab_size", "tgt_vocab_size", "entity_vocab_size"), 40),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("visual_feat_dim", "fusion_hidden_size", "router_hidden_size", "classifier_proj_size"), 16),
    **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size", "feature_projection_input_dim"), 16),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "linear_head_dim", "stem_out_channels"), 8),
    **dict.fromkeys(("linear_num_heads", "num_groups", "pred_num_attention_heads", "frames_per_clip"), 4),
    **dict.fromkeys(("l_layers", "x_layers", "r_layers", "num_self_attends_per_block", "num_dense_layers"), 2),
    **dict.fromkeys(("n_shared_experts", "pred_num_hidden_layers", "num_pooler_layers"), 1),
    **dict.fromkeys(("frequency_stride", "time_stride"), 4),
    **dict.fromkeys(("num_first_full_attention_layers", "num_last_full_attention_layers"), 1),
    **dict.fromkeys(("num_key_value_attention_heads", "num_register_tokens"), 2),
    "coordinate_size": 6,
    "shape_size": 4,
    "num_latents": 8,
    "num_patches": 16,
    "input_size": 32,
    "crop_size": 32,
    "conv_depthwise_kernel_size": 3,
    "width_coefficient": 0.25,
    "depth_coefficient": 0.2,
    "neck_hidden_sizes": (8, 8, 16, 16),
    "question_token_id": 4,
    "default_language": "en_XX",
    "moe_topk": 2,
    "zero_expert_num": 2,
    "attn_layer_indices": [1],
    "key_dim": [4, 4, 4],
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "model_max_length": 64,
    "use_cache": False,
    "width_multiplier": 0.25,
    "aspp_out_channels": 16,
    "attn_layers": ("local", "lsh"),
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 4,
    "axial_pos_shape": (3, 4),
    "axial_pos_embds_dim": (16, 16),
    "attention_head_size": 8,
    "feed_forward_size": 48,
}
# Features of four layers.
_FOUR = {"image_size": 64, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "backbone_out_indices": [0, 1, 2, 3]}
_HEAD = {
    "upsample_out_channels": [8, 8],
    "conv_out_channels": [8, 8],
    "upsample_kernel_sizes": [4, 4],
    "conv_kernel_sizes": [1, 1],
}
_MIXTURE = {
    "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
}
#: (names whose usual small sizes do not fit, settings of kinds of architectures that only go together).
TRIED: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...] = (
    (("layer_types",), {"layer_types": ["linear_attention", "full_attention"]}),
    (("layer_types",), {"layer_types": ["conv", "full_attention"]}),
    # Windows are shifted in every second layer of a stage, and no wider than a picture is in the last stage.
    (("patch_size",), {"image_size": 64, "window_size": 2, "depths": [1, 2, 1, 2]}),
    (("patch_size",), {"image_size": 64}),
    ((), {}),
    (
        ("head_dim", "attention_hidden_size", "layer_types"),
        {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    ),
    (("layer_types",), {"num_heads": 8, "n_groups": 2}),
    ((), {"num_experts_per_tok": 1}),
    ((), {"n_routed_experts": 4, "num_experts_per_tok": 2}),
    # Boxes are embedded in sixths, or in eighths by sines and cosines.
    ((), {"hidden_size": 192}),
    (("patch_size",), {"image_size": 64, "hidden_dim": 320}),
    (("patch_size",), _FOUR),
    (("patch_size",), {**_FOUR, "use_auxiliary_head": True}),
    ((), {"is_decoder": True}),
    ((), {"num_key_value_heads": 4, "head_dim": 4}),
    ((), {"hidden_size": 128}),
    ((), _MIXTURE),
    ((), {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}}}),
    (("patch_size",), {**_FOUR, "reshape_hidden_states": False}),
    (("patch_size",), {"image_size": 64, "head_config": _HEAD}),
    ((), {"image_size": 36, "num_frames": 2, "num_spatial_layers": 1, "num_temporal_layers": 1}),
)
