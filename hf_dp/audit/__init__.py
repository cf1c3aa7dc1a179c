"""From outside, as an attacker would: lower bounds on epsilon. Imports no torch."""

from hf_dp.audit.guesses import OneRun, gaussian_one_run, one_run
from hf_dp.audit.hypotheses import epsilon_of_mu
from hf_dp.audit.worlds import TwoWorlds, two_worlds

__all__ = ["OneRun", "TwoWorlds", "epsilon_of_mu", "gaussian_one_run", "one_run", "two_worlds"]
