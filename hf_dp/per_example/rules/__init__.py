"""One explicit table: torch function -> the factors of each parameter that it uses.

A rule repeats what autograd would do for the input and replaces the weight gradient by its factors. To add one for an
operation of your own, pass `{**RULES, my_function: Rule(...)}` to `record` and `preflight`; an operator of
`torch.ops.library` goes by its name, "library.operator".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hf_dp.per_example.rule import Rule
from hf_dp.per_example.rules.convolutions import CONVOLUTIONS
from hf_dp.per_example.rules.elementwise import ELEMENTWISE
from hf_dp.per_example.rules.experts import EXPERTS
from hf_dp.per_example.rules.linear import LINEAR
from hf_dp.per_example.rules.lookups import LOOKUPS
from hf_dp.per_example.rules.normalisation import NORMALISATION
from hf_dp.per_example.rules.recurrent import RECURRENT


class _Table(dict[Any, Rule]):
    def __repr__(self) -> str:
        # Of a default all of it would be shown by help().
        return "RULES"


RULES: Mapping[Any, Rule] = MappingProxyType(
    _Table({**LINEAR, **LOOKUPS, **NORMALISATION, **ELEMENTWISE, **CONVOLUTIONS, **RECURRENT, **EXPERTS})
)


def may_read_parameters(rule: Rule, function: Any, are_freed: bool) -> bool:
    """Whether its backward pass reads parameters without need, or, where they are freed by then, none knows that it
    does not: it is a rule of one's own."""
    return rule.reads_parameters or (are_freed and RULES.get(function) is not rule)
