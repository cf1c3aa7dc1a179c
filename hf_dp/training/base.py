"""What the parts of DPTrainerMixin stand in front of, as type checkers see it: some Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer

    TrainerBehind = Trainer
else:
    TrainerBehind = object
