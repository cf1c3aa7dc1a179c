"""What a private run cannot honour of a Trainer, or of a loop of one's own, each refused by name."""

from hf_dp.training.refusals.adapters import refuse_adapters_in_part
from hf_dp.training.refusals.arguments import private_arguments, refuse_changed_arguments
from hf_dp.training.refusals.choices import (
    refuse_choices_by_training_data,
    refuse_evaluated_in_training,
    refuse_told_of_training_data,
)
from hf_dp.training.refusals.dataset import refuse_dataset
from hf_dp.training.refusals.optimizer import refuse_optimizer
from hf_dp.training.refusals.overrides import refuse_overrides
from hf_dp.training.refusals.own_loop import refuse_no_output_dir, refuse_own_optimizer, refuse_own_settings, unwrapped
from hf_dp.training.refusals.parallel import refuse_parallel_model
from hf_dp.training.refusals.surroundings import refuse_other_surroundings, surroundings

__all__ = [
    "private_arguments",
    "refuse_adapters_in_part",
    "refuse_changed_arguments",
    "refuse_choices_by_training_data",
    "refuse_dataset",
    "refuse_evaluated_in_training",
    "refuse_no_output_dir",
    "refuse_optimizer",
    "refuse_other_surroundings",
    "refuse_overrides",
    "refuse_own_optimizer",
    "refuse_own_settings",
    "refuse_parallel_model",
    "refuse_told_of_training_data",
    "surroundings",
    "unwrapped",
]
