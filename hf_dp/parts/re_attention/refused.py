"""What noise cannot be followed through, refused before a pass."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.parts.embeddings import token_tables


def refuse_copies(module: nn.Module) -> None:
    """Of parameters that are copied, or merged into others, the noise would be lost."""
    if getattr(module, "_is_replica", False):
        raise UnsupportedModelError(
            "a replica of torch.nn.DataParallel.",
            why="its parameters are copies, and their noise is not known.",
            fix="use one device, or call hf_dp.remove_re_attention(model) first.",
        )
    if any(getattr(part, "merged", False) is True for part in module.modules()):
        raise UnsupportedModelError(
            "adapters that are merged into the weights they adapt.",
            why="the correction would leave out the noise of the adapters.",
            fix="call model.unmerge_adapter(), or hf_dp.remove_re_attention(model).",
        )


def refuse_embedded(model: nn.Module, noisy: Collection[str]) -> None:
    """Embeddings from outside, where those of the model are noisy."""
    ids = {id(p) for name, p in model.named_parameters() if name in noisy}
    if any(id(p) in ids for p in token_tables(model)):
        raise UnsupportedModelError(
            "inputs_embeds from outside the model, whose token embedding is noisy.",
            why="the correction would leave out the noise of the embeddings.",
            fix="give input_ids, or call hf_dp.remove_re_attention(model) first.",
        )


def refuse_encoded(model: nn.Module, module: Any, noisy: Collection[str]) -> None:
    """What an encoder said, from outside, where the encoder of `module` is noisy."""
    ids = {id(p) for name, p in model.named_parameters() if name in noisy}
    if any(id(p) in ids for p in module.get_encoder().parameters()):
        raise UnsupportedModelError(
            "encoder_outputs that were made, copied or repeated outside the model, whose encoder is noisy.",
            why="the correction would leave out the noise of what the encoder said.",
            fix="give input_ids, repeated for more answers in place of num_return_sequences or num_beams, or call "
            "hf_dp.remove_re_attention(model) first.",
        )
