"""The part of DPTrainerMixin that logs: epsilon, what is released, and of the rest what is not withheld."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.accounting import PrivacyReport
from hf_dp.figures import logged, upper
from hf_dp.step.written import gradient_norm
from hf_dp.training.behind.usual import Usual
from hf_dp.training.runs import RunsMixin

# Of what Trainer logs; what a private run adds says itself what of it is released.
WITHHELD = {"loss", "train_loss", "num_input_tokens_seen", "total_flos"}
# Withheld too, and in no checkpoint: how long the drawn rows took, and how much memory. Not those of an evaluation.
_MEASURED = re.compile(r"train_(runtime|\w+_per_second|mem_\w+)|(before_)?init_mem_\w+")


class LogsMixin(RunsMixin):
    """What Trainer would read from a plain batch, and what comes out of a private run in numbers."""

    _behind: Usual

    @property
    def _withholds_logs(self) -> bool:
        """As the training that has begun was promised, whatever `privacy` is by now."""
        return (self.privacy if self._begun is None else self._begun.plan.config).withhold_non_private_logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with epsilon and the clipping statistics beside the training loss."""
        if self.is_in_train and ("loss" in logs or "train_loss" in logs):
            logs.update(logged(self._epsilon(), self._accounted.noise_multiplier))
        withheld = self._withholds_logs
        if self.is_in_train and "loss" in logs and self._begun is not None:
            logs.update(self._begun.logs().shown(withheld))
        if withheld:
            for name in [name for name in logs if name in WITHHELD or _MEASURED.fullmatch(name)]:
                del logs[name]
        self._behind.forget_batch_metrics()
        # Where tokens are counted, Trainer adds the time since then to each entry.
        super().log(logs, None if withheld else start_time)

    def spent(self) -> str:
        """Epsilon so far, of what budget, and after which step, for a progress bar."""
        target = self.privacy.target_epsilon
        budget = "" if target is None else f" of {target:g}"
        return f"{upper(self._epsilon(), 4)}{budget} after step {self.state.global_step}"

    def _epsilon(self) -> float:
        return self.ledger.epsilon(self._accounted.delta, self.privacy.accountant)

    def privacy_report(self) -> PrivacyReport:
        """What was promised and what was spent so far.

        Raises:
            ConfigurationError: before the first call of `train()`.
        """
        return self._accounted.report(self.ledger)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Trainer's writes the gradients, times 1, to learn it, and torch has no norm of a sparse tensor.
        return gradient_norm(model) if grad_norm is None else grad_norm

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        # A token count over the batch would let one example's length rescale its neighbours.
        return None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As Trainer's, summed over the micro-batches."""
        parts = inputs.get("micro_batches", [inputs])
        if self._withholds_logs:
            return 0  # It grows with the drawn batch and its lengths, and is saved in trainer_state.json.
        return sum(int(super(LogsMixin, self).floating_point_ops(part)) for part in parts)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self._withholds_logs:
            return
        # One call, for each adds up over the ranks, which may have other numbers of micro-batches, or none.
        parts = inputs.get("micro_batches", [inputs])
        flat: dict[str, list[Tensor]] = {getattr(self.model, "main_input_name", "input_ids"): []}
        flat |= {"attention_mask": []} if any("attention_mask" in part for part in parts) else {}
        for name, found in flat.items():
            found += [part[name].flatten() for part in parts if name in part] or [torch.empty(0)]
        super()._track_num_input_tokens({name: torch.cat(found) for name, found in flat.items()})  # type: ignore[no-untyped-call]
