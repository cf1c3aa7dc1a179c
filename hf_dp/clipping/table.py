"""The one table of clipping rules: kind of the terms -> the rule that keeps what they promise."""

from __future__ import annotations

from types import MappingProxyType

from hf_dp.accounting import ClippingTerms
from hf_dp.clipping.automatic import Automatic
from hf_dp.clipping.flat import Flat
from hf_dp.clipping.groups import Groups
from hf_dp.clipping.rule import ClippingRule

RULES = MappingProxyType[str, type[ClippingRule]]({"flat": Flat, "automatic": Automatic, "groups": Groups})


def rule_of(terms: ClippingTerms) -> ClippingRule:
    """The rule of these terms."""
    return RULES[terms.kind](terms)
