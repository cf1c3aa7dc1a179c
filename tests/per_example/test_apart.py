"""Layers that a loop in Python calls for one example after another: each use is one example's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import HfDpError
from hf_dp.per_example import Certificate, PerExampleGradients, RowSum, loop, preflight, record
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.per_example.sharding import as_sums
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.test_picked_rows_elsewhere import layers, marked, refused
from tests.zoo import tiny

LENGTH = 6
SIZES = [(1, 6), (2, 6), (3, 6), (4, 6), (LENGTH, LENGTH), (12, 6), (2, 2), (4, 4), (3, 1), (5, 3)]
Way = Callable[[Any, Tensor], Tensor]


class Scaled(nn.Module):
    """A weight that is computed from others, as DoRA's is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = parameter(4, 4), parameter(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.scale * self.weight / self.weight.norm(dim=1, keepdim=True))


def members() -> dict[str, Any]:
    return {
        "first": nn.Linear(4, 4),
        "layer": nn.Linear(4, 4),
        "w": parameter(4),
        "scaled": Scaled(),
        "table": parameter(7, 4),
    }


def hidden(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))


def attending(m: Any, rows: Tensor) -> Tensor:
    return (m.layer(rows) @ m.layer(2 * rows).T).softmax(-1) @ rows


def written(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for i, rows in enumerate(hidden(m, x)):
        out[i] = m.layer(rows)
    return out


def beside_the_batch(m: Any, x: Tensor) -> Tensor:
    """The same layer, on all examples at once and on one after another."""
    h = hidden(m, x)
    return torch.stack([m.layer(rows) for rows in h]).mean(1) * m.layer(h.mean(1)).cos()


def beside_points_in_time(m: Any, x: Tensor) -> Tensor:
    """The same layer, on one example after another and on one point in time after another."""
    h = hidden(m, x)
    by_time = torch.stack([m.layer(rows) for rows in h.transpose(0, 1)]).transpose(0, 1)
    return torch.stack([m.layer(rows) for rows in h]) * by_time.cos()


def beside_prototypes(m: Any, x: Tensor) -> Tensor:
    prototypes = m.layer(torch.eye(4, dtype=x.dtype))
    return torch.stack([m.layer(rows) @ prototypes for rows in hidden(m, x)])


def looked_up(m: Any, x: Tensor) -> Tensor:
    """As wide as there are examples, in some batches."""
    ids = (3 * x[..., 0]).long().clamp(-3, 3) + 3
    return m.layer(torch.stack([m.table[own] * rows for own, rows in zip(ids, hidden(m, x), strict=True)]))  # type: ignore[no-any-return]


WAYS: dict[str, Way] = {
    "a layer": lambda m, x: torch.stack([m.layer(rows) for rows in hidden(m, x)]),
    "of the batch": lambda m, x: torch.stack([m.layer(rows) for rows in x]),
    "by number": lambda m, x: torch.stack([m.layer(hidden(m, x)[i]) for i in range(len(x))]),
    "a batch of one": lambda m, x: torch.cat([m.layer(rows[None]) for rows in x]),
    "some rows, or none": lambda m, x: torch.stack(
        [m.layer(rows[rows[:, 0] > 0.5]).sum(0) + m.layer(rows[:1])[0] for rows in hidden(m, x)]
    ),
    "one row": lambda m, x: torch.stack([m.layer(rows.mean(0)) for rows in hidden(m, x)]),
    "tied": lambda m, x: torch.stack([m.layer(m.layer(rows).relu_()) * m.layer(rows[:1]) for rows in hidden(m, x)]),
    "attention": lambda m, x: torch.stack([attending(m, rows) for rows in hidden(m, x)]),
    "computed weights": lambda m, x: torch.stack([m.scaled(rows) for rows in hidden(m, x)]),
    "scales": lambda m, x: torch.stack([F.rms_norm(rows, (4,), m.w) * m.w + m.w for rows in hidden(m, x)]),
    "no rule": lambda m, x: torch.stack([torch.cat([rows, m.w[None]]).logcumsumexp(0) for rows in hidden(m, x)]),
    "written": written,
    "halves": lambda m, x: torch.cat([m.layer(some) for some in hidden(m, x).tensor_split(2)]),
    "pairs": lambda m, x: torch.cat([m.layer(some) for some in x.split(2)]),
    "beside the batch": beside_the_batch,
    "beside points in time": beside_points_in_time,
    "beside prototypes": beside_prototypes,
    "looked up": looked_up,
}


@pytest.mark.parametrize("name", WAYS)
def test_they_are_exact(name: str) -> None:
    model = Small(WAYS[name], **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    for size, length in SIZES:
        data = batch(size, length, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


MODULES: dict[str, tuple[nn.Module, Way]] = {
    "LSTM": (nn.LSTM(4, 4), lambda m, x: torch.stack([m.layer(rows)[0] for rows in x])),
    "attention": (nn.MultiheadAttention(4, 2), lambda m, x: torch.stack([m.layer(r, r, r)[0] for r in x])),
    "encoder": (
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        lambda m, x: torch.cat([m.layer(rows[None]) for rows in x]),
    ),
    "convolution": (nn.Conv1d(4, 3, 1), lambda m, x: torch.stack([m.layer(rows.T) for rows in x])),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_that_are_called_so_are_exact(name: str) -> None:
    layer, way = MODULES[name]
    model = Small(lambda m, x: way(m, hidden(m, x)), first=nn.Linear(4, 4), layer=layer)
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    for size, length in SIZES:
        data = batch(size, length, 4)
        found = record(model, square, data, certificate=certificate)
        assert relative_error(found, loop(model, square, data)) <= 1e-12


def by_rows(model: Any, data: Any) -> Tensor:
    """As of a model that is called for each row by itself."""
    rows = zip(data["input_ids"], data["attention_mask"], strict=True)
    logits = [model(input_ids=ids[None], attention_mask=mask[None]).logits for ids, mask in rows]
    return torch.stack([one.square().mean() for one in logits])


def texts(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    mask = torch.ones(size, LENGTH, dtype=torch.long)
    for row, few in enumerate(mask):
        few[: row % 3] = 0
    return {"input_ids": torch.randint(1, 20, (size, LENGTH), generator=generator), "attention_mask": mask}


@pytest.mark.parametrize(("kind", "head"), [("bert", "sequence"), ("llama", "causal_lm")])
def test_whole_models_that_are_called_so_are_exact(kind: str, head: str) -> None:
    model = tiny(kind, head)
    certificate = preflight(model, by_rows, texts(3))
    for size in (1, 2, 4, LENGTH):
        found = record(model, by_rows, texts(size), certificate=certificate)
        assert relative_error(found, loop(model, by_rows, texts(size))) <= 1e-9


@pytest.mark.parametrize("size", [1, 4, LENGTH])
def test_two_passes_give_what_one_gives(size: int) -> None:
    model = Small(WAYS["tied"], **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    data = batch(size, LENGTH, 4)
    found = record_in_two_passes(model, square, data, certificate=certificate)
    assert relative_error(found, loop(model, square, data)) <= 1e-12
    assert found.differing is not None
    assert not found.differing


def test_groups_are_summed_as_one_is() -> None:
    model = Small(WAYS["beside the batch"], **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    data, sums = batch(4, LENGTH, 4), dict[str, Tensor]()
    names = sorted(name for name, _ in model.named_parameters())
    weights = torch.linspace(0.3, 1.7, 4, dtype=torch.float64)
    found = InGroups(model, square, data, certificate=certificate)

    def take(_: int, own: PerExampleGradients) -> None:
        made = own.weighted_sum(weights)
        sums.update({name: made[name] for name in own.factors})

    found.by_groups([names[::2], names[1::2]], take)
    truth = loop(model, square, data).weighted_sum(weights)
    assert all(torch.allclose(sums[name], value) for name, value in truth.items())


def test_rows_that_a_loop_looks_up_are_summed_by_rows() -> None:
    def looked_up(m: Any, ids: Tensor) -> Tensor:
        return torch.stack([m.table(one[one > 0]).sum(0).sin() * m.layer(m.table(one)).mean(0) for one in ids])

    model = Small(looked_up, table=nn.Embedding(9, 4), layer=nn.Linear(4, 4))
    data = {"x": torch.tensor([[1, 2, 2], [3, 0, 0], [8, 1, 8], [0, 0, 5]])}
    certificate = preflight(model, square, data, tables=["table.weight"])
    found = record(model, square, data, certificate=certificate, tables=["table.weight"])
    truth, weights = loop(model, square, data), torch.linspace(0.3, 1.7, 4, dtype=torch.float64)
    assert torch.allclose(found.squared_norms(), truth.squared_norms())
    sums = as_sums(found.zeros(besides=["table.weight"]), found.parameters)
    rows = {"table.weight": RowSum("table.weight", found.parameters["table.weight"])}
    found.add_weighted_sum_(sums, weights, rows)
    whole = torch.zeros(9, 4, dtype=torch.float64)
    whole.index_add_(0, *rows["table.weight"].coalesced())
    assert torch.allclose(whole, truth.weighted_sum(weights)["table.weight"])


def test_rows_of_one_unit_are_one_example() -> None:
    model = Small(WAYS["computed weights"], **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    data, owners = batch(5, LENGTH, 4), [0, 1, 0, 2, 1]
    found = record(model, square, data, certificate=certificate).grouped(owners)
    whole = {k: v.values for k, v in ((k, f.instantiated() if hasattr(f, "instantiated") else f) for k, (f,) in (
        loop(model, square, data).factors.items()) )}  # fmt: skip
    squares = sum(
        torch.zeros(3, *v.shape[1:], dtype=v.dtype).index_add(0, torch.tensor(owners), v).square().flatten(1).sum(1)
        for v in whole.values()
    )
    assert torch.allclose(found.squared_norms(), torch.as_tensor(squares))


def beside_the_one_before(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    return torch.stack([m.layer(h[i] + h[i - 1]) for i in range(len(h))])


def products_with_the_one_before(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    return torch.stack([m.layer(h[i]) * m.layer(h[i - 1]) for i in range(len(h))])


def scaled_by_all(m: Any, x: Tensor) -> Tensor:
    made = [m.layer(rows) for rows in hidden(m, x)]
    mean = torch.stack(made).mean().item()
    return torch.stack([mean * rows for rows in made])


def handed_on(m: Any, x: Tensor) -> Tensor:
    state, found = torch.zeros(4, dtype=x.dtype), []
    for rows in hidden(m, x):
        found.append(state := torch.tanh(m.layer(rows.mean(0) + state)))
    return torch.stack(found)


def through_views(m: Any, x: Tensor) -> Tensor:
    """What was taken out before another example was written there."""
    h = hidden(m, x).clone()
    rows = [*h]
    h[0].copy_(h[-1].clone())
    return torch.stack([m.layer(one) for one in rows])


def to_a_view(m: Any, x: Tensor) -> Tensor:
    """One example's rows, and another's, in memory that both views show."""
    into, found = torch.zeros(2, *x.shape[1:], dtype=x.dtype), []
    one, both = into[0], into[:]
    for rows in hidden(m, x):
        both.add_(rows)
        found.append(m.layer(one + 0.0))
    return torch.stack(found)


MIXING: list[Way] = [
    beside_the_one_before, products_with_the_one_before, scaled_by_all, handed_on, through_views, to_a_view,
]  # fmt: skip


@pytest.mark.parametrize("way", MIXING)
def test_what_mixes_examples_is_refused(way: Way) -> None:
    model = Small(way, **members())
    with pytest.raises(HfDpError):
        preflight(model, square, batch(3, LENGTH, 4))
    with pytest.raises(HfDpError):
        record(model, square, batch(4, LENGTH, 4))


def test_where_sizes_alone_tell_which_axis_it_is_it_is_refused() -> None:
    """Which they do not, once there are as many points in time as examples."""

    def turned(m: Any, x: Tensor) -> Tensor:
        by_time = torch.einsum("btd,de->tbe", hidden(m, x), torch.eye(4, dtype=x.dtype))
        apart = torch.stack([m.layer(rows) for rows in x])
        return apart * torch.stack([m.layer(rows) for rows in by_time]).transpose(0, 1)

    with pytest.raises(HfDpError):
        preflight(Small(turned, **members()), square, batch(3, LENGTH, 4))


def test_what_was_one_example_s_in_the_check_is_not_read_by_its_shape_later() -> None:
    """Through NumPy nobody knows whose it is; as many points in time as examples are no examples."""

    def function(m: Any, x: Tensor) -> Tensor:
        if len(x) == x.shape[1]:
            with torch.no_grad():
                x = torch.from_numpy(x.numpy().copy())
        return torch.stack([m.layer(rows) for rows in x])

    model = Small(function, **members())
    certificate = preflight(model, square, batch(3, LENGTH, 4))
    with pytest.raises(HfDpError):
        record(model, square, batch(LENGTH, LENGTH, 4), certificate=certificate)


def test_a_checkpoint_that_computes_one_example_again_is_refused_before_anything_is_spent() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return torch.stack([checkpoint(m.layer, rows, use_reentrant=False) for rows in hidden(m, x)])

    with pytest.raises(HfDpError):
        preflight(Small(function, **members()), square, batch(3, LENGTH, 4))


def test_factors_are_kept_once() -> None:
    """And not once for each example, with zeros for all others."""
    model = Small(WAYS["a layer"], **members())
    certificate: Certificate = preflight(model, square, batch(3, LENGTH, 4))
    found = record(model, square, batch(8, LENGTH, 4), certificate=certificate)
    assert [len(uses) for name, uses in found.factors.items() if name.startswith("layer")] == [1, 1]


def permuted(h: Tensor, order: list[int]) -> Tensor:
    return F.one_hot(torch.tensor(order), len(h)).to(h.dtype)


def seen_before(h: Tensor, order: list[int]) -> list[Tensor]:
    into = h.clone()
    views = [*into]
    into.copy_(h[order])
    return views


# In the check all have as many marks, so that each example stays where it is.
ORDERS: dict[str, Callable[[Tensor, list[int]], Any]] = {
    "picked": lambda h, order: h[order],
    "product": lambda h, order: torch.einsum("ij,jtd->itd", permuted(h, order), h),
    "products": lambda h, order: (permuted(h, order).expand(h.shape[1], -1, -1) @ h.transpose(0, 1)).transpose(0, 1),
    "written": lambda h, order: h.clone().copy_(h[order]),
    "seen before": seen_before,
}


@pytest.mark.parametrize("name", ORDERS)
def test_examples_that_are_in_another_order_in_the_middle_of_a_training_are_refused(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order = sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)
        rows = torch.stack([m.other(one) for one in ORDERS[name](h, order)]).square().sum((1, 2))
        return torch.stack([rows[order.index(i)] for i in range(len(mask))]) + h.sum((1, 2))

    batches = [marked(2, 1, 3), marked(3, 0, 0, 1), marked(2, 0), marked(5, 2, 1)]
    assert refused(function, marked(1, 1, 1), batches, **layers()) == len(batches)


def test_examples_that_the_loop_takes_in_another_order_are_exact() -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]).tanh(), data["mask"]
        order = sorted(range(len(mask)), key=mask.sum(1).tolist().__getitem__)
        rows = [m.other(h[i]).square().sum() for i in order]
        return torch.stack([rows[order.index(i)] for i in range(len(mask))]) + h.sum((1, 2))

    batches = [marked(2, 1, 3), marked(3, 0, 0, 1), marked(2, 0), marked(4, 4, 4, 4, length=4)]
    assert not refused(function, marked(1, 1, 1), batches, **layers())
