"""TRL's KTOTrainer behind DPTrainerMixin: refused."""

from __future__ import annotations

from hf_dp.errors import ConfigurationError
from hf_dp.training.behind.trl import Trl

_MIXED = (
    "it puts the answer of the row before into each row, and holds each loss against a mean over the batch: what one "
    "example changes in others is not bounded by clipping."
)
_ITS_OWN = "the private step does not compute its losses of single answers, so it would be trained for another loss."


class Kto(Trl):
    """Of KTOTrainer, whose rows and loss are of several examples, but for one of its losses."""

    name = "KTOTrainer"
    has_known_loss = False

    def refuse(self, own_loss: bool) -> None:
        raise ConfigurationError(
            "KTOTrainer behind DPTrainerMixin.",
            why=_ITS_OWN if self.trainer.args.loss_type == "apo_zero_unpaired" else _MIXED,
            fix="make pairs of a wanted and an unwanted answer to the same prompt, and use DPOTrainer.",
        )
