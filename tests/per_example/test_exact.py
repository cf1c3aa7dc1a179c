"""Engine against oracle: norms and weighted sums of real architectures, to 1e-10 in float64."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, PreTrainedTokenizerFast

from hf_dp.losses import per_example_losses
from hf_dp.per_example import PerExampleGradients, loop, preflight, record
from tests.zoo import text_batch, tiny

DECODERS = ("gpt2", "llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "gpt_neox")
ENCODERS = ("bert", "roberta", "distilbert")
NO_HEAD = {
    *((name, "qa") for name in ("gemma2", "gemma3", "phi3")),
    *((name, "token") for name in ("gemma3", "opt")),
}
CASES = [
    *((name, head) for name in DECODERS for head in ("causal_lm", "sequence", "token", "qa")),
    *((name, head) for name in ENCODERS for head in ("masked_lm", "sequence", "token", "qa")),
    ("vit", "image"),
]


def slow(*case: Any) -> Any:
    """What repeats a sibling with another model."""
    return pytest.param(*case, marks=pytest.mark.slow)


def errors(found: PerExampleGradients, truth: PerExampleGradients) -> tuple[float, float, float]:
    """The worst relative errors: a norm, the weighted sum of one parameter, the whole weighted sum."""
    weights = torch.linspace(0.3, 1.7, truth.batch_size, dtype=torch.float64)
    norms, true_norms = (g.squared_norms().double().sqrt() for g in (found, truth))
    ours, sums = found.weighted_sum(weights), truth.weighted_sum(weights)
    assert list(ours) == list(sums)
    difference = {name: float((ours[name].double() - sums[name].double()).norm()) for name in sums}
    size = {name: float(sums[name].double().norm()) for name in sums}
    whole = sum(s**2 for s in size.values()) ** 0.5
    # A key's bias has no gradient but rounding: 1e-6 of the whole stands for zero.
    each = max(difference[name] / max(size[name], 1e-6 * whole) for name in sums)
    total = sum(d**2 for d in difference.values()) ** 0.5 / whole
    return float(((norms - true_norms) / true_norms).abs().max()), each, total


def assert_exact(model: nn.Module, batch: dict[str, Any], tolerance: float = 1e-10, **options: Any) -> None:
    found = record(model, per_example_losses, batch, **options)
    truth = loop(model, per_example_losses, batch)
    assert float(truth.squared_norms().min()) > 1e-8, "a vanishing gradient would show nothing"
    assert torch.allclose(found.losses, truth.losses, rtol=1e-9)
    assert max(errors(found, truth)) <= tolerance


@pytest.mark.parametrize(
    ("name", "head"),
    [
        # These are llama or gemma2 but for sizes; and beside their first one, heads are those of gpt2, bert and llama.
        pytest.param(
            *case,
            marks=[pytest.mark.slow]
            * (
                case[0] in {"mistral", "qwen2", "phi3", "gemma3"}
                or (case[0] not in {"gpt2", "bert", "llama"} and case[1] in {"sequence", "token", "qa"})
            ),
        )
        for case in CASES
        if case not in NO_HEAD
    ],
)
def test_every_head_is_exact(name: str, head: str) -> None:
    assert_exact(tiny(name, head), text_batch(head))


def test_gpt2_is_tied_and_llama_is_either() -> None:
    tied, untied = tiny("llama_tied", "causal_lm"), tiny("llama", "causal_lm")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    found = record(tiny("gpt2", "causal_lm"), per_example_losses, text_batch("causal_lm"))
    assert len(found.factors["transformer.wte.weight"]) == 2
    assert "lm_head.weight" not in found.factors


@pytest.mark.parametrize("name", ["gpt2", slow("llama_tied"), "bert", slow("vit")])
@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(name: str, kind: str) -> None:
    head = {"bert": "masked_lm", "vit": "image"}.get(name, "causal_lm")
    model, batch = tiny(name, head), text_batch(head)
    plain = record(model, per_example_losses, batch)
    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    assert_exact(model, batch)
    assert max(errors(record(model, per_example_losses, batch), plain)) <= 1e-12


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", ["gpt2", slow("llama"), "bert", slow("roberta"), slow("opt"), "gemma2"])
def test_one_example_and_as_many_examples_as_positions(name: str, size: int) -> None:
    head = "sequence" if name in ENCODERS else "causal_lm"
    model = tiny(name, head)
    assert_exact(model, text_batch(head, size=size, length=7))


@pytest.mark.parametrize("size", [4, 6, 24])
def test_as_many_examples_as_heads_features_or_a_head_has(size: int) -> None:
    model = tiny("qwen3", "causal_lm")
    assert_exact(model, text_batch("causal_lm", size=size, length=5))


def test_a_certificate_covers_other_sizes_and_lengths() -> None:
    model = tiny("gpt2", "causal_lm")
    certificate = preflight(model, per_example_losses, text_batch("causal_lm", size=3, length=6))
    for size, length in ((1, 4), (4, 4), (5, 9), (8, 5)):
        assert_exact(model, text_batch("causal_lm", size=size, length=length), certificate=certificate)


@pytest.mark.parametrize("frozen", ["transformer.wte", "transformer.h.0", "transformer.ln_f", "transformer.h.1.mlp"])
def test_partly_frozen(frozen: str) -> None:
    model = tiny("gpt2", "causal_lm")
    model.get_submodule(frozen).requires_grad_(False)
    assert_exact(model, text_batch("causal_lm"))


def test_frozen_weights_beside_trainable_biases() -> None:
    model = tiny("bert", "sequence")
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    assert_exact(model, text_batch("sequence"))


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), "gemma2", slow("bert")])
def test_float32(name: str) -> None:
    head = "masked_lm" if name == "bert" else "causal_lm"
    batch = text_batch(head)
    model = tiny(name, head)
    truth = loop(model, per_example_losses, batch)
    found = record(model.float(), per_example_losses, batch)
    norms, each, whole = errors(found, truth)
    assert norms <= 1e-4
    assert whole <= 1e-4
    assert each <= 1e-3
    assert found.squared_norms().dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), slow("bert")])
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_bf16_norms_are_within_two_percent(name: str, how: str) -> None:
    head = "masked_lm" if name == "bert" else "causal_lm"
    batch = text_batch(head, size=5, length=16)
    model = tiny(name, head, torch.float32)

    def autocast(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return per_example_losses(model, batch)

    if how == "weights":
        model = model.bfloat16()
        found = record(model, per_example_losses, batch)
        truth = loop(model.float(), per_example_losses, batch)
    else:
        found = record(model, autocast, batch, certificate=preflight(model, autocast, batch))
        truth = loop(model, per_example_losses, batch)
    norms, _, whole = errors(found, truth)
    assert norms <= 0.02
    assert whole <= 0.04
    assert all(total.dtype == torch.float32 for total in found.weighted_sum(torch.ones(5)).values())


@pytest.mark.parametrize("tf32", [False, True])
def test_norms_and_sums_do_not_know_autocast_or_tf32(tf32: bool) -> None:
    model, batch = tiny("gpt2", "causal_lm", torch.float32), text_batch("causal_lm")
    plain = record(model, per_example_losses, batch)
    found = record(model, per_example_losses, batch)
    before = torch.get_float32_matmul_precision()
    try:
        if tf32:
            torch.set_float32_matmul_precision("medium")
            norms, sums = found.squared_norms(), found.weighted_sum(torch.ones(3))
            assert torch.get_float32_matmul_precision() == "medium"
        else:
            with torch.autocast("cpu", torch.bfloat16):
                norms, sums = found.squared_norms(), found.weighted_sum(torch.ones(3))
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(norms, plain.squared_norms())
    assert all(torch.equal(sums[name], v) for name, v in plain.weighted_sum(torch.ones(3)).items())


def adapted(name: str, head: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, **options)
    model = peft.get_peft_model(tiny(name, head, torch.float32), config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "head", "options"),
    [
        ("gpt2", "causal_lm", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        slow("bert", "sequence", {"target_modules": ["query", "value", "dense"], "task_type": "SEQ_CLS"}),
        ("llama", "causal_lm", {"target_modules": "all-linear"}),
        ("llama", "causal_lm", {"target_modules": ["q_proj"], "bias": "all", "use_rslora": True}),
        slow("bert", "sequence", {"target_modules": ["query"], "bias": "lora_only"}),
        slow("llama", "causal_lm", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", "causal_lm", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    ],
    ids=["gpt2", "bert", "llama", "bias", "lora_only", "modules_to_save", "modules_to_save_embeddings"],
)
def test_lora_is_exact(name: str, head: str, options: dict[str, Any]) -> None:
    model, batch = adapted(name, head, **options), text_batch(head)
    certificate = preflight(model, per_example_losses, batch)
    assert_exact(model, batch)
    assert_exact(model, text_batch(head, size=7, length=7), certificate=certificate)


def test_a_fresh_adapter_is_certified_off_zero_and_stays_at_zero() -> None:
    config = peft.LoraConfig(r=3, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(tiny("gpt2", "causal_lm"), config).train()
    preflight(model, per_example_losses, text_batch("causal_lm"))
    fresh = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert fresh
    assert not any(bool(p.any()) for p in fresh)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    text = "[PAD] [BOS] [EOS] [MASK] [UNK] the cat sat on a mat and then it ran away from his dog"
    words = {word: i for i, word in enumerate(text.split())}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", mask_token="[MASK]"
    )


TEXTS = ["the cat sat on a mat", "it ran", "and then it ran away from his dog", "a dog sat"]


@pytest.mark.parametrize("name", ["gpt2", slow("llama"), "opt"])
def test_stock_collator_for_causal_language_models(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([tokenizer(text) for text in TEXTS])
    model = tiny(name, "causal_lm")
    assert_exact(model, dict(batch), certificate=preflight(model, per_example_losses, dict(batch)))


def test_stock_collator_for_masked_language_models(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.5)
    batch = collate([tokenizer(text) for text in TEXTS])
    assert_exact(tiny("bert", "masked_lm"), dict(batch))


@pytest.mark.parametrize("name", ["bert", slow("roberta"), slow("distilbert"), "gpt2"])
def test_stock_collator_for_classification(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    collate = DataCollatorWithPadding(tokenizer)
    batch = dict(collate([{**tokenizer(text), "label": i % 3} for i, text in enumerate(TEXTS)]))
    if name in ("distilbert", "gpt2"):
        batch.pop("token_type_ids", None)
    model = tiny(name, "sequence")
    assert_exact(model, batch, certificate=preflight(model, per_example_losses, batch))


def test_the_model_may_be_run_twice_in_one_loss() -> None:
    model, batch = tiny("llama_tied", "causal_lm"), text_batch("causal_lm")

    def contrast(model: Any, batch: Any) -> Tensor:
        return per_example_losses(model, batch) - 0.5 * per_example_losses(
            model, {**batch, "input_ids": batch["input_ids"].flip(1)}
        )

    found, truth = (method(model, contrast, batch) for method in (record, loop))
    assert max(errors(found, truth)) <= 1e-10
