"""Commands as they are typed."""

from typer.testing import CliRunner

from hf_dp.cli import app

TINY = '{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11, "n_positions": 4}'
BASE = ["plan", "--n", "10003", "--batch-size", "512"]


def invoke(*args):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
