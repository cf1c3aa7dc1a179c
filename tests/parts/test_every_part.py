"""Each part, under what every part must keep."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import nn

from hf_dp import OutputBiasConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.config.asked import EMBEDDING_ROWS, LABEL_PRESENCE, ROW_COUNTS, TOKEN_PRESENCE
from hf_dp.parts.output_bias import OutputBias
from hf_dp.parts.re_attention.part import AttentionNoise
from hf_dp.parts.sparse_embeddings.part import SparseTraining
from hf_dp.parts.table import PARTS
from hf_dp.parts.token_frequencies import TokenFrequencies
from tests.parts.contract import PartContract
from tests.parts.test_output_bias import with_output

OF_ROWS = {"surviving_rows", "gradient_density", "reduction_factor"}


@pytest.mark.slow
class TestReAttention(PartContract):
    kind = AttentionNoise
    settings: ClassVar[dict[str, Any]] = {"re_attention": ReAttentionConfig(token_frequencies="uniform")}
    streams: ClassVar[dict[tuple[str, int | None], str]] = {}
    exact: ClassVar[set[str]] = {"transformer.h.0.attn", "transformer.h.1.attn"}
    refused = ({"sparse_embeddings": SparseEmbeddingConfig()}, {}, "re_attention together with sparse_embeddings")
    file = "re_attention.safetensors"


@pytest.mark.slow
class TestTokenFrequencies(PartContract):
    kind = TokenFrequencies
    settings: ClassVar[dict[str, Any]] = {"re_attention": ReAttentionConfig()}
    streams: ClassVar[dict[tuple[str, int | None], str]] = {("noise", -1): TOKEN_PRESENCE}
    refused = (
        {"re_attention": ReAttentionConfig(token_frequencies="public", public_frequencies="no/such.json")},
        {},
        "public_frequencies",
    )
    file = "re_attention.safetensors"


class TestChosenRows(PartContract):
    kind = SparseTraining
    settings: ClassVar[dict[str, Any]] = {"sparse_embeddings": SparseEmbeddingConfig(method="fest", kept_rows=20)}
    streams: ClassVar[dict[tuple[str, int | None], str]] = {("top-k", None): EMBEDDING_ROWS}
    released = OF_ROWS
    exact: ClassVar[set[str]] = {"false_positives"}
    refused = (
        {"sparse_embeddings": SparseEmbeddingConfig(method="fest", kept_rows=10**6)}, {}, "kept_rows=1000000 of"
    )  # fmt: skip
    file = "sparse_embeddings.safetensors"


class TestAdaptiveRows(PartContract):
    kind = SparseTraining
    settings: ClassVar[dict[str, Any]] = {"sparse_embeddings": SparseEmbeddingConfig(threshold=2.0)}
    streams: ClassVar[dict[tuple[str, int | None], str]] = {
        ("contribution noise", None): ROW_COUNTS,
        ("false positives", None): ROW_COUNTS,
    }
    released = OF_ROWS
    exact: ClassVar[set[str]] = {"false_positives"}
    refused = ({}, {"weight_decay": 0.1}, "weight_decay=0.1 with sparse gradients")


@pytest.mark.slow
class TestOutputBias(PartContract):
    kind = OutputBias
    settings: ClassVar[dict[str, Any]] = {"output_bias": OutputBiasConfig()}
    streams: ClassVar[dict[tuple[str, int | None], str]] = {("noise", -2): LABEL_PRESENCE}
    refused = ({"output_bias": OutputBiasConfig(), "target_epsilon": None, "noise_multiplier": 1.0}, {}, "output_bias")
    file = "output_bias.safetensors"

    def model(self) -> nn.Module:
        return with_output()


def test_every_part_of_the_table_is_under_the_contract() -> None:
    assert {kind.kind for kind in PartContract.__subclasses__()} == set(PARTS.values())
