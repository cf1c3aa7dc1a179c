"""The optimizer moves weights by what the private step wrote, and by nothing else that lies in a `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hf_dp.errors import ConfigurationError, HfDpError
from hf_dp.per_example.checks.memory import buffers_told, write_of
from hf_dp.per_example.modules import named_parameters, parameters_of
from hf_dp.per_example.sharding import local, total_norm
from hf_dp.per_example.watched import flatten
from hf_dp.step.alone import Alone, closure_of, refuse_others, refuse_spoilt
from hf_dp.step.remembered import Remembered, refuse_loading

Mark = tuple[Tensor, int, int, int]
# Optimizers that are held to the gradients of private steps.
_HELD = weakref.WeakSet[torch.optim.Optimizer]()
# By parameter the kind of another one that has stepped, and those of which all parameters are noted.
_STEPPED: Any = WeakTensorKeyDictionary()
_NOTED = weakref.WeakSet[torch.optim.Optimizer]()


class Around(NamedTuple):
    """What a loop is told of its optimizer.

    Attributes:
        before: called before it takes the gradients of a private step; what it raises moves nothing.
        after: when it has taken them, before its `step()` returns.
        refused: when they are others, and are dropped.
    """

    before: Callable[[], None]
    after: Callable[[], None]
    refused: Callable[[], None]


class WrittenGradients:
    """The gradients of the latest private step, held against those that the optimizer takes, right before it does.

    A gradient that was added, replaced or changed in place counts in torch's versions, whoever did it. What torch does
    not count is not seen: changes through `.data`, NumPy or DLPack.

    Args:
        optimizer: as accelerate wrapped it, or plain.
        around: what is told of it.
        model: that no other may move meanwhile, where a loop (`around`) does not look at that itself.

    Raises:
        ConfigurationError: an optimizer that calls no hooks before its step; or see `refuse_spoilt`.
    """

    def __init__(self, optimizer: Any, around: Around | None = None, model: nn.Module | None = None) -> None:
        self._around = around
        self._optimizer: torch.optim.Optimizer = plain_optimizer(optimizer)
        self._marks: dict[int, Mark] = {}
        self._taken = False
        self._handles: list[Any] = []
        calls_hooks = getattr(type(self._optimizer).step, "hooked", False)
        if not calls_hooks or not hasattr(self._optimizer, "_optimizer_step_pre_hooks"):
            raise ConfigurationError(
                f"{type(self._optimizer).__name__} calls no hooks before its step.",
                why="that its gradients are those with noise, and no others, is checked there.",
                fix="call super().__init__(params, defaults) of torch.optim.Optimizer in its constructor.",
            )
        _refuse_hooks_within(self._optimizer)
        refuse_spoilt(model)
        _HELD.add(self._optimizer)
        self._alone = Alone(self._optimizer, model if around is None else None)
        self._remembered = Remembered(self._optimizer)
        self._listen()

    def note(self, model: nn.Module) -> None:
        """Remembers the gradients of all parameters, which were just written."""
        self._marks = {id(p): _mark(p.grad) for p in parameters_of(model) if p.grad is not None}
        self._taken, self._alone.depth = False, 0
        # Again, so that hooks that were added since come first.
        self._listen()

    def refuse_other_state(self) -> None:
        """See `Remembered`, and `Alone`: before a step is charged, which the optimizer would refuse."""
        self._remembered.refuse_other()
        self._alone.refuse_written()

    def refuse_untaken(self) -> None:
        """Refuses a step that another optimizer made; of the step that was made nothing is kept.

        Raises:
            HfDpError: the gradients that were noted were not compared with what moved the weights.
        """
        # They would be a second copy of all gradients beside the next ones.
        self._marks = {}
        if not self._taken:
            raise HfDpError(
                f"the gradients of a private step were not taken by {type(self._optimizer).__name__}.",
                why="the optimizer was exchanged during the training, and what the other one took is not known.",
                fix="pass optimizers=(...) to the trainer, and begin again: these weights may not be private.",
            )

    def forget(self) -> None:
        """Lets the optimizer take any gradient again."""
        self._marks = {}
        self._alone.forget()
        _HELD.discard(self._optimizer)
        for handle in self._handles:
            handle.remove()

    def _listen(self) -> None:
        for handle in self._handles:
            handle.remove()
        register = self._optimizer.register_step_pre_hook, self._optimizer.register_step_post_hook
        self._handles = [register[0](self._begin), register[1](self._end)]
        if hasattr(self._optimizer, "_optimizer_load_state_dict_pre_hooks"):
            self._handles.append(self._optimizer.register_load_state_dict_pre_hook(refuse_loading))

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # Torch calls the hooks again in super().step() of a subclass, which may have clipped by then.
        if not self._alone.depth:
            try:
                self._compare(optimizer, closure_of(args, kwargs))
                self._remembered.refuse_other()
            except ConfigurationError:
                self._drop(optimizer)
                raise
            if self._around is not None and self._marks:
                self._around.before()
        self._alone.depth += 1

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._alone.depth -= 1
        if not self._alone.depth:
            self._remembered.note()
        # Once for each private step: whoever looks at it calls `refuse_untaken`.
        if self._around is not None and not self._alone.depth and self._taken and self._marks:
            self._around.after()

    def _drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing of these gradients is taken: they are paid for, and the loop may go on without them."""
        self._marks = {}
        for p in _held(optimizer):
            p.grad = None
        if self._around is not None:
            self._around.refused()

    def _compare(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        was_taken, self._taken = self._taken, True
        _refuse_hooks_within(optimizer)
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._handles[0].id:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() with a hook that was registered after the private step.",
                why="it comes after the comparison with the gradients of the private step, and may change them.",
                fix="register hooks of the optimizer before the step (in on_step_begin). This step moved nothing.",
            )
        held = _held(optimizer)
        # torch.distributed makes the state of an optimizer that has none by a step with zeros, to save it.
        is_idle = was_taken and closure is None
        if is_idle and not any(p.grad is not None and bool(_numbers(p.grad).any()) for p in held):
            return
        if closure is not None or not all(_is_same(p.grad, self._marks.get(id(p))) for p in held):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() with gradients that are not those of the private step.",
                why="a callback, a hook or a line of the loop changed them after the noise, or steps by itself: what "
                "it adds is neither clipped nor noised nor counted.",
                fix="leave .grad and the optimizer alone between the private step and the optimizer's (no backward "
                "pass and no clipping there), and put what belongs to the loss into that of each example "
                "(compute_per_example_loss). This step moved nothing and its gradients are gone: what they cost is "
                "spent. A loop of your own may go on with the next batch, and save.",
            )


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refuse_hooks_within(optimizer: torch.optim.Optimizer) -> None:
    """Refuses hooks of the optimizers that this one steps: they come when its gradients have been compared."""
    seen, to_do = {id(optimizer)}, [optimizer]
    for outer in to_do:
        for inner in flatten(list(vars(outer).values())):
            if not isinstance(inner, torch.optim.Optimizer) or id(inner) in seen:
                continue
            seen.add(id(inner))
            to_do.append(inner)
            if getattr(inner, "_optimizer_step_pre_hooks", None):
                raise ConfigurationError(
                    f"{type(inner).__name__} with a hook before its step, within {type(optimizer).__name__}.",
                    why="it comes after the comparison with the gradients of the private step, and may change them.",
                    fix="register the hook with the optimizer that the training steps (trainer.optimizer in "
                    "on_train_begin, or what make_optimizer() returned), before the step. Nothing was moved by this.",
                )


class Weights:
    """The weights after the optimizer's latest step, which nothing else may move between two steps.

    As of gradients, what torch does not count is not seen: changes through `.data`, NumPy or DLPack.

    Args:
        model: of whose parameters, trained or not, the versions are noted, and of its saved buffers checksums.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._marks: dict[str, tuple[Tensor, Any, torch.dtype]] = {}
        self._buffers: dict[str, tuple[Tensor | None, int | None, Any]] = {}

    def note(self) -> None:
        """They are as they should be."""
        self._marks = {name: (p, write_of(p), p.dtype) for name, p in named_parameters(self._model).items()}
        self._buffers = buffers_told(self._model, self._buffers)

    def refuse_moved(self, what: str) -> None:
        """Refuses `what` follows, if something else has changed, exchanged or added weights since.

        Raises:
            ConfigurationError: with the name of one.
        """
        for name in self._moved():
            raise ConfigurationError(
                f"{what}, after something else than the run's optimizer has changed {name}.",
                why="what it put into what is saved may be neither clipped nor noised nor counted, and the claim "
                "beside it would be untrue.",
                fix="move the weights by the optimizer of begin() alone (in groups of parameters, where rates differ); "
                "wrap, load, freeze, average and gather statistics before begin() or in a copy of the model.",
            )

    def _moved(self) -> Iterator[str]:
        now = named_parameters(self._model)
        for name in sorted({*now, *self._marks}):
            p, mark = now.get(name), self._marks.get(name)
            if p is None or mark is None or p is not mark[0] or (write_of(p), p.dtype) != mark[1:]:
                yield name
        buffers = buffers_told(self._model, self._buffers)
        for name in sorted({*buffers, *self._buffers}):
            if name not in buffers or name not in self._buffers or buffers[name][2] != self._buffers[name][2]:
                yield name


def _count_writes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Lets torch count what fused optimizers write, Trainer's default among them, as it does of others; what is written
    once a training has ended is held against its end, and what was before it begins, `stepped_by` tells.

    But for those of private trainings that are at work.
    """
    refuse_others(optimizer, closure_of(args, kwargs))
    if optimizer in _HELD:
        return
    written = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    increment_version([p for p in written if not p.is_inference()])
    if optimizer not in _NOTED:
        # That of a private training may be made of several.
        held = {id(p) for one in _HELD for group in one.param_groups for p in group["params"]}
        others = [p for p in written if id(p) not in held]
        _STEPPED.update((p, type(optimizer).__name__) for p in others)
        if others:
            _NOTED.add(optimizer)


# As long as the process lives, from the import on: a baseline is mostly trained first.
register_optimizer_step_pre_hook(_count_writes)


def stepped_by(p: Tensor) -> str | None:
    """The kind of an optimizer of no private training that has moved a parameter in this process; None if none has."""
    return _STEPPED.get(p)  # type: ignore[no-any-return]


def gradient_norm(model: nn.Module) -> Tensor:
    """The l2 norm (), float64, of all gradients together, read without writing them. All ranks call it together."""
    return total_norm((p, _numbers(p.grad)) for p in parameters_of(model) if p.grad is not None)


def _numbers(gradient: Tensor) -> Tensor:
    """What this rank holds of it."""
    return gradient._values() if gradient.is_sparse else local(gradient)


def _mark(gradient: Tensor) -> Mark:
    """The tensor itself, its versions (a shard counts its own), and where its numbers lie."""
    held = _numbers(gradient)
    return gradient, gradient._version, held._version, held.data_ptr()


def _is_same(gradient: Tensor | None, mark: Mark | None) -> bool:
    if gradient is None or mark is None:
        return gradient is None and mark is None
    return gradient is mark[0] and _mark(gradient)[1:] == mark[1:]


def plain_optimizer(optimizer: Any) -> Any:
    """The one that accelerate has wrapped, or itself."""
    return getattr(optimizer, "optimizer", optimizer)
