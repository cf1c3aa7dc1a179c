"""What a private run cannot honour of a Trainer, each refused by name."""

from hf_dp.training.refusals.arguments import private_arguments
from hf_dp.training.refusals.dataset import refuse_dataset
from hf_dp.training.refusals.optimizer import refuse_optimizer, refuse_weight_decay
from hf_dp.training.refusals.overrides import refuse_overrides
from hf_dp.training.refusals.parallel import refuse_parallel_model, refuse_sharded_parts

__all__ = [
    "private_arguments",
    "refuse_dataset",
    "refuse_optimizer",
    "refuse_overrides",
    "refuse_parallel_model",
    "refuse_sharded_parts",
    "refuse_weight_decay",
]
