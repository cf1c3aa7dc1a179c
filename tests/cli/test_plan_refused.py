"""`hf-dp plan` refuses bad input in words that name it."""

import pytest

from tests.cli.typed import BASE, invoke


@pytest.mark.few(35)
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([*BASE, "--steps", "1", "--noise", "1", "--tpr", "0.1"], "--noise together"),
        ([*BASE, "--steps", "1", "--noise", "1", "--fpr", "0.1"], "at_fpr=0.1 without target_tpr"),
        ([*BASE, "--steps", "1", "--tpr", "0.01"], "target_tpr=0.01 at at_fpr=0.01"),
        (["plan", "--n", "99", "--tpr", "0.1", "--epochs", "3"], "no --batch-size, with --noise or --tpr"),
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
        (["plan"], "none of --n, --units and --sampling-probability"),
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


@pytest.mark.parametrize("typed", ["10,000", "1.5", "nan", "1e400", "ten"])
def test_what_is_no_whole_number_is_told_how_one_is_written(typed):
    result = invoke("plan", "--n", typed)
    assert result.exit_code == 2
    assert f"'{typed}' is no whole number. It is written as 10000, 10_000 or 1e4." in result.stderr


@pytest.mark.parametrize("option", ["--canaries", "--texts", "--steps", "--examples"])
def test_audit_reads_whole_numbers_alike(option):
    read = invoke("audit", option, "1e4", "--model", "nowhere")  # which is asked about after all numbers
    assert "--model and --data, one without the other." in read.stderr
    for typed, said in (("0", "0 is not in the range x>=1."), ("ten", "'ten' is no whole number.")):
        refused = invoke("audit", option, typed)
        assert (refused.exit_code, said in refused.stderr) == (2, True)
