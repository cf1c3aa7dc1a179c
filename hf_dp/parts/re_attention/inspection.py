"""What the correction does: attention by how frequent the attended token is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.config import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts.re_attention.installed import ReAttention, installed, remove_re_attention


@dataclass(frozen=True)
class AttentionByFrequency:
    """Attention that tokens get, relative to uniform attention, over all layers, heads and queries.

    Attributes:
        frequencies: the mean frequency of the tokens of each bin.
        plain: without the correction.
        corrected: with it.
        noise_free: of the reference model, if there was one.
    """

    frequencies: list[float]
    plain: list[float]
    corrected: list[float]
    noise_free: list[float] | None

    def draw(self, path: str | Path) -> None:
        """Writes a figure."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        lines = {"noise-free": self.noise_free, "private": self.plain, "private, corrected": self.corrected}
        for label, values in lines.items():
            if values is not None:
                axes.plot(self.frequencies, values, marker="o", label=label)
        axes.set(xscale="log", xlabel="share of examples with the token", ylabel="attention / uniform attention")
        axes.legend()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)


@torch.no_grad()
def inspect_attention(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    frequencies: Tensor,
    reference: nn.Module | None = None,
    bins: int = 8,
) -> AttentionByFrequency:
    """Attention by token frequency, with and without the correction, on data that may be looked at.

    Args:
        model: with Re-Attention.
        batches: `input_ids` (B, T) and what else the model takes; not private, or not to be published.
        frequencies: (V,) share of examples that contain each token.
        reference: the same architecture trained without noise.
        bins: of equally many attended positions each.

    Raises:
        ConfigurationError: a model without Re-Attention, or without noise.
    """
    attention = installed(model)
    if attention is None or not attention.errors:
        raise ConfigurationError(
            "a model without Re-Attention, or one whose noise is not known.",
            why="there is no correction to look at.",
            fix="train with PrivacyConfig(re_attention=ReAttentionConfig()), or call hf_dp.load_re_attention.",
        )
    kept = list(batches)
    tokens = torch.cat([frequencies[b["input_ids"].flatten().cpu()] for b in kept])
    edges = torch.quantile(tokens.float(), torch.linspace(0, 1, bins + 1)[1:-1])
    plain, corrected, mean = _received(model, attention, kept, frequencies, edges)
    noise_free = None
    if reference is not None:
        noise_free = _received(
            reference, ReAttention(reference, ReAttentionConfig(token_frequencies="uniform")), kept, frequencies, edges
        )[0]
        remove_re_attention(reference)
    return AttentionByFrequency(mean, plain, corrected, noise_free)


def _received(
    model: nn.Module, attention: ReAttention, batches: list[Any], frequencies: Tensor, edges: Tensor
) -> tuple[list[float], list[float], list[float]]:
    """Without and with the correction, relative to uniform attention, and the mean frequency, for each bin; of one into
    which no token falls, as where many have one frequency, nan."""
    sums = torch.zeros(4, len(edges) + 1, dtype=torch.float64)
    ids: Tensor = torch.empty(0)

    def listen(plain: Tensor, corrected: Tensor) -> None:
        shares = frequencies[ids.cpu()].float()
        if plain.shape[-1] != shares.shape[1]:
            return  # cross attention to something else
        seen = plain.gt(0).double()
        uniform = seen / seen.sum(-1, keepdim=True).clamp_min(1)
        # Queries that see one key alone have no choice.
        chosen = (seen.sum(-1, keepdim=True) > 1).double()
        per_key = [(values.double() * chosen).sum((1, 2)).cpu() for values in (plain, corrected, uniform)]
        where = torch.bucketize(shares, edges)
        for row, values in zip(sums, (*per_key, per_key[2] * shares), strict=True):
            row.index_add_(0, where.flatten(), values.flatten())

    was_training = model.training
    model.eval()
    attention.listener = listen
    try:
        for batch in batches:
            ids = batch["input_ids"]
            model(**batch)
    finally:
        attention.listener = None
        model.train(was_training)
    plain, corrected, uniform, weighted = sums
    return (plain / uniform).tolist(), (corrected / uniform).tolist(), (weighted / uniform).tolist()
