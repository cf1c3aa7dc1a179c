"""How a use of a parameter is seen and recorded.

For the duration of one forward and backward pass every trainable parameter is replaced by a `WatchedParameter`, a
tensor whose `__torch_function__` looks the operation up in the rules. Uses are thus keyed on (operation, parameter),
not on module class: tied weights, GPT-2's Conv1D, every RMSNorm and LoRA need no code of their own. An operation
without a rule is refused where it happens. Each use runs as an autograd Function on the plain weight, so autograd never
forms weight gradients; what backward needs goes through `save_for_backward`, so checkpointing works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, check_losses
from hf_dp.per_example.factors import Factors, Outer, full_precision, sum_dtype
from hf_dp.per_example.rule import Axis, Operands, Rule, Use
from hf_dp.per_example.watched import Source, WatchedParameter, flatten


@dataclass(eq=False)
class Watch:
    """What one recording of one micro-batch shares between its uses."""

    batch_size: int
    rules: Mapping[Any, Rule]
    ambiguous_sizes: frozenset[int] | None = None
    observe: Callable[[Use, Tensor, Axis], None] | None = None
    factors: dict[str, list[Factors]] = field(default_factory=dict)
    sum_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    uses: set[Use] = field(default_factory=set)
    doubts: set[Use] = field(default_factory=set)
    leaked: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    is_final: bool = False

    def run(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Tensor:
        """One forward and one backward pass; the losses (B,), detached. The factors are then in `factors`."""
        with self.blaming_copies(model, loss_fn, batch), self.attached(model), torch.enable_grad():
            losses = loss_fn(model, batch)
            check_losses(losses, self.batch_size)
            self.is_final = True
            losses.sum().backward()
        return losses.detach()

    @contextmanager
    def blaming_copies(self, model: nn.Module, loss_fn: LossFunction, batch: Batch) -> Iterator[None]:
        """Refuses by name a model that fails only because a row for all examples was copied for each of them.

        Raises:
            UnsupportedModelError: with the parameter; a model that fails by itself fails as it does.
        """
        try:
            yield
        except RuntimeError as error:
            copied = sorted({use.parameter for use in self.uses if use.reading == "broadcast"})
            if not copied or isinstance(error, torch.OutOfMemoryError):
                raise
            with torch.no_grad():
                loss_fn(model, batch)
            raise UnsupportedModelError(
                f"the model fails ({str(error).splitlines()[0]}) when {', '.join(copied)} is watched.",
                why="what it computes once for all examples is copied for each, so that each one's share is known, and "
                "the model then repeats or indexes it by itself, as prompt tuning does.",
                fix="give the model one row for each example (position ids of shape (B, T), say), freeze the "
                "parameter, or train with LoRA.",
            ) from error

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Replaces every trainable parameter of `model`, wherever it is tied, and puts them back at the end.

        Raises:
            UnsupportedModelError: a compiled module, or a gradient reached a parameter behind the watch's back.
        """
        _refuse_compiled(model)
        originals = {name: p for name, p in model.named_parameters() if p.requires_grad}
        watched = {id(p): WatchedParameter.of(Source(name, self, p.detach())) for name, p in originals.items()}
        kept_gradients = {name: p.grad for name, p in originals.items()}
        places = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in watched
        ]
        self.factors = {name: [] for name in originals}
        self.sum_dtypes = {name: sum_dtype(p.dtype) for name, p in originals.items()}
        try:
            for holder, key, p in places:
                holder[key] = watched[id(p)]  # type: ignore[assignment]
            for p in originals.values():
                p.grad = None
            yield
            leaked = self.leaked | {name for name, p in originals.items() if p.grad is not None}
            if leaked:
                raise UnsupportedModelError(
                    f"gradient reached {', '.join(sorted(leaked))} by a use that no rule saw.",
                    why="a use that is not seen is missing from the norm, so the clipping bound would not hold.",
                    fix="freeze these parameters (requires_grad_(False)) or train with LoRA instead.",
                )
        finally:
            for holder, key, p in places:
                holder[key] = p
            for name, p in originals.items():
                p.grad = kept_gradients[name]

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Runs one operation that involves a watched parameter by its rule."""
        rule = self.rules.get(function)
        names = sorted({a.source.parameter for a in flatten((args, kwargs)) if isinstance(a, WatchedParameter)})
        if rule is None:
            raise _refusal(names, f"operation {_name(function)}", "it has no rule for exact per-example gradients")
        try:
            bound = rule.bind(*args, **kwargs)
        except TypeError as error:
            raise _refusal(names, f"operation {rule.name}", f"its arguments are not known ({error})") from None
        watched = {r: p for r, p in bound.parameters.items() if isinstance(p, WatchedParameter)}
        strays = [a for a in flatten((bound.input, bound.options)) if isinstance(a, WatchedParameter)]
        if strays or len({id(p) for p in watched.values()}) != len(watched):
            raise _refusal(names, f"operation {rule.name}", "parameters are combined with one another there")
        plain = {r: p.source.plain if isinstance(p, WatchedParameter) else p for r, p in bound.parameters.items()}
        if any(isinstance(a, Tensor) and a.requires_grad for a in flatten((plain, bound.options))):
            raise _refusal(names, f"operation {rule.name}", "another of its operands needs a gradient too")
        operands = Operands(plain, frozenset(watched), bound.options)
        given = bound.input
        if given is not None and given.dim() > rule.features and given.shape[0] == 1 and self.batch_size > 1:
            axis = Axis(self.batch_size, "broadcast")
            given = given.expand(self.batch_size, *given.shape[1:])
        else:
            axis = self._read(rule, given, names)
        is_doubtful = self._is_doubtful(rule, bound.input, axis)
        for parameter in watched.values():
            use = Use(rule.name, parameter.source.parameter, axis.reading, 0 if given is None else given.dim())
            self.uses.add(use)
            self.doubts |= {use} if is_doubtful else set()
            if self.observe is not None and given is not None:
                self.observe(use, given, axis)
        anchor = torch.zeros((), requires_grad=True)
        output: Tensor = _RecordedUse.apply(anchor, given, _Call(self, rule, operands, watched, axis))  # type: ignore[no-untyped-call]
        self.dtypes.add(output.dtype)
        if given is None and output.shape[0] != self.batch_size:
            raise _refusal(
                names, f"operation {rule.name} to shape {tuple(output.shape)}", "its rows are not the examples"
            )
        return output

    def add(self, parameter: WatchedParameter, factors: Factors) -> None:
        """Records one use's factors, pulled back from the derived weight to the parameter itself."""
        source = parameter.source
        factors = factors.scaled(source.scale)
        factors = factors.transposed if source.is_transposed else factors
        if isinstance(factors, Outer):
            with full_precision(parameter.source.plain.device):
                factors = factors.settled()
        # A float64 parameter may be used through a float32 derivative (Gemma's norms); its sums stay float64.
        self.factors[source.parameter].append(factors.accumulated_in(self.sum_dtypes[source.parameter]))

    def _read(self, rule: Rule, given: Tensor | None, names: list[str]) -> Axis:
        if given is None or (given.dim() > rule.features and given.shape[0] == self.batch_size):
            return Axis(self.batch_size, "batch")
        if rule.features and given.dim() > rule.features and given.shape[0] % self.batch_size == 0:
            return Axis(self.batch_size, "folded")
        raise _refusal(
            names,
            f"operation {rule.name} on an input of shape {tuple(given.shape)}",
            f"no axis of that shape can be read as {self.batch_size} examples",
        )

    def _is_doubtful(self, rule: Rule, given: Tensor | None, axis: Axis) -> bool:
        """Whether the shape of an input could be read in another way, or might not be led by examples at all."""
        if self.ambiguous_sizes is None or self.batch_size == 1:
            return False
        if given is None or self.batch_size in self.ambiguous_sizes or self.batch_size in given.shape[1:]:
            return True
        if axis.reading == "broadcast":
            are_position_ids = given.dim() == 2 and not given.is_floating_point()
            return not are_position_ids
        if axis.reading == "folded":
            return not _is_plainly_folded(given, self.batch_size)
        is_single_position = given.shape[1 : given.dim() - rule.features].numel() == 1
        return is_single_position and not given.requires_grad

    def check_broadcast(self, call: _Call, gradient: Tensor) -> None:
        """Doubts a broadcast whose rows were not used by one example each: all alike, or all but the first unused."""
        if self.ambiguous_sizes is not None and call.axis.reading == "broadcast":
            rows = gradient[1:]
            if bool(rows.eq(gradient[:1]).all()) or not bool(rows.any()):
                self.doubts.add(Use(call.rule.name, next(iter(call.watched.values())).source.parameter, "broadcast", 0))


def _is_plainly_folded(given: Tensor, batch_size: int) -> bool:
    """Whether `given` is a plain view of a tensor (B, ...) whose examples lie one after another in memory."""
    base = given._base
    return (
        base is not None
        and base.shape[:1] == (batch_size,)
        and base.stride(0) * batch_size == base.numel() == given.numel()
        and base.storage_offset() == given.storage_offset()
        and given.is_contiguous()
    )


class _Call(NamedTuple):
    watch: Watch
    rule: Rule
    operands: Operands
    watched: dict[str, WatchedParameter]
    axis: Axis


class _RecordedUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: Tensor | None, call: _Call) -> Tensor:
        output, saved = call.rule.forward(given, call.operands)
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.input_dtype = None if given is None else given.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        call: _Call = ctx.call
        if not call.watch.is_final:
            raise _refusal(
                sorted({w.source.parameter for w in call.watched.values()}),
                f"operation {call.rule.name}",
                "the loss function differentiates it by itself, as gradient penalties do",
            )
        call.watch.check_broadcast(call, gradients[0])
        needs_input = bool(ctx.needs_input_grad[1])
        # Detached: factors that held on to the graph would be held by it in turn, and never be freed.
        saved = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        input_gradient, factors = call.rule.backward(saved, call.operands, gradients[0], call.axis, needs_input)
        for role, parameter in call.watched.items():
            found = factors[role]
            if found is not None:
                call.watch.add(parameter, found)
        if not needs_input or input_gradient is None:
            return None, None, None
        return None, input_gradient.to(ctx.input_dtype), None


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if is_compiled and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedModelError(
                f"{name or 'the model'} is compiled (torch.compile) and has trainable parameters.",
                why="the uses of a parameter cannot be seen inside a compiled graph.",
                fix="train the module uncompiled (compile it again for inference), or freeze its parameters.",
            )


def _refusal(names: list[str], what: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"parameter {', '.join(names)} is used by {what}.",
        why=f"{reason}, and a gradient that is not known to be exact would break the clipping bound.",
        fix="freeze this parameter (requires_grad_(False)), train with LoRA, or pass a rule for the operation.",
    )


def _name(function: Any) -> str:
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', None) or getattr(function, '__name__', function)}".lstrip(".")
