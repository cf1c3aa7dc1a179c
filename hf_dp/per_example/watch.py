"""How a use of a parameter is seen and recorded.

For the duration of one forward and backward pass every trainable parameter is replaced by a `WatchedParameter`, a
tensor whose `__torch_function__` looks the operation up in the rules. Uses are thus keyed on (operation, parameter),
not on module class: tied weights, GPT-2's Conv1D, every RMSNorm and LoRA need no code of their own. An operation
without a rule is refused where it happens. Each use runs as an autograd Function on the plain weight, so autograd never
forms weight gradients; what backward needs goes through `save_for_backward`, so checkpointing works.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, check_losses
from hf_dp.per_example.casts import Casts
from hf_dp.per_example.checks.state import refuse_compiled
from hf_dp.per_example.composites import COMPOSITES
from hf_dp.per_example.constants import Constant, by_autograd, by_rule
from hf_dp.per_example.factors import Factors, Outer
from hf_dp.per_example.functions import Applied, functions_seen
from hf_dp.per_example.idle import without_idle
from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.leaves import refusing_others
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import PLAIN, Axis, Bound, Operands, Rule, Use, refusal
from hf_dp.per_example.sharding import refuse_unknown_shards, reshard, trained_in, watched_when_whole
from hf_dp.per_example.use import BROADCASTING, PRODUCTS, Call, recorded, sorted_operands
from hf_dp.per_example.watched import Source, WatchedParameter, flatten, in_place, mapped, plain

_AND = ", "  # joins the names of the parameters behind one constant
# Methods that change a tensor, or what becomes of it.
_CHANGING = re.compile(r"[^_]_$|hook$|backward$")

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
    # Those of the model that was attached last.
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
    is_final: bool = False
    is_closed: bool = False
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

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
            losses = self.forward(model, loss_fn, batch)
            self.is_final = True
            losses.sum().backward()
            with torch.no_grad(), full_precision(losses.device):
                for constant in reversed(self.constants):
                    constant.settle()
        return losses.detach()

    def forward(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """One forward pass of an attached model: the losses (B,), with their graph."""
        self.reader.begin(v for v in batch.values() if isinstance(v, Tensor))
        with torch.enable_grad():
            losses = loss_fn(model, batch)
        self._refuse_constant(losses)
        check_losses(losses, self.batch_size)
        return losses

    def _refuse_constant(self, losses: Tensor) -> None:
        if isinstance(losses, WatchedParameter):
            uses = [use for use in self.uses if use.reading == "constant"]
            operations = ", ".join(sorted({use.operation for use in uses}))
            reason = f"no axis of its operands can be read as {self.batch_size} examples (a model called for each row "
            reason += "by itself sees one: call it once for all, and take each one's loss of what it gives)"
            raise refusal(sorted({use.parameter for use in uses}), f"operation {operations}", reason)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Replaces every trainable parameter of `model`, wherever it is tied, and puts them back at the end.

        Raises:
            UnsupportedModelError: a compiled module, or a gradient reached a parameter behind the watch's back.
        """
        # A model may have thousands of modules; for each micro-batch it is walked through as seldom as can be.
        reshard(model)
        named = list(model.named_modules())
        modules = [module for _, module in named]
        refuse_compiled(modules)
        refuse_unknown_shards(modules)
        self.parameters = originals = trained_in(named)
        del named  # which Python would look through for garbage as long as the pass takes
        hooked = sorted(n for n, p in originals.items() if p._backward_hooks or p._post_accumulate_grad_hooks)
        if hooked:
            raise UnsupportedModelError(
                f"{', '.join(hooked)} has a hook on its gradient.",
                why="the hook would not see the gradient of each example, and what it changes would be left out.",
                fix="remove the hook (the handle's remove()), or change the loss instead.",
            )

        keep = self._keep

        def watch(name: str, whole: Tensor) -> WatchedParameter:
            return WatchedParameter.of(Source(name, self, whole.detach(), functools.partial(keep, name)))

        sharded = {id(p): name for name, p in originals.items() if isinstance(p, DTensor)}
        watched = {id(p): watch(name, p) for name, p in originals.items() if id(p) not in sharded}
        self.factors = {name: [] for name in originals}
        self.sum_dtypes = {name: sum_dtype(p.dtype) for name, p in originals.items()}
        try:
            with in_place(modules, originals, watched), functions_seen():
                with watched_when_whole(model, sharded, watch):
                    yield
                leaked = self.leaked | {name for name, p in originals.items() if p.grad is not None}
                if leaked:
                    raise UnsupportedModelError(
                        f"gradient reached {', '.join(sorted(leaked))} by a use that no rule saw.",
                        why="a use that is not seen is missing from the norm, so the clipping bound would not hold.",
                        fix="freeze these parameters (requires_grad_(False)) or train with LoRA instead.",
                    )
        finally:
            # They know this watch: a cycle would keep the memory of the whole pass.
            self.constants.clear()
            self.is_closed = True

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operation that involves a watched tensor: a use, by its rule, or one on constants alone."""
        rule = self.rules.get(function)
        name = rule.name if rule else _name(function)
        watched = [a for a in flatten((args, kwargs)) if isinstance(a, WatchedParameter)]
        parameters = sorted({name for w in watched for name in w.source.parameter.split(_AND)})
        if self.is_closed or any(w.source.watch is not self for w in watched):
            reason = "it works on a value that was computed from the parameter in an earlier pass and kept"
            raise refusal(parameters, f"operation {name}", reason)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise refusal(
                parameters, f"operation {name}", "torch.func (vmap, grad, jvp) hides the axis of the examples"
            )
        if rule is None and function in COMPOSITES:
            output = COMPOSITES[function](*args, **kwargs)
            if output is not NotImplemented:
                return output
        bound = sorted_operands(rule, name, parameters, args, kwargs)
        if rule is not None and isinstance(bound, Bound):
            try:
                return self._use(rule, bound, parameters, function, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                # What fails without a rule too is the model's own error.
                function(*mapped(plain, args), **mapped(plain, kwargs))
                raise refusal(parameters, f"operation {name}", f"its rule cannot read it ({error})") from error
        assert isinstance(bound, UnsupportedModelError)
        if function in BROADCASTING or (function in PRODUCTS and all(w.dim() > 1 for w in watched)):
            copies = self._copies(name, parameters, args, kwargs, is_whole=function in BROADCASTING)
            if copies is not None:
                try:
                    return function(*copies[0], **copies[1])
                except RuntimeError as error:  # masked_fill takes no rows
                    raise bound from error
        others = None if _CHANGING.search(name) else self._constant_operands(name, parameters, args, kwargs)
        if others is None:
            raise bound
        output = self._on_constants(function, args, kwargs, parameters, bound)
        # What has no gradient (a test for infinities, say) is no use; nor is what torch itself differentiates, where it
        # has no other operand, whose axes could be read in another way.
        if not torch.is_grad_enabled() or any(isinstance(o, WatchedParameter) for o in flatten(output)):
            doubtful = bool(others) and self.reader.ambiguous_sizes is not None
            for given in others or ((None,) if isinstance(function, Applied) else ()):
                self._note(name, parameters, given, Axis(self.batch_size, "constant"), doubtful)
        return output

    def _use(self, rule: Rule, bound: Bound, parameters: list[str], function: Any, args: Any, kwargs: Any) -> Any:
        watched = {r: p for r, p in bound.parameters.items() if isinstance(p, WatchedParameter)}
        operands = Operands({r: plain(p) for r, p in bound.parameters.items()}, frozenset(watched), bound.options)
        given = bound.input
        axis = Axis(self.batch_size, self.reader.read(rule, bound, parameters))
        self._note(rule.name, parameters, given, axis, self.reader.is_doubtful(rule, given, axis))
        if axis.reading == "constant":
            if given is None or rule.features > 1:
                refused = refusal(parameters, f"operation {rule.name}", "its rows are not the examples")
                return self._on_constants(function, args, kwargs, parameters, refused)
            if not torch.is_grad_enabled():
                return rule.forward(given, operands)[0]
            return self._constant(parameters, *by_rule(rule, given, operands, watched))
        output = recorded(given, Call(self, rule, operands, watched, axis))
        self.dtypes.add(output.dtype)
        return output

    def _on_constants(
        self, function: Any, args: Any, kwargs: Any, parameters: list[str], refused: UnsupportedModelError
    ) -> Any:
        if not torch.is_grad_enabled():
            return function(*mapped(plain, args), **mapped(plain, kwargs))
        try:
            return by_autograd(function, args, kwargs, functools.partial(self._constant, parameters))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise refused from error

    def _constant(self, parameters: list[str], value: Tensor, hand_on: Callable[[Tensor, Tensor], None]) -> Any:
        constant = Constant(hand_on, value.shape)
        self.constants.append(constant)
        self.dtypes.add(value.dtype)
        return WatchedParameter.of(Source(_AND.join(parameters), self, value.detach(), constant.gather))

    def _constant_operands(self, name: str, parameters: list[str], args: Any, kwargs: Any) -> list[Tensor] | None:
        """The other operands of an operation without a rule, if no example is in any of them."""
        others = [a for a in flatten((args, kwargs)) if isinstance(a, Tensor) and not isinstance(a, WatchedParameter)]
        for other in others:
            # Of a single example's data as of a constant, the gradient is exact.
            may_be_data = other.dim() > 0 and (other.shape[0] == 1 or self.batch_size > 1)
            known = self.reader.known(name, parameters, other)
            reading = known or (self.reader.example_axis(other.shape[0]) if may_be_data else None)
            if other.requires_grad or reading not in ("constant", None):
                return None
        return others

    def _copies(self, name: str, parameters: list[str], args: Any, kwargs: Any, *, is_whole: bool) -> Any:
        """The operands of an operation with a row for each row of the data, where parameters have one; or as large as
        the output, so that it is not autograd that adds up their gradients over positions."""
        tensors = [a for a in flatten((args, kwargs)) if isinstance(a, Tensor)]
        dimensions = max(t.dim() for t in tensors)
        data = [t for t in tensors if t.dim() == dimensions and not isinstance(t, WatchedParameter)]
        rows = {len(t) for t in data if self.reader.may_be_data(name, parameters, t)} - {1}
        watched = [t for t in tensors if isinstance(t, WatchedParameter)]
        if len(rows) > 1 or not data or any(t.dim() == dimensions and len(t) > 1 for t in watched):
            return None
        shape = torch.broadcast_shapes(*(t.shape for t in tensors)) if is_whole else (-1,) * dimensions
        if rows:
            readings = ["batch"] if all(t.requires_grad for t in data) else ["batch", PLAIN]
            self.read |= {Use(name, parameter, reading, dimensions) for parameter in parameters for reading in readings}

        def copied(value: Any) -> Any:
            if not isinstance(value, WatchedParameter):
                return value
            one: Any = value.reshape(*[1] * (dimensions - value.dim()), *value.shape)
            return one.expand(next(iter(rows), 1), *shape[1:])

        return mapped(copied, (args, kwargs)) if rows or self.batch_size == 1 else None

    def _note(self, operation: str, parameters: list[str], given: Tensor | None, axis: Axis, doubtful: bool) -> None:
        for parameter in parameters:
            use = Use(operation, parameter, axis.reading, 0 if given is None else given.dim())
            (self.uses if torch.is_grad_enabled() else self.read).add(use)
            self.doubts.update((use,) if doubtful else ())
            if given is not None and axis.reading != "constant" and not given.requires_grad:
                self.read.add(use._replace(reading=PLAIN))
            if self.observe is not None and given is not None:
                self.observe(use, given, axis)

    def _keep(self, name: str, factors: Factors) -> None:
        # A float64 parameter may be used through a float32 derivative (Gemma's norms), or the other way round.
        factors = factors.accumulated_in(self.sum_dtypes[name])
        if isinstance(factors, Outer) and name not in self.tables:
            factors = without_idle(factors).settled()
        kept = (factors.left.tensor, factors.right.tensor) if isinstance(factors, Outer) else (factors.values,)
        self.versions += [(tensor, tensor._version) for tensor in kept if not tensor.is_inference()]
        self.factors[name].append(factors)


def _name(function: Any) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', None) or getattr(function, '__name__', function)}".lstrip(".")
