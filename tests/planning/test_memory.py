"""The arithmetic of docs/scaling.md; scripts/scaling.py holds it against what small runs take and send."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_dp.cli import app
from hf_dp.errors import ConfigurationError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import record
from hf_dp.planning.memory import estimate
from hf_dp.planning.sized import ModelSize, Parameter, model_size
from tests.architectures import AUTO, CONFIGS
from tests.zoo import text_batch, tiny

SHAPE = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    AutoConfig.for_model("llama", **SHAPE).save_pretrained(tmp_path)
    return tmp_path


def test_sizes_are_those_of_the_model(directory: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SHAPE))
    size = model_size(str(directory))
    assert size.total == size.trained == sum(p.numel() for p in model.parameters())
    assert size.largest == 800
    assert size.units[""] == 800 + 800 + 8
    assert len(size.units) == 4
    lora = model_size(str(directory), lora_rank=2)
    assert lora.trained == 3 * 2 * (4 * (8 + 8) + 3 * (8 + 24))
    assert lora.total == size.total + lora.trained


GPT2 = {"vocab_size": 100, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 32}
LINEAR = ["c_attn", "c_proj", "c_fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(("kind", "shape"), [("llama", SHAPE), ("gpt2", GPT2)])
def test_lora_is_that_of_peft(tmp_path: Path, kind: str, shape: dict[str, int]) -> None:
    config = AutoConfig.for_model(kind, **shape)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    names = {name.split(".")[-1] for name, _ in model.named_modules()} & set(LINEAR)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=sorted(names), fan_in_fan_out=kind == "gpt2"))
    size = model_size(str(tmp_path), lora_rank=2)
    assert size.trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert size.total == sum(p.numel() for p in adapted.parameters())
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {p.names[0] for p in size.parameters if p.trained} == trained


def test_a_tied_head_is_counted_once_and_used_twice(tmp_path: Path) -> None:
    AutoConfig.for_model("gpt2", **GPT2).save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    uses = {p.shape: p.uses for p in size.parameters if p.is_embedding}
    assert uses == {(100, 8): 2, (32, 8): 1}
    assert size.units[""] == (100 + 32) * 8 + 2 * 8
    assert len(size.units) == 4


def test_factors_of_experts_are_those_of_the_positions_that_they_are_given(tmp_path: Path) -> None:
    name, values = CONFIGS["mixtral"]
    config = AutoConfig.for_model(name, **values)
    config.save_pretrained(tmp_path)
    size = model_size(str(tmp_path))
    assert {p.routes for p in size.parameters if "experts" in p.names[0]} == {config.num_experts_per_tok}
    assert not any(p.routes for p in size.parameters if "experts" not in p.names[0])
    model = tiny("mixtral", "causal_lm", torch.float32)
    found = record(model, per_example_losses, text_batch("causal_lm", 3, 16, torch.float32))
    for p in size.parameters:
        if p.routes:
            kept = [side.numel() for use in found.factors[p.names[0]] for side in (use.left.tensor, use.right.tensor)]
            assert sum(kept) == 3 * p.factor_numbers(16)[1]


def test_experts_that_are_given_all_positions_are_kept_whole() -> None:
    """Llama 4 multiplies every position by the matrices of all of them."""
    model = tiny("llama4", "causal_lm", torch.float32)
    experts = [p for p in ModelSize.of(model).parameters if "experts" in p.names[0] and len(p.shape) == 3]
    found = record(model, per_example_losses, text_batch("causal_lm", 3, 16, torch.float32))
    for p in experts:
        assert p.routes == 0
        assert p.factor_numbers(16)[0] == p.numel
        assert {use.values[0].numel() for use in found.factors[p.names[0]]} == {p.numel}
    assert experts


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_of_an_encoder_and_a_decoder_both_are_counted_and_one_use_as_a_head(kind: str, tmp_path: Path) -> None:
    """As causal language models BART and Whisper would be their decoders; T5's table has four names."""
    name, values = CONFIGS[kind]
    config = AutoConfig.for_model(name, **values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        whole = AUTO["speech" if kind == "whisper" else "seq2seq"].from_config(config)
    size = model_size(str(tmp_path))
    assert size.total == sum(p.numel() for p in whole.parameters())
    assert {p.uses for p in size.parameters if p.is_embedding and config.vocab_size in p.shape} == {2}


@pytest.mark.parametrize(
    ("parameter", "length", "numbers"),
    [
        (Parameter((6, 10), True, ""), 2, (0, 32)),
        (Parameter((6, 10), True, ""), 4, (60, 0)),
        (Parameter((6, 10), False, ""), 4, (0, 0)),
        (Parameter((6,), True, ""), 4, (6, 0)),
        (Parameter((90, 10), True, "", is_embedding=True), 4, (0, 40)),
        (Parameter((90, 10), True, "", is_embedding=True, uses=2), 4, (0, 440)),
        (Parameter((8, 6, 10), True, "0", routes=2), 4, (0, 128)),
    ],
)
def test_what_is_kept_of_an_example(parameter: Parameter, length: int, numbers: tuple[int, int]) -> None:
    assert parameter.factor_numbers(length) == numbers


def test_on_tensor_cores_up_to_twice_as_many_numbers_are_kept_whole() -> None:
    weight = Parameter((60, 100), True, "")
    assert [weight.factor_numbers(length, on_cores=True) for length in (18, 19)] == [(0, 2880), (6000, 0)]
    adapter = Parameter((8, 100), True, "")
    assert adapter.factor_numbers(1, on_cores=True) == (800, 0)
    tied = Parameter((900, 100), True, "", is_embedding=True, uses=2)
    assert [tied.factor_numbers(length, on_cores=True) for length in (44, 45)] == [(0, 48_400), (90_000, 4_500)]
    kept = [
        estimate(ModelSize((weight,)), "DDP", 1, length=19, micro_batch=3, bytes_computed=c).memory["factors"]
        for c in (2, 4)
    ]
    assert kept == [3 * 4 * 6000, 3 * 4 * 3040]


def test_bytes_are_shared_out_by_fsdp_and_not_by_ddp(directory: Path) -> None:
    size = model_size(str(directory))
    whole, shared = (estimate(size, kind, 4, length=16, micro_batch=2, micro_batches=3) for kind in ("DDP", "FSDP2"))
    for part in ("weights", "sum of gradients", "Adam"):
        assert shared.memory[part] == whole.memory[part] // 4
    assert whole.sent == {"all-reduce of the sum": 2 * 4 * size.total * 3 // 4}
    assert shared.sent["reduce-scatter of the sum"] == 3 * (4 * size.total * 3 // 4)
    alone = estimate(size, "DDP", 1, length=16, micro_batch=2)
    assert alone.total_sent == 0
    with pytest.raises(ConfigurationError, match="--length 0"):
        estimate(size, "DDP", 1, length=0, micro_batch=2)


def test_little_is_reduced_once() -> None:
    size = ModelSize((Parameter((1000, 10), False, ""), Parameter((10, 10), True, "block")))
    one, three = (estimate(size, "FSDP2", 2, length=8, micro_batch=1, micro_batches=k) for k in (1, 3))
    assert one.sent["reduce-scatter of the sum"] == three.sent["reduce-scatter of the sum"] == 200


def test_the_command(directory: Path) -> None:
    base = ["size", "--batch-size", "64", "--world-size", "4"]
    found = CliRunner().invoke(app, [*base, "--model", str(directory), "--json"])
    assert found.exit_code == 0, found.output
    sizes = json.loads(found.stdout)
    memory = sizes["per_rank"]["FSDP2"]["memory"]
    together = "without activations"
    assert memory[together] == sum(v for k, v in memory.items() if k != together)
    shown = CliRunner().invoke(app, [*base, "--model", str(directory)], env={"COLUMNS": "120", "TERM": "dumb"})
    assert "Each of 4 ranks" in shown.stdout
    alone = CliRunner().invoke(app, [*base[:-2], "--model", str(directory)], env={"COLUMNS": "120", "TERM": "dumb"})
    assert "One rank, GB" in alone.stdout
    assert "reduce-scatter of the sum" in shown.stdout
    refused = CliRunner().invoke(app, [*base, "--model", str(directory / "nothing")])
    assert refused.exit_code == 2
    assert "there is no folder" in refused.output


def test_nothing_is_said_of_an_encoder_but_what_was_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoConfig.for_model("bert", **SHAPE).save_pretrained(tmp_path)
    caplog.clear()
    library, level = logging.getLogger("transformers"), transformers.logging.get_verbosity()
    library.addHandler(caplog.handler)  # it hands nothing on
    try:
        assert model_size(str(tmp_path)).total > 800
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records
    assert transformers.logging.get_verbosity() == level


def test_numbers_are_counted_in_the_type_that_weights_are_loaded_in(directory: Path) -> None:
    def weights(*flags: str) -> int:
        base = ["size", "--model", str(directory), "--lora-rank", "2", "--json"]
        found = json.loads(CliRunner().invoke(app, [*base, *flags]).stdout)
        return int(found["per_rank"]["DDP"]["memory"]["weights"])

    size = model_size(str(directory), lora_rank=2)
    in_float32, in_bfloat16 = (4 * size.trained + each * (size.total - size.trained) for each in (4, 2))
    assert weights() == in_float32, "where nothing is said"
    assert weights("--dtype", "bfloat16") == in_bfloat16
    AutoConfig.for_model("llama", **SHAPE, dtype="bfloat16").save_pretrained(directory)
    assert weights() == in_bfloat16, "as its configuration says"
    assert weights("--dtype", "float32") == in_float32
    refused = CliRunner().invoke(app, ["size", "--model", str(directory), "--dtype", "int4"])
    assert refused.exit_code == 2
    shown = CliRunner().invoke(app, ["size", "--model", str(directory)], env={"COLUMNS": "120", "TERM": "dumb"})
    assert "memory, in all" not in shown.stdout
    assert "memory, without activations" in shown.stdout


def test_two_passes_are_proposed_where_one_does_not_fit(directory: Path) -> None:
    size, shape = model_size(str(directory)), {"length": 256, "micro_batch": 8, "bytes_computed": 4}
    one, two = (estimate(size, "DDP", 1, **shape, passes=passes) for passes in (1, 2))
    kept = [4 * whole + 4 * computed for whole, computed in (p.factor_numbers(256) for p in size.parameters)]
    assert (one.memory["factors"], two.memory["factors"]) == (8 * sum(kept), 8 * max(kept))
    assert {**one.memory, "factors": 0} == {**two.memory, "factors": 0}
    base = ["size", "--model", str(directory), "--length", "256", "--micro-batch", "8", "--gpu-memory"]
    half, few, alone = (estimate(size, "DDP", 1, **{**shape, "micro_batch": k}).total_memory for k in (4, 2, 1))
    least = estimate(size, "DDP", 1, **{**shape, "micro_batch": 1}, passes=2).total_memory
    assert least < alone < few < two.total_memory < half
    for memory, fitting, rows, told in (
        (one.total_memory, [1, 2], None, "DDP fits in one pass"),
        (
            one.total_memory - 1,
            [2],
            4,
            "but in micro-batches of 4, or in two (slower): PrivacyConfig(passes=2), on a GPU",
        ),
        (
            two.total_memory - 1,
            [],
            2,
            "one pass (0.00 GB in one and 0.00 GB in two), but in micro-batches of 2, on a GPU",
        ),
        (alone - 1, [], None, "but in micro-batches of 2 and two passes (slower): PrivacyConfig(passes=2), on a GPU"),
        (least - 1, [], None, "nor otherwise (shorter rows and adapters take less), on a GPU"),
    ):
        shown = CliRunner().invoke(app, [*base, str(memory / 1e9)], env={"COLUMNS": "200", "TERM": "dumb"})
        assert told in shown.stdout
        assert "before the activations" in shown.stdout
        found = json.loads(CliRunner().invoke(app, [*base, str(memory / 1e9), "--json"]).stdout)
        assert found["fits"]["DDP"]["passes"] == fitting
        assert found["fits"]["DDP"]["micro_batch"] == rows
        assert found["fits"]["DDP"]["without activations"] == {"1": one.total_memory, "2": two.total_memory}


@pytest.mark.slow
def test_groups_keep_the_factors_of_one_and_of_those_that_are_used_far_apart(directory: Path) -> None:
    size = model_size(str(directory))
    kept = {p.names[0]: sum(4 * numbers for numbers in p.factor_numbers(256)) for p in size.parameters}
    layers = [sum(k for name, k in kept.items() if name.startswith(f"model.layers.{i}.")) for i in range(3)]
    base = ["size", "--batch-size", "8", "--model", str(directory)]
    base += ["--length", "256", "--micro-batch", "8", "--world-size", "2", "--gpu-memory", "80", "--json"]

    def planned(*patterns: str) -> dict[str, Any]:
        given = [word for pattern in patterns for word in ("--group", f"{pattern}=1")]
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, [*base, *given]).stdout)
        return found

    flat, one = planned(), planned("*")
    assert one["per_rank"] == flat["per_rank"]
    by_layer = planned(*(f"model.layers.{i}.*" for i in range(3)), "lm_head.*", "*")
    rest = sum(kept[name] for name in ("model.embed_tokens.weight", "model.norm.weight"))
    assert by_layer["per_rank"]["DDP"]["memory"]["factors"] == 8 * (max(*layers, kept["lm_head.weight"]) + rest)
    assert by_layer["per_rank"]["FSDP2"] == flat["per_rank"]["FSDP2"], "all are kept there"
    assert flat["fits"]["DDP"]["passes"] == [1, 2]
    assert by_layer["fits"]["DDP"]["passes"] == [1], "groups are clipped in one pass"
    two_layers = planned("model.layers.[01].*", "*")
    assert two_layers["per_rank"] == flat["per_rank"], "layers that are used one after another are kept together"
    refused = CliRunner().invoke(app, [*base, "--group", "transformer.*=1"])
    assert refused.exit_code == 2
    assert "matched by no pattern of groups" in refused.output
