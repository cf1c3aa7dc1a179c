"""`hf-dp size` as it is typed; what it computes is tested in tests/planning."""

import json

import pytest

from tests.cli.typed import TINY, invoke


def test_memory_and_time_are_told_of_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text(TINY)
    result = invoke("size", "--model", str(tmp_path), "--world-size", "2")
    assert result.exit_code == 0, result.output
    assert "Each of 2 ranks" in result.stdout
    found = json.loads(invoke("size", "--model", str(tmp_path), "--world-size", "2", "--json").stdout)
    assert set(found) == {"parameters", "trained", "dtype", "per_rank", "time_to_ordinary", "busy_from_micro_batch"}
    ratio, fewest = found["time_to_ordinary"]["H100"], found["busy_from_micro_batch"]["H100"]
    said = " ".join(result.stdout.split())
    assert f"predicted to take {ratio:.2f} x on one H100" in said
    assert f"fewer than about {fewest} on one H100" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--gpu-memory", "0"], "--gpu-memory 0.0"),
        (["--batch-size", "nan"], "--batch-size nan"),
        (["--group", "*"], "--group *"),
        ([], "there is no folder '/nowhere/at/all'"),
    ],
)
def test_bad_input_is_refused_in_words_with_code_2(flags, named):
    result = invoke("size", "--model", "/nowhere/at/all", *flags)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "What to do:" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("config", "flags", "named"),
    [
        (None, [], "no configuration of a model"),
        ("{", [], "no configuration of a model"),
        ("[1]", [], "no configuration of a model"),
        ('{"model_type": "nothing"}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_embd": 0}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_head": 0}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_embd": -8}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "vocab_size": 0}', [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_layer": -1}', [], "no configuration of a model"),
        ("[" * 100_000, [], "no configuration of a model"),
        ('{"model_type": "gpt2", "n_embd": 30, "n_head": 4}', [], "no configuration of a model"),
        (TINY, ["--world-size", "0"], "--world-size 0"),
        (TINY, ["--length", "-1"], "--length -1"),
        (TINY, ["--micro-batch", "0"], "--micro-batch 0"),
    ],
)
def test_a_model_that_cannot_be_sized_is_refused(tmp_path, config, flags, named):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    result = invoke("size", "--model", str(tmp_path), *flags)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.output
