"""A logical batch as micro-batches: sorted by length, and collated by the user's function, whose work is checked."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import hf_dp.ranks as ranks
from hf_dp.data.cut import Part, by_rows, by_tokens, by_units, check_max_tokens
from hf_dp.data.failing_rows import NUMBERS, for_all_rows
from hf_dp.data.kinds import kind_of, refuse_changed
from hf_dp.data.lengths import length
from hf_dp.data.refused_batches import name_of, refuse_other_than_rows, refuse_packing
from hf_dp.data.shapes import IN_16_BITS, Shape, refuse_other_sizes, shape_of
from hf_dp.data.widths import Checked, Widths, widths_of
from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.randomness import global_state, secret_global_state, unchanged_global_state
from hf_dp.units.packing import Owners

# What Trainer collates with where it is given neither a collator nor a tokenizer.
_PADS_NOTHING = "default_data_collator"

logger = logging.getLogger(__name__)

# What a collator raises of rows that it cannot read; an AttributeError of such as are no dicts.
_UNREAD = (ValueError, TypeError, LookupError, RuntimeError, AttributeError)
Randomness = Callable[[], AbstractContextManager[None]]


class Unit(NamedTuple):
    """Rows that are one example together."""

    rows: list[Any]


class LogicalBatchCollator:
    """Splits a logical batch into micro-batches of similar lengths and collates each with the user's function.

    Picklable if the user's function is.

    Args:
        micro_batch_size: the most examples in one micro-batch.
        collate: list of examples (never empty) -> mapping whose tensors have one row per example: (b, ...).
        reproducible: leave the randomness of collating, and of reading rows for it, to the global seeds (not private).
        max_tokens: the most tokens in one, padding included; None: any number. See `hf_dp.data.cut`.
        equal_widths: whether only those share one that are as wide by themselves.

    Attributes:
        checked: the widths that micro-batches may have without more ado; None: any.
        given, name: the user's function, and its name.

    Raises:
        ConfigurationError: a micro-batch size below 1, or a collator that is none, or known to put several examples in
                one row.
    """

    def __init__(
        self,
        micro_batch_size: int,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        reproducible: bool = False,
        max_tokens: int | None = None,
        equal_widths: bool = False,
    ) -> None:
        if micro_batch_size < 1:
            raise ConfigurationError(
                f"a micro-batch size of {micro_batch_size!r}.",
                why="a micro-batch holds at least one example.",
                fix="set per_device_train_batch_size to 1 or more.",
            )
        check_max_tokens(max_tokens)
        refuse_packing(collate)
        if not callable(collate):
            raise ConfigurationError(
                f"a collator that is {collate!r}.",
                why="rows become micro-batches by it.",
                fix="pass a function of a list of rows, for example torch.utils.data.default_collate.",
            )
        self._micro_batch_size, self._max_tokens, self._equal_widths = micro_batch_size, max_tokens, equal_widths
        self.given = collate
        self.checked: Checked | None = None
        self._measured: dict[int, tuple[Any, Widths]] | None = None
        self.name = name_of(getattr(collate, "data_collator", collate))
        self.randomness: Randomness = nullcontext if reproducible else secret_global_state

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """`{"micro_batches": [what the collator returned, ...]}`; no micro-batch of no examples.

        Where micro-batches are wider or narrower than all before, the rows to hold against one another are under
        "unlike", as they were read, a list for each such micro-batch. Where there are `Unit`s, "owners" has for each
        micro-batch whose its rows are (`Owners`). What was drawn for a step has its number under "step".

        Raises:
            ConfigurationError: the collator did not return a mapping with tensors of one row per example; or, with
                equal_widths, makes them of another width than alone.
        """
        owners = None
        with self.randomness():
            # Their sum does not depend on who shares a micro-batch, but the padding that is computed does.
            if any(isinstance(example, Unit) for example in examples):
                units = sorted((e.rows for e in examples), key=lambda rows: (len(rows), max(map(length, rows))))
                cut = [*self._cut_units(units)]
                parts, owners = [part for part, _ in cut], [whose for _, whose in cut]
            else:
                parts = [*self._cut(sorted(examples, key=length))]
            unlike = []
            if self.checked is not None:
                unlike = [rows for part, batch in parts if (rows := self.checked.beyond(part, batch, self.widths))]
            return {
                "micro_batches": [batch for _, batch in parts],
                **({"unlike": unlike} if unlike else {}),
                **({"owners": owners} if owners is not None else {}),
                **({"step": step} if (step := getattr(examples, "step", None)) is not None else {}),
            }

    def check_cut(self, rows: list[Any], moved: Sequence[float]) -> None:
        """Tries whether `rows` are as wide beside one another; or says what 16 bits do where they need not be.

        Args:
            moved: by how much of its norm the gradient of a row did in 16 bits, when others were beside it, of those
                that were tried; none where there are no 16 bits. That it is little says nothing of other rows.

        Raises:
            ConfigurationError: they are not, with equal_widths.
        """
        if self._equal_widths:
            with unchanged_global_state():
                list(self._cut([*copy.deepcopy(rows), *copy.deepcopy(rows)]))
        elif moved and self._micro_batch_size > 1 and len({shape_of([row], self._alone(row)) for row in rows}) > 1:
            by = max(moved)
            ranks.warn(logger, IN_16_BITS, f"by up to {100 * by:.2g} % of its norm" if by else "none did")

    def _drawn(self, rows: list[Any]) -> Mapping[str, Any]:
        """One micro-batch, with random numbers of its own, whatever the collator has seeded before."""
        with self.randomness():
            return self.collated(rows)

    def _cut(self, rows: list[Any]) -> Iterator[Part]:
        size, most = self._micro_batch_size, self._max_tokens
        for shape, few in self._alike(rows, lambda row: [row]):
            cut = by_rows(few, size, self._drawn)
            for part, batch in cut if most is None else by_tokens(few, size, most, self._drawn, self._alone):
                if shape is not None:
                    refuse_other_sizes(self.name, shape, batch)
                yield part, batch

    def _cut_units(self, units: list[list[Any]]) -> Iterator[tuple[Part, Owners]]:
        size, most = self._micro_batch_size, self._max_tokens
        for shape, few in self._alike(units, list):
            for part, whose in by_units(few, size, most, self._drawn, self._alone, length):
                # One in several is as wide as its own rows make each.
                if shape is not None and not (whose.before or whose.after):
                    refuse_other_sizes(self.name, shape, part[1])
                yield part, whose

    def _alike(
        self, examples: list[Any], rows_of: Callable[[Any], list[Any]]
    ) -> Iterable[tuple[Shape | None, list[Any]]]:
        """Rows, or units, by which may share micro-batches, and the shape that each has by itself; in order."""
        if not self._equal_widths:
            return [(None, examples)]
        found: dict[Shape | None, list[Any]] = {}
        for example in examples:
            rows = rows_of(example)
            # A unit of more rows shares none.
            key = shape_of(rows, self._apart(rows)) if len(rows) <= self._micro_batch_size else None
            found.setdefault(key, []).append(example)
        return found.items()

    def dummy(self, row: Any) -> Mapping[str, Any]:
        """A micro-batch of one row, to be computed with and to add nothing."""
        with self.randomness():
            return self.collated([row])

    def widths(self, row: Any) -> Widths:
        """Of one row by itself, which is what matters: what it is made of is the collator's affair."""
        if self._measured is None:
            return widths_of(self._alone(row))
        if id(row) not in self._measured:
            # With the row, so that no other comes to lie where it lay.
            self._measured[id(row)] = row, widths_of(self._alone(row))
        return self._measured[id(row)][1]

    @contextmanager
    def measuring_once(self) -> Iterator[None]:
        """Inside, each row is measured once: the checks before the first step ask for the same few again and again."""
        self._measured = {}
        try:
            yield
        finally:
            self._measured = None

    def _alone(self, row: Any) -> Mapping[str, Any]:
        return self._apart([row])

    def _apart(self, rows: list[Any]) -> Mapping[str, Any]:
        with unchanged_global_state():
            return self.collated(copy.deepcopy(rows))

    def _failed(self, examples: list[Any], kinds_before: list[Any], error: Exception) -> ConfigurationError:
        alone: list[tuple[Any, Exception]] = []
        for row, kind in zip(examples, kinds_before, strict=True):
            if kind_of(row) != kind:  # the collator has changed it
                continue
            try:
                self._alone(row)
            except _UNREAD as its:
                alone.append((row, its))
        if alone:
            row, own = alone[0]
            made_of = row if isinstance(row, Mapping) else {"it": row}
            kinds = ", ".join(f"{name} is {type(value).__name__}" for name, value in made_of.items())
            is_all, nothing = len(alone) == len(examples), [name for name, value in made_of.items() if value is None]
            is_named = nothing and made_of is row
            without = f": dataset.filter(lambda row: row[{nothing[0]!r}] is not None)" if is_named else ""
            return ConfigurationError(
                f"the data collator {self.name} fails on {'each' if is_all else 'a'} row by itself "
                f"({type(own).__name__}: {own}): {kinds}.",
                why="training would end where one is drawn.",
                fix=for_all_rows(row, own) if is_all else f"correct the row, or leave it out{without}.",
            )
        unlike = "of other columns or types " if len(set(kinds_before)) > 1 else ""
        pads = (
            "pass processing_class=tokenizer, with which the trainer pads what the tokenizer makes; labels that are "
            "lists need a data_collator that pads them too (DataCollatorForTokenClassification)"
            if self.name == _PADS_NOTHING
            else "let it pad all columns that differ in length (DataCollatorForSeq2Seq, or another one, pads labels "
            "too; DataCollatorWithPadding only what the tokenizer makes)"
        )
        return ConfigurationError(
            f"the data collator {self.name} fails on {len(examples)} examples {unlike}together "
            f"({type(error).__name__}: {error}).",
            why="examples that are drawn together are computed together, in tensors with a row for each.",
            fix=f"{pads}; give each row the same columns, of one type, and pictures of one size; {NUMBERS}",
        )

    def collated(self, examples: list[Any]) -> Mapping[str, Any]:
        """One micro-batch of `examples` (at least one), checked. Errors as for a call."""
        kinds = list(map(kind_of, examples))
        unlike = copy.deepcopy(examples) if len(set(kinds)) > 1 else []
        before = global_state() if unlike else ()
        try:
            # Some take the labels out of a row, which is measured and collated again, or the dataset's own.
            batch = self.given([copy.copy(e) if isinstance(e, (MutableMapping, list)) else e for e in examples])
        except _UNREAD as error:
            if len(examples) == 1 or isinstance(error, HfDpError):  # then the row itself is to be named
                raise
            raise self._failed(examples, kinds, error) from error
        refuse_other_than_rows(self.name, batch, len(examples))
        if unlike:
            refuse_changed(self.name, self._alone, unlike, batch, draws=global_state() != before)
        return batch


class Prepared:
    """A collator, and what a method of the user's makes of its batches before a model sees them: for checks.

    Attributes:
        given, name: both functions, and the name of both.
    """

    def __init__(self, collate: LogicalBatchCollator, prepare: Callable[[Any], Any], name: str) -> None:
        self._collate, self._prepare, self.name = collate, prepare, f"{collate.name}, with {name},"
        self.given = functools.partial(prepare, collate.given)

    def collated(self, examples: list[Any]) -> Mapping[str, Any]:
        """As the collator's, prepared."""
        prepared: Mapping[str, Any] = self._prepare(self._collate.collated(examples))
        return prepared
