"""What a private run asks of the trainer behind the mixin, answered for Transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.losses import check_own_loss, loss_kind, per_example_losses
from hf_dp.per_example.modules import named_parameters, refuse_no_numbers

Collate = Callable[[list[Any]], Mapping[str, Any]]


class Usual:
    """Of a trainer whose loss is the model's own. A row of a batch is an example.

    Args:
        trainer: of which nothing is read before its own `__init__` has.
    """

    #: Whether `compute_loss` of that very class is the loss that `losses` gives, example by example.
    has_known_loss = True

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @contextmanager
    def making(self, model: Any = None, *_: Any, args: Any = None, **others: Any) -> Iterator[None]:
        """Around the trainer's own `__init__`, which is given the same: where it fails of that, says of what.

        A trainer of one's own may make a model of a name, so nothing is refused beforehand.

        Raises:
            ConfigurationError: the model is none, or the arguments are, or one has another name now.
        """
        try:
            yield
        except HfDpError:
            raise
        except (AttributeError, TypeError) as error:
            if "tokenizer" in others:  # as Transformers 4 called it
                raise ConfigurationError(
                    "tokenizer=, which trainers do not have any more.",
                    why="it is saved with the model, and may make the collator.",
                    fix="pass it as processing_class=.",
                ) from error
            if "unexpected keyword argument" in str(error):
                raise
            if model is not None and not isinstance(model, nn.Module):
                raise ConfigurationError(
                    f"model={shown(model)}, which is no torch module.",
                    why="per-example gradients are those of a module's parameters.",
                    fix="load it first, for example AutoModelForSequenceClassification.from_pretrained(NAME).",
                ) from error
            if args is not None and not isinstance(args, TrainingArguments):
                raise ConfigurationError(
                    f"args={shown(args)}, which is no TrainingArguments.",
                    why="the size of the batches and the number of steps, which are accounted for, stand there.",
                    fix="pass args=TrainingArguments(output_dir, ...).",
                ) from error
            raise
        except NotImplementedError:
            if isinstance(model, nn.Module):
                refuse_no_numbers(named_parameters(model))
            raise

    def refuse(self, own_loss: bool) -> None:
        """Refuses what the trainer was asked for and a private run does not do.

        Args:
            own_loss: whether `compute_per_example_loss` is overridden.

        Raises:
            ConfigurationError: with the name of the option.
        """

    def refuse_unknown_loss(self) -> None:
        """Refuses a model whose kind of loss is not known to `losses` (`UnsupportedModelError`)."""
        loss_kind(self.trainer.model)

    def collator(self, collate: Collate) -> Collate:
        """What gives the batches of training, whose tensors have a row for each example."""
        return collate

    def beside(self) -> Sequence[nn.Module]:
        """Models besides the trained one that the losses follow from."""
        return ()

    def losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """(B,): each example's own loss."""
        return per_example_losses(model, batch, label_smoothing=self.trainer.args.label_smoothing_factor)

    def prepared(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch that is on the model's device, with what its losses need besides: each example's from it alone."""
        return batch

    def check_losses(self, model: nn.Module, batch: Mapping[str, Any], alone: Iterable[Mapping[str, Any]]) -> None:
        """Holds `losses` against the loss of each example by itself that would be computed without privacy.

        Args:
            model: unwrapped.
            batch: a few examples, cut short.
            alone: the same as they are, each by itself.

        Raises:
            UnsupportedModelError: they differ.
        """
        check_own_loss(model, batch)

    def forget_batch_metrics(self) -> None:
        """Drops what the trainer would log of training batches."""
