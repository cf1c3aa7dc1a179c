"""Clipping by groups of parameters: flat in each, by itself, with a part of the norm."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping

from hf_dp.accounting import GroupClipping
from hf_dp.clipping.flat import Flat
from hf_dp.clipping.rule import Group
from hf_dp.config.clipping import EVERY_OTHER
from hf_dp.errors import ConfigurationError


class Groups(Flat):
    """Scales what each example's gradient has in a group g of parameters to l2 norm at most C_g (McMahan et al. 2018,
    arXiv:1710.06963, per-layer clipping; He et al. 2023, arXiv:2212.01539, as the backward pass goes).

    Sensitivity: one example adds at most C_g in each group, so at most sqrt(sum of C_g^2) = C over all of them. That
    takes nothing about what it adds in which: also where its gradient is not finite in one and is left out there.
    """

    terms: GroupClipping

    def groups(self, names: Mapping[str, Collection[str]]) -> tuple[Group, ...]:
        """The parameters of each pattern, by any of their names.

        Raises:
            ConfigurationError: a parameter of no pattern or of several, a pattern of no parameter.
        """
        found: dict[str, set[str]] = {pattern: set() for pattern in self.terms.shares}
        for name, all_names in names.items():
            own = [pattern for pattern in found if pattern != EVERY_OTHER and _matches(pattern, all_names)]
            if not own and EVERY_OTHER in found:
                own = [EVERY_OTHER]
            if len(own) != 1:
                said = ", ".join(sorted(all_names))
                raise ConfigurationError(
                    f"{said} is matched by {' and by '.join(map(repr, own)) or 'no pattern'} of groups.",
                    why="each trained parameter is clipped once, in one group with all of its uses, or the bound would "
                    "not hold.",
                    fix="give patterns that have no parameter in common, and '*' for every parameter that no other one "
                    "matches.",
                )
            found[own[0]].add(name)
        empty = [pattern for pattern, members in found.items() if not members]
        if empty:
            raise ConfigurationError(
                f"{', '.join(map(repr, empty))} in groups matches no parameter"
                + (" that no other pattern matches." if empty == [EVERY_OTHER] else " that is trained."),
                why="it would take a part of the clipping norm, and nothing would be clipped to it.",
                fix="name parameters as model.named_parameters() does, or leave it out.",
            )
        return tuple(Group(frozenset(members), self.terms.shares[pattern]) for pattern, members in found.items())


def _matches(pattern: str, names: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
