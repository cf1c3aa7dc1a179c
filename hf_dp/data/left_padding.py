"""Padding on the left: what a language model does with it must not depend on how much there is.

A language model that counts positions from the first column (GPT-2) gives an example other positions beside a longer
one, and predicts its first token from padding only where there is some.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.data.hidden import begins, mask_of, on_host, without_hidden
from hf_dp.losses.kinds import base_model
from hf_dp.per_example.batch import take
from hf_dp.per_example.checks.independence import NoDropout, forked_rng, in_mode
from hf_dp.per_example.precision import computed_in
from hf_dp.per_example.sharding import is_sharded

# In float32 the same is equal to 1e-5 or so.
_SAME = 1e-4


class LeftPadding:
    """Completes batches that are padded on the left, or hidden elsewhere, in training and in evaluation alike.

    Args:
        has_usual_loss: see `without_hidden`.

    Attributes:
        counts_columns: whether positions must be given, for the model counts columns; None until a batch has shown it.
    """

    def __init__(self, has_usual_loss: bool = True) -> None:
        self._has_usual_loss = has_usual_loss
        self.counts_columns: bool | None = None

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """No batch gets positions inside, nor shows whether it must."""
        known, self.counts_columns = self.counts_columns, False
        try:
            yield
        finally:
            self.counts_columns = known

    def completed(self, model: nn.Module, batch: Any, collated: Any = None) -> Any:
        """`batch`; without labels for what hidden positions, padding among them, would predict (`without_hidden`), and
        with `position_ids` if the model counts columns: in all batches, padded or not, so that it takes one path.

        Args:
            model: that it is for.
            batch: on the model's device.
            collated: see `on_host`.
        """
        mask, known = mask_of(batch), on_host(batch, collated)
        usual = self._has_usual_loss
        changes = without_hidden(model, batch, collated, has_usual_loss=usual) if isinstance(batch, Mapping) else {}
        if mask is None or known is None:
            return {**batch, **changes} if changes else batch
        # What is changed of a row follows from it alone: the others have nothing to change, and keep what they have.
        if _is_padded(known):
            is_asked = self.counts_columns is None and "position_ids" in _arguments(model)
            # Ranks that share weights would have to ask at the same time.
            if is_asked and not is_sharded(model):
                self.counts_columns = "position_ids" not in batch and _counts_columns(model, batch)
        if self.counts_columns and "position_ids" not in batch:
            changes["position_ids"] = _positions(mask)
        return {**batch, **changes} if changes else batch


def _is_padded(mask: Tensor) -> bool:
    """Whether any example is padded on the left."""
    return bool(begins(mask)[:, 0].any())


def _positions(mask: Tensor) -> Tensor:
    """(B, T): how many positions that are not padding stand before each; without padding, its column."""
    return ((~begins(mask)).long().cumsum(1) - 1).clamp_min(0)


def _arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(base_model(model).forward).parameters)


@torch.no_grad()
def _counts_columns(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's output for an example without its padding is another, and with positions it is the same."""
    mask = batch["attention_mask"]
    row = int(begins(mask)[:, 0].nonzero()[0])
    names = _arguments(model) - {"labels", "start_positions", "end_positions"}
    padded = {name: value for name, value in take(batch, [row]).items() if name in names}
    begin = int(mask[row].ne(0).nonzero()[0])
    own = {
        name: value[:, begin:] if isinstance(value, Tensor) and value.shape[1:] == mask.shape[1:] else value
        for name, value in padded.items()
    }

    def output(inputs: Mapping[str, Any]) -> Tensor:
        with computed_in(model, inputs, torch.float32) as exact:
            found = model(**exact)
        values = found.values() if isinstance(found, Mapping) else found
        first: Tensor = next(v for v in values if isinstance(v, Tensor) and v.is_floating_point())
        return first.double()

    with forked_rng(model), in_mode(model, training=False), NoDropout():
        alone = output(own)

        def off(inputs: Mapping[str, Any]) -> float:
            found = output(inputs)
            return float(((found if found.shape == alone.shape else found[:, begin:]) - alone).norm() / alone.norm())

        plain = off(padded)
        return plain > _SAME and off({**padded, "position_ids": _positions(mask[row : row + 1])}) <= 0.1 * plain
