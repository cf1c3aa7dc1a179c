"""Private gradients of embedding tables that stay sparse: DP-FEST and DP-AdaFEST."""

from hf_dp.parts.sparse_embeddings.contributions import ContributionSum
from hf_dp.parts.sparse_embeddings.optimizer import LazyRows, RowWiseAdam, with_lazy_rows
from hf_dp.parts.sparse_embeddings.selection import AdaptiveSelection, Survivors
from hf_dp.parts.sparse_embeddings.table_rows import TableRows
from hf_dp.parts.sparse_embeddings.tables import find_tables
from hf_dp.parts.sparse_embeddings.top_k import gumbel_scale, noisy_top_k

__all__ = [
    "AdaptiveSelection",
    "ContributionSum",
    "LazyRows",
    "RowWiseAdam",
    "Survivors",
    "TableRows",
    "find_tables",
    "gumbel_scale",
    "noisy_top_k",
    "with_lazy_rows",
]
