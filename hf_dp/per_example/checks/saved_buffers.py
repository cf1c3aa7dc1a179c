"""Buffers, and configurations, that are saved with a model, and how they are put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from hf_dp.per_example.checks.saved_settings import put_back_settings
from hf_dp.per_example.checks.state import Attributes, attributes_of, is_saved, values_of
from hf_dp.per_example.checks.values import NOTHING, copied, same
from hf_dp.per_example.modules import named_modules

Place = tuple[str, str]


@contextmanager
def saved_put_back(model: nn.Module) -> Iterator[list[str]]:
    """Puts back what is written inside into buffers that are saved with the model, and into configurations: their
    names, once it has ended.

    With buffers goes back what is known of them: that there is one, say, or how long it is.
    """
    before, attributes = saved_buffers(named_modules(model)), attributes_of(model)
    written = list[str]()

    def undone() -> list[str]:
        changed = put_back_saved(model, before)
        if changed:
            _put_back_beside([path for path, _ in changed], attributes)
        return [".".join(filter(None, place)) for place in changed] + put_back_settings(model, attributes)

    try:
        yield written
    except BaseException:
        with suppress(RuntimeError):  # see `unchanged_weights`
            undone()
        raise
    written += undone()


def put_back_saved(model: nn.Module, before: Mapping[Place, Tensor | None]) -> list[Place]:
    """Makes saved buffers what they were `before`; which were others."""
    now = saved_buffers(named_modules(model), as_is=True)
    changed = [place for place in {**before, **now} if not same(before.get(place), now.get(place))]
    for path, last in changed:
        owner = model.get_submodule(path)
        value, found = before.get((path, last)), owner._buffers.get(last)
        if (path, last) not in before:
            del owner._buffers[last]
        else:
            is_there = value is not None and found is not None and found.shape == value.shape
            owner._buffers[last] = found.detach().copy_(value) if is_there else value  # type: ignore[union-attr,arg-type]
    return changed


def saved_buffers(modules: Sequence[tuple[str, nn.Module]], *, as_is: bool = False) -> dict[Place, Tensor | None]:
    """By their places: copies of them, or themselves if `as_is`."""
    return {
        (path, last): buffer if as_is else copied(buffer)
        for path, owner in modules
        for last, buffer in owner._buffers.items()
        if is_saved(owner, last)
    }


def _put_back_beside(paths: Iterable[str], attributes: Attributes) -> None:
    """Puts back what the modules at these paths, and those that they lie in, have in their plain attributes."""
    around = {path[:end] for path in paths for end in range(len(path) + 1) if path[end : end + 1] in ("", ".")} | {""}
    for path, holder, before in attributes:
        if isinstance(holder, nn.Module) and path in around:
            now = values_of(holder)
            for name in now.keys() - before.keys():
                delattr(holder, name)
            for name, value in before.items():
                if now.get(name, NOTHING) is not value:
                    setattr(holder, name, value)
