"""No random number moves two examples: one coin for a whole micro-batch is found however seldom it falls."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from random import random as from_python
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example import preflight
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.checks.draws import Change, Draws, _combined, _drew_nothing
from hf_dp.randomness import seed_global_state, unchanged_global_state
from tests.per_example.small import Small, batch, in_training, square


def per_row(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * torch.rand(len(x), 1, 1).lt(0.5)


def elementwise(m: Any, x: Tensor) -> Tensor:
    return m.linear(F.dropout(x, 0.3)).cos()


def time_first(m: Any, x: Tensor) -> Tensor:
    return m.linear(F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1)).cos()


def folded(m: Any, x: Tensor) -> Tensor:
    return m.linear(F.dropout(x.flatten(0, 1), 0.3).view_as(x)).cos()


def folded_time_first(m: Any, x: Tensor) -> Tensor:
    dropped = F.dropout(x.transpose(0, 1).flatten(0, 1), 0.3)
    return m.linear(dropped.view(x.shape[1], len(x), -1).transpose(0, 1)).cos()


def locked_over_time(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * F.dropout(torch.ones_like(x[:, :1]), 0.3)).cos()


def numpy_rows(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * torch.from_numpy(np.random.rand(len(x), 1, 1))).cos()


def python_numbers_row_by_row(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * torch.tensor([random.random() for _ in x], dtype=x.dtype)[:, None, None]).cos()


def drawn_in_vain(m: Any, x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0 or random.random() < 0 else m.linear(x).cos()


def counted(function: Any) -> list[str]:
    """The draws that are seen in it."""
    draws = Draws(3, Change())
    with draws.attached():
        function(torch.ones(3, 2, 4, dtype=torch.double))
    return [draw.name for draw in draws.seen]


def test_what_draws_nothing_is_no_draw() -> None:
    """Attention and dropout have a place for random numbers, which they may not use."""
    assert counted(lambda x: F.scaled_dot_product_attention(x, x, x)) == []
    assert counted(lambda x: F.dropout(x, 0.0)) == []
    assert counted(lambda x: F.dropout(x, 1e-9)) == ["bernoulli_"]
    assert counted(lambda x: torch.empty(3).random_(1)) == ["random_"]
    assert len(counted(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=1e-9))) == 1
    assert counted(lambda x: [random.shuffle([]), random.random(), np.random.rand(0)]) == ["shuffle", "random"]


@torch.library.custom_op("hf_dp_tests::seeded", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def seeded(x: Tensor) -> Tensor:
    """Noise from the seed of the global generator, which does not move."""
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(torch.initial_seed()))


def test_a_draw_that_moves_no_generator_is_one() -> None:
    assert counted(lambda x: seeded(x)) == ["seeded"]


@torch.library.custom_op("hf_dp_tests::beside", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def beside(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same, beside what is no noise."""
    return x.clone(), seeded(x)


def test_states_of_generators_are_no_draws() -> None:
    """What attention on a GPU has no use for without dropout lies beside its result: whatever was in that memory."""
    calls = iter(range(100))

    def attended(moving: float = 0.0) -> list[Tensor]:
        call = next(calls)
        return [torch.ones(3) + moving * call, torch.tensor([call, 7], dtype=torch.uint64)]

    def drew_nothing(draw: Any, is_torchs: bool) -> bool:
        with unchanged_global_state():
            seed_global_state(5)
            return _drew_nothing(draw(), 5, draw, is_torchs)

    assert drew_nothing(attended, is_torchs=True)
    assert not drew_nothing(functools.partial(attended, 1.0), is_torchs=True)
    assert not drew_nothing(attended, is_torchs=False)
    assert not drew_nothing(lambda: [torch.rand(3)], is_torchs=True)
    assert counted(lambda x: beside(x)) == ["beside"]


@pytest.mark.parametrize("extreme", ["least", "most", "another"])
def test_states_of_generators_are_not_compared(extreme: str) -> None:
    states, others = (torch.tensor(numbers, dtype=torch.uint64) for numbers in ([1, 2], [2, 1]))
    one, two = (torch.tensor([1.0, 4.0]), states), (torch.tensor([2.0, 3.0]), others)
    found = _combined(one, two, {"least": torch.minimum, "most": torch.maximum}.get(extreme, lambda _, other: other))
    assert found[0].tolist() == {"least": [1.0, 3.0], "most": [2.0, 4.0], "another": [2.0, 3.0]}[extreme]
    assert torch.equal(found[1], states)


def large_whole_number(m: Any, x: Tensor) -> Tensor:
    """Of a type that states of generators have on a GPU."""
    coin = torch.randint(0, 100, (), dtype=torch.uint64)
    return m.linear(x).cos() * (1.0 if int(coin) else 5.0)


def large_whole_numbers(m: Any, x: Tensor) -> Tensor:
    coins = torch.randint(0, 200, (len(x), 1, 1), dtype=torch.uint64)
    return m.linear(x).cos() * (5.0 if bool((coins.double() < 20).any()) else 1.0)


def of_a_generator_by_place(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * torch.poisson(torch.full((), 0.9), GENERATOR)


GENERATOR = torch.Generator()


@pytest.mark.parametrize("function", [large_whole_number, large_whole_numbers, of_a_generator_by_place])
def test_coins_that_hardly_look_like_some(function: Any) -> None:
    with pytest.raises(PreflightError):
        preflight(in_training(function), square, batch(3, 5, 4))


def into_a_buffer(m: Any, x: Tensor) -> Tensor:
    noise = torch.empty(len(x), 1, 1, dtype=x.dtype)
    return m.linear(x * torch.rand(noise.shape, out=noise)).cos()


@pytest.mark.parametrize(
    "function",
    [
        into_a_buffer,
        per_row, elementwise, time_first, folded, folded_time_first, locked_over_time, numpy_rows,
        python_numbers_row_by_row, drawn_in_vain,
    ],
)  # fmt: skip
@pytest.mark.slow
def test_random_numbers_of_each_example_are_accepted(function: Any) -> None:
    model = in_training(function)
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    preflight(model, square, batch(3, 5, 4))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def layer_drop(m: Any, x: Tensor) -> Tensor:
    """In one of twelve layers, once in fifty times."""
    for i in range(12):
        x = x if i == 7 and torch.rand([]) < 0.02 else x + m.linear(x).cos()
    return x


def numpy_coin(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * (1 + (np.random.random() < 0.02))


def python_coin(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * random.uniform(0.999, 1.001)


def imported_coin(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * (1 + (from_python() < 0.3))


def positions(m: Any, x: Tensor) -> Tensor:
    return m.linear(x + F.dropout(m.table, 0.3)).cos()


def weights(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.dropout(m.linear.weight, 0.3)).cos()


def locked_over_examples(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * F.dropout(torch.ones_like(x[:1]), 0.3)).cos()


def channels_on_the_wrong_axis(m: Any, x: Tensor) -> Tensor:
    return m.linear(F.dropout1d(x.permute(1, 2, 0), 0.3).permute(2, 0, 1)).cos()


def half_of_the_rows(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * torch.randperm(len(x)).lt(2)[:, None, None]


def both_coins(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * (1 + (torch.rand([]) < 0.03) * (torch.rand([]) < 0.03))


def own_generator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * torch.rand(len(x), 1, 1, generator=torch.Generator().manual_seed(1))).cos()


_NUMPY = np.random.default_rng(0)


def own_numpy_generator(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * torch.from_numpy(_NUMPY.random((len(x), 1, 1)))).cos()


def seeded_anew(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return m.linear(F.dropout(x, 0.3)).cos()


def seeded_within(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return m.linear(F.dropout(x, 0.3)).cos()


def seeded_python(m: Any, x: Tensor) -> Tensor:
    random.seed(1)
    return python_numbers_row_by_row(m, x)


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("function", "found"),
    [
        (layer_drop, r"rand of shape \(\)"),
        (numpy_coin, r"random of shape \(\)"),
        (python_coin, r"uniform of shape \(\)"),
        (imported_coin, "not called as random.f"),
        (positions, r"of shape \(5, 4\)"),
        (weights, r"of shape \(4, 4\)"),
        (locked_over_examples, r"of shape \(1, 5, 4\)"),
        (channels_on_the_wrong_axis, r"of shape \(5, 4, 1\)"),
        (half_of_the_rows, "randperm"),
        (both_coins, r"rand of shape \(\)"),
        (own_generator, "a generator of its own"),
        (seeded_anew, "a generator that it seeds itself"),
        (seeded_within, "a generator that it seeds itself"),
        (seeded_python, "a generator that it seeds itself"),
    ],
)
def test_failure_28_one_coin_for_a_micro_batch_is_refused(function: Any, found: str) -> None:
    model = in_training(function)
    model.register_buffer("table", torch.ones(5, 4, dtype=torch.float64))
    with pytest.raises(
        PreflightError, match=f"(one random number moves several examples|draws random numbers from).*{found}"
    ):
        preflight(model, square, batch(3, 5, 4))


def test_failure_28_a_generator_that_is_not_seen_is_refused() -> None:
    """It is known by what it does: the same rows come out otherwise."""
    with pytest.raises(PreflightError, match=r"something else when it is called again.*a generator of its own\."):
        preflight(in_training(own_numpy_generator), square, batch(3, 5, 4))


def test_a_loss_that_counts_its_calls_is_told_from_one_that_draws_numbers() -> None:
    calls = itertools.count(1)

    def counted(model: nn.Module, batch: Batch) -> Tensor:
        return square(model, batch) * next(calls)

    with pytest.raises(PreflightError, match="something else when it is called again with the same rows"):
        preflight(in_training(per_row), counted, batch(3, 5, 4))


def test_dropout_before_a_mean_over_the_batch_is_not_called_the_cause() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(x, 0.5, m.training)
        return m.linear(hidden - hidden.mean(0)).cos()

    with pytest.raises(PreflightError, match=r"in linear, used by .* depends on its neighbours(.|\n)*not the cause"):
        preflight(in_training(function), square, batch(3, 5, 4))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), lambda x: nn.functional.dropout(x, 0.5)])
def test_a_loss_over_the_batch_is_blamed_and_not_the_dropout_before_it(
    caplog: pytest.LogCaptureFixture, dropout: Callable[[Tensor], Tensor]
) -> None:
    """Dropout shows it first, and would be named, or switched off."""

    def negatives(model: nn.Module, batch: Batch) -> Tensor:
        rows = nn.functional.normalize(model(batch["x"]).flatten(1), dim=1)
        return nn.functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="none")

    model = Small(lambda m, x: m.linear(m.dropped(x)), linear=nn.Linear(4, 4), dropped=dropout)
    with pytest.raises(PreflightError, match=r"loss depends on its neighbours in the batch\."):
        preflight(model, negatives, batch(3, 5, 4))
    assert "Switched off" not in caplog.text


def noise_of_a_neighbour(m: Any, x: Tensor) -> Tensor:
    neighbours = torch.eye(len(x), dtype=x.dtype).roll(1, 0) @ torch.randn_like(x).flatten(1)
    return m.linear(x + neighbours.view_as(x)).cos()


def test_noise_of_a_neighbour_is_refused() -> None:
    with pytest.raises(PreflightError, match="an example is moved by random numbers of its neighbours: randn_like"):
        preflight(Small(noise_of_a_neighbour, linear=nn.Linear(4, 4)), square, batch(3, 5, 4))


@pytest.mark.parametrize("made", [np.random.default_rng, random.Random, lambda: np.random.RandomState(1)])
def test_a_generator_that_a_module_holds_is_refused_however_rarely_its_coin_falls(made: Any) -> None:
    model = in_training(lambda m, x: m.linear(x).cos() * bool(m.own.random() < 2))
    model.own = made()
    with pytest.raises(PreflightError, match="a generator of its own"):
        preflight(model, square, batch(3, 5, 4))


def test_a_generator_for_each_pass_is_refused_and_one_with_a_seed_is_none() -> None:
    def scaled(*seed: int) -> Any:
        return in_training(lambda m, x: m.linear(x).cos() * bool(np.random.default_rng(*seed).random() < 2))

    preflight(scaled(1), square, batch(3, 5, 4))
    with pytest.raises(PreflightError, match="a generator of its own"):
        preflight(scaled(), square, batch(3, 5, 4))


def late_coin(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * (torch.rand(()) < 0.5)


def late_noise_of_a_neighbour(m: Any, x: Tensor) -> Tensor:
    return m.linear(x).cos() * torch.rand(len(x), 1, 1).roll(1, 0)


def late_number_row_by_row(m: Any, x: Tensor) -> Tensor:
    found = m.linear(x).cos()
    return found * torch.stack([torch.rand(()) for _ in found])[:, None, None].to(found)


def weighted(model: nn.Module, batch: Batch) -> Tensor:
    return batch["weight"] * square(model, batch)


def few_that_count(*weights: float) -> Batch:
    """As rows of which most have no label."""
    return {**batch(len(weights), 5, 4), "weight": torch.tensor(weights, dtype=torch.float64)}


def weighted_beside_a_constant(model: nn.Module, batch: Batch) -> Tensor:
    return weighted(model, batch) + batch["weight"].eq(0) * 0.7


COUNTING = [
    (1.0, 0.0, 0.0),
    pytest.param((0.0, 0.0, 1.0), marks=pytest.mark.slow),
    (0.0, 0.0, 0.0, 1.0, 0.0),
    pytest.param((1.0, 0.0, 0.0, 0.0, 1.0), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("weights", COUNTING, ids=str)
@pytest.mark.parametrize("function", [late_coin, late_noise_of_a_neighbour])
@pytest.mark.slow
def test_failure_28_it_is_found_where_most_examples_add_nothing(function: Any, weights: tuple[float, ...]) -> None:
    for loss in (weighted, weighted_beside_a_constant):
        with pytest.raises(PreflightError, match="moves several examples|random numbers of its neighbours"):
            preflight(in_training(function), loss, few_that_count(*weights))


@pytest.mark.parametrize("weights", COUNTING, ids=str)
@pytest.mark.slow
def test_numbers_of_each_example_are_accepted_where_most_add_nothing(weights: tuple[float, ...]) -> None:
    for function in (late_number_row_by_row, per_row):
        preflight(in_training(function), weighted, few_that_count(*weights))
