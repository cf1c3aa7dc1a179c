"""Which parameters embed tokens."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel


def token_tables(model: nn.Module) -> list[Tensor]:
    """The trained token embeddings: what Transformers calls input embeddings, also where PEFT wraps them."""
    found: dict[int, Tensor] = {}
    for base in model.modules():
        if isinstance(base, PreTrainedModel):
            try:
                embedding = base.get_input_embeddings()
            except NotImplementedError:
                continue
            inner = embedding.modules() if isinstance(embedding, nn.Module) else ()
            found |= {id(e.weight): e.weight for e in inner if isinstance(e, nn.Embedding) and e.weight.requires_grad}
    return list(found.values())
