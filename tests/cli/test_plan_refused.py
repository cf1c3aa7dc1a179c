"""`hf-dp plan` refuses bad input in words that name it."""

import pytest

from tests.cli.typed import BASE, TINY, invoke


@pytest.mark.few(35)
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([*BASE, "--steps", "1", "--noise", "1", "--tpr", "0.1"], "--noise together"),
        ([*BASE, "--steps", "1", "--noise", "1", "--fpr", "0.1"], "at_fpr=0.1 without target_tpr"),
        ([*BASE, "--steps", "1", "--tpr", "0.01"], "target_tpr=0.01 at at_fpr=0.01"),
        (["plan", "--n", "99", "--tpr", "0.1", "--epochs", "3"], "no --batch-size, with --noise or --tpr"),
        (["plan", "--model", "somewhere", "--tpr", "0.1"], "no --n, with --tpr"),
        ([*BASE, "--epochs", "10"], "none of --epsilon, --tpr and --noise"),
        ([*BASE, "--epochs", "10", "--epsilon", "8", "--noise", "1"], "--epsilon and --noise together"),
        ([*BASE, "--epsilon", "8"], "none of --epochs, --steps, --examples"),
        ([*BASE, "--epsilon", "8", "--steps", "3", "--examples", "10"], "--steps and --examples together"),
        (["plan", "--n", "1000", "--noise", "1", "--epochs", "3"], "no --batch-size, with --noise"),
        (["plan", "--n", "1000", "--epsilon", "1", "--steps", "3"], "no --batch-size, with --steps"),
        (["plan", "--n", "1000", "--epsilon", "1", "--examples", "9"], "9 examples for at least 10 steps"),
        (["plan", "--n", "1000", "--epsilon", "1", "--minutes", "9"], "--minutes without --rows-per-second"),
        (["plan", "--n", "1000", "--epsilon", "1", "--epochs", "9", "--rows-per-second", "9"], "without --minutes"),
        (["plan", "--n", "1000", "--epsilon", "1", "--epochs", "inf"], "--epochs inf"),
        ([*BASE, "--steps", "1", "--noise", "1", "--clipping-norm", "0"], "--clipping-norm 0"),
        ([*BASE, "--steps", "1", "--noise", "0", "--plot", "x.png"], "--plot of a plan with no noise"),
        ([*BASE, "--steps", "1", "--noise", "1e9", "--plot", "x.png"], "--plot of a plan with noise so large"),
        ([*BASE, "--steps", "1", "--noise", "1", "--plot", "/tmp"], "--plot '/tmp': no such place"),
        ([*BASE, "--steps", "1", "--noise", "1", "--plot", "figure"], "--plot 'figure': no ending"),
        ([*BASE, "--steps", "1", "--noise", "1", "--plot", "/nowhere/x.png"], "--plot '/nowhere/x.png'"),
        ([*BASE, "--steps", "1", "--noise", "1", "--plot", "x.nonsense"], "--plot 'x.nonsense'"),
        ([*BASE, "--epochs", "10", "--epsilon", "0"], "target_epsilon=0"),
        ([*BASE, "--epochs", "10", "--epsilon", "-1"], "target_epsilon=-1"),
        ([*BASE, "--epochs", "10", "--noise", "-1"], "noise_multiplier=-1"),
        ([*BASE, "--epochs", "0", "--noise", "1"], "--epochs 0"),
        ([*BASE, "--epochs", "inf", "--noise", "1"], "--epochs inf"),
        ([*BASE, "--steps", "0", "--noise", "1"], "steps=0"),
        ([*BASE, "--steps", "1", "--noise", "1", "--max-batch-size", "0"], "max_batch_size=0"),
        ([*BASE, "--steps", "1", "--noise", "1", "--max-batch-size", "9", "--plot", "x.png"], "with --max-batch-size"),
        (["plan", "--n", "99", "--epsilon", "1", "--epochs", "3", "--max-batch-size", "9"], "without --batch-size"),
        (["plan", "--model", "somewhere", "--max-batch-size", "9"], "no --n, with --max-batch-size"),
        ([*BASE, "--steps", "1", "--noise", "1", "--world-size", "8"], "--world-size without --model"),
        ([*BASE, "--steps", "1", "--noise", "1", "--lora-rank", "8"], "--lora-rank without --model"),
        ([*BASE, "--steps", "1", "--noise", "1", "--gpu-memory", "80"], "--gpu-memory without --model"),
        (["plan", "--model", "somewhere", "--gpu-memory", "0"], "--gpu-memory 0.0"),
        ([*BASE, "--steps", "1", "--epsilon", "1e5"], "target_epsilon=100000.0"),
        ([*BASE, "--steps", "1", "--noise", "1e308"], "noise_multiplier=1e+308"),
        ([*BASE, "--steps", "1", "--noise", "1", "--clipping-norm", "nan"], "--clipping-norm nan"),
        ([*BASE, "--steps", "1", "--noise", "1", "--clipping-norm", "1e30"], "clipping_norm=1e+30"),
        ([*BASE, "--steps", "1", "--noise", "nan"], "noise_multiplier=nan"),
        (["plan", "--n", "0", "--batch-size", "1", "--steps", "1", "--noise", "1"], "n=0"),
        (
            ["plan", "--units", "99", "--batch-size", "9", "--steps", "1", "--noise", "1", "--delta", "0.3"],
            "of 99 units",
        ),
        (["plan", "--units", "1", "--epochs", "1", "--epsilon", "1"], "n=1 units"),
        (["plan", "--n", "9", "--batch-size", "nan", "--steps", "1", "--noise", "1"], "--batch-size nan"),
        (["plan"], "neither --n nor --model"),
        (["plan", "--model", "somewhere", "--epsilon", "8"], "no --n, with --epsilon"),
        (["plan", "--model", "/nowhere/at/all"], "there is no folder '/nowhere/at/all'"),
        ([*BASE, "--steps", "1", "--noise", "1", "--delta", "0.1"], "delta=0.1"),
        (["plan", "--n", "100", "--batch-size", "512", "--steps", "1", "--noise", "1"], "--batch-size 512"),
        (["plan", "--n", "1", "--batch-size", "1", "--steps", "1", "--noise", "1"], "n=1"),
    ],
)
def test_bad_input_is_refused_in_words_with_code_2(args, named):
    result = invoke(*args)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.output
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
    result = invoke("plan", "--model", str(tmp_path), *flags)
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert "Traceback" not in result.output
