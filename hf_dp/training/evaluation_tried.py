"""The first evaluation is tried before anything is spent: one that fails would end a training that was paid for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from datasets import Dataset
from torch.utils.data import IterableDataset, Subset

import hf_dp.ranks as ranks
from hf_dp.data.failing_rows import keep_columns
from hf_dp.errors import ConfigurationError, HfDpError, shortened
from hf_dp.launched import of_the_backend
from hf_dp.per_example.checks.state import put_back
from hf_dp.per_example.sharding import reshard
from hf_dp.randomness import unchanged_global_state
from hf_dp.training.behind.trl import is_of_trl
from hf_dp.training.evaluation import EvaluationMixin, is_of_transformers

logger = logging.getLogger(__name__)
_ALL = "with eval_on_start=True all of it is evaluated before anything is spent."


class TriedEvaluationMixin(EvaluationMixin):
    """The part of DPTrainerMixin that evaluates a few rows as a training begins."""

    _ignored_keys: Any = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's."""
        self._ignored_keys = kwargs.get("ignore_keys_for_eval", args[2] if len(args) > 2 else None)
        return super().train(*args, **kwargs)

    def _try_evaluation(self) -> None:
        """Evaluates the first `eval_batch_size` rows of each evaluation set; nothing of it is logged, and the
        model and what Trainer keeps are as before. What your own methods count, they count once more.

        Not of what has no rows by index, nor where the user's own class evaluates, or TRL's.

        Raises:
            ConfigurationError: no evaluation would succeed.
        """
        if self.args.eval_strategy == "no" or self.args.eval_on_start or not _is_transformers_own(self):
            return
        given: Any = self.eval_dataset
        sets = {f"eval_{name}": each for name, each in given.items()} if isinstance(given, dict) else {"eval": given}
        few = {prefix: _first(each, self.args.eval_batch_size) for prefix, each in sets.items()}
        found: dict[str, Any] = {}
        for prefix, rows in few.items():
            if rows is not None:
                found |= self._tried(prefix, rows)
        if None not in few.values():
            self._miss_metric(found)

    def _tried(self, prefix: str, rows: Any) -> dict[str, Any]:
        """The metrics of a few rows."""
        failed: list[Exception] = []
        metrics, logits = self.compute_metrics, self.preprocess_logits_for_metrics
        with _nothing_stays(self):
            # All ranks meet once more where one's metrics fail: no exception may take it out of the loop.
            vars(self).update(
                compute_metrics=metrics and _noting(metrics, failed, lambda *_: {}),
                preprocess_logits_for_metrics=logits and _noting(logits, failed, lambda logits, _: logits),
            )
            try:
                found = self.evaluate(rows, ignore_keys=self._ignored_keys, metric_key_prefix=prefix)
            except HfDpError:
                raise
            except Exception as error:
                if of_the_backend(error):
                    raise
                raise ConfigurationError(
                    f"evaluation fails on the first rows of {_named(prefix)} ({type(error).__name__}: {error}).",
                    why="training would stop at its first evaluation, and lose what was spent until then.",
                    fix=keep_columns(error)
                    or "mend what it says, in the rows, the collator, the model or the loss; or, where training "
                    "data does not fail so too, leave eval_strategy out and evaluate afterwards.",
                ) from error
        if failed:
            what = shortened(f"{type(failed[0]).__name__}: {failed[0]}", 200, 2)
            ranks.warn(
                logger,
                "The metrics of the first rows of %s fail (%s). Where they do of all rows too, training stops at its "
                "first evaluation, and loses what was spent until then; %s",
                *(_named(prefix), what, _ALL),
            )
        return found

    def _miss_metric(self, found: Mapping[str, Any]) -> None:
        """Refuses, or warns of, a metric that Trainer would look for in vain."""
        metric = self.args.metric_for_best_model
        name = None if metric is None else f"eval_{metric.removeprefix('eval_')}"
        if name is None or name in found:
            return
        has = ", ".join(found)
        if self.compute_metrics is not None and not name.endswith("_loss"):
            ranks.warn(
                logger,
                "metric_for_best_model=%r is not among what was evaluated of a few rows (%s). Where all give no more, "
                "training stops at its first evaluation, and loses what was spent until then.",
                *(metric, has),
            )
            return
        raise ConfigurationError(
            f"metric_for_best_model={metric!r}, and an evaluation gives {has}.",
            why="training would stop at its first evaluation, and lose what was spent until then.",
            fix="name one of these; a loss is there where the batches have what label_names says, and others are what "
            "compute_metrics returns.",
        )


def _is_transformers_own(trainer: Any) -> bool:
    if any(map(is_of_trl, type(trainer).__mro__)):
        return False  # which count what they evaluate
    for name in ("evaluate", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler"):
        owner = next(kind for kind in type(trainer).__mro__ if kind is not EvaluationMixin and name in vars(kind))
        if name in vars(trainer) or not is_of_transformers(owner):
            return False
    return True


def _first(rows: Any, most: int) -> Any:
    """The first of them; None where there are none, or none by index."""
    if isinstance(rows, IterableDataset) or not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
        return None
    if not (n := min(most, len(rows))):
        return None
    return rows.select(range(n)) if isinstance(rows, Dataset) else Subset(rows, range(n))


def _named(prefix: str) -> str:
    name = prefix.removeprefix("eval").removeprefix("_")
    return f"eval_dataset[{name!r}]" if name else "eval_dataset"


def _noting(function: Callable[..., Any], failed: list[Exception], instead: Callable[..., Any]) -> Callable[..., Any]:
    """The same, without an exception: `failed` has the first one."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not failed:
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever a metric raises
                failed.append(error)
        return instead(*args)

    return noting


@contextmanager
def _nothing_stays(trainer: Any) -> Iterator[None]:
    """Inside, a trainer evaluates without callbacks and logs; it and its model come back as they were."""
    own = (
        "optimizer", "log", "compute_metrics", "preprocess_logits_for_metrics", "control", "gather_function",
        "_eval_dataloaders",
    )  # fmt: skip
    handler, accelerator, modules = trainer.callback_handler, trainer.accelerator, list(trainer.model.modules())
    modes, loaders = [module.training for module in modules], list(accelerator._dataloaders)
    iterated = accelerator.gradient_state.dataloader_references
    with ExitStack() as stack:
        for owner, names in ((trainer, own), (handler, ("callbacks", "eval_dataloader"))):
            stack.enter_context(_come_back(owner, names))
        stack.enter_context(unchanged_global_state())
        stack.enter_context(put_back(trainer.model))
        # One that has other weights for evaluation is not asked for them: there and back they are rounded.
        trainer.optimizer, handler.callbacks = None, []
        vars(trainer).pop("_eval_dataloaders", None)
        vars(trainer)["log"] = lambda *args, **kwargs: None
        try:
            yield
        finally:
            accelerator._dataloaders, accelerator.gradient_state.dataloader_references = loaders, iterated
            reshard(trainer.model)  # FSDP2 leaves the root's parameters whole
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode


@contextmanager
def _come_back(owner: Any, names: tuple[str, ...]) -> Iterator[None]:
    """What an object itself has by these names comes back, or goes."""
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    try:
        yield
    finally:
        for name in names:
            vars(owner).pop(name, None)
        vars(owner).update(before)
