"""From outside, as an attacker would: lower bounds on epsilon, canaries, and what a model has memorised.

Imports no torch; dirac, public, scores, texts, guessed and memorisation do.
"""

from hf_dp.audit.canaries import Planted, coins, plant, random_labels, random_texts, random_tokens, unlabelled
from hf_dp.audit.guesses import OneRun, gaussian_one_run, one_run
from hf_dp.audit.hypotheses import epsilon_of_mu
from hf_dp.audit.members import Membership, membership
from hf_dp.audit.outcome import Audit
from hf_dp.audit.secrets import Secret, exposure
from hf_dp.audit.worlds import TwoWorlds, two_worlds

__all__ = [
    "Audit",
    "Membership",
    "OneRun",
    "Planted",
    "Secret",
    "TwoWorlds",
    "coins",
    "epsilon_of_mu",
    "exposure",
    "gaussian_one_run",
    "membership",
    "one_run",
    "plant",
    "random_labels",
    "random_texts",
    "random_tokens",
    "two_worlds",
    "unlabelled",
]
