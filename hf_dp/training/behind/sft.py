"""TRL's SFTTrainer behind DPTrainerMixin: what of it a private run cannot honour, refused by name.

TRL prepares the data (chat templates, masks, truncation) and evaluates. A private step runs nothing of its
`compute_loss`: for one example by itself that is the loss of `hf_dp.losses`, the mean over the example's own labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words
from hf_dp.training.behind.trl import Conflicts, Trl

_IGNORED = -100
_ONE_ROW = "an example must be a row of its own to be clipped; several in one row would be clipped together."
_LEAVE_OUT = "leave it out; micro-batches of similar lengths have little padding."
_PADDING_FREE = "padding_free=True.", _ONE_ROW, _LEAVE_OUT


class Sft(Trl):
    """Of SFTTrainer."""

    name = "SFTTrainer"

    _had_rows = False

    @contextmanager
    def making(self, *args: Any, **options: Any) -> Iterator[None]:
        given = options.get("train_dataset")
        self._had_rows = isinstance(given, Sized) and len(given) > 0
        with super().making(*args, **options):
            try:
                yield
            except ValueError as error:
                if "`padding_free=True`" in str(error):  # whose ways out are packing, or no end
                    raise ConfigurationError(_PADDING_FREE[0], why=_PADDING_FREE[1], fix=_PADDING_FREE[2]) from error
                if "not training-compatible" not in str(error):
                    raise
                raise ConfigurationError(
                    f"assistant_only_loss=True, and {error}",
                    why="nothing says which words are the assistant's, so others' would be learnt, or none.",
                    fix="save a chat template with {% generation %} marks, and name it by SFTConfig("
                    "chat_template_path=...): docs/trl.md has SmolLM2's. Or make rows of a prompt and a completion, "
                    "which train the completion with any template.",
                ) from error

    def refuse(self, own_loss: bool) -> None:
        super().refuse(own_loss)
        self._refuse_none_left()
        with self.known_parts():
            if self.trainer.args.assistant_only_loss:
                _check_answers(self.trainer)

    def _refuse_none_left(self) -> None:
        """TRL leaves out the rows of which truncation leaves nothing to be learnt."""
        data, most = self.trainer.train_dataset, self.trainer.args.max_length
        if not self._had_rows or most is None or not isinstance(data, Sized) or len(data):
            return
        raise ConfigurationError(
            f"a training dataset of which no row is left, once TRL has cut each to max_length={most}.",
            why="it leaves out rows of which no word that is learnt is left, as where a prompt alone is longer; so "
            "there is nothing to draw from.",
            fix="give a larger max_length, or cut prompts before, so that answers are left.",
        )

    def conflicts(self, own_loss: bool) -> Conflicts:
        trainer, args = self.trainer, self.trainer.args
        if args.packing:
            yield "packing=True.", _ONE_ROW, _LEAVE_OUT
        if "seq_lengths" in (getattr(trainer.train_dataset, "column_names", None) or ()):
            yield "packed rows (train_dataset has the column 'seq_lengths').", _ONE_ROW, "pass one example in each row."
        if trainer.padding_free:
            yield _PADDING_FREE
        if args.loss_type != "nll" and not own_loss:
            yield (
                f"loss_type={args.loss_type!r}.",
                "the private step computes the negative log-likelihood, so it would be trained for another loss.",
                "leave it out, or override compute_per_example_loss(model, inputs) to return it for each example.",
            )
        yield from super().conflicts(own_loss)
        if trainer._is_vlm or trainer._is_vision_dataset:
            yield (
                "SFTTrainer with images.",
                "how its collator spreads images over the rows of a batch was not tested.",
                "pass a tokenizer as processing_class and data without images.",
            )


def _check_answers(trainer: Any) -> None:
    """Refuses labels that hold more than the assistant's turns.

    A chat template may mark other turns too. And before 5.24 Transformers marked a `{% generation %}` block whose last
    character belongs to no token (a space, for some tokenizers) up to the end of the conversation, the user's words
    included.
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
                f"assistant_only_loss=True, but the labels of {row_in_words(index)} "
                "are not the assistant's words alone.",
                why=f"they are in {marked} part(s) for {answers} answer(s): others' words would be learnt as answers.",
                fix="mark answers alone by {% generation %} blocks of the chat template, and (before Transformers "
                "5.24) end each on a character that is a token of its own, such as an end-of-turn token, not on a "
                "space; or pass input_ids and labels.",
            )


def _runs(marks: Sequence[bool]) -> int:
    return sum(mark for mark, _ in groupby(marks))
