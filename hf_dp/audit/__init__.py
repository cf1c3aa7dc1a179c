"""From outside, as an attacker would: lower bounds on epsilon, and canaries. Imports no torch; dirac, public and scores
do."""

from hf_dp.audit.canaries import Planted, coins, plant, random_labels, random_texts, random_tokens, unlabelled
from hf_dp.audit.guesses import OneRun, gaussian_one_run, one_run
from hf_dp.audit.hypotheses import epsilon_of_mu
from hf_dp.audit.outcome import Audit
from hf_dp.audit.worlds import TwoWorlds, two_worlds

__all__ = [
    "Audit",
    "OneRun",
    "Planted",
    "TwoWorlds",
    "coins",
    "epsilon_of_mu",
    "gaussian_one_run",
    "one_run",
    "plant",
    "random_labels",
    "random_texts",
    "random_tokens",
    "two_worlds",
    "unlabelled",
]
