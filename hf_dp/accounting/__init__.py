"""Privacy accounting with `dp_accounting`: events, epsilon, calibration, mechanism, ledger and report. No torch."""

from hf_dp.accounting.accountants import epsilon, has_renyi
from hf_dp.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrated,
    noise_for_tpr,
    paid_releases,
    smallest_noise_multiplier,
)
from hf_dp.accounting.caveats import (
    FLOATING_POINT,
    HYPER_PARAMETER_SEARCH,
    LOGGED_METRICS,
    MANY_ALIKE,
    MODEL_SELECTION,
    NO_NOISE,
    REPRODUCIBLE,
    STANDARD_CAVEATS,
    TOKENIZER,
    standard_caveats,
)
from hf_dp.accounting.earlier import Earlier, delta_after
from hf_dp.accounting.events import (
    check_delta,
    check_steps,
    default_delta,
    event_from_dict,
    event_to_dict,
    in_words,
    promised_delta,
)
from hf_dp.accounting.ledger import Ledger
from hf_dp.accounting.mechanism import Mechanism
from hf_dp.accounting.release import GRADIENT, TRAINING_STEP, Release
from hf_dp.accounting.report import PrivacyReport, noise_in_words
from hf_dp.accounting.terms import (
    GaussianNoise,
    PoissonSampling,
    SamplingTerms,
    TruncatedPoissonSampling,
    clipping_terms,
    sampling_terms,
    step_event,
)
from hf_dp.accounting.units import (
    ColumnExamplesUnit,
    ColumnUnit,
    ExampleUnit,
    UncountedColumnExamplesUnit,
    UncountedColumnUnit,
    UncountedExampleUnit,
    UnitTerms,
    promised_unit,
    unit_terms,
)
from hf_dp.config.asked import Query, Share
from hf_dp.config.clipping import (
    AutomaticClipping,
    ClippingTerms,
    FlatClipping,
    GroupClipping,
    clipping_in_words,
)
from hf_dp.config.ranges import check_target_epsilon

__all__ = [
    "FLOATING_POINT",
    "GRADIENT",
    "HYPER_PARAMETER_SEARCH",
    "LOGGED_METRICS",
    "MANY_ALIKE",
    "MODEL_SELECTION",
    "NO_NOISE",
    "REPRODUCIBLE",
    "STANDARD_CAVEATS",
    "TOKENIZER",
    "TRAINING_STEP",
    "AutomaticClipping",
    "ClippingTerms",
    "ColumnExamplesUnit",
    "ColumnUnit",
    "Earlier",
    "ExampleUnit",
    "FlatClipping",
    "GaussianNoise",
    "GroupClipping",
    "Ledger",
    "Mechanism",
    "PoissonSampling",
    "PrivacyReport",
    "Query",
    "Release",
    "SamplingTerms",
    "Share",
    "TruncatedPoissonSampling",
    "UncountedColumnExamplesUnit",
    "UncountedColumnUnit",
    "UncountedExampleUnit",
    "UnitTerms",
    "calibrate_noise_multiplier",
    "calibrated",
    "check_delta",
    "check_steps",
    "check_target_epsilon",
    "clipping_in_words",
    "clipping_terms",
    "default_delta",
    "delta_after",
    "epsilon",
    "event_from_dict",
    "event_to_dict",
    "has_renyi",
    "in_words",
    "noise_for_tpr",
    "noise_in_words",
    "paid_releases",
    "promised_delta",
    "promised_unit",
    "sampling_terms",
    "smallest_noise_multiplier",
    "standard_caveats",
    "step_event",
    "unit_terms",
]
