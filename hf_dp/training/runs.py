"""Which training of a trainer is at work: what Trainer's hooks, logs and files are about."""

from __future__ import annotations

from typing import Any

from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.step.plan import Plan
from hf_dp.training.base import TrainerBehind
from hf_dp.training.run import Run


class RunsMixin(TrainerBehind):
    """The runs of a trainer, of which the latest may not have begun: it knows the one that did."""

    privacy: PrivacyConfig
    ledger: Ledger
    _run: Run | None

    @property
    def _begun(self) -> Run | None:
        """The latest training that began; the one at work, if one is."""
        return None if self._run is None else self._run.begun

    @property
    def _plan(self) -> Plan | None:
        return None if self._begun is None else self._begun.plan

    @property
    def _accounted(self) -> Plan:
        """Of the latest training that began, or of the first one that will."""
        return self._plan or self._require_run().plan

    def _require_run(self) -> Run:
        if self._run is None:
            raise ConfigurationError(
                "there is no privacy plan yet.",
                why="it depends on the number of steps, which train() fixes.",
                fix="call trainer.train() first.",
            )
        return self._run

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial spends budget on the same data."""
        raise ConfigurationError(
            "hyperparameter_search on private data.",
            why="every trial is a training of its own, and their epsilons add up; choosing the best one leaks too.",
            fix="search on public data; or train and save each candidate under a promise of its own, and put all "
            "of them under one budget: PrivacyConfig(after=[...]) of the next.",
        )
