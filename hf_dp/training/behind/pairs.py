"""What TRL's trainers on pairs of answers have in common: a pair is one example, whose loss needs both its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_dp.data.pairs import PairCollator, rows_of_pairs
from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.losses.own import COMPARED
from hf_dp.per_example.batch import batch_size, take
from hf_dp.per_example.checks.independence import NoDropout
from hf_dp.per_example.precision import computed_in
from hf_dp.per_example.sharding import is_sharded
from hf_dp.training.behind.trl import Conflicts, Trl
from hf_dp.training.behind.usual import Collate

# How far TRL's loss of a pair may be off in float32, and in shards, which stay in their own precision.
_SAME, _SAME_IN_SHARDS = 1e-3, 1e-1


class Pairs(Trl):
    """Of a trainer whose batches have the first rows of all pairs before the second ones."""

    def collator(self, collate: Collate) -> Collate:
        return PairCollator(collate)

    def check_losses(self, model: nn.Module, batch: Mapping[str, Any], alone: Iterable[Mapping[str, Any]]) -> None:
        compared = 0
        for i in range(batch_size(batch)):
            if compared == COMPARED:
                return
            # In 16 bits a reference and a model that are the same differ by their rounding.
            with torch.no_grad(), NoDropout(), computed_in(model, take(batch, [i]), torch.float32) as exact:
                pair = self.prepared(model, exact)
                ours, trls = float(self.losses(model, pair)), self._trls_loss(model, pair)
            if math.isnan(ours) and math.isnan(trls):
                continue
            compared += 1
            if not abs(ours - trls) <= (_SAME_IN_SHARDS if is_sharded(model) else _SAME) * max(1.0, abs(trls)):
                raise UnsupportedModelError(
                    f"{self.name} computes {trls:.6g} as its loss of one pair; the private step computes {ours:.6g}.",
                    why="it would be trained for something else than what was asked for.",
                    fix="use a version of TRL that was tested, or override compute_per_example_loss(model, inputs).",
                )

    def conflicts(self, own_loss: bool) -> Conflicts:
        yield from super().conflicts(own_loss)
        if getattr(self.trainer, "_is_vision_dataset", False) or getattr(self.trainer, "_is_vlm", False):
            yield (
                f"{self.name} with images.",
                "how its collator spreads images over the rows of a batch was not tested.",
                "pass a tokenizer as processing_class and data without images.",
            )

    def _trls_loss(self, model: nn.Module, pair: Mapping[str, Any]) -> float:
        try:
            return float(self.trainer.compute_loss(model, rows_of_pairs(pair, firsts_first=True)))
        except (HfDpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} cannot compute its loss of one pair ({type(error).__name__}: {error}).",
                why="what it would train for is unknown, and so whether the private step computes that.",
                fix="train it once without DPTrainerMixin; or override compute_per_example_loss(model, inputs).",
            ) from error
