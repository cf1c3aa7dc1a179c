"""What a promise consists of, field by field, and what command lines say of each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hf_dp.config.clipping import ClippingName
from hf_dp.config.computed import NoiseName
from hf_dp.config.output_bias import OutputBiasConfig
from hf_dp.config.re_attention import ReAttentionConfig
from hf_dp.config.sparse_embeddings import SparseEmbeddingConfig
from hf_dp.config.target import AT_FPR
from hf_dp.config.units import UnitSamplingName

AccountantName = Literal["pld", "rdp"]


@dataclass(frozen=True, init=False)
class Fields:
    """Those of `PrivacyConfig`, which says what they mean.

    A class of their own: of one that is a dataclass itself some editors show no `__init__` but a generated one.
    """

    target_epsilon: float | None = field(
        default=None, metadata={"help": "The privacy budget epsilon. Give this or noise_multiplier."}
    )
    noise_multiplier: float | None = field(
        default=None, metadata={"help": "Noise standard deviation in units of the clipping norm."}
    )
    target_delta: float | None = field(default=None, metadata={"help": "Delta; by default n ** -1.1 for n examples."})
    clipping_norm: float = field(default=1.0, metadata={"help": "The l2 norm each example's gradient is clipped to."})
    clipping: ClippingName = field(
        default="flat", metadata={"help": "flat (long gradients are cut) or automatic (all are brought near the norm)."}
    )
    noise: NoiseName = field(
        default="gaussian",
        metadata={"help": "What makes it: gaussian (fast), chacha20 (a cipher), grid (that, exact to the last digit)."},
    )
    max_batch_size: int | None = field(
        default=None, metadata={"help": "The most examples that a step uses; of a larger draw so many, at random."}
    )
    accountant: AccountantName = field(default="pld", metadata={"help": "Accountant: pld (tight) or rdp."})
    withhold_non_private_logs: bool = field(
        default=False, metadata={"help": "Keep training loss and clipping statistics out of the logs."}
    )
    sampling_probability: float | None = field(
        default=None,
        metadata={"help": "What examples are drawn with, whatever their number, which is then secret (add or remove)."},
    )
    unit: str | None = field(
        default=None, metadata={"help": "The dataset's column that says whose each example is: the unit of privacy."}
    )
    max_examples_per_unit: int | None = field(
        default=None, metadata={"help": "With unit, the most examples of one unit that a step uses."}
    )
    unit_sampling: UnitSamplingName = field(
        default="units", metadata={"help": "How units are drawn: units (whole) or examples (each by itself)."}
    )
    target_tpr: float | None = field(
        default=None, metadata={"help": "The budget as the share of members that any attack may find, at at_fpr."}
    )
    at_fpr: float = field(default=AT_FPR, metadata={"help": "The share of others that it takes for members."})
    dataset_size: int | None = field(
        default=None, metadata={"help": "A public number in place of that of the examples, which is then secret."}
    )
    # In this order, so that command lines take several.
    after: tuple[str, ...] | str | None = field(
        default=None,
        metadata={
            "help": "Where earlier private trainings on the same people were saved: one budget.",
            "nargs": "+",
            "action": "extend",  # given again, no place is forgotten
        },
    )
    other_people: bool = field(
        default=False, metadata={"help": "The model was trained privately before, on data of nobody who is in this."}
    )
    passes: int = field(default=1, metadata={"help": "Backward passes of a step: 2 for less memory and more time."})
    equal_widths: bool = field(
        default=False, metadata={"help": "Only examples of one width, padding included, share a micro-batch."}
    )
    groups: Mapping[str, float] | tuple[tuple[str, float], ...] | None = field(default=None, init=False)
    seed: int | None = field(default=None, init=False)
    re_attention: ReAttentionConfig | None = field(default=None, init=False)
    sparse_embeddings: SparseEmbeddingConfig | None = field(default=None, init=False)
    output_bias: OutputBiasConfig | None = field(default=None, init=False)
