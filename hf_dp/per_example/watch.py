"""How a use of a parameter is seen and recorded.

For the duration of one forward and backward pass every trainable parameter is replaced by a `WatchedParameter`, a
tensor whose `__torch_function__` looks the operation up in the rules. Uses are thus keyed on (operation, parameter),
not on module class: tied weights, GPT-2's Conv1D, every RMSNorm and LoRA need no code of their own. An operation
without a rule is refused where it happens. Each use runs as an autograd Function on the plain weight, so autograd never
forms weight gradients; what backward needs goes through `save_for_backward`, so checkpointing works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.distributed.tensor import DTensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.apart import Apart
from hf_dp.per_example.batch import Batch, LossFunction, check_losses, laid_out
from hf_dp.per_example.casts import Casts
from hf_dp.per_example.checks.state import refuse_compiled, refuse_hooked
from hf_dp.per_example.constants import Constant, by_autograd, by_rule, refuse_constant
from hf_dp.per_example.factors import Factors, Outer
from hf_dp.per_example.filled import Filled, is_asked_to_write, is_writing
from hf_dp.per_example.functions import Applied, by_rows, functions_seen, refuse_returned
from hf_dp.per_example.idle import without_idle
from hf_dp.per_example.ieee import are_in_full, full_precision, whole_sums
from hf_dp.per_example.leaves import refusing_others
from hf_dp.per_example.modules import named_modules, trained_in
from hf_dp.per_example.precision import sum_dtypes
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import HIDDEN_BY_FUNC, PLAIN, Axis, Bound, Operands, Rule, Use, refusal
from hf_dp.per_example.rules import may_read_parameters
from hf_dp.per_example.rules.composites import COMPOSITES
from hf_dp.per_example.sharding import refuse_unknown_shards, reshard, watched_when_whole
from hf_dp.per_example.targets import targets_in_range
from hf_dp.per_example.use import CHANGING, Call, copied, name_of, of_earlier_pass, recorded, sorted_operands
from hf_dp.per_example.watched import Source, WatchedParameter, flatten, in_place, mapped, names_of, plain, tensors_in

Observer = Callable[[Use, Tensor, Axis], None]


@dataclass(eq=False)
class Watch:
    """What one recording of one micro-batch shares between its uses."""

    reader: Reader
    rules: Mapping[Any, Rule]
    observe: Observer | None = None
    # Parameters whose factors must keep their ids.
    tables: frozenset[str] = frozenset()
    constants: list[Constant] = field(default_factory=list)
    filled: Filled = field(default_factory=Filled)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    factors: dict[str, list[Factors]] = field(default_factory=dict)
    sum_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    uses: set[Use] = field(default_factory=set)
    doubts: set[Use] = field(default_factory=set)
    # Known for the reading of shapes alone: no gradient follows from them, so they are no unseen uses.
    read: set[Use] = field(default_factory=set)
    leaked: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    # One for all uses: what lets autograd know that they have a gradient.
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    casts: Casts = field(default_factory=Casts)
    # What ran without gradients may be a reentrant checkpoint, which the backward pass computes again.
    may_come_again: bool = False
    is_final: bool = False
    # Whether products are in full precision as the backward pass begins.
    are_in_full: bool = False
    is_closed: bool = False
    is_sharded: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    # Of uses that are computed again, which examples (B,) then come out otherwise.
    differing: list[Tensor] = field(default_factory=list)
    _apart: Apart = field(default_factory=Apart)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.reader.batch_size

    @property
    def found_any(self) -> bool:
        """Whether any parameter got a gradient."""
        return any(self.factors.values())

    def run(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """One forward and one backward pass; the losses (B,), detached. The factors are then in `factors`."""
        with self.attached(model), refusing_others([*self.parameters.values(), *batch.values()]):
            with whole_sums(self.parameters.values()):
                losses = self.forward(model, loss_fn, batch)
                self.backward(losses)
            with torch.no_grad(), full_precision(losses.device):
                for constant in reversed(self.constants):
                    constant.settle()
        return losses.detach()

    def backward(self, losses: Tensor) -> None:
        """The backward pass, in which the uses hand on their factors."""
        self.is_final, self.are_in_full = True, are_in_full(losses.device)
        with self.reader.again():
            losses.backward(torch.ones_like(losses))
        self._apart.hand_on(self._keep)

    def forward(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """One forward pass of an attached model: the losses (B,), with their graph."""
        batch = laid_out(batch)
        with torch.enable_grad(), self.reader.reading(v for v in batch.values() if isinstance(v, Tensor)):
            losses = loss_fn(model, batch)
            refuse_constant(losses, self.uses, self.batch_size)
            check_losses(losses, self.batch_size)
            self.reader.check_order(losses)
            self.read |= self.reader.inferred
        return losses

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Replaces every trainable parameter of `model`, wherever it is tied, and puts them back at the end.

        Raises:
            UnsupportedModelError: a compiled module, or a gradient reached a parameter behind the watch's back.
        """
        reshard(model)
        # It may have thousands of modules, and is walked through as seldom as can be for each micro-batch.
        named = named_modules(model)
        refuse_compiled(modules := [module for _, module in named])
        refuse_unknown_shards(modules)
        holders = [(name, module) for name, module in named if module._parameters]
        self.parameters = originals = trained_in(holders)
        modules = [module for _, module in holders]
        del named, holders  # which Python would look through for garbage as long as the pass takes
        refuse_hooked(originals)
        keep = self._apart.before(self._keep)

        def watch(name: str, whole: Tensor) -> WatchedParameter:
            if whole.is_complex():
                raise refusal([name], "complex numbers", "no rule is known to conjugate as they need it")
            return WatchedParameter.of(Source((name,), self, whole.detach(), functools.partial(keep, name)))

        sharded = {id(p): name for name, p in originals.items() if isinstance(p, DTensor)}
        watched = {id(p): watch(name, p) for name, p in originals.items() if id(p) not in sharded}
        self.factors, self.is_sharded = {name: [] for name in originals}, bool(sharded)
        self.sum_dtypes = sum_dtypes(originals)
        try:
            with in_place(modules, originals, watched), functions_seen(), self.reader.followed(model.modules()):
                with watched_when_whole(model, sharded, watch), targets_in_range():
                    yield
                leaked = self.leaked | {name for name, p in originals.items() if p.grad is not None}
                if leaked:
                    raise UnsupportedModelError(
                        f"gradient reached {', '.join(sorted(leaked))} by a use that no rule saw.",
                        why="a use that is not seen is missing from the norm, so the clipping bound would not hold.",
                        fix="freeze these parameters (requires_grad_(False)), train with LoRA instead, or call a "
                        "Function of autograd as MyFunction.apply(...) where it is used, not as f = MyFunction.apply.",
                    )
        finally:
            # They know this watch: a cycle would keep the memory of the whole pass.
            self.constants.clear()
            self.filled.end()
            self.is_closed = True

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Sequence[WatchedParameter]
    ) -> Any:
        """Runs one operation that involves a watched tensor: a use, by its rule, or one on constants alone."""
        refuse_returned(watched)
        self.may_come_again |= not torch.is_grad_enabled()
        # The operators of other libraries by their names: they are there once these are imported.
        rule = self.rules.get(str(function) if isinstance(function, OpOverloadPacket) else function)
        name = rule.name if rule else name_of(function)
        parameters = names_of(w.source for w in watched)
        if self.is_closed or any(w.source.watch is not self for w in watched):
            return of_earlier_pass(function, name, parameters, args, kwargs, is_over=self.is_closed)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise refusal(parameters, f"operation {name}", *HIDDEN_BY_FUNC)
        bound = sorted_operands(rule, name, parameters, args, kwargs)
        if rule is not None and isinstance(bound, Bound):
            return self._by_rule(rule, bound, parameters, function, args, kwargs)
        if function in COMPOSITES and kwargs.get("out") is None:
            output = COMPOSITES[function](*args, **kwargs)
            if output is not NotImplemented:
                return output
        assert isinstance(bound, UnsupportedModelError)
        copies = copied(self.reader, function, name, parameters, args, kwargs)
        if copies is not None:
            self.read |= copies.read
            try:
                return function(*copies.args, **copies.kwargs)
            except RuntimeError as error:  # masked_fill takes no rows
                raise bound from error
        others = [a for a in tensors_in(args, kwargs) if not isinstance(a, WatchedParameter)]
        shared = [other for other in others if self.reader.is_constant(name, parameters, other)]
        data = [other for other in others if not any(other is one for one in shared)]
        is_hidden = isinstance(function, Applied)
        doubtful = bool(others or is_hidden) and self.reader.ambiguous_sizes is not None

        def note() -> None:
            for given in shared or ((None,) if is_hidden and not data else ()):
                self._note(name, parameters, given, Axis(self.batch_size, "constant"), doubtful)

        if data and isinstance(function, Applied):
            found = by_rows(function, args, kwargs, data, self.differing.append)
            if found is None:
                return function(*args, **kwargs)
            note()
            return self._by_rule(*found, parameters, function, args, kwargs)
        if data or CHANGING.search(name):
            raise bound
        if is_writing(name) or is_asked_to_write(name, args, kwargs):
            note()  # of what is another tensor afterwards
            return self._written(function, args, kwargs, parameters, bound)
        output = self._on_constants(function, args, kwargs, parameters, bound)
        # What has no gradient (a test for infinities, say) is no use; nor is what torch itself differentiates, where it
        # has no other operand, whose axes could be read in another way.
        if not torch.is_grad_enabled() or any(isinstance(o, WatchedParameter) for o in flatten(output)):
            note()
        return output

    def _by_rule(self, rule: Rule, bound: Bound, parameters: list[str], function: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._use(rule, bound, parameters, function, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            # What fails without a rule too is the model's own error.
            function(*mapped(plain, args), **mapped(plain, kwargs))
            raise refusal(parameters, f"operation {rule.name}", f"its rule cannot read it ({error})") from error

    def _use(self, rule: Rule, bound: Bound, parameters: list[str], function: Any, args: Any, kwargs: Any) -> Any:
        watched = {r: p.source for r, p in bound.parameters.items() if isinstance(p, WatchedParameter)}
        operands = Operands({r: plain(p) for r, p in bound.parameters.items()}, frozenset(watched), bound.options)
        axis = self.reader.axis(rule, bound, parameters)
        given = None if bound.input is None else axis.led(bound.input)
        is_doubtful = self.reader.is_doubtful(rule, given, axis, is_known=not isinstance(function, Applied))
        self._note(rule.name, parameters, given, axis, is_doubtful)
        if axis.reading == "constant":
            if given is None or rule.features > 1 or may_read_parameters(rule, function, self.is_sharded):
                refused = refusal(parameters, f"operation {rule.name}", "its rows are not the examples")
                return self._on_constants(function, args, kwargs, parameters, refused)
            if not torch.is_grad_enabled():
                return rule.forward(given, operands)[0]
            return self._constant(parameters, *by_rule(rule, given, operands, watched))
        output = recorded(bound.input if rule.is_sorted else given, Call(self, rule, operands, watched, axis))
        self.dtypes.add(output.dtype)
        if bound.input is None and axis.example is None:
            self.reader.note_copies(rule.name, parameters, output, bound.options["rows"])
        return output if rule.is_sorted else axis.as_before(output)

    def _on_constants(
        self, function: Any, args: Any, kwargs: Any, parameters: list[str], refused: UnsupportedModelError
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*mapped(plain, args), **mapped(plain, kwargs))
        try:
            return by_autograd(function, args, kwargs, functools.partial(self._constant, parameters), self.is_sharded)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise refused from error

    def _written(
        self, function: Any, args: Any, kwargs: Any, parameters: list[str], refused: UnsupportedModelError
    ) -> Any:
        try:
            return self.filled.write(function, args, lambda f, a: self._on_constants(f, a, kwargs, parameters, refused))
        except RuntimeError as error:
            raise refused from error

    def _constant(self, parameters: list[str], value: Tensor, constant: Constant, is_apart: bool) -> Any:
        self.constants.append(constant)
        self.dtypes.add(value.dtype)
        made = WatchedParameter.of(Source(tuple(parameters), self, value.detach(), constant.gather))
        return self.filled.computed(made, is_apart)

    def _note(self, operation: str, parameters: list[str], given: Tensor | None, axis: Axis, doubtful: bool) -> None:
        for parameter in parameters:
            use = Use(operation, parameter, axis.reading, 0 if given is None else given.dim())
            (self.uses if torch.is_grad_enabled() else self.read).add(use)
            self.doubts.update((use,) if doubtful else ())
            if given is not None and axis.reading != "constant" and not given.requires_grad:
                self.read.add(Use(operation, parameter, PLAIN, given.dim()))
            if self.observe is not None and given is not None:
                self.observe(use, given, axis)

    def _keep(self, name: str, factors: Factors) -> None:
        # A float64 parameter may be used through a float32 derivative (Gemma's norms), or the other way round.
        factors = factors.accumulated_in(self.sum_dtypes[name])
        if isinstance(factors, Outer) and name not in self.tables:
            with nullcontext() if self.are_in_full else full_precision(factors.device):
                factors = without_idle(factors).settled()
        kept = (factors.left.tensor, factors.right.tensor) if isinstance(factors, Outer) else (factors.values,)
        self.versions += [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]
        self.factors[name].append(factors)
