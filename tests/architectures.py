"""Every architecture under test, as small as it goes, and which heads it is tested with: tables."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    AutoModelForVideoClassification,
)

VOCABULARY = 37
AUTO = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    **dict.fromkeys(("sequence", "multi_label", "regression"), AutoModelForSequenceClassification),
    "token": AutoModelForTokenClassification,
    "qa": AutoModelForQuestionAnswering,
    "image": AutoModelForImageClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
    "speech": AutoModelForSpeechSeq2Seq,
    "ctc": AutoModelForCTC,
    "choice": AutoModelForMultipleChoice,
    "text": AutoModel,
    "image_text": AutoModelForImageTextToText,
    "video": AutoModelForVideoClassification,
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
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 24, "d_ff": 40, "d_kv": 6, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TWO_TOWERS: dict[str, Any] = {
    "projection_dim": 12,
    "text_config": {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0,
                    "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {**_TOWER, "image_size": 12, "patch_size": 4, "num_channels": 3},
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    **_TOWER, "vocab_size": VOCABULARY, "pad_token_id": 0, "conv_dim": [8, 8], "conv_kernel": [3, 3],
    "conv_stride": [2, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "mask_time_length": 2,
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
    "phi": ("phi", {**_LLAMA_LIKE, "partial_rotary_factor": 0.67}),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "smollm3": ("smollm3", _LLAMA_LIKE),
    "gpt_bigcode": ("gpt_bigcode", {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4,
                                    "n_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt_oss": ("gpt_oss", {**_LLAMA_LIKE, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "sliding_window": 4}),
    "mamba": ("mamba", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4,
                        "time_step_rank": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "granite": ("granite", _LLAMA_LIKE),
    "stablelm": ("stablelm", {**_LLAMA_LIKE, "partial_rotary_factor": 0.67}),
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
    "t5": ("t5", _T5),
    "flan-t5": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("mt5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("bart", _BART),
    "vit": ("vit", {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "image_size": 12, "patch_size": 4, "num_channels": 3}),
    "swin": ("swin", {"image_size": 12, "patch_size": 2, "window_size": 3, "embed_dim": 8, "depths": [1, 1],
                      "num_heads": [2, 2], "num_channels": 3}),
    "dinov2": ("dinov2", {**_TOWER, "mlp_ratio": 2, "image_size": 12, "patch_size": 4, "num_channels": 3}),
    "whisper": ("whisper", {"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
                            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40,
                            "decoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 6,
                            "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                            "decoder_start_token_id": 1}),
    **{name: (name, _SPEECH) for name in ("wav2vec2", "hubert")},
    "clip": ("clip", _TWO_TOWERS),
    "siglip": ("siglip", _TWO_TOWERS),
}  # fmt: skip
CONFIGS |= {name: (name, {**_LLAMA_LIKE, "head_dim": 6}) for name in ("starcoder2", "nemotron", "glm4")}
CONFIGS["granite_swa"] = ("granite_swa", _LLAMA_LIKE)
CONFIGS |= {name: (name, _BART) for name in ("mbart", "m2m_100", "pegasus", "marian")}
for _name in ("mixtral", "qwen3_moe", "gpt_oss"):
    CONFIGS[f"{_name}, experts batched"] = CONFIGS[_name]
    CONFIGS[f"{_name}, experts in a loop"] = CONFIGS[_name]
for _name in ("mixtral", "qwen3_moe"):
    CONFIGS[f"{_name}, experts and router frozen"] = CONFIGS[_name]
CONFIGS["videomae"] = ("videomae", {**_TOWER, "image_size": 8, "patch_size": 4, "num_frames": 4, "tubelet_size": 2})
CONFIGS["longformer"] = ("longformer", {**_BERT_LIKE, "attention_window": [4, 4], "bos_token_id": 1, "eos_token_id": 2})
CONFIGS["xlnet"] = ("xlnet", {"vocab_size": VOCABULARY, "d_model": 24, "d_inner": 40, "n_layer": 2, "n_head": 4})
CONFIGS["llama4"] = (
    "llama4_text",
    {**_LLAMA_LIKE, "head_dim": 6, "intermediate_size_mlp": 40, "num_local_experts": 4, "interleave_moe_layer_step": 2},
)
# Four patches of an image stand for as many tokens, or (by their scale factor) for one.
IMAGE_TOKEN, _VISION = 3, {**_TOWER, "image_size": 8, "patch_size": 4, "num_channels": 3}
_SEEING: dict[str, Any] = {
    "text_config": {**_LLAMA_LIKE, "model_type": "llama"}, "image_token_id": IMAGE_TOKEN, "pad_token_id": 0,
}  # fmt: skip
SEVERAL_IMAGES = ("idefics3", "smolvlm")
CONFIGS["llava"] = ("llava", {**_SEEING, "vision_config": {**_VISION, "model_type": "clip_vision_model"}})
CONFIGS["paligemma"] = ("paligemma", {
    **_SEEING, "text_config": {**_LLAMA_LIKE, "head_dim": 6, "model_type": "gemma"}, "projection_dim": 24,
    "vision_config": {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
})  # fmt: skip
CONFIGS |= {
    name: (name, {**_SEEING, "scale_factor": 2, "vision_config": {**_VISION, "model_type": f"{name}_vision"}})
    for name in SEVERAL_IMAGES
}
FROZEN = {name: ".mlp." for name in CONFIGS if name.endswith("frozen")}
# Its config cannot say so; a checkpoint with weights of its own for the head does.
UNTIED = ("flan-t5",)

CLASSIFIER = ("sequence", "multi_label", "regression")
_DECODER, _ENCODER = ("causal_lm", *CLASSIFIER, "token", "qa"), ("masked_lm", *CLASSIFIER, "token", "qa", "choice")
HEADS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CONFIGS, _DECODER),
    **dict.fromkeys(
        ("bert", "roberta", "distilbert", "xlm-roberta", "albert", "electra", "deberta-v2", "modernbert", "mpnet"),
        _ENCODER,
    ),
    **dict.fromkeys(("t5", "flan-t5"), ("seq2seq", *CLASSIFIER, "token", "qa")),
    "bart": ("seq2seq", "causal_lm", *CLASSIFIER, "qa"),
    **dict.fromkeys(("mbart", "m2m_100", "pegasus", "marian", "mt5"), ("seq2seq",)),
    **dict.fromkeys(("mamba", "granite_swa"), ("causal_lm",)),
    "whisper": ("speech",),
    **dict.fromkeys(("wav2vec2", "hubert"), ("ctc",)),
    **dict.fromkeys(("vit", "swin", "dinov2"), ("image",)),
    "clip": ("image", "text"),
    "siglip": ("image", "text"),
    "videomae": ("video",),
    **dict.fromkeys(("longformer", "xlnet"), CLASSIFIER),
    "llama4": ("causal_lm",),
    **dict.fromkeys(("llava", "paligemma", *SEVERAL_IMAGES), ("image_text",)),
}
