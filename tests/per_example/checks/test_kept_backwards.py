"""What backward passes alone write and read, from which gradients follow and no loss; and objects that passes make."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.kept import Memory
from tests.per_example.checks.test_memory import Plain, batch


class Backwards(nn.Module):
    """A model whose gradients are divided by the largest of all so far, which no loss follows from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.largest, self.steps = Plain(), 1e-3, 0

    def divided(self, gradient: Tensor) -> Tensor:
        by, self.largest = self.largest, max(self.largest, float(gradient.abs().max()))
        self.steps += 1
        return gradient / by

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if found.requires_grad:
            found.register_hook(self.divided)
        return found


def test_failure_111_what_backward_passes_alone_read() -> None:
    model = Backwards()

    def losses(x: Tensor) -> Tensor:
        return model(x).square().sum(1)  # type: ignore[no-any-return]

    memory = Memory(model, losses)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="largest keeps something"), memory.unmoved():
            losses(batch(3, 3)).sum().backward()
    assert model.largest == 1e-3
    assert "largest" in memory.read_by(batch(2, 2)).names[""], "another value is seen between the steps"


def test_what_backward_passes_count_is_welcome() -> None:
    model: Any = Backwards()
    model.divided = lambda gradient: setattr(model, "steps", model.steps + 1)

    def losses(x: Tensor) -> Tensor:
        return model(x).square().sum(1)  # type: ignore[no-any-return]

    memory = Memory(model, losses)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        losses(batch(3, 3)).sum().backward()
    assert model.steps
    assert all(p.grad is not None for p in model.parameters())


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by


class Made:
    """When it is first asked for."""

    one: Any = None


@pytest.mark.parametrize("follows_data", [True, False])
@pytest.mark.parametrize("of_class", [True, False])
def test_failure_112_an_object_that_is_made_by_a_pass_must_not_follow_from_data(
    of_class: bool, follows_data: bool
) -> None:
    Made.one, model = None, Plain()
    made: Any = Made if of_class else Made()

    def losses(x: Tensor) -> Tensor:
        if made.one is None:
            made.one = Scale(float(x.detach().abs().max()) if follows_data else 2.0)
        return model(x / made.one.by).sum(1)  # type: ignore[no-any-return]

    memory = Memory(model, losses, losses)
    memory.ask_of(batch(2, 2))
    if not follows_data:
        memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
        assert not made.one
        with memory.unmoved():
            losses(batch(3, 3))
        assert made.one.by == 2
        return
    with pytest.raises(UnsupportedModelError, match=r"one\b.* keeps something"):
        memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"one\b.* keeps something"), memory.unmoved():
        losses(batch(3, 3))
    assert not made.one


_later: Any = None


def test_so_is_one_in_a_variable_of_a_file() -> None:
    model = Plain()

    def losses(x: Tensor) -> Tensor:
        global _later
        _later = _later or Scale(2.0)
        return model(x / _later.by).sum(1)  # type: ignore[no-any-return]

    memory = Memory(model, losses, losses)
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        losses(batch(3, 3))
    assert isinstance(_later, Scale)
