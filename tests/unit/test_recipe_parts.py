"""What recipes share: the report by group, metrics without a network, rows of files, the smoke flag."""

import json
import math
import socket
import sys
from pathlib import Path

import pytest

from hf_dp.errors import ConfigurationError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def part(monkeypatch):
    """Imports a module of the recipes as they do, and forgets it afterwards."""
    monkeypatch.syspath_prepend(RECIPES)
    known = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - known:
        if str(RECIPES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def report(part, directory, values, groups, **changes):
    options = {"measure": "accuracy", "larger_is_better": True, "directory": directory, **changes}
    part("groups").report_by_group(values, groups, **options)
    return json.loads((directory / "groups.json").read_text(encoding="utf-8"))


def test_each_group_has_its_mean_its_standard_error_and_its_gap(part, tmp_path, capsys):
    groups = ["a", "a", "a", "a", "b", "b", "[c] $x"]
    found = report(part, tmp_path, [1, 1, 1, 0, 1, 0, 1], groups, without_privacy=[1, 1, 1, 1, 1, 1, 1])
    first, second, single = found["groups"]
    assert (first["group"], first["n"], first["value"], first["gap"]) == ("a", 4, 0.75, -0.25)
    assert first["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 * 4 / 3) / 2)
    assert first["gap_standard_error"] == pytest.approx(0.25)
    assert (second["value"], second["without_privacy"], second["gap"]) == (0.5, 1.0, -0.5)
    assert (single["group"], single["standard_error"]) == ("[c] $x", None)
    assert (found["worst_group"], found["all"]["n"]) == ("b", 7)
    assert found["all"]["value"] == pytest.approx(5 / 7)
    assert (tmp_path / "groups.png").read_bytes().startswith(b"\x89PNG")
    assert "[c] $x" in capsys.readouterr().out


def test_the_worst_group_has_the_largest_loss(part, tmp_path):
    found = report(part, tmp_path / "new", [1.0, 3.0], ["a", "b"], measure="loss", larger_is_better=False)
    assert found["worst_group"] == "b"
    assert "gap" not in found["groups"][0]


@pytest.mark.parametrize(
    ("values", "groups", "without"),
    [([], [], None), ([1.0], ["a", "b"], None), ([1.0], ["a"], [1.0, 0.0]), ([math.nan], ["a"], None)],
)
def test_values_that_do_not_go_with_groups_are_refused(values, groups, without, part, tmp_path):
    with pytest.raises(ConfigurationError):
        report(part, tmp_path, values, groups, without_privacy=without)
    assert not list(tmp_path.iterdir())


def test_metrics_by_hand_and_without_a_network(part, monkeypatch):
    def refuse(*_):
        raise AssertionError("a metric used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    measured = part("results").measured
    # F1 of label 0: 2 / 3, of 1: 2 / 4, of 2, which was never right: 0.
    found = measured(("accuracy", "macro_f1"), [0, 0, 1, 2], [0, 1, 1, 1])
    assert found == pytest.approx({"accuracy": 0.5, "macro_f1": (2 / 3 + 1 / 2 + 0) / 3})
    # Tokens count alike, not examples: exp((1 * 1 + 3 * 2) / 4).
    assert measured(("perplexity",), [1.0, 2.0], [1, 3]) == pytest.approx({"perplexity": math.exp(7 / 4)})


def test_rows_of_files(part, tmp_path):
    read_rows = part("data").read_rows
    (tmp_path / "a.csv").write_text('text,label\n"one, two",x\nthree,y\n', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n', encoding="utf-8")
    csv, lines = str(tmp_path / "a.csv"), str(tmp_path / "a.jsonl")
    assert read_rows(csv, split="train", columns=("text",))[0] == {"text": "one, two", "label": "x"}
    assert read_rows(lines, split="train", columns=("text",), max_examples=1) == [{"text": "one"}]
    with pytest.raises(ConfigurationError, match="no column 'label'"):
        read_rows(lines, split="train", columns=("text", "label"))


def test_smoke_wins_over_the_file_and_flags_win_over_it(part, tmp_path, monkeypatch):
    arguments, recipe = part("arguments"), part("causal_lm").RecipeArguments
    path = tmp_path / "a.yaml"
    path.write_text("text_file: t.txt\nmax_steps: 500\nlearning_rate: 0.5\ntarget_epsilon: 3\n", encoding="utf-8")

    def parsed(*flags):
        monkeypatch.setattr(sys, "argv", ["recipe", str(path), "--output_dir", str(tmp_path), "--use_cpu", "1", *flags])
        return arguments.parse(recipe)

    made, training, privacy = parsed("--smoke", "true", "--per_device_train_batch_size", "4")
    assert (made.max_examples, training.max_steps, training.learning_rate, privacy.target_epsilon) == (64, 2, 0.5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 2)
    assert training.save_strategy == "no"
    made, training, _ = parsed()
    assert (made.max_examples, training.max_steps) == (None, 500)
