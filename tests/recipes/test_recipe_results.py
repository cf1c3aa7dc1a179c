"""What recipes tell: the report by group, and metrics by hand and without a network."""

import json
import math
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from hf_dp.errors import ConfigurationError


def report(part, directory, values, groups, **changes):
    options = {"measure": "accuracy", "larger_is_better": True, "directory": directory, **changes}
    part("common.groups").report_by_group(values, groups, **options)
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
    measured = part("common.results").measured
    # F1 of label 0: 2 / 3, of 1: 2 / 4, of 2, which was never right: 0.
    found = measured(("accuracy", "macro_f1"), [0, 0, 1, 2], [0, 1, 1, 1])
    assert found == pytest.approx({"accuracy": 0.5, "macro_f1": (2 / 3 + 1 / 2 + 0) / 3})
    # Tokens count alike, not examples: exp((1 * 1 + 3 * 2) / 4).
    assert measured(("perplexity",), [1.0, 2.0], [1, 3]) == pytest.approx({"perplexity": math.exp(7 / 4)})
    # "a c" of three words and two: 4 / 5; of the two references the better one. Nothing in common, or nothing said: 0.
    said, wanted = ["A, b; c", "d", ""], [["e", "a c"], ["e f"], ["g"]]
    assert measured(("rouge_l",), said, wanted) == pytest.approx({"rouge_l": (4 / 5 + 0 + 0) / 3})


def test_bleu_and_slot_coverage_by_hand(part):
    measured = part("common.results").measured
    # All n-grams are right; 6 words for references of 6 and, the closest, 1: exp(1 - 7 / 6).
    said, wanted = ["The cat sat on the", "a"], [["the cat sat on the mat"], ["b b b", "A"]]
    assert measured(("bleu",), said, wanted) == pytest.approx({"bleu": math.exp(-1 / 6)})
    # No four words in a row are right.
    assert measured(("bleu",), ["the cat sat in the mat"], [["the cat sat on the mat"]]) == {"bleu": 0.0}
    tables = ["name[Blue Spice], area[city centre], familyFriendly[yes]", "familyFriendly[no]"]
    assert measured(("slot_coverage",), ["blue spice is nice", "no"], tables) == {"slot_coverage": 0.5}


def test_rarity_by_hand(part):
    comparison = part("common.comparison")
    # Of 30 occurrences more frequent ids have 0, 9, 9, 25, 30.
    counts = np.array([9, 8, 8, 5, 0])
    assert comparison.rarity(counts).tolist() == [0, 0, 0, 2, 2]
    assert comparison.rarity(np.array([2, 1, 1, 1, 1])).tolist() == [0, 1, 1, 1, 1]
    train = np.repeat(np.arange(4), [6, 5, 2, 1]).reshape(-1, 2)
    # Ids 0 to 3 have 0, 6, 11 and 13 of 14 before them: head, middle, tail, tail.
    found = comparison.by_rarity(train, np.array([[0, 3], [1, 2], [3, 4]]))
    assert found == ["head", "middle", "tail"]


def test_a_loss_of_tokens_is_shared_out_among_their_characters(part, monkeypatch):
    plays = part("causal_lm")
    scores = part("common.results").Scores({"perplexity": math.exp(1.5)}, [1.5, 1.5])
    monkeypatch.setattr(plays, "scored_by_loss", lambda *_: scores)
    rows = [{"input_ids": [9, 1, 2]}, {"input_ids": [9, 3]}]  # the first token of a row is not predicted
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join({9: "!", 1: "to", 2: " b", 3: "e or"}[i] for i in ids))
    found = plays.scored(None, rows, tokenizer).measures
    assert found["loss per character"] == pytest.approx(1.5 * 3 / 8)
    assert found["perplexity of a character"] == pytest.approx(math.exp(1.5 * 3 / 8))


def test_adapters_over_4_bits_are_loaded_over_4_bits(part):
    results = part("common.results")
    usage = results.in_four_bits(results.CONTINUE)
    compile(usage, "usage", "exec")
    assert usage.startswith("from transformers import BitsAndBytesConfig, pipeline\n")
    assert 'max_new_tokens=20, model_kwargs={"quantization_config": BitsAndBytesConfig(' in usage
    assert usage.endswith("print(continue_(PROMPT))")
