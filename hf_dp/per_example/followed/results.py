"""Whose the rows are of what an operation gives, from what is known of its arguments (`routes.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.per_example.followed import picks
from hf_dp.per_example.followed.operations import BATCHED, is_elementwise, keeps_axes, works_by_rows
from hf_dp.per_example.followed.owners import Known, are_same, is_join, joined, of_all, of_rows
from hf_dp.per_example.followed.picking import MAKING, PIECES, Operation
from hf_dp.per_example.followed.routes import Routes
from hf_dp.per_example.watched import WatchedParameter, tensors_in

Enter = Callable[[Tensor], Tensor | None]
_VIEWS = ("view", "reshape", "flatten")


class Results:
    """Finds them.

    Args:
        routes: what is known of rows.
        is_data: whether anything of the batch is in a tensor.
        enter: gives the owners of what rows are picked of, and nothing is known of; None where a module sorts rows.
        is_across: whether the examples lie along the second axis of a tensor.
    """

    def __init__(
        self,
        routes: Routes,
        is_data: Callable[[Tensor], bool],
        enter: Enter | None,
        is_across: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._routes, self._batch_size, self._is_data = routes, routes.batch_size, is_data
        self._enter, self._is_across = enter, is_across

    def lays_below(self, name: str, source: Any) -> bool:
        """Whether an operation of this name may lay the examples that lie along a second axis below one another."""
        return name in _VIEWS and isinstance(source, Tensor) and self._is_across(source)

    def followed(
        self, op: Operation, known: Known, is_blank: bool, entered: Tensor | None
    ) -> Tensor | list[Tensor] | None:
        """Those of what an operation gave, from what was `known` of its arguments before; a list, of several pieces.

        Args:
            is_blank: whether there was no data in its first argument before.
            entered: the owners of that by `enter`, before anything was written.
        """
        name, given = op.name, tensors_in(op.args, op.kwargs)
        if is_join(op):
            owners = joined(op, self._entered(op, known), self._is_data)
            # Of rows that were joined the numbers may differ later; of examples each has one.
            is_one = not any(one is not None and one.dim() for one in known.values())
            is_one &= owners is not None and owners.shape == (self._batch_size,)
            return self._routes.sorted_back(owners) if owners is not None and is_one else owners
        every = [known.get(id(a)) for a in given if known.get(id(a)) is not None or self._is_data(a)]
        if picks.is_write(name) or name in MAKING or not every or any(one is None or one.dim() for one in every):
            rows = {id(a): of_rows(known.get(id(a)), a) for a in given}
            found = self._of_rows(op, rows, is_blank, entered)
            if found is not None or picks.is_write(name) or name in MAKING:
                return found
        return of_all(every)

    def _entered(self, op: Operation, known: Known) -> Known:
        """With those of rows that lie in order, where they are laid below others."""
        pieces, place = op.picked_of, op.join
        if self._enter is None or place != (0, False) or not any(map(self._is_data, pieces)):
            return known
        # Of pieces with a row for each example: what is put together of other parts need not be followed for that.
        whole = [one for one in pieces if known.get(id(one)) is None and one.shape[:1] == (self._batch_size,)]
        return known | {id(one): self._enter(one) for one in whole}

    def _of_rows(
        self, op: Operation, known: Known, is_blank: bool, entered: Tensor | None
    ) -> Tensor | list[Tensor] | None:
        name, args, output, source = op.name, op.args, op.output, op.source
        if source is None:
            return None
        before = known.get(id(source))
        if (write := picks.written(op)) is not None:
            value = None if write.value is None else known.get(id(write.value))
            if write.is_one:
                if (one := of_all([value])) is None:
                    return None
                value = one[None]
            if before is None and is_blank and source.dim():
                return self._filled(write, source, value)
            return self._written(write, of_rows(entered, source) if before is None else before, value)
        pick = picks.picked(op)
        are_pieces = name in PIECES and op.axis_at(2) == 0
        is_number = name in picks.NUMBERING and isinstance(output, Tensor) and not output.is_floating_point()
        may_enter = pick is not None or are_pieces or op.is_search or name in picks.REPEATING or is_number
        if before is None and self._enter is not None and may_enter:
            before = self._enter(source)
            if before is not None and not before.dim():  # whatever of it is picked
                return before
        if before is None and pick is not None and not self._is_data(source):
            return self._looked_up(pick, tensors_in(args[1:], op.kwargs), known)
        if before is not None and len(before) != len(source) and name not in _VIEWS:  # (1, n, ...)
            return None
        if before is None and self.lays_below(name, source):
            numbers = torch.arange(self._batch_size, device=source.device).repeat(len(source))
            is_row_by_row = output.shape[:1] == numbers.shape and output.shape[1:].numel() == source.shape[2:].numel()
            return numbers if is_row_by_row else None
        if before is None and is_elementwise(name):
            before = next((owners for owners in known.values() if owners is not None), None)
        if before is None:
            return None
        if op.is_search:
            several = tensors_in(output)
            return [before[output[:, 0] if isinstance(output, Tensor) else several[0]]] * len(several)
        if pick is not None:
            return self._picked(pick, before)
        if name == "__getitem__":
            return before if picks.keeps_first(args[1], source.dim()) else None
        if name in picks.REPEATING:
            return self._repeated(op, before)
        if name == "sort":
            return before[output[1]] if source.dim() == 1 else None
        if are_pieces:
            return self._pieces(op, before)
        if name in _VIEWS and isinstance(output, Tensor) and output.dim():
            return self._viewed(before, len(output))
        made, given = tensors_in(output), tensors_in(args, op.kwargs)
        others = [a for a in given if known.get(id(a)) is not None]
        if not works_by_rows(op) or not all(one.shape[:1] == before.shape for one in made):
            return None
        # What has fewer axes is not laid beside the first one.
        is_aligned = not keeps_axes(name) or len({a.dim() for a in (*made, *others)}) < 2
        if any(self._may_lie_otherwise(a, before, name) for a in given if known.get(id(a)) is None):
            return None
        return before if is_aligned and all(are_same(before, known[id(a)]) for a in others) else None

    def _looked_up(self, pick: picks.Pick, index: list[Tensor], known: Known) -> Tensor | None:
        """Of rows of what has no data: those of the numbers, or of the mask, that picked them."""
        if len(index) != 1 or (index[0].dim() != 1 and (pick.are_numbers or not index[0].dim())):
            return None
        owners = known.get(id(index[0]))
        if pick.are_numbers:
            return owners
        if owners is None and self._enter is not None:
            owners = of_rows(self._enter(index[0]), index[0])
        return None if owners is None else owners[pick.rows]

    def _pieces(self, op: Operation, before: Tensor) -> list[Tensor]:
        """Of rows in pieces; where each example's number of them says how many one is, also of those with none."""
        sizes = [len(piece) for piece in op.output]
        if len(op.args) > 1 and self._routes.has_one_for_each(op.args[1]):
            each = torch.arange(self._batch_size, device=before.device)
            if torch.equal(before, each.repeat_interleave(torch.tensor(sizes, device=before.device))):
                return list(each.unbind())
        return list(before.split(sizes))

    def _picked(self, pick: picks.Pick, before: Tensor) -> Tensor | None:
        """Of rows that were picked; where a module sorts those of experts, all of them go back in the end."""
        owners: Tensor = before[pick.rows].reshape(-1)
        is_sorting = self._enter is None
        if pick.are_numbers and not self._routes.numbers.are_places(pick.rows, unseen=is_sorting):
            # What all go back by leaves no room for others.
            owners = self._routes.sorted_back(owners)
            is_back = self._routes.are_in_order(owners) and (is_sorting or not self._routes.are_in_order(before))
            return owners if is_back else None
        # Of rows in order numbers may pick others in another micro-batch, and are none that put them back.
        may_be_back = pick.are_numbers and (is_sorting or not self._routes.are_in_order(before))
        return self._routes.sorted_back(owners) if may_be_back else owners

    def _filled(self, write: picks.Write, target: Tensor, value: Tensor | None) -> Tensor | None:
        """Of rows that were made to be written to."""
        places = torch.arange(len(target), device=target.device)
        rows = places[write.rows]
        is_matched = value is not None and value.shape == rows.shape
        several = len(rows.unique())
        if is_matched and several == len(places):  # all of them are written
            assert value is not None
            owners = torch.empty_like(places).index_copy_(0, rows, value)
            return self._routes.sorted_back(owners) if torch.equal(owners[rows], value) else None
        # Those that are not lie as all others of as many do, which is not known where rows were picked that do not, and
        # what was written may be some of these.
        is_summed = is_matched and several < len(rows)
        others = self._routes.others_of(len(target), value if is_summed else None)
        if len(target) % self._batch_size or any(self._written(write, one, value) is one for one in others):
            return None
        before = self._routes.in_order(len(target), target.device)
        return before if self._written(write, before, value) is before else None

    def _written(self, write: picks.Write, before: Tensor | None, value: Tensor | None) -> Tensor | None:
        """Of rows into which others were written, `value` being whose these are."""
        if value is None:  # a number, or the same for all rows
            is_same = write.value is None or (write.value.shape[:1].numel() == 1 and not self._is_data(write.value))
            return before if is_same else None
        if before is None:
            return None
        own = before[write.rows]
        if write.times > 1:
            value = value.repeat_interleave(write.times)[: len(own)]
        if are_same(own, value):
            return before
        if write.is_partial or own.shape != value.shape:
            return None
        owners = before.clone()
        owners[write.rows] = value
        # Of two that are written into one place nobody knows which is left there.
        return self._routes.sorted_back(owners) if torch.equal(owners[write.rows], value) else None

    def _viewed(self, before: Tensor, rows: int) -> Tensor | None:
        """Of the same numbers in longer rows, or in shorter ones."""
        if rows == len(before):
            return self._routes.sorted_back(before) if rows == self._batch_size else before
        if self._routes.are_in_order(before):
            return self._routes.in_order(rows, before.device) if rows % self._batch_size == 0 else None
        if rows and rows % max(len(before), 1) == 0 and len(before):
            return before.repeat_interleave(rows // len(before))
        if not rows or not len(before) or len(before) % rows:
            return None
        pieces = before.view(rows, -1)
        return self._routes.sorted_back(pieces[:, 0]) if bool((pieces == pieces[:, :1]).all()) else None

    def _repeated(self, op: Operation, before: Tensor) -> Tensor | None:
        """Of each row several: one after another, or all once more after all."""
        times = op.args[1] if len(op.args) > 1 else op.kwargs.get("repeats")
        if op.name == "repeat_interleave":
            is_along = "dim" in op.kwargs or len(op.args) > 2
            if not is_along or op.axis_at(2) != 0 or not isinstance(times, (int, Tensor)):
                return None
            owners = before.repeat_interleave(times)
            return self._routes.sorted_back(owners) if isinstance(times, int) else owners
        sizes = times if isinstance(times, (tuple, list)) else op.args[1:]
        return before.repeat(sizes[0]) if sizes and isinstance(sizes[0], int) else None

    def _may_lie_otherwise(self, other: Tensor, before: Tensor, name: str) -> bool:
        """Whether these may be rows of other examples than those beside them, with which an operation mixes them."""
        if isinstance(other, (nn.Parameter, WatchedParameter)) or other.shape[:1] != before.shape or len(before) < 2:
            return False
        if self._enter is None:  # in experts
            return name == "where" and other.requires_grad
        is_followed = self._is_data(other) or (name in BATCHED and other.dim() > 2)
        own = of_rows(self._enter(other), other) if is_followed else before
        return not are_same(before, own)
