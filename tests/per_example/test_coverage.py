"""Every architecture, head, PEFT method and setting of the coverage tables: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from hf_dp.per_example import record
from scripts import coverage, judging
from tests import architectures, zoo

# As many examples as positions: the numbers that tell their axes apart least. In float64 alone.
QUICK = ((7, 7),)
REFUSED_ADAPTERS = {"OFT, constrained"}
# Adapters of which one tensor is for all layers.
SHARED = {
    *("FRoD", "RandLora", "UniLoRA", "VBLoRA", "VeRA"),
    *("prompt tuning", "prefix tuning", "prefix tuning, projected", "p-tuning", "p-tuning, LSTM"),
}


# Of one code with another of these, but for sizes, activations and what is tied, or seldom used;
# `test_every_case` has them too.
ALIKE = {
    *("mistral", "qwen2", "granite", "olmo2", "smollm3", "starcoder2", "granite_swa", "glm4", "nemotron"),  # llama
    *("gemma", "gemma3", "phi", "phi3", "stablelm"),  # gemma2, qwen3 and gpt_neox
    *("gpt_bigcode", "mpnet", "dinov2"),  # gpt2, bert, vit
    *("qwen3_moe", "qwen3_moe, experts batched", "qwen3_moe, experts and router frozen"),  # mixtral
    *("xlm-roberta", "electra", "mt5", "flan-t5"),  # roberta, bert and albert, t5
    *("mbart", "m2m_100", "pegasus", "marian"),  # bart
    *("hubert", "siglip"),  # wav2vec2, clip
    *("smolvlm", "llava", "paligemma"),  # idefics3, with one image of the towers of clip and siglip
    # gpt2 and llama, whose layers have no more than these; t5 and whisper
    *("gptj", "gpt_neo", "falcon", "bloom", "bart"),
    *("mixtral", "gpt_oss, experts batched"),  # gpt_oss and mixtral, experts batched
    # tests/per_example/test_mixtures.py has them.
    *(f"{name}, experts in a loop" for name in ("mixtral", "qwen3_moe", "gpt_oss")),
    # tests/per_example/test_exact.py has them, on real batches.
    *("llama_tied", "qwen3", "opt", "gpt_neox", "roberta", "distilbert"),
    # Adapters whose operations others have, with other numbers.
    *("rsLoRA", "DoRA on Conv1D", "LoRA on attention beside experts (qwen3_moe)", "LoRA, bias='lora_only'"),
    *("modules_to_save, embedding and untied head", "trainable_token_indices, untied", "trainable tokens"),
    *("LoRA on attention beside experts (mixtral)", "LoRA on an embedding", "LoRA on Conv1D over a bf16 base"),
    *("DoRA on an embedding", "prefix tuning", "p-tuning"),
    *("LoHa", "GraLoRA", "HRA", "BOFT", "RandLora", "UniLoRA"),  # LoKr, LoRA, OFT and VeRA
    # tests/per_example/test_exact.py has them.
    *("LoRA on Conv1D", "modules_to_save, untied head"),
    # Each alike to none, but seldom used.
    *("FRoD", "VBLoRA", "C3A", "LoKr", "WaveFT", "p-tuning, LSTM", "OFT", "FourierFT", "SHiRA", "RoAd", "VeRA"),
    *("OFT, exact, one block for all", "prefix tuning, projected", "LN tuning", "longformer", "xlnet", "deberta-v2"),
    *("swin", "videomae", "idefics3", "llama4", "mixtral, experts and router frozen", "cohere", "AdaLoRA"),
    *("modernbert", "whisper", "wav2vec2"),
    # Settings of which each has one of the two models, or both: tests/per_example/test_exact.py has those of gpt2.
    *((name, "gpt2") for name in coverage.SETTING if name.startswith(("bf16", "gradient checkpointing"))),
    *((name, "llama with LoRA") for name in coverage.SETTING if not name.startswith("dropout")),
    *((name, "llama") for name in coverage.SETTING),
}


def cases(of: Iterable[Any]) -> list[Any]:
    """With those that are like others marked as slow."""
    return [
        pytest.param(*([case] if isinstance(case, str) else case), marks=[pytest.mark.slow] * (case in ALIKE))
        for case in of
    ]


def assert_as_expected(result: str, refused: bool) -> None:
    assert result.startswith("refused: " if refused else ("exact ", "within ")), result


@pytest.mark.few(4)
@pytest.mark.parametrize("name", cases(architectures.CONFIGS))
def test_architectures(name: str) -> None:
    """With their first head; `test_every_case` has all of them."""
    assert_as_expected(coverage.judge_head(name, architectures.HEADS[name][0], QUICK), refused=False)


@pytest.mark.few(3)
@pytest.mark.parametrize("method", cases(zoo.ADAPTERS))
def test_adapters(method: str) -> None:
    """In one layer, where layers share nothing; `test_every_case` has two of each."""
    layers = {} if method in SHARED else {"num_hidden_layers": 1}
    assert_as_expected(coverage.judge_adapter(method, QUICK, **layers), method in REFUSED_ADAPTERS)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "model"), cases((name, model) for name in coverage.SETTING for model in coverage.MODELS)
)
def test_settings(name: str, model: str) -> None:
    assert_as_expected(coverage.SETTING[name](coverage.MODELS[model], QUICK), refused=False)


@pytest.mark.slow
def test_every_case() -> None:
    results = coverage.judge_all()
    found = {
        (name, column): text for rows in results.values() for name, row in rows.items() for column, text in row.items()
    }
    assert not {case: text for case, text in found.items() if text.startswith("WRONG")}
    refused = {name for (name, column), text in found.items() if text.startswith("refused")}
    assert refused == REFUSED_ADAPTERS | {"bart"}


def test_what_the_zoo_calls_tied_is_tied() -> None:
    def is_tied(name: str, head: str) -> bool:
        model = zoo.tiny(name, head)
        return model.get_output_embeddings().weight is model.get_input_embeddings().weight

    assert is_tied("t5", "seq2seq")
    assert is_tied("whisper", "speech")
    assert not is_tied("flan-t5", "seq2seq")
    for method in ("modules_to_save, tied", "trainable_token_indices, tied"):
        found = record(zoo.adapted(method), coverage.per_example_losses, zoo.text_batch("causal_lm"))
        (embedding,) = (uses for name, uses in found.factors.items() if "embed_tokens" in name)
        assert len(embedding) == 2


def test_an_adapter_over_a_bf16_base_is_itself_in_float32() -> None:
    dtypes = {(p.requires_grad, p.dtype) for p in zoo.adapted("LoRA over a bf16 base", torch.float32).parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}


# --- the judge itself -----------------------------------------------------------------------------------------------


def test_a_wrong_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = judging.record

    def off(*args: object, **options: object) -> object:
        found = right(*args, **options)
        for name in found.factors:
            found.factors[name] = [use.scaled(1 + 1e-6) for use in found.factors[name]]
        return found

    monkeypatch.setattr(judging, "record", off)
    assert coverage.judge_head("gpt2", "sequence", QUICK).startswith("WRONG by 1e-06 with 7 examples")


def test_a_neighbour_that_is_seen_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "moved_by_a_neighbour", lambda *_: float("nan"))
    assert coverage.judge_head("gpt2", "sequence", QUICK).startswith("WRONG by nan")


def test_nan_is_never_the_smaller_error() -> None:
    for errors in ((0.0, float("nan")), (float("nan"), 0.0)):
        assert judging.worst(errors) != judging.worst(errors)


def test_low_precision_is_measured_against_the_oracle() -> None:
    model, other = (zoo.tiny(name, "causal_lm", torch.float32) for name in ("llama", "llama_tied"))
    assert judging.judge_low_precision(model, other, coverage.language()).startswith("WRONG by")
