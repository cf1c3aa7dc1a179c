"""What a longer or a shorter example beside it does to an example's gradient is seen, in every family and precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.padding import check_padding
from tests.architectures import CONFIGS, VOCABULARY
from tests.zoo import adapted, tiny, with_dropout

TEXTS = [[4, 3], [5, 6, 7], [8, 9, 10, 11, 12]]
Collate = Callable[[list[list[int]]], dict[str, Tensor]]


def collator(side: str = "right", masked: bool = True, width: int = 0) -> Collate:
    def collate(rows: list[list[int]]) -> dict[str, Tensor]:
        longest = max(width, *map(len, rows))
        fill = [[0] * (longest - len(row)) for row in rows]
        ids = torch.tensor([f + r if side == "left" else r + f for f, r in zip(fill, rows, strict=True)])
        mask = {"attention_mask": ids.ne(0).long()} if masked else {}
        return {"input_ids": ids, **mask, "labels": ids.masked_fill(ids.eq(0), -100)}

    return collate


def language_model(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**CONFIGS["llama"][1], **changes})
    make = AutoModelForMaskedLM if kind in ("fnet", "big_bird") else AutoModelForCausalLM
    model: nn.Module = make.from_config(config).to(dtype).train()
    return model


LONGROPE = {
    "max_position_embeddings": 16,
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 3, "long_factor": [2.0] * 3,
    },
}  # fmt: skip
DYNAMIC = {
    "max_position_embeddings": 8,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
FNET = {"type_vocab_size": 2, "hidden_dropout_prob": 0.0}
BIG_BIRD = {"block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 64, "type_vocab_size": 2}


def speech(norm: str) -> nn.Module:
    torch.manual_seed(0)
    changes = {"apply_spec_augment": False, "layerdrop": 0.0}
    config = AutoConfig.for_model("wav2vec2", **{**CONFIGS["wav2vec2"][1], **changes, "feat_extract_norm": norm})
    model: nn.Module = AutoModelForCTC.from_config(config).train()
    return model


def sounds(rows: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sound = torch.randn(200, generator=generator)
    mask = (torch.arange(max(rows)) < torch.tensor(rows)[:, None]).long()
    labels = torch.tensor([[3, 4, 5]] * len(rows))
    return {"input_values": sound[: max(rows)] * mask, "attention_mask": mask, "labels": labels}


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_failure_16_padding_on_the_right_is_harmless(name: str, dtype: torch.dtype) -> None:
    check_padding(tiny(name, "causal_lm", dtype), per_example_losses, TEXTS, collator())


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox", "bloom"])
@pytest.mark.slow
def test_padding_on_the_left_is_harmless_where_positions_follow_from_the_mask(name: str) -> None:
    def first_token_unpredicted(rows: list[list[int]]) -> dict[str, Tensor]:
        batch = collator("left")(rows)
        hidden = nn.functional.pad(batch["attention_mask"], (1, 0))[:, :-1].eq(0)
        return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}

    check_padding(tiny(name, "causal_lm", torch.float32), per_example_losses, TEXTS, first_token_unpredicted)


@pytest.mark.parametrize(
    ("model", "texts", "collate"),
    [
        (lambda: tiny("gpt2", "causal_lm", torch.float32), TEXTS, collator("left")),
        (lambda: tiny("gpt2", "causal_lm", torch.bfloat16), TEXTS, collator("left")),
        (lambda: tiny("bert", "masked_lm", torch.float32), TEXTS, collator(masked=False)),
        (lambda: language_model("fnet", **FNET), TEXTS, collator(masked=False)),
        (lambda: language_model("phi3", **LONGROPE), [[5, 6, 7], list(range(3, 15))], collator()),
        (lambda: language_model("llama", **DYNAMIC), [[5, 6, 7], list(range(3, 15))], collator()),
        (lambda: language_model("big_bird", **BIG_BIRD), [[5, 6, 7], list(range(3, 35))], collator()),
        (lambda: speech("group"), [80, 150], sounds),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_failure_30_a_long_row_that_changes_its_neighbours(model: Any, texts: Any, collate: Any) -> None:
    trained = model()
    before = {name: p.detach().clone() for name, p in trained.named_parameters()}
    with pytest.raises(PreflightError, match=r"gradient moves by .* beside it in a batch|inv_freq is another"):
        check_padding(trained, per_example_losses, texts, collate)
    assert all(p.dtype == before[name].dtype and p.equal(before[name]) for name, p in trained.named_parameters())


@pytest.mark.parametrize(
    ("model", "texts", "collate"),
    [
        (lambda: language_model("fnet", **FNET), TEXTS, collator(masked=False, width=6)),
        (lambda: language_model("phi3", **LONGROPE), TEXTS, collator()),
        (lambda: language_model("phi3", **LONGROPE), [list(range(3, 13)), list(range(3, 15))], collator()),
        (lambda: language_model("phi3", **LONGROPE), TEXTS, collator(width=10)),
        (lambda: language_model("llama", **DYNAMIC), TEXTS, collator()),
        (lambda: tiny("gpt2", "causal_lm", torch.float32), TEXTS, collator("left", width=6)),
        (lambda: speech("layer"), [80, 150], sounds),
        (lambda: speech("group"), [80, 80], sounds),
        (lambda: adapted("LoRA over a bf16 base", torch.float32), TEXTS, collator()),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_one_width_for_all_or_padding_without_influence_is_accepted(model: Any, texts: Any, collate: Any) -> None:
    check_padding(model(), per_example_losses, texts, collate)


@pytest.mark.parametrize("always", [False, True], ids=["in training", "in eval mode too"])
@pytest.mark.slow
def test_dropout_and_noise_of_the_model_are_no_leak(always: bool) -> None:
    class Noisy(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            embedded = self.inner.get_input_embeddings()(input_ids)
            if self.training or always:
                embedded = embedded * (1 + 0.1 * torch.rand_like(embedded))
            return self.inner(inputs_embeds=nn.functional.dropout(embedded, 0.5), attention_mask=attention_mask)

    def losses(model: Any, batch: Any) -> Tensor:
        hidden = model(batch["input_ids"], batch["attention_mask"]).logits
        kept = batch["attention_mask"][..., None]
        return (hidden.square() * kept).sum((1, 2)) / kept.sum((1, 2))

    def held(name: str, collate: Any) -> None:
        model = Noisy(tiny(name, "causal_lm", torch.float32)).train()
        certificate = preflight(model, losses, collate(TEXTS))
        check_padding(model, losses, TEXTS, collate, certificate=certificate)

    held("llama", collator())
    with pytest.raises(PreflightError, match="gradient moves by"):
        held("gpt2", collator("left"))


@pytest.mark.slow
def test_a_leak_in_training_mode_alone_is_one_where_attention_could_draw_numbers_and_does_not() -> None:
    def losses(model: Any, batch: Any) -> Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        scale = embedded.shape[1] if model.training else 1
        rows = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
        return per_example_losses(model, {"inputs_embeds": embedded * scale, **rows})

    model = tiny("llama", "causal_lm", torch.float32)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(model, losses, TEXTS, collator())


@pytest.mark.slow
def test_a_loss_divided_by_the_tokens_of_the_batch_is_not_called_a_matter_of_padding() -> None:
    def losses(model: Any, batch: Any) -> Tensor:
        tokens = batch["attention_mask"].sum(1)
        return per_example_losses(model, batch) * tokens / tokens.sum()

    with pytest.raises(PreflightError, match="what is beside it in a batch, also where it is padded as far"):
        check_padding(tiny("llama", "causal_lm", torch.float32), losses, TEXTS, collator())


@pytest.mark.parametrize("leak", [0.0, 1e-2])
def test_rounding_in_float32_is_no_leak(leak: float) -> None:
    """As of an example that is known by heart: its gradient is a small difference of large numbers."""

    def losses(model: Any, batch: Any) -> Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        far = 1e3 * embedded.shape[1]
        rows = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
        given = (embedded + far) - far + leak * embedded.shape[1] * embedded.sin()
        return per_example_losses(model, {"inputs_embeds": given, **rows})

    model = tiny("llama", "causal_lm", torch.float32)
    if leak:
        with pytest.raises(PreflightError, match="gradient moves by"):
            check_padding(model, losses, TEXTS, collator())
    else:
        check_padding(model, losses, TEXTS, collator())


@pytest.mark.parametrize(
    ("dtype", "times", "autocast"),
    [(torch.float32, 2, False), (torch.bfloat16, 1, False), (torch.float32, 1, True), (torch.float32, 0.5, True)],
)
@pytest.mark.slow
def test_failure_30_what_is_not_finite_beside_a_longer_row_is_no_rounding(
    dtype: torch.dtype, times: float, autocast: bool
) -> None:
    """A mask that is added twice is beyond float32, and once beyond bf16: what sees nothing but padding is no number,
    and spreads."""

    def losses(model: Any, batch: Any) -> Tensor:
        embedded, mask = model.get_input_embeddings()(batch["input_ids"]), batch["attention_mask"]
        hidden = (mask.eq(0)[:, None] | torch.ones(mask.shape[1], mask.shape[1]).triu(1).bool()).to(embedded.dtype)
        far = times * (torch.finfo(torch.float32).min * hidden)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            attended = torch.baddbmm(far, embedded, embedded.mT).softmax(-1) @ embedded
            labels = batch["labels"].masked_fill(mask.cumsum(1).eq(1), -100)  # of what nothing comes before
            given = {"inputs_embeds": attended, "attention_mask": mask, "labels": labels}
            return per_example_losses(model, given)

    model = tiny("llama", "causal_lm", dtype)
    check_padding(model, losses, TEXTS, collator())
    if times < 1:
        check_padding(model, losses, TEXTS, collator("left"))
    else:
        with pytest.raises(PreflightError, match="in one of both no number"):
            check_padding(model, losses, TEXTS, collator("left"))


def test_what_is_masked_at_random_in_16_bits_is_held_against_the_same_draw() -> None:
    """A row of which nothing was masked has no loss, which another draw does not say again."""
    calls = itertools.count()

    def drawn(rows: list[list[int]]) -> dict[str, Tensor]:
        data = collator()(rows)
        return {**data, "labels": data["labels"] if next(calls) % 2 == 0 else torch.full_like(data["labels"], -100)}

    def losses(model: Any, data: Any) -> Tensor:
        logits = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits.float()
        each = nn.functional.cross_entropy(logits.mT, data["labels"], reduction="none")
        return each.sum(1) / data["labels"].ne(-100).sum(1)

    check_padding(tiny("bert", "masked_lm", torch.bfloat16), losses, TEXTS, drawn)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.slow
def test_checkpoints_with_dropout_in_16_bits(use_reentrant: bool) -> None:
    """What is left out in the forward pass is not to come when it is computed again."""
    model: Any = with_dropout(tiny("llama", "causal_lm", torch.bfloat16))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    check_padding(model, per_example_losses, TEXTS, collator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_checkpoints_of_torch_with_dropout(dtype: torch.dtype) -> None:
    """As accelerate wraps layers in, under FSDP2."""
    model: Any = with_dropout(tiny("gpt2", "causal_lm", dtype))
    model.config.use_cache = False
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "GPT2Block")
    check_padding(model, per_example_losses, TEXTS, collator())
    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(model, per_example_losses, TEXTS, collator("left"))


def test_a_model_that_cannot_compute_in_float64_is_told_what_leaks_in_float32() -> None:
    def losses(model: Any, batch: Any) -> Tensor:
        if model.lm_head.weight.dtype == torch.float64:
            raise NotImplementedError("no kernel")
        return per_example_losses(model, batch)

    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(tiny("gpt2", "causal_lm", torch.float32), losses, TEXTS, collator("left"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_a_coin_that_falls_alike_twice_is_random_all_the_same(seed: int) -> None:
    """Two losses of one example under stochastic depth of 0.1 are the same more often than not."""

    def losses(model: Any, batch: Any) -> Tensor:
        embedded = model.get_input_embeddings()(batch["input_ids"])
        kept = torch.rand(len(embedded), 1, 1).ge(0.1) if model.training else 1
        rows = {"attention_mask": batch["attention_mask"], "labels": batch["labels"]}
        return per_example_losses(model, {"inputs_embeds": embedded * kept + embedded.sin(), **rows})

    model = tiny("llama", "causal_lm", torch.float32)
    torch.manual_seed(seed)
    check_padding(model, losses, TEXTS, collator())


@pytest.mark.slow
def test_autocast_in_the_loss_function_hides_nothing_and_refuses_nothing() -> None:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return per_example_losses(model, batch)

    check_padding(tiny("gpt2", "causal_lm", torch.float32), losses, TEXTS, collator())
    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(tiny("gpt2", "causal_lm", torch.float32), losses, TEXTS, collator("left"))


@pytest.mark.slow
def test_checkpoints_that_are_computed_again_under_autocast() -> None:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return per_example_losses(model, batch)

    model: Any = tiny("llama", "causal_lm", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check_padding(model, losses, TEXTS, collator())
    assert model.is_gradient_checkpointing


def test_a_collator_that_draws_the_same_twice_is_random_all_the_same() -> None:
    """Of a row of few tokens most often nothing is masked."""
    calls = itertools.count()

    def masked(rows: list[list[int]]) -> dict[str, Tensor]:
        batch, _ = collator()(rows), torch.rand(1)
        hidden = batch["labels"].ne(-100) & (next(calls) > 1)
        return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1)}

    check_padding(tiny("roberta", "masked_lm", torch.float32), per_example_losses, TEXTS, masked)


@pytest.mark.slow
def test_a_collator_that_masks_at_random() -> None:
    def masked(side: str) -> Collate:
        def collate(rows: list[list[int]]) -> dict[str, Tensor]:
            batch = collator(side)(rows)
            hidden = torch.rand(batch["input_ids"].shape) < 0.5
            return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden & batch["labels"].ne(-100), 1)}

        return collate

    texts = [[4, 3, 5], [5, 6, 7], [8, 9, 10, 11, 12]]
    for side in ("right", "left"):
        check_padding(tiny("roberta", "masked_lm", torch.float32), per_example_losses, texts, masked(side))
    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(tiny("bert", "masked_lm", torch.float32), per_example_losses, texts, masked("left"))


@pytest.mark.slow
def test_the_last_token_that_is_no_padding_is_what_is_classified() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**CONFIGS["llama"][1], "num_labels": 3})
    model = AutoModelForSequenceClassification.from_config(config).train()

    def labelled(collate: Collate) -> Collate:
        return lambda rows: {**collate(rows), "labels": torch.tensor([len(row) % 3 for row in rows])}

    for side in ("right", "left"):
        check_padding(model, per_example_losses, TEXTS, labelled(collator(side)))
    model.config.pad_token_id = VOCABULARY - 1
    with pytest.raises(PreflightError, match="gradient moves by"):
        check_padding(model, per_example_losses, TEXTS, labelled(collator()))


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_it_is_noted_how_far_rows_move_in_16_bits(how: str) -> None:
    model = tiny("llama", "causal_lm", torch.bfloat16 if how == "bfloat16" else torch.float32)
    if how == "autocast":  # as accelerate does it
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    moved: list[float] = []
    check_padding(model, per_example_losses, TEXTS, collator(), note=moved.append)
    assert (max(moved, default=0.0) > 1e-4) == (how != "float32")
