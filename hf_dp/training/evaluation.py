"""The part of DPTrainerMixin that evaluates: by the loss that is trained, where that is the user's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.saved_buffers import saved_put_back
from hf_dp.training.base import TrainerBehind
from hf_dp.training.refusals import refuse_evaluated_in_training

logger = logging.getLogger(__name__)


class EvaluationMixin(TrainerBehind):
    """What `compute_per_example_loss` gives is reported too, and chosen by.

    Not where the trainer behind evaluates in a way of its own (TRL's, which lay out batches otherwise), where a loss
    for evaluation was given besides (`compute_loss_func`), or in a class that overrides `compute_loss`.
    """

    _told_written: frozenset[str] = frozenset()
    _is_ending = False

    if TYPE_CHECKING:

        @property
        def _has_usual_loss(self) -> bool: ...

        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor: ...

    @property
    def _own_loss_decides(self) -> bool:
        if self._has_usual_loss or self.compute_loss_func is not None or behind(self, "compute_loss") is not Trainer:
            return False
        return is_of_transformers(behind(self, "prediction_step"))

    @property
    def _generates(self) -> bool:
        return isinstance(self, Seq2SeqTrainer) and bool(getattr(self.args, "predict_with_generate", False))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As Trainer's, in evaluation; of a `compute_per_example_loss` of one's own the mean over the batch.

        Returns:
            The loss, 0-dimensional; with `return_outputs` a pair of it and of what the model returned meanwhile.

        Raises:
            ConfigurationError: outputs are asked for, and `compute_per_example_loss` did not call the model once.
        """
        if not self._own_loss_decides:
            return super().compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
        module = self.accelerator.unwrap_model(model)
        if not return_outputs:
            return self.compute_per_example_loss(module, dict(inputs)).mean()
        with _noted(module) as outputs:
            loss = self.compute_per_example_loss(module, dict(inputs)).mean()
        if len(outputs) != 1:
            raise ConfigurationError(
                f"compute_per_example_loss called the model {len(outputs)} times for a batch of evaluation.",
                why="which output compute_metrics is to get follows from a single call.",
                fix="leave compute_metrics out, call model(...) once, or override compute_loss(model, inputs, "
                "return_outputs=False, num_items_in_batch=None) too.",
            )
        return loss, _as_trainer_reads(outputs[0], loss)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's, or that of the class behind. In the course of a training, where a callback asks for it, not of
        the training data if logs are withheld or early stopping goes by it (`ConfigurationError`)."""
        if self.is_in_train and not self._is_ending:
            given = args[0] if args else kwargs.get("eval_dataset")
            prefix = kwargs.get("metric_key_prefix") or next((str(a) for a in args[1:] if isinstance(a, str)), "eval")
            refuse_evaluated_in_training(self, given, prefix)
        return super().evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # By what callbacks evaluate at the end nothing is chosen, and no checkpoint has it.
        self._is_ending = True
        try:
            return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._is_ending = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; what rows of evaluation write into buffers and configurations that are saved with the model is
        put back."""
        with saved_put_back(self.accelerator.unwrap_model(self.model)) as written:
            output = super().evaluation_loop(*args, **kwargs)
        told, self._told_written = self._told_written, self._told_written | set(written)
        # Trainer itself writes defaults there, after it has generated.
        own = "generation_config." if self._generates else None
        if new := [name for name in written if name not in told and not (own and name.startswith(own))]:
            ranks.warn(
                logger,
                "Evaluation changed %r, which is saved with the model; it was put back, since no noise is added to "
                "what it remembers of these rows. What need not be saved belongs into no configuration, and into "
                "buffers with register_buffer(..., persistent=False).",
                new[0],
            )
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As Trainer's; a loss of one's own needs no `label_names`, and is reported beside generated texts too."""
        is_own = self._own_loss_decides and getattr(self.compute_loss, "__func__", None) is EvaluationMixin.compute_loss
        if is_own and prediction_loss_only:
            return self._own_loss(model, inputs), None, None
        loss, *others = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        if is_own and loss is not None and self._generates:
            loss = self._own_loss(model, inputs)
        return loss, others[0], others[1]

    def _own_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with torch.no_grad(), self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach()


def behind(trainer: Any, method: str) -> type:
    """The class whose `method` would be used without the mixin: the first that has it behind `EvaluationMixin`."""
    kinds = type(trainer).__mro__
    return next(kind for kind in kinds[kinds.index(EvaluationMixin) + 1 :] if method in vars(kind))


def is_of_transformers(kind: type) -> bool:
    """Whether Transformers itself has this class."""
    return kind.__module__.partition(".")[0] == "transformers"


@contextmanager
def _noted(module: nn.Module) -> Iterator[list[Any]]:
    """What the module returns inside."""
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


def _as_trainer_reads(output: Any, loss: Tensor) -> Any:
    """With a loss first, which Trainer skips, unless it has names."""
    if isinstance(output, Mapping):
        return output
    if not isinstance(output, tuple | list):
        return loss, output
    has_loss = bool(output) and isinstance(output[0], Tensor) and not output[0].dim()
    return tuple(output) if has_loss else (loss, *output)
