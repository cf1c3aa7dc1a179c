"""TRL's SFTTrainer behind DPTrainerMixin: what of it a private run cannot honour, refused by name.

TRL prepares the data (chat templates, masks, truncation) and evaluates. A private step runs nothing of its
`compute_loss`: for one example by itself that is the loss of `hf_dp.losses`, the mean over the example's own labels.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import Any

from hf_dp.errors import ConfigurationError
from hf_dp.launched import is_first

# Of TRL. The oldest is in pyproject.toml and constraints-oldest.txt too, the newest in constraints.txt.
OLDEST, NEWEST = (1, 15), (1, 16)
_TESTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
_IGNORED = -100


def is_sft_trainer(kind: type) -> bool:
    """Whether `kind` is TRL's own SFTTrainer, not a subclass of it."""
    return kind.__module__ == "trl.trainer.sft_trainer" and kind.__name__ == "SFTTrainer"


def refuse_sft(trainer: Any, own_loss: bool) -> None:
    """Refuses what SFTTrainer was asked for and a private run does not do; nothing for another trainer.

    Args:
        trainer: its arguments read and its data prepared.
        own_loss: whether `compute_per_example_loss` is overridden.

    Raises:
        ConfigurationError: with the name of the option, or of a version that is too old or no longer known.
    """
    if not _is_sft(trainer):
        return
    version = importlib.metadata.version("trl")
    minor = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if minor < OLDEST:
        raise ConfigurationError(
            f"TRL {version} behind DPTrainerMixin.",
            why="private training failed with versions so old, which compute their loss in other ways.",
            fix=f"install a version that was tested, {_TESTED}.",
        )
    if minor > NEWEST and is_first():
        _warn_of_a_new_version(version)
    with _known_parts():
        for found, why, fix in _conflicts(trainer, own_loss):
            raise ConfigurationError(found, why=why, fix=fix)
        if trainer.args.assistant_only_loss:
            _check_answers(trainer)


def forget_batch_metrics(trainer: Any) -> None:
    """Drops what SFTTrainer would log of training batches: entropy, token accuracy, and the number of tokens seen."""
    if _is_sft(trainer):
        with _known_parts():
            trainer._metrics["train"].clear()
            trainer._metrics["eval"].pop("num_tokens", None)  # of training: nobody counted them


@cache  # once in a process
def _warn_of_a_new_version(version: str) -> None:
    warnings.warn(
        f"TRL {version} behind DPTrainerMixin was not tested; {_TESTED} were. What its SFTTrainer can be asked for "
        "since then is not known here: look whether the rows of trainer.train_dataset have the labels that you want.",
        stacklevel=2,
    )


@contextmanager
def _known_parts() -> Iterator[None]:
    """A part of SFTTrainer that is read here and is not there is refused: what it says is not known then."""
    try:
        yield
    except AttributeError as error:
        raise ConfigurationError(
            f"TRL {importlib.metadata.version('trl')} behind DPTrainerMixin ({error}).",
            why="without this part of its SFTTrainer it is not known what was asked for.",
            fix=f"install a version that was tested, {_TESTED}.",
        ) from error


def _is_sft(trainer: Any) -> bool:
    return any(map(is_sft_trainer, type(trainer).__mro__))


def _conflicts(trainer: Any, own_loss: bool) -> Iterable[tuple[str, str, str]]:
    args = trainer.args
    one_row = "an example must be a row of its own to be clipped; several in one row would be clipped together."
    if args.packing:
        yield "packing=True.", one_row, "leave it out; micro-batches of similar lengths have little padding."
    if "seq_lengths" in (getattr(trainer.train_dataset, "column_names", None) or ()):
        yield "packed rows (train_dataset has the column 'seq_lengths').", one_row, "pass one example in each row."
    if trainer.padding_free:
        yield "padding_free=True.", one_row, "leave it out; micro-batches of similar lengths have little padding."
    if args.loss_type != "nll" and not own_loss:
        yield (
            f"loss_type={args.loss_type!r}.",
            "the private step computes the negative log-likelihood, so it would be trained for another loss.",
            "leave it out, or override compute_per_example_loss(model, inputs) to return that loss of each example.",
        )
    if args.activation_offloading:
        yield (
            "activation_offloading=True.",
            "SFTTrainer does it in its own training step, which the private one replaces.",
            "leave it out; gradient checkpointing saves memory too, and is on by default.",
        )
    if (args.model_init_kwargs or {}).get("use_kernels"):
        yield (
            "model_init_kwargs={'use_kernels': True}.",
            "fused kernels use parameters where no rule sees them.",
            "leave it out.",
        )
    if trainer._is_vlm or trainer._is_vision_dataset:
        yield (
            "SFTTrainer with images.",
            "how its collator spreads images over the rows of a batch was not tested.",
            "pass a tokenizer as processing_class and data without images.",
        )
    if _adds_router_loss(trainer):
        yield (
            "router_aux_loss_coef, for a mixture of experts.",
            "its load balancing is a loss of the whole batch, and no example's own.",
            "set router_aux_loss_coef=0.0.",
        )


def _adds_router_loss(trainer: Any) -> bool:
    config = trainer.model.config.get_text_config()
    wanted = trainer.args.router_aux_loss_coef
    coefficient = getattr(config, "router_aux_loss_coef", 0.0) if wanted is None else wanted
    return hasattr(config, "output_router_logits") and coefficient != 0.0


def _check_answers(trainer: Any) -> None:
    """Refuses labels that hold more than the assistant's turns.

    Transformers marks a `{% generation %}` block from character to token. Where its last character belongs to no token
    (a space, for some tokenizers), it marks everything up to the end of the conversation, the user's words included.
    """
    data, most = trainer.train_dataset, trainer.args.max_length
    columns = set(getattr(data, "column_names", None) or ())
    turns = ["messages"] if "messages" in columns else ["completion"]
    if "prompt" in columns and not trainer.completion_only_loss:
        turns = ["prompt", "completion"]
    if not {*turns, "labels"} <= columns:
        return
    for index, row in enumerate(data.select_columns([*turns, "labels"])):
        labels, roles = row["labels"], [turn["role"] for name in turns for turn in row[name]]
        if most is not None and len(labels) >= most:
            continue  # answers may have been cut off
        answers, marked = _runs([role == "assistant" for role in roles]), _runs([x != _IGNORED for x in labels])
        if marked < answers or (roles[-1] != "assistant" and labels[-1] != _IGNORED):
            raise ConfigurationError(
                f"assistant_only_loss=True, but the labels of row {index} are not the assistant's words alone.",
                why=f"they are in {marked} part(s) for {answers} answer(s): others' words would be learnt as answers.",
                fix="end the {% generation %} block of the chat template on a character that is a token of its own, "
                "such as an end-of-turn token, not on a space; or pass input_ids and labels.",
            )


def _runs(marks: Sequence[bool]) -> int:
    return sum(mark for mark, _ in groupby(marks))
