"""Values computed from parameters alone: position embeddings, T5's relative positions, DoRA's scales, a soft prompt.

No example is in them, so they have no example axis, and an operation on constants gives another constant. Where one
meets data, a rule finds each example's gradient of it, as of a parameter. When the backward pass is over, these are
handed on, from the last constant to the first, until they reach the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.apart import Apart
from hf_dp.per_example.bits import bits_of
from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.functions import Applied
from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.low_rank import summands_of
from hf_dp.per_example.norms import magnitude_of
from hf_dp.per_example.routed import Routed
from hf_dp.per_example.rule import Axis, Operands, Rule, Use, refusal, refuse_changed
from hf_dp.per_example.watched import Source, WatchedParameter, mapped, tensors_in


@dataclass(eq=False)
class Constant:
    """Gathers the per-example gradients of one constant over all its uses.

    Attributes:
        hand_on: takes them (B, *shape of the constant), and how much they cancelled (B,), to what the constant was
            computed from.
        hand_on_routed: the same, of one use of the matrices of experts, as the factors that it is; where it is known.
    """

    hand_on: Callable[[Tensor, Tensor], None]
    shape: torch.Size
    hand_on_routed: Callable[[Routed], None] | None = None
    gathered: Tensor | None = None
    # Multiplied out when they are handed on: of many constants, each may be as large as a weight.
    kept: list[Outer] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    magnitude: Tensor | None = None
    apart: Apart = field(default_factory=Apart)

    def gather(self, factors: Factors) -> None:
        """Adds the gradients of one use."""
        if not self.apart.keeps("", factors):
            self._gather(factors)

    def _gather(self, factors: Factors) -> None:
        if not self._is_handed_on(factors):
            magnitude = magnitude_of(factors)
            self.magnitude = magnitude if self.magnitude is None else self.magnitude + magnitude
        if isinstance(factors, Outer):
            with full_precision(factors.device):
                factors = factors.settled()
        if isinstance(factors, Outer):
            self.kept.append(factors)
            sides = factors.left.tensor, factors.right.tensor
            self.versions += [(side, side._version) for side in sides if not side.is_inference()]
        else:
            self._add(factors.values)

    def _is_handed_on(self, factors: Factors) -> TypeGuard[Routed]:
        # Lengths that are given are those of other rows.
        return self.hand_on_routed is not None and isinstance(factors, Routed) and factors.given is None

    def _add(self, values: Tensor) -> None:
        values = values.reshape(len(values), *self.shape)
        self.gathered = values if self.gathered is None else self.gathered + values

    def settle(self) -> None:
        """Hands on what was gathered."""
        self.apart.hand_on(lambda _, factors: self._gather(factors))
        refuse_changed(self.versions)
        while self.kept:
            use = self.kept.pop()
            if self.hand_on_routed is not None and self._is_handed_on(use):
                self.hand_on_routed(use)
            else:
                self._add(use.instantiated().values)
        self.versions.clear()
        if self.gathered is not None and self.magnitude is not None:
            gathered, self.gathered = self.gathered, None
            norms = torch.linalg.vector_norm(gathered.reshape(len(gathered), -1), dim=1).to(self.magnitude)
            # Of what is nothing nothing comes, however large this is.
            cancelled = self.magnitude / norms.clamp_min(torch.finfo(norms.dtype).tiny)
            cancelled = cancelled.clamp(1, torch.finfo(norms.dtype).max ** 0.25)
            self.hand_on(gathered, cancelled.masked_fill(~self.magnitude.isfinite(), torch.inf))


def by_rule(rule: Rule, given: Tensor, operands: Operands, watched: dict[str, Source]) -> tuple[Tensor, Constant, bool]:
    """The value of an operation on a constant input, what gathers its gradients (to hand them on by the rule's own
    backward), and whether no operand shares its memory."""
    output, saved = rule.forward(given, operands)
    check = _untouched([*saved, output])

    def hand_on(gradients: Tensor, cancelled: Tensor) -> None:
        check()
        axis = Axis(len(gradients), "constant")
        rows = tuple(t.detach().expand(len(gradients), *t.shape) for t in saved)
        _, factors = rule.backward(rows, operands, gradients.to(output.dtype), axis, False)
        for role, source in watched.items():
            found = factors[role]
            if found is not None:
                source.pull(_of_sums(found, cancelled))

    parameters = [p for p in operands.parameters.values() if isinstance(p, Tensor)]
    return output, Constant(hand_on, output.shape), _is_apart(output, [given, *parameters])


def _of_sums(factors: Factors, cancelled: Tensor) -> Factors:
    """The same gradients, computed from sums in which so much cancelled (B,)."""
    lengths = Lengths((magnitude_of(factors) * cancelled)[:, None])
    return replace(factors, given=lengths) if isinstance(factors, Outer) else replace(factors, lengths=lengths)


def by_autograd(
    function: Any,
    args: Any,
    kwargs: Any,
    make: Callable[[Tensor, Constant, bool], WatchedParameter],
    is_sharded: bool = False,
) -> Any:
    """What any operation on constants returns, with constants for tensors.

    Their gradients are handed on by one vector-Jacobian product for each example.

    Args:
        make: makes one of a value, of what gathers its gradients, and of whether no other shares its memory.
        is_sharded: whether FSDP2 frees the memory of parameters when their module's backward pass is over; what the
            products need of them is copied, and a Function is given copies: it may keep what no hook sees.

    Raises:
        RuntimeError: the operation changes one of its arguments.
    """
    leaves: dict[int, tuple[Source, Tensor]] = {}
    is_copied = is_sharded and isinstance(function, Applied)

    def leaf(value: Any) -> Any:
        if not isinstance(value, WatchedParameter):
            return value.clone() if is_copied and isinstance(value, Tensor) else value
        if id(value) not in leaves:
            whole = value.source.plain.detach()
            leaves[id(value)] = value.source, (whole.clone() if is_copied else whole).requires_grad_()
        return leaves[id(value)][1]

    given = mapped(leaf, args), mapped(leaf, kwargs)
    tensors = [t.detach() if t.requires_grad else t for t in tensors_in(given)]
    versions = [t._version for t in tensors]
    freed = set(map(_memory, tensors)) if is_sharded and not is_copied else set[int]()
    needed: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        # Detached, since a result that is saved would hold on to the graph that holds it.
        needed.append(saved.detach().clone() if freed and _memory(saved) in freed else saved.detach())
        return needed[-1]

    # Gradient checkpointing must not compute again, under vmap, what is kept here.
    kept = torch.autograd.graph.saved_tensors_hooks(keep, Tensor.detach)
    with torch.enable_grad(), kept, torch._C.DisableTorchFunctionSubclass():
        output = function(*given[0], **given[1])
    if versions != [t._version for t in tensors]:
        raise RuntimeError("an operation in place")
    check = _untouched([*tensors, *(o.detach() for o in tensors_in(output))], needed if is_sharded else None)
    parents, inputs = [p for p, _ in leaves.values()], [x for _, x in leaves.values()]

    summands = None if is_sharded else summands_of(function, args, kwargs)

    def hand_on_routed(routed: Routed) -> None:
        check()
        for summand in summands or ():
            summand.source.pull(summand.passed(routed))

    def constant(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value

        def hand_on(gradients: Tensor, cancelled: Tensor) -> None:
            check()
            for parent, gradient in zip(parents, _products(value, inputs, gradients.to(value.dtype)), strict=True):
                if gradient is not None:
                    parent.pull(_of_sums(PerExample(gradient), cancelled))

        gathered = Constant(hand_on, value.shape, hand_on_routed if summands else None)
        return make(value.detach(), gathered, output is value and _is_apart(value, tensors))

    return mapped(constant, output)


def _is_apart(value: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether it has memory of its own."""
    if any(t.layout is not torch.strided for t in (value, *others)):
        return False
    return all(_memory(t) != _memory(value) for t in others)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _products(value: Tensor, inputs: list[Tensor], gradients: Tensor) -> Iterable[Tensor | None]:
    """Vector-Jacobian products, one for each row of `gradients`: of each input, with a row for each."""
    kept = {"retain_graph": True, "allow_unused": True}
    try:
        return torch.autograd.grad(value, inputs, gradients, is_grads_batched=True, **kept)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001
        # The backward pass of an autograd Function may do what vmap cannot.
        rows = [torch.autograd.grad(value, inputs, gradient, **kept) for gradient in gradients]
        # That of a sparse matrix may be sparse.
        return [None if found[0] is None else torch.stack(found).to_dense() for found in zip(*rows, strict=True)]


def _untouched(tensors: list[Tensor], needed: list[Tensor] | None = None) -> Callable[[], None]:
    """Refuses, when it is called, what was changed in place since: autograd does not look at what is kept here.

    And where FSDP2 has freed what of them is `needed` (by default all).
    """
    versions = [(t, t._version) for t in tensors if not t.is_inference()]
    # PEFT takes these out and puts them back in each pass, and once more where a checkpoint computes again, which torch
    # counts as writes.
    told = {id(t): bits_of(t.detach().reshape(1, -1)) for t, _ in versions if _is_of_experts(t)}

    def check() -> None:
        counted = [(t, n) for t, n in versions if t._version != n]
        refuse_changed((t, n) for t, n in counted if id(t) not in told or not _is_still(t, told[id(t)]))
        # FSDP2 frees the memory of whole parameters when their module's backward pass is over.
        whole = (t for t in (tensors if needed is None else needed) if t.numel() and t.layout is torch.strided)
        if not all(t.untyped_storage().nbytes() for t in whole):
            raise UnsupportedModelError(
                "a value is computed from parameters alone, some of which FSDP2 shards.",
                why="its gradient needs them whole after the backward pass, when they are no longer.",
                fix="use DDP, or freeze these parameters.",
            )

    return check


def _is_of_experts(tensor: Tensor) -> bool:
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return is_frozen and tensor.dim() == 3 and tensor.layout is torch.strided and not tensor.is_complex()


def _is_still(tensor: Tensor, bits: Tensor) -> bool:
    return torch.equal(bits_of(tensor.detach().reshape(1, -1)), bits)


def refuse_constant(losses: Tensor, uses: Iterable[Use], batch_size: int) -> None:
    """Refuses losses that are a constant, of which no use was read as one of so many examples.

    Raises:
        UnsupportedModelError: with the parameters and the operations.
    """
    if isinstance(losses, WatchedParameter):
        constant = [use for use in uses if use.reading == "constant"]
        operations = ", ".join(sorted({use.operation for use in constant}))
        reason = f"no axis of its operands can be read as {batch_size} examples (a model called for each row by itself "
        reason += "sees one: call it once for all, and take each one's loss of what it gives)"
        raise refusal(sorted({use.parameter for use in constant}), f"operation {operations}", reason)
