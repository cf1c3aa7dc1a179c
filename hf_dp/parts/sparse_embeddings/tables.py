"""Which parameters are embedding tables: found by what the model does with them, or named by the user."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.parts.embeddings import token_tables
from hf_dp.per_example.rule import Use

# A smaller table gains nothing worth a lazy optimizer.
_SMALLEST = 1000
_LOOKUP = "embedding"


def find_tables(model: nn.Module, uses: Iterable[Use], names: Collection[str] | None) -> dict[str, nn.Parameter]:
    """The embedding tables whose private gradient can be sparse, by the names of their parameters.

    Args:
        model: with its trainable parameters.
        uses: which operations use which parameters.
        names: of the tables; None to look for them: what Transformers calls input embeddings, or, in a model without
            these, tables of at least 1000 rows that are looked up by what is in the batch.

    Raises:
        ConfigurationError: a name of no trained matrix.
        UnsupportedModelError: no table, a tied output embedding, LoRA around a table, position embeddings by name.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    used: dict[str, set[Use]] = {}
    for use in uses:
        used.setdefault(use.parameter, set()).add(use)
    wrapped = [name for name in trained if "lora_embedding_" in name]
    if wrapped:
        raise UnsupportedModelError(
            f"sparse embeddings, and LoRA around an embedding ({wrapped[0]}).",
            why="its factors have a column for each row of the table, and a gradient that is dense in the other one.",
            fix="leave the embedding out of LoRA's target_modules and train it whole (modules_to_save), or leave "
            "sparse_embeddings out: adapters are small already.",
        )
    found = _named(trained, names) if names is not None else _looked_for(model, trained, used)
    if not found:
        raise UnsupportedModelError(
            "sparse embeddings, and no trained embedding table was found.",
            why="there is no gradient that could be sparse.",
            fix="unfreeze the input embeddings (requires_grad_(True)), name the tables "
            "(SparseEmbeddingConfig(tables=...)), or leave sparse_embeddings out.",
        )
    for name in found:
        _check(name, used.get(name, set()))
    return found


def _named(trained: dict[str, nn.Parameter], names: Collection[str]) -> dict[str, nn.Parameter]:
    for name in names:
        if name not in trained or trained[name].dim() != 2:
            matrices = [n for n, p in trained.items() if p.dim() == 2]
            raise ConfigurationError(
                f"SparseEmbeddingConfig(tables=...) names {name!r}.",
                why="the model trains no matrix of that name; a tied parameter has the first of its names.",
                fix=f"name one of {', '.join(matrices[:8])}{', ...' if len(matrices) > 8 else ''}.",
            )
    return {name: p for name, p in trained.items() if name in names}


def _looked_for(
    model: nn.Module, trained: dict[str, nn.Parameter], used: dict[str, set[Use]]
) -> dict[str, nn.Parameter]:
    inputs = {id(p) for p in token_tables(model)}
    if inputs:
        return {name: p for name, p in trained.items() if id(p) in inputs}
    return {
        name: p
        for name, p in trained.items()
        if p.dim() == 2
        and len(p) >= _SMALLEST
        and any(use.operation == _LOOKUP and use.reading != "constant" for use in used.get(name, ()))
    }


def _check(name: str, uses: set[Use]) -> None:
    others = sorted({use.operation for use in uses} - {_LOOKUP})
    if others:
        raise UnsupportedModelError(
            f"{name} is an embedding table, and is also used by {', '.join(others)}: a tied output embedding, say.",
            why="such a use has a gradient in every row, so noise on a few rows would not hide it.",
            fix="untie it (tie_word_embeddings=False, when the model is made), train an encoder with a head of its "
            "own, put LoRA on the model without sparse_embeddings, or name other tables.",
        )
    if any(use.reading == "constant" for use in uses):
        raise UnsupportedModelError(
            f"{name} is looked up by the same ids for all examples, as position embeddings are.",
            why="its gradient is dense.",
            fix="leave it out of SparseEmbeddingConfig(tables=...): it is trained as before.",
        )
    if not uses:
        raise UnsupportedModelError(
            f"{name} was not used in a forward pass.",
            why="whether its gradient is that of a lookup is not known.",
            fix="leave it out of SparseEmbeddingConfig(tables=...), or freeze it.",
        )
