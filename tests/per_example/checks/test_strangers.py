"""What one example holds may change no other's gradient, whether the data shows it or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.strangers import check_strangers
from tests.zoo import text_batch, tiny

F32 = torch.float32
Losses = Callable[[nn.Module, Any], Tensor]


def batch() -> dict[str, Tensor]:
    """Of which no row shows what is rare: a positive label, a flag, a large number."""
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.rand(3, 4, generator=generator),
        "flag": torch.zeros(3, dtype=torch.bool),
        "labels": torch.zeros(3, dtype=torch.int64),
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def plain(model: nn.Module, inputs: Any) -> Tensor:
    return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")


def weighted_by_the_batch(model: nn.Module, inputs: Any) -> Tensor:
    positive = inputs["labels"].sum()
    weight = (len(inputs["labels"]) - positive) / positive if positive else 1.0
    return plain(model, inputs) * weight


def scaled_by_the_largest(model: nn.Module, inputs: Any) -> Tensor:
    x = inputs["x"]
    return plain(model, {**inputs, "x": x / 255 if x.max() > 1 else x})


def skipped_with_nan(model: nn.Module, inputs: Any) -> Tensor:
    losses = plain(model, inputs)
    return losses if losses.isfinite().all() else losses * 0


def skipped_with_infinities(model: nn.Module, inputs: Any) -> Tensor:
    return plain(model, inputs) * (not inputs["x"].isinf().any())


def told_by_a_flag(model: nn.Module, inputs: Any) -> Tensor:
    return plain(model, inputs) * (2.0 if inputs["flag"].any() else 1.0)


def cut_on_its_way_back(model: nn.Module, inputs: Any) -> Tensor:
    hidden = model[:2](inputs["x"])  # type: ignore[index]
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g * (10 / inputs["x"].abs().amax()).clamp(max=1))
    return F.cross_entropy(model[2](hidden), inputs["labels"], reduction="none")  # type: ignore[index]


MIXING: list[tuple[Losses, str]] = [
    (weighted_by_the_batch, "1 in 'labels'"),
    (scaled_by_the_largest, "large numbers in 'x'"),
    (skipped_with_nan, "NaN in 'x'"),
    (skipped_with_infinities, "infinities in 'x'"),
    (told_by_a_flag, "True in 'flag'"),
    (cut_on_its_way_back, "large numbers in 'x'"),
]


def held(model: nn.Module, losses: Losses, batch: dict[str, Tensor]) -> None:
    certificate = preflight(model, losses, batch)
    check_strangers(model, losses, batch, certificate=certificate)


@pytest.mark.parametrize(("losses", "named"), MIXING, ids=[losses.__name__ for losses, _ in MIXING])
def test_failure_73_what_few_rows_hold_decides_for_a_whole_micro_batch(losses: Losses, named: str) -> None:
    with pytest.raises(PreflightError, match=f"is another with {named} in another example"):
        held(model(), losses, batch())


def test_failure_73_what_several_rows_decide_together_is_refused_too() -> None:
    def told_by_two(model: nn.Module, inputs: Any) -> Tensor:
        return plain(model, inputs) * (2.0 if inputs["x"].abs().gt(100).any(1).sum() > 1 else 1.0)

    with pytest.raises(PreflightError, match="is another with large numbers in 'x' and others in another example"):
        held(model(), told_by_two, batch())


def test_failure_73_of_few_classes_each_may_be_the_one_that_decides() -> None:
    def told_by_a_class(model: nn.Module, inputs: Any) -> Tensor:
        return inputs["x"].matmul(model[0].weight.T).sum(1) * (2.0 if inputs["labels"].eq(5).any() else 1.0)  # type: ignore[index, operator, union-attr]

    with pytest.raises(PreflightError, match="is another with 5 in 'labels' in another example"):
        held(
            nn.Sequential(nn.Linear(4, 6, bias=False)), told_by_a_class, {**batch(), "labels": torch.tensor([0, 9, 0])}
        )


def filled_with_means(model: nn.Module, inputs: Any) -> Tensor:
    x = inputs["x"]
    return plain(model, {**inputs, "x": torch.where(x.isnan(), x.nanmean(0).nan_to_num(0), x)})


def filled_where_there_is_nothing(model: nn.Module, inputs: Any) -> Tensor:
    x = inputs["x"]
    return plain(model, {**inputs, "x": torch.where(x.any(1, keepdim=True), x, x.mean(0))})


def filled_where_a_flag_says_so(model: nn.Module, inputs: Any) -> Tensor:
    x = inputs["x"]
    return plain(model, {**inputs, "x": torch.where(inputs["flag"][:, None], x.mean(0), x)})


def filled_where_a_mask_is_0(model: nn.Module, inputs: Any) -> Tensor:
    seen, x = inputs["seen"].bool(), inputs["x"]
    mean = x.where(seen, 0.0).sum(0) / seen.sum(0).clamp(min=1)
    return plain(model, {**inputs, "x": torch.where(seen, x, mean)})


def filled_where_a_code_is_unknown(model: nn.Module, inputs: Any) -> Tensor:
    x = inputs["x"]
    return plain(model, {**inputs, "x": torch.where(inputs["code"].eq(0)[:, None], x.mean(0), x)})


def labelled_as_most_are(model: nn.Module, inputs: Any) -> Tensor:
    labels = inputs["labels"]
    most = labels[labels >= 0].mode().values if (labels >= 0).any() else labels.new_zeros(())
    return plain(model, {**inputs, "labels": torch.where(labels < 0, most, labels)})


def told() -> dict[str, Tensor]:
    """Of which no row lacks anything."""
    seen, code = torch.ones(3, 4, dtype=torch.int64), torch.tensor([1, 2, 1])
    return {**batch(), "labels": torch.tensor([0, 1, 1]), "seen": seen, "code": code}


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        (filled_with_means, "NaN in 'x'"),
        (filled_where_there_is_nothing, "zeros in 'x'"),
        (filled_where_a_flag_says_so, "True in 'flag'"),
        (labelled_as_most_are, "no label in 'labels'"),
        (filled_where_a_mask_is_0, "0 in 'seen'"),
        (filled_where_a_code_is_unknown, "0 in 'code'"),
    ],
)
def test_failure_117_what_an_example_lacks_is_taken_from_others(losses: Losses, named: str) -> None:
    with pytest.raises(PreflightError, match=f"the gradient of an example with {named} is another where other"):
        held(model(), losses, told())


def test_failure_118_losses_are_divided_by_how_many_of_the_batch_have_a_label() -> None:
    def among_the_labelled(model: nn.Module, inputs: Any) -> Tensor:
        return plain(model, inputs) * len(inputs["labels"]) / inputs["labels"].ge(0).sum().clamp(min=1)

    with pytest.raises(PreflightError, match="is another with no label in 'labels' in another example"):
        held(model(), among_the_labelled, batch())


def test_what_each_example_decides_by_itself_is_not_refused() -> None:
    def own(model: nn.Module, inputs: Any) -> Tensor:
        x = inputs["x"]
        x = torch.where(x.amax(1, keepdim=True) > 1, x / 255, x).nan_to_num(0, 0, 0)
        return plain(model, {**inputs, "x": x}) * inputs["flag"].float().add(1)

    held(model(), own, batch())


def test_what_each_example_fills_by_itself_is_not_refused() -> None:
    def own(model: nn.Module, inputs: Any) -> Tensor:
        x, seen = inputs["x"].nan_to_num(0), inputs["seen"].bool()
        x = torch.where(seen, x, x.mean(1, keepdim=True)) * inputs["code"].ne(0)[:, None]
        labelled = inputs["labels"] >= 0
        return plain(model, {**inputs, "x": x, "labels": inputs["labels"].clamp(min=0)}) * labelled

    held(model(), own, told())


@pytest.mark.slow
def test_numbers_that_are_drawn_in_eval_mode_too_are_no_reason_to_refuse() -> None:
    def amid_noise(losses: Losses) -> Losses:
        def drawn(model: nn.Module, inputs: Any) -> Tensor:
            share = torch.rand(len(inputs["x"]), 1)
            return losses(model, {**inputs, "x": (1 - share) * inputs["x"] + share * torch.randn_like(inputs["x"])})

        return drawn

    held(model(), amid_noise(plain), batch())
    with pytest.raises(PreflightError, match="is another with large numbers in 'x'"):
        held(model(), amid_noise(lambda m, b: plain(m, b) * (2.0 if b["x"].abs().max() > 100 else 1.0)), batch())


@pytest.mark.slow
def test_what_cannot_be_computed_is_no_reason_to_refuse() -> None:
    def strict(model: nn.Module, inputs: Any) -> Tensor:
        if not inputs["x"].abs().le(10).all():
            raise ValueError("inputs are at most 10")
        return plain(model, inputs)

    held(model(), strict, batch())
    with pytest.raises(PreflightError, match="1 in 'labels'"):
        held(model(), lambda model, inputs: strict(model, inputs) * weighted_by_the_batch(model, inputs), batch())


def test_where_an_example_adds_nothing_the_next_one_tells() -> None:
    first = batch()["x"][0]

    def first_left_out(model: nn.Module, inputs: Any) -> Tensor:
        return weighted_by_the_batch(model, inputs).masked_fill(inputs["x"].eq(first).all(1), 0.0)

    with pytest.raises(PreflightError, match="1 in 'labels'"):
        held(model(), first_left_out, batch())


@pytest.mark.parametrize(
    ("name", "head", "dtype"),
    [
        ("gpt2", "causal_lm", torch.bfloat16), ("llama", "sequence", torch.bfloat16), ("bert", "multi_label", F32),
        ("mixtral, experts batched", "causal_lm", F32), ("t5", "seq2seq", F32), ("vit", "image", F32),
        ("mamba", "causal_lm", F32),
        ("bert", "choice", F32),
        ("wav2vec2", "ctc", F32),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_models_that_see_each_row_alone_pass(name: str, head: str, dtype: torch.dtype) -> None:
    held(tiny(name, head, dtype), per_example_losses, text_batch(head, 4, 7, dtype))
