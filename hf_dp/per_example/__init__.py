"""Per-example gradients: `record` in one pass, `loop` as the oracle, `preflight` to hold one against the other."""

from hf_dp.per_example.checks.preflight import preflight
from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.oracle import loop
from hf_dp.per_example.pieces import Pieces
from hf_dp.per_example.record import PerExampleGradients, record
from hf_dp.per_example.rows import RowSum, Tables, sparse_gradient
from hf_dp.per_example.rule import Axis, Bound, Certificate, Operands, Rule
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.rules.instantiate import instantiating

__all__ = [
    "RULES",
    "Axis",
    "Bound",
    "Certificate",
    "Dense",
    "Factors",
    "Lengths",
    "OneHot",
    "Operands",
    "Outer",
    "PerExample",
    "PerExampleGradients",
    "Pieces",
    "RowSum",
    "Rule",
    "Tables",
    "instantiating",
    "loop",
    "preflight",
    "record",
    "sparse_gradient",
]
