"""Batches of random rows for a model of any architecture, by its head and by what its forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 40


class _Rows:
    """Rows that differ, from one seed."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self.size, self._dtype = size, dtype

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(self.size, *shape, generator=self._generator).to(self._dtype)

    def ids(self, length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (self.size, length), generator=self._generator)

    def boxes(self, length: int) -> Tensor:
        """x0, y0, x1, y1, on pages of 1000 x 1000."""
        corners = torch.randint(0, 500, (self.size, length, 2), generator=self._generator)
        sides = torch.randint(1, 500, (self.size, length, 2), generator=self._generator)
        return torch.cat([corners, corners + sides], -1)


def _named(config: Any, *names: str, default: int) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def _sides(config: Any) -> tuple[int, int]:
    side = _named(config, "image_size", "crop_size", default=32)
    height, width = (side, side) if isinstance(side, int) else side
    return height, width


def _pictures(rows: _Rows, model: nn.Module, takes: Any, config: Any) -> dict[str, Any]:
    channels = _named(config, "num_channels", default=3)
    if "spatial_shapes" in takes:
        config = config.vision_config
        side = int(config.num_patches**0.5)
        return {
            "pixel_values": rows.draw(side * side, config.num_channels * config.patch_size**2),
            "pixel_attention_mask": torch.ones(rows.size, side * side, dtype=torch.long),
            "spatial_shapes": torch.full((rows.size, 2), side),
        }
    if model.main_input_name == "input_ids" and "pixel_values" not in takes:
        return {"input_ids": rows.ids(16)}
    name = "inputs" if "pixel_values" not in takes else "pixel_values"
    return {name: rows.draw(channels, *_sides(config))}


def _sounds(rows: _Rows, model: nn.Module, config: Any) -> dict[str, Any]:
    if model.main_input_name == "input_features" and hasattr(config, "feature_projection_input_dim"):
        return {"input_features": rows.draw(12, config.feature_projection_input_dim)}
    if hasattr(config, "frequency_stride"):
        return {"input_values": rows.draw(config.max_length, config.num_mel_bins)}
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return {"input_features": rows.draw(config.num_mel_bins, 2 * config.max_source_positions)}
    return {"input_values": rows.draw(400)}


def _beside_texts(rows: _Rows, takes: Any, config: Any, length: int) -> dict[str, Any]:
    """What some models are told of a text, or beside it, and do not do without."""
    beside: dict[str, Any] = {}
    if "bbox" in takes:
        boxes = rows.boxes(length)
        beside["bbox"] = boxes if hasattr(config, "max_2d_position_embeddings") else boxes / 1000
    if "bbox" in takes and "pixel_values" in takes:
        beside["pixel_values"] = rows.draw(config.num_channels, config.input_size, config.input_size)
    if "visual_feats" in takes:
        beside["visual_feats"] = rows.draw(4, config.visual_feat_dim)
        beside["visual_pos"] = rows.draw(4, config.visual_pos_dim)
    return beside


def batch_for(head: str, model: Any, size: int, length: int = 12, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Rows that differ, with labels; texts of one length, each with an end."""
    config: Any = model.config
    takes = inspect.signature(model.forward).parameters
    rows = _Rows(size, dtype)
    classes = torch.arange(size) % 2
    if head == "image":
        return {**_pictures(rows, model, takes, config), "labels": classes}
    if head == "segmentation":
        labels = (rows.draw(*_sides(config)) > 0).long()
        return {"pixel_values": rows.draw(_named(config, "num_channels", default=3), *_sides(config)), "labels": labels}
    if head == "video":
        frames = _named(config, "num_frames", "frames_per_clip", default=8)
        name = "pixel_values_videos" if "pixel_values_videos" in takes else "pixel_values"
        return {name: rows.draw(frames, _named(config, "num_channels", default=3), *_sides(config)), "labels": classes}
    if head == "audio":
        return {**_sounds(rows, model, config), "labels": classes}
    text = rows.ids(length)
    batch: dict[str, Any] = {"inputs" if "input_ids" not in takes else "input_ids": text}
    batch["attention_mask"] = torch.ones_like(text)
    if hasattr(config, "num_image_with_embedding"):  # a text is its own beside a picture alone
        batch["pixel_values"] = rows.draw(config.vision_config.num_channels, *_sides(config.vision_config))
    if head in ("causal_lm", "masked_lm"):
        return {**batch, "labels": text.clone()}
    if head == "seq2seq":
        batch["labels"] = labels = rows.ids(7) if config.is_encoder_decoder else text.clone()
        if hasattr(config, "langs"):  # it shifts no labels by itself; collators do
            batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
        return batch
    text[:, -1] = 2
    batch |= _beside_texts(rows, takes, config, length)
    if head == "token":
        return {**batch, "labels": text % 2}
    if head == "qa" and "global_attention_mask" in takes:  # else they look for marks between question and text
        batch["global_attention_mask"] = (torch.arange(length) < 6).long().repeat(size, 1)
    if head == "qa" and "start_positions" in takes:
        return {**batch, "start_positions": classes, "end_positions": classes + 2}
    return {**batch, "labels": classes}
