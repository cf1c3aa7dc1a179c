"""Privacy accounting with `dp_accounting`: events, epsilon, calibration, ledger and report. Imports no torch."""

from hf_dp.accounting.accountants import epsilon
from hf_dp.accounting.calibration import affordable_steps, calibrate_noise_multiplier
from hf_dp.accounting.events import (
    check_delta,
    check_steps,
    default_delta,
    event_from_dict,
    event_to_dict,
    step_event,
)
from hf_dp.accounting.ledger import TRAINING_STEP, Ledger
from hf_dp.accounting.report import (
    FLOATING_POINT,
    HYPER_PARAMETER_SEARCH,
    LOGGED_METRICS,
    MODEL_SELECTION,
    NO_NOISE,
    REPRODUCIBLE,
    STANDARD_CAVEATS,
    TOKENIZER,
    PrivacyReport,
    library_versions,
    standard_caveats,
)
from hf_dp.config.ranges import check_target_epsilon

__all__ = [
    "FLOATING_POINT",
    "HYPER_PARAMETER_SEARCH",
    "LOGGED_METRICS",
    "MODEL_SELECTION",
    "NO_NOISE",
    "REPRODUCIBLE",
    "STANDARD_CAVEATS",
    "TOKENIZER",
    "TRAINING_STEP",
    "Ledger",
    "PrivacyReport",
    "affordable_steps",
    "calibrate_noise_multiplier",
    "check_delta",
    "check_steps",
    "check_target_epsilon",
    "default_delta",
    "epsilon",
    "event_from_dict",
    "event_to_dict",
    "library_versions",
    "standard_caveats",
    "step_event",
]
