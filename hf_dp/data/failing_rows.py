"""For the check before the first step: rows that do not go through the collator and the model, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.data.extremes import empty_rows
from hf_dp.data.lengths import length_of
from hf_dp.data.telling_rows import is_same
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.figures import row_in_words
from hf_dp.launched import of_the_backend
from hf_dp.per_example.targets import targets_in_range

_TOO_LITTLE = (
    "The check before the first step takes a few rows, the longest among them, at once and in float32, and spends no "
    "budget. Cut rows shorter (max_length), train fewer parameters (LoRA), or take an accelerator with more memory."
)

_IN_A_STEP = (
    "hf_dp: a private step failed. What was spent until then is in the ledger, and in the checkpoints: "
    "resume_from_checkpoint=True goes on from the last. The check before the first step looks at all rows of a list "
    "and of a Dataset of datasets, of others at a few: if a row is wrong (an id beyond the vocabulary, a label beyond "
    "num_labels, a text beyond the positions), take each one through collator and model to find it, and correct it."
)

# As collators of Transformers name them.
_LABELS = {"label", "label_ids", "labels"}
NUMBERS = (
    "leave out columns that are no numbers, or make numbers of them beforehand (of texts with the tokenizer, of names "
    "of labels)."
)
A_DICT = (
    "let it return a dict of names to tensors of shape (examples, ...). Of rows that are tuples, as a TensorDataset "
    "has them: lambda rows: {'input_ids': torch.stack([row[0] for row in rows]), 'labels': torch.stack([row[1] for "
    "row in rows])}."
)


def for_all_rows(row: Any, error: Exception) -> str:
    """What to do where a collator fails with `error` on each row, such as `row`."""
    if not isinstance(row, Mapping):
        return A_DICT
    dropped = (
        " What the dataset has and the row has not was dropped by Trainer, since the model's forward does not name it "
        "(remove_unused_columns)."
    )
    return keep_columns(error) or _say_what_pads(error) or _no_inputs(row) or NUMBERS + dropped


def keep_columns(error: Exception) -> str | None:
    """What to do where `error` says that a column is not there; None where it says something else."""
    if not isinstance(error, KeyError):
        return None
    give = (
        "give the dataset that column; if it has it, TrainingArguments(remove_unused_columns=False): Trainer drops "
        "what the model's forward does not name, and a collator, a transform (set_transform, with_transform) or a loss "
        "of your own may need it."
    )
    if (where := _in_a_model(error)) is None:
        return give
    looked_up = f"look at {where}, where the model looks up what is not there"
    is_name = isinstance(next(iter(error.args), None), str)
    return f"{looked_up}. If it is the name of a column: {give}" if is_name else f"{looked_up} (no column: no name)."


def _in_a_model(error: Exception) -> str | None:
    """The place in a module's own code where it was raised; None where no module was at work."""
    if (found := _module_at_work(error)) is None:
        return None
    owner, frame, line = found
    return f"{type(owner).__name__}.{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}, line {line})"


def _module_at_work(error: Exception) -> tuple[nn.Module, FrameType, int] | None:
    """The innermost module in whose code, which is not torch's, it was raised; with the place there."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if isinstance(owner := frame.f_locals.get("self"), nn.Module) and _package_of(frame) != "torch":
            found = owner, frame, line
    return found


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _of_an_adapter(error: Exception) -> str | None:
    """What to do where PEFT's own code fails on what it has put an adapter around; None where it does not."""
    if not isinstance(error, AttributeError) or (found := _module_at_work(error)) is None:
        return None
    owner, frame, _ = found
    if _package_of(frame) != "peft" or (base := getattr(owner, "base_layer", None)) is None:
        return None
    return (
        f"leave what is a {type(base).__name__} out of target_modules (exclude_modules of the adapter's config names "
        "it): PEFT cannot adapt it, since it gives something else than one tensor, and the model fails without hf_dp "
        "too."
    )


def _say_what_pads(error: Exception) -> str | None:
    """What to do where `error` asks for a padding token: some models take no two rows without one."""
    if "padding token" not in str(error):
        return None
    return (
        "say which token pads: tokenizer.pad_token = tokenizer.eos_token where it has none, and "
        "model.config.pad_token_id = tokenizer.pad_token_id."
    )


def _let_gradients_be_taken(error: Exception) -> str | None:
    """What to do where a loss that takes gradients by itself is computed without them; None where that is not it."""
    if "does not require grad and does not have a grad_fn" not in str(error):
        return None
    return (
        "take gradients within the loss under `with torch.enable_grad():`, of an input, with constants in place of "
        "parameters (p.detach()): the checks compute losses without gradients too, and so does evaluation."
    )


def _too_few_classes(error: Exception) -> str | None:
    """What to do where a label is beyond the outputs; None where `error` says something else."""
    found = re.search(r"Target (\d+) is out of bounds", str(error))
    return found and (
        f"make the model with as many classes as the labels have (num_labels={int(found[1]) + 1} or more), or, if it "
        "has them, correct the row or leave it out: labels are whole numbers from 0 to num_labels - 1, or -100 where "
        "there is none."
    )


def _no_inputs(row: Any) -> str | None:
    """What to do where a row has nothing for the model to read; None where it has."""
    if not isinstance(row, Mapping) or not set(row) <= _LABELS:
        return None
    return (
        "give the rows inputs: they have nothing but labels left, since Trainer drops columns that the model's forward "
        "does not name. dataset.map(...) makes them of texts (tokenizer), of pictures or of sound (processor); a "
        "transform (with_transform) needs TrainingArguments(remove_unused_columns=False)."
    )


def _of_no_row(rows: list[Any], run: Callable[[Any], object], error: Exception) -> str | None:
    """What to do where two more of the `rows` fail as the first one does, which may not be to blame then; else None."""
    others: list[Any] = []
    for row in rows:
        if len(others) < 2 and not any(is_same(row, one) for one in [rows[0], *others]):
            others.append(row)
    if len(others) < 2 or not all(_fails_with(error, row, run) for row in others):
        return None
    where = _in_a_model(error)
    return (
        f"others fail with the same words: look first at what all share{'' if where is None else f', at {where}'}. A "
        "config that is not the model's (num_labels, vocab_size), another tokenizer, a column that was dropped "
        "(remove_unused_columns=False keeps it)? Where the model needs labels and is called without them, override "
        "compute_per_example_loss(model, inputs). Else correct the rows."
    )


def _fails_with(error: Exception, row: Any, run: Callable[[Any], object]) -> bool:
    try:
        run(row)
    except Exception as another:  # noqa: BLE001 - whatever it is, it is compared
        return (type(another), str(another)) == (type(error), str(error))
    return False


def refuse_rows_that_fail(dataset: Any, extremes: list[int], few: list[Any], run: Callable[[Any], object]) -> None:
    """Refuses training data of which some row would stop the training, after it has spent budget.

    Args:
        dataset: of which the `extremes` are tried.
        extremes: see `hf_dp.data.extremes`.
        few: rows that are tried as well; see `telling_rows`.
        run: takes one row through the collator and the model, to its loss.

    Raises:
        ConfigurationError: with the error that the row made.
    """
    tried = [(f"{row_in_words(i)} of the training data", dataset[i]) for i in extremes]
    gone: list[Any] = []
    for name, row in [*tried, *(("a row of the training data", row) for row in few)]:
        if any(is_same(row, one) for one in gone):
            continue
        gone.append(row)
        try:
            loss = run(row)
            if isinstance(loss, Tensor):
                # An accelerator tells of an index out of range only when it is asked for a number.
                loss.sum().item()
        except (HfDpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = f"does not go through the collator and the model ({type(error).__name__}: {error})"
            why = "the training would stop where it is drawn, and what was spent until then would be lost."
            if (found := _nothing_in(row, dataset)) is not None:
                column, number = found
                more = "" if number is None else f" ({number} such row{'s' * (number != 1)})"
                raise ConfigurationError(
                    f"{name} has nothing in its column {column!r}{more}, and {failed}.",
                    why=why,
                    fix="leave out the rows that are empty, before or after they are tokenized, for example "
                    f"dataset.filter(lambda row: len(row[{column!r}]) > 0); or give each a token, such as the end of a "
                    "text.",
                ) from error
            rows = [row, *(one for _, one in tried), *few]
            raise ConfigurationError(
                f"{name} {failed}.",
                why=why,
                fix=keep_columns(error)
                or _of_an_adapter(error)
                or _too_few_classes(error)
                or _let_gradients_be_taken(error)
                or _no_inputs(row)
                or _of_no_row(rows, run, error)
                or "correct the row or leave it out: token ids are below the size of the vocabulary, labels of "
                "classes whole numbers below num_labels (not True, not 1.0), texts no longer than the model has "
                "positions (truncation=True). If all fail: remove_unused_columns=False keeps what Trainer dropped and "
                "the model asks for; where the model needs labels and is called without them, override "
                "compute_per_example_loss(model, inputs).",
            ) from error


@contextmanager
def failures_refused() -> Iterator[None]:
    """What fails inside with an error of the model's, the loss's or the collator's own is refused; targets of CTC that
    are no classes fail, since a process that ends tells nothing.

    Raises:
        ConfigurationError: with that error, unless it is of memory, or of another rank.
    """
    try:
        with targets_in_range():
            yield
    except torch.OutOfMemoryError as error:
        error.add_note(_TOO_LITTLE)
        raise
    except (HfDpError, MemoryError):
        raise
    except Exception as error:
        if of_the_backend(error):
            raise
        raise ConfigurationError(
            f"the check before the first step failed in the model, its loss or the collator ({type(error).__name__}: "
            f"{error}).",
            why="it takes rows of all kinds through them, by themselves and together, as training does, which would "
            "stop at such a batch and lose what was spent until then.",
            fix=keep_columns(error)
            or _of_an_adapter(error)
            or _say_what_pads(error)
            or _let_gradients_be_taken(error)
            or "if some rows have what others lack, such as a picture, give it to all, or train on rows of one kind; "
            "of a model in few bits quantise weights alone, not activations. Else the traceback says where.",
        ) from error


@contextmanager
def explained_in_a_step() -> Iterator[None]:
    """What fails inside is told what became of the budget, and how to go on; it stays the error that it is."""
    try:
        yield
    except (HfDpError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not of_the_backend(error):
            error.add_note(_IN_A_STEP)
        raise


def _nothing_in(row: Any, dataset: Any) -> tuple[str, int | None] | None:
    """A column in which a row has nothing, and others have something; and how many rows have nothing there."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        # A number in a tensor or an array has no length either.
        if isinstance(value, Sized) and getattr(value, "shape", None) != () and not length_of(value):
            number = empty_rows(getattr(dataset, "dataset", dataset), str(name))
            if number != len(dataset):
                return str(name), number
    return None
