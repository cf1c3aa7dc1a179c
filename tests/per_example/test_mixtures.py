"""Mixtures of experts that are written as loops, and heads on some tokens alone, are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnseenUseError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.in_groups import InGroups
from tests import zoo
from tests.per_example.small import relative_error

EXPERTS, WIDTH, WORDS = 3, 6, 12


class Mixture(nn.Module):
    """Experts, of which `how` gives each token of (B, T, d) some."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.how(self, self.norm(h))


class Texts(nn.Module):
    """Two mixtures between embeddings."""

    def __init__(
        self, how: Callable[[Any, Tensor], Tensor], is_checkpointed: bool = False, is_tied: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks, self.is_checkpointed = nn.ModuleList(Mixture(how) for _ in range(2)), is_checkpointed
        if is_tied:
            self.out.weight = self.table.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.is_checkpointed else block(h)
        return self.out(h)


def losses(model: Any, data: Any) -> Tensor:
    return F.cross_entropy(model(data["input_ids"]).mT, data["labels"], reduction="none").mean(1)


def texts(size: int = 4, length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * size + length)
    ids, labels = (torch.randint(0, WORDS, (size, length), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


def places_added(self: Any, h: Tensor) -> Tensor:
    """Two experts for each token, as Transformers 4 wrote Mixtral's."""
    rows = h.view(-1, WIDTH)
    weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
    made, hit = torch.zeros(len(rows), WIDTH, dtype=h.dtype), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for expert, mask in zip(self.experts, hit, strict=True):
        which, places = torch.where(mask)
        made.index_add_(0, places, expert(rows[None, places].reshape(-1, WIDTH)) * weights[places, which, None])
    return made.view(h.shape)


def sorted_and_back(self: Any, h: Tensor) -> Tensor:
    """As DeepSeek's own code does."""
    rows = h.view(-1, WIDTH)
    weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
    order, several, begin = chosen.flatten().argsort(), [], 0
    for expert, count in zip(self.experts, chosen.flatten().bincount(minlength=EXPERTS).tolist(), strict=True):
        several += [expert(rows[order // 2][begin : begin + count])] if count else []
        begin += count
    made = torch.empty_like(torch.cat(several))
    made[order] = torch.cat(several)
    return made.view(len(rows), 2, -1).mul_(weights[..., None]).sum(1).view(h.shape)


def masked(self: Any, h: Tensor) -> Tensor:
    chosen, made = self.router(h).argmax(-1), torch.zeros_like(h)
    for number, expert in enumerate(self.experts):
        made[chosen == number] = expert(h[chosen == number])
    return made


def in_pieces(self: Any, h: Tensor) -> Tensor:
    rows = h.view(-1, WIDTH)
    chosen = self.router(rows).argmax(-1)
    order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=EXPERTS).tolist()
    pieces = [expert(few) for expert, few in zip(self.experts, rows[order].split(counts), strict=True)]
    return torch.zeros_like(rows).index_copy(0, order, torch.cat(pieces)).view_as(h)


def scattered(self: Any, h: Tensor) -> Tensor:
    chosen, made = self.router(h).argmax(-1), h
    for number, expert in enumerate(self.experts):
        mask = chosen == number
        made = made.masked_scatter(mask[..., None], expert(h[mask]))
    return made


def left_out(self: Any, h: Tensor) -> Tensor:
    """Experts that get no token are not called."""
    rows = h.view(-1, WIDTH)
    gates, made = self.router(rows).softmax(-1), torch.zeros_like(rows)
    chosen = gates.argmax(-1)
    for number, expert in enumerate(self.experts):
        places = chosen.eq(number).nonzero().squeeze(1)
        if len(places):
            made[places] += gates[places, number, None] * expert(rows[places])
    return made.view_as(h)


HOW = {one.__name__: one for one in (places_added, sorted_and_back, masked, in_pieces, scattered, left_out)}
OTHERS = ((1, 9), (7, 3), (2, 1), (3, 3), (5, 16))


def exact(model: nn.Module, loss: Any = losses, tables: tuple[str, ...] = ()) -> None:
    certificate = preflight(model, loss, texts(), tables=tables)
    for size, length in OTHERS:
        data = texts(size, length)
        found, slow = record(model, loss, data, certificate=certificate, tables=tables), loop(model, loss, data)
        assert relative_error(found, slow) <= 1e-12
        coefficients = torch.linspace(0.1, 1, size, dtype=torch.float64)
        sums = found.weighted_sum(coefficients)
        for name, whole in slow.weighted_sum(coefficients).items():
            torch.testing.assert_close(sums[name], whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_experts_in_a_loop_are_exact(how: str, is_checkpointed: bool) -> None:
    """Also where an expert gets no token, or one of each example, and with other numbers of these."""
    exact(Texts(HOW[how], is_checkpointed))


@pytest.mark.parametrize("how", [left_out, scattered])
def test_no_chance_of_routing_is_refused(how: Any) -> None:
    """An expert that no token of the check came to, one that as many tokens as examples come to, and none at all."""
    for seed in range(8):
        model = Texts(how)
        torch.manual_seed(seed)
        for block in model.blocks:
            nn.init.normal_(block.router.weight, std=3)
        certificate = preflight(model, losses, texts(3, 4))
        for size, length in OTHERS:
            data = texts(size, length)
            found = record(model, losses, data, certificate=certificate)
            assert relative_error(found, loop(model, losses, data)) <= 1e-12


def test_an_expert_of_another_kind_is_not_taken_to_be_like_others() -> None:
    def without_the_last(self: Any, h: Tensor) -> Tensor:
        for expert in self.experts[:2] if len(h) < 20 else self.experts[2:]:
            h = h.masked_scatter(h[..., :1] > 0, expert(h[h[..., 0] > 0]))
        return h

    model = Texts(without_the_last)
    for block in model.blocks:
        block.experts[2] = nn.LayerNorm(WIDTH).double()
    certificate = preflight(model, losses, texts())
    with pytest.raises(UnseenUseError, match="layer_norm"):
        record(model, losses, texts(29, 3), certificate=certificate)


def test_rows_of_tables_are_exact_too() -> None:
    exact(Texts(masked, is_tied=False), tables=("table.weight",))


def test_groups_of_their_parameters_are_clipped_as_they_come() -> None:
    model = Texts(places_added)
    certificate = preflight(model, losses, texts())
    names = [name for name, _ in model.named_parameters()]
    groups = [[n for n in names if "experts.1" in n], [n for n in names if "experts.1" not in n]]
    data, found = texts(5, 7), dict[int, Tensor]()
    several = InGroups(model, losses, data, certificate=certificate)
    several.by_groups(groups, lambda number, group: found.update({number: group.squared_norms()}))
    slow = loop(model, losses, data)
    slow.by_groups(
        groups,
        lambda number, group: torch.testing.assert_close(found[number], group.squared_norms(), rtol=1e-10, atol=1e-14),
    )


def on_marked_tokens(model: Any, data: Any) -> Tensor:
    mask = data["labels"] > 3
    each = F.cross_entropy(model.out(model.table(data["input_ids"])[mask]), data["labels"][mask], reduction="none")
    return torch.zeros(len(mask), dtype=each.dtype).index_add(0, mask.nonzero()[:, 0], each)


def of_marked_tokens(model: Any, data: Any) -> Tensor:
    """Of which the ids are picked, before they are looked up."""
    mask = data["labels"] > 3
    each = F.cross_entropy(model.out(model.table(data["input_ids"][mask])), data["labels"][mask], reduction="none")
    return torch.zeros(len(mask), dtype=each.dtype).index_add(0, mask.nonzero()[:, 0], each)


@pytest.mark.parametrize("loss", [on_marked_tokens, of_marked_tokens])
def test_a_head_on_marked_tokens_alone_is_exact(loss: Any) -> None:
    exact(Texts(masked), loss)
    exact(Texts(masked, is_tied=False), loss, tables=("table.weight",))


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gpt_oss"))]
)
def test_experts_that_transformers_runs_one_after_another_are_exact(name: str) -> None:
    model = zoo.tiny(f"{name}, experts in a loop", "causal_lm")
    certificate = preflight(model, per_example_losses, zoo.text_batch("causal_lm"))
    for size in (1, 3, 4):
        batch = zoo.text_batch("causal_lm", size)
        found = record(model, per_example_losses, batch, certificate=certificate)
        assert relative_error(found, loop(model, per_example_losses, batch)) <= 1e-10
