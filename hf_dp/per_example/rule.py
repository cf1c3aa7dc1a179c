"""What a rule is: how one torch function uses its parameters, and how the example axis of its input is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.factors import Factors
from hf_dp.per_example.order import Order

# What a rule saves, and what its backward pass gives: the input's gradient, and the factors by role.
Saved = tuple[Tensor, ...]
Backward = tuple[Tensor | None, dict[str, Factors | None]]


class Bound(NamedTuple):
    """The arguments of one call, sorted: the example-led input, the parameters by role, everything else."""

    input: Tensor | None
    parameters: dict[str, Tensor | None]
    options: dict[str, Any]


class Operands(NamedTuple):
    """What a rule computes with: plain tensors by role, and which roles are watched."""

    parameters: dict[str, Tensor | None]
    watched: frozenset[str]
    options: dict[str, Any]

    def needed(self, role: str) -> Tensor:
        """One that is there."""
        value = self.parameters[role]
        assert value is not None
        return value


class Axis(NamedTuple):
    """How the example axis of an input is read: "batch" (B, ...), "folded" (B*k, ...), or "constant": in none.

    Where it is SECOND, (T, B, ...), rules see the first two axes in the other order; where it is ROUTED, (n, ...) in
    the order of something else, they see as many rows of each example, one after another, unless they are `is_sorted`.
    Where it is ALONE they see a batch of one.

    Attributes:
        order: of a ROUTED input.
        example: of one that is ALONE, its number, and that of all examples.
        is_row: whether that is a single row, without an axis for it.
    """

    batch_size: int
    reading: str
    order: Order | None = None
    example: tuple[int, int] | None = None
    is_row: bool = False

    def positions(self, tensor: Tensor) -> Tensor:
        """(B, T, n) from a tensor laid out like the input, features last."""
        if tensor.dim() == 3 and tensor.shape[0] == self.batch_size:
            return tensor  # A view of its own for each use takes a GPU's host longer than to ask.
        return tensor.reshape(self.batch_size, -1, tensor.shape[-1])

    def led(self, tensor: Tensor) -> Tensor:
        """An input as rules see it: the examples first, one after another."""
        if self.reading == SECOND:
            return tensor.transpose(0, 1)
        if self.order is None:
            return tensor[None] if self.is_row else tensor
        if not len(tensor):
            return tensor.new_zeros(self.batch_size, *tensor.shape[1:])
        rows, blank = tensor[self.order.at], self.order.blank
        # Of an example that has none those of another might be infinite.
        return rows if blank is None else rows.masked_fill(_beside(blank, rows), 0)

    def spread(self, gradient: Tensor) -> Tensor:
        """The gradient of what an `is_sorted` rule gave, as other rules see theirs: none of rows that come again."""
        rows, used = self.led(gradient), None if self.order is None else self.order.used
        return rows if used is None else rows.masked_fill(~_beside(used, rows), 0)

    def as_before(self, tensor: Tensor) -> Tensor:
        """What a rule gave, laid out like the input."""
        if self.reading == SECOND:
            # Contiguous, as torch would have given it: models take its first two axes for one with `view`.
            return tensor.transpose(0, 1).contiguous()
        if self.is_row:
            return tensor[0]
        return tensor if self.order is None else tensor[self.order.back]

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, k, ...) from a tensor laid out like the input."""
        # How many are said: torch cannot tell where there are no positions.
        each = tensor.shape[0] // self.batch_size if tensor.dim() else 1
        return tensor.reshape(self.batch_size, each, *tensor.shape[1:])


def _beside(mask: Tensor, rows: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (rows.dim() - 1))


@dataclass(frozen=True)
class Rule:
    """How one torch function uses its parameters.

    Attributes:
        name: the operation's name in messages and certificates.
        bind: takes the function's own arguments and sorts them into a `Bound`.
        forward: `(input, operands) -> (output, tensors to save)`.
        backward: `(saved, operands, grad_output, axis, needs_input_gradient) -> (input gradient or None,
            {role: Factors})`. Example i's factor must depend on row i of the saved tensors and of `grad_output` alone.
        features: number of trailing axes of the input that are not example or position axes.
        is_orderless: whether axes that are no features may change places, if no option of a `Bound` denies it.
        is_sorted: what it does follows from the order of the input's rows, whose examples `order` of the axis says.
        reads_parameters: whether `backward` reads what they hold, and not their shapes alone, also without the input's
            gradient. Of a constant input autograd finds the gradients then.
        is_product: autocast computes it in fewer bits, of an input cast to these; that cast is saved in its place then.
    """

    name: str
    bind: Callable[..., Bound]
    forward: Callable[[Any, Operands], tuple[Tensor, Saved]]
    backward: Callable[[Saved, Operands, Tensor, Axis, bool], Backward]
    features: int = 1
    is_product: bool = False
    is_orderless: bool = False
    is_sorted: bool = False
    reads_parameters: bool = False


class Use(NamedTuple):
    """The signature of a use, which preflight certifies: the same for every batch size and length."""

    operation: str
    parameter: str
    reading: str
    dimensions: int


SECOND = "second"
# Rows that a module sorted, of which `followed/routes.py` knows whose they are.
ROUTED = "routed"
# Of one example, which a loop in Python took out of the batch.
ALONE = "alone"
# First in one place, second in another.
MIXED = "mixed"
# Before how other rows of such a use were read, of which it is known that they are in order, or shared by all examples.
AND_ROUTED = f"{ROUTED}, else "
AND_ALONE = f"{ALONE}, else "
# Noted beside the reading of data that requires no gradient.
PLAIN = "plain"
BY_GRADIENT = "by gradient"
# Noted beside "folded", where that is no plain view.
INFERRED = "inferred"
# The key of whether any reading is.
INFERS = ("", "", 0)
Readings = Mapping[tuple[str, str, int], str]


class Certificate(frozenset[Use]):
    """The uses that `preflight` has seen and found exact. An unseen use, later, is refused.

    Args:
        uses: compared with the oracle.
        read: only seen, where there was no gradient (the first pass of a checkpoint, or another mode of the model).
    """

    read: frozenset[Use]

    def __new__(cls, uses: Iterable[Use] = (), read: Iterable[Use] = ()) -> Certificate:
        made = super().__new__(cls, uses)
        made.read = frozenset(read)
        return made

    def covers(self, uses: Iterable[Use]) -> bool:
        """Whether all `uses` were seen; folded with one row for each example is the same as not folded.

        Of experts that are alike but for their numbers one speaks for others that no row of the check was given. Whose
        their rows are follows from no shape.
        """
        same = {"batch": "folded", "folded": "batch"}
        return all(
            u in self
            or u._replace(reading=same.get(u.reading, u.reading)) in self
            or (u.reading == ROUTED and _without_number(u) in self._routed)
            for u in uses
        )

    @cached_property
    def _routed(self) -> frozenset[Use]:
        return frozenset(_without_number(use) for use in self if use.reading == ROUTED)

    @cached_property
    def readings(self) -> Readings:
        """How first axes were read, by (operation, parameter, dimensions).

        "batch", "folded", "data" for both of these, "constant", or "either" for constant and another; BY_GRADIENT where
        all the others require a gradient and no constant does; SECOND, or MIXED for this and another; ROUTED, and with
        others AND_ROUTED and how these were read; and so of ALONE, which comes before all others.
        """
        found: dict[tuple[str, str, int], set[str]] = {}
        for use in self | self.read:
            found.setdefault((use.operation, use.parameter, use.dimensions), set()).add(use.reading)
        infers = any(seen & {INFERRED, ALONE} for seen in found.values())
        readings = {key: _joined(seen - {INFERRED}) for key, seen in found.items()}
        return {**readings, INFERS: INFERRED if infers else ""}


def _without_number(use: Use) -> Use:
    return use._replace(parameter=re.sub(r"\d+", "*", use.parameter))


def _joined(readings: set[str]) -> str:
    is_plain, readings = PLAIN in readings, readings - {PLAIN}
    if len(readings) == 1:
        return next(iter(readings))
    if ALONE in readings:
        return AND_ALONE + _joined(readings - {ALONE} | ({PLAIN} if is_plain else set()))
    if SECOND in readings:
        return MIXED
    if ROUTED in readings:
        return AND_ROUTED + _joined(readings - {ROUTED} | ({PLAIN} if is_plain else set()))
    if "constant" in readings:
        return "either" if is_plain else BY_GRADIENT
    return "data"


def refusal(names: list[str], what: str, reason: str, way: str = "") -> UnsupportedModelError:
    """That of a use, and if there is another way than those of every use, that `way` first."""
    return UnsupportedModelError(
        f"parameter {', '.join(names)} is used by {what}.",
        why=f"{reason}, and a gradient that is not known to be exact would break the clipping bound.",
        fix=f"{way}{'; or ' if way else ''}freeze this parameter (requires_grad_(False)), train with LoRA, or pass a "
        "rule for the operation (docs/rules.md).",
    )


HIDDEN_BY_FUNC = "torch.func (vmap, grad, jvp) hides the examples' axis", "call it on the whole batch, without it"


def unsupported(
    operation: str, found: str, why: str, fix: str = "freeze the parameter, train with LoRA"
) -> UnsupportedModelError:
    """Arguments of an operation that its rule does not know."""
    return UnsupportedModelError(
        f"{operation} with {found} uses a trainable parameter.",
        why=f"{why}; a gradient that is not known to be exact would break the clipping bound.",
        fix=f"{fix}, or pass a rule for the operation (docs/rules.md).",
    )


def refuse_changed(versions: Iterable[tuple[Tensor, int]]) -> None:
    """Refuses tensors whose version is no longer what it was when they were recorded.

    Raises:
        UnsupportedModelError: one was changed in place.
    """
    if any(tensor._version != version for tensor, version in versions):
        raise UnsupportedModelError(
            "activations or their gradients were changed in place after they were recorded.",
            why="norms and sums would be of other numbers than the gradients.",
            fix="do not change tensors of the batch, the activations or the gradients in place; let a loss of your "
            "own use a copy of the logits (logits.clone()).",
        )


def most_differing(found: Sequence[Tensor], known: Tensor | None = None) -> Tensor | None:
    """How many examples differ, () on a device, at most by one of these masks (B,), or as `known` before."""
    counts = [mask.sum() for mask in found] + ([] if known is None else [known])
    # Layers of one model may lie on several devices.
    return torch.stack([count.to(counts[0].device) for count in counts]).amax() if counts else None


def refuse_differing(examples: Tensor | None) -> None:
    """Refuses a step in which this many examples came out otherwise when they were computed again.

    Raises:
        UnsupportedModelError: one did.
    """
    if examples is not None and bool(examples):
        raise UnsupportedModelError(
            f"{int(examples)} examples whose gradients were others when they were computed again.",
            why="what is summed is not what the norms were taken of, and may be longer than the clipping bound.",
            fix="let the model and its loss compute the same when they are called again on the same batch "
            "(torch.use_deterministic_algorithms(True), no counters), and Functions for each example by itself; or "
            "leave passes at 1.",
        )
