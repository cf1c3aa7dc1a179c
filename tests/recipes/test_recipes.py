"""Every recipe runs with its own YAML file on tiny local models and data."""

from __future__ import annotations

import json
import shutil
from statistics import fmean

import pytest

from hf_dp import DPTrainer, load_report
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from tests.recipes.running import called, groups_of

pytestmark = pytest.mark.usefixtures("checked_once")

ATTENTION = [f"{arm}, released, scale 1" for arm in ("on", "shuffled", "constant")]


@pytest.mark.slow
def test_adapters_after_a_head_are_under_one_budget(train, local, tmp_path):
    flags = ("--smoke", "true", "--accountant", "rdp")
    _, head = train("classify", *flags, "--target_epsilon", "4")
    assert len(json.loads((head / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]) > 2
    assert verify(head).private
    flags = (*local("classify_lora"), *flags, "--output_dir", str(tmp_path / "both"), "--start_from", str(head))
    said = called("classify_lora", *flags, code=2)
    assert "the promise of this one does not say whose data that was" in " ".join(said.split())
    called("classify_lora", *flags, "--after", str(head))
    report = load_report(tmp_path / "both")
    assert 7.9 < report.epsilon <= 8.0
    assert report.earlier[0].startswith("out: epsilon 4 at delta 1e-05")
    assert verify(tmp_path / "both").private


@pytest.mark.slow
def test_a_recipe_goes_on_from_its_checkpoint_and_never_begins_anew_instead(train):
    flags = ("--smoke", "true", "--save_strategy", "steps", "--save_steps", "1")
    _, out = train("classify_full", *flags)
    first = (out / "checkpoint-1" / "model.safetensors").stat().st_mtime_ns
    for given in ("true", str(out / "checkpoint-1")):
        shutil.rmtree(out / "checkpoint-2")
        (out / "privacy.json").unlink()
        train("classify_full", *flags, "--resume_from_checkpoint", given)
        record = json.loads((out / "privacy.json").read_text(encoding="utf-8"))
        assert record["report"]["steps"] == 2
        assert (out / "checkpoint-2").is_dir()
        assert (out / "checkpoint-1" / "model.safetensors").stat().st_mtime_ns == first, "it began anew"
    (out / "privacy.json").unlink()
    train("classify_full", *flags, "--resume_from_checkpoint", "true")
    record = json.loads((out / "privacy.json").read_text(encoding="utf-8"))
    assert record["report"]["steps"] == 2, "of its last step it only saves the model"
    for recipe, given, words in (
        ("classify_full", str(out / "checkpoint-9"), "no such checkpoint"),
        ("sparse_embeddings", str(out / "checkpoint-1"), "where several trainings are compared"),
    ):
        printed, _ = train(recipe, *flags, "--resume_from_checkpoint", given, code=2)
        assert words in printed


@pytest.mark.parametrize(
    "recipe",
    ["classify", "classify_lora", "classify_as_infilling", "classify_as_answers"],
)
@pytest.mark.slow
def test_accuracy_by_group_and_the_gap_to_training_without_privacy(recipe, train):
    flags = ("--group_column", "branch", "--compare_without_privacy", "true")
    printed, out = train(recipe, "--smoke", "true", *flags)
    found = json.loads((out / "groups.json").read_text(encoding="utf-8"))
    assert [(row["group"], row["n"]) for row in found["groups"]] == [("north", 24), ("south", 6)]
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(results) == ["before", "epsilon 8", "without privacy"]
    assert found["all"]["value"] == pytest.approx(results["epsilon 8"]["accuracy"])
    assert found["all"]["without_privacy"] == pytest.approx(results["without privacy"]["accuracy"])
    assert "accuracy by group" in printed
    assert (out / "groups.png").stat().st_size > 5000
    assert not list((out / "without_privacy").glob("**/*.safetensors"))


@pytest.mark.slow
def test_loss_by_group_where_noise_drowns_what_is_learnt_without_privacy(train, questions_directory):
    _, out = train(
        "causal_lm",
        *("--text_file", str(questions_directory / "train.csv"), "--group_column", "branch"),
        *("--evaluation_share", "0.3", "--passage_length", "32", "--compare_without_privacy", "true"),
        *("--smoke", "true", "--max_steps", "20", "--target_epsilon", "0.02"),
    )
    found = json.loads((out / "groups.json").read_text(encoding="utf-8"))
    assert found["measure"] == "loss"
    assert {row["group"] for row in found["groups"]} == {"north", "south"}
    assert all(row["gap"] > 0.5 for row in found["groups"])
    assert found["worst_group"] == max(found["groups"], key=lambda row: row["value"])["group"]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.slow
def test_a_pretrained_language_model_on_rows(method, train, questions_directory, causal_directory):
    flags = ("--text_file", str(questions_directory / "train.csv"), "--model", str(causal_directory))
    printed, out = train("causal_lm", "--smoke", "true", *flags, "--method", method, "--prompt", "my card")
    assert "perplexity" in printed
    assert "my card" in printed
    assert (out / ("adapter_model.safetensors" if method == "lora" else "model.safetensors")).exists()


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("causal_lm", ("--group_column", "branch"), "a text file has no columns"),
        ("causal_lm", ("--method", "lora"), "--method lora without a model"),
        ("causal_lm_lora", ("--method", "full"), "--lora_layers 15 with --method full"),
        ("classify", ("--group_column", "country"), "has no column 'country' (it has text, label, branch)"),
        ("classify", ("--label_column", "branch"), "has the label 'south'"),
        ("classify_as_infilling", ("--template", "{text} about"), "each text needs exactly one mask"),
        ("sequential_recommendation", ("--group_column", "country"), "--group_column country"),
        ("sequential_recommendation", ("--group_column", "group"), "--group_column group with generated data"),
        ("sequential_recommendation", ("--arms", "off,of"), "--arms of"),
        (
            "sequential_recommendation",
            ("--group_column", "rarity", "--withhold_non_private_logs", "true"),
            "--group_column rarity with --withhold_non_private_logs",
        ),
        ("sequential_recommendation", ("--noise_multiplier", "1", "--users", "50"), "with --start released"),
        ("sequential_recommendation", ("--interactions_file", "lines.txt"), "without --items_file"),
        ("sequential_recommendation", ("--epsilons", "3,x"), "could not convert string to float: 'x'"),
        (
            "sequential_recommendation",
            ("--arms", "off,on", "--scales", "0", "--users", "50"),
            "ReAttentionConfig got scale",
        ),
        ("sparse_embeddings", ("--group_column", "branch"), "--group_column branch"),
        ("sparse_embeddings", ("--arms", "dense,sparse"), "--arms sparse"),
        ("sparse_embeddings", ("--arms", "dense,adafest", "--noise_ratios", "0"), "noise_ratio=0.0"),
        ("sparse_embeddings_banking77", ("--group_column", "country"), "has no column 'country'"),
    ],
)
def test_refusals(recipe, flags, words, train):
    printed, out = train(recipe, *flags, code=2)
    assert words in printed
    assert "What to do:" in printed
    assert not list(out.rglob("privacy.json"))


@pytest.mark.slow
def test_what_is_refused_before_the_first_step_is_refused_before_anything_is_scored(train, monkeypatch):
    def refuse(*_):
        raise ConfigurationError("found.", why="reason.", fix="way.")

    scored = []
    monkeypatch.setattr(DPTrainer, "begin_private_run", refuse)
    monkeypatch.setattr(DPTrainer, "get_eval_dataloader", lambda *_: scored.append(1))
    train("causal_lm", "--smoke", "true", code=2)
    assert not scored


@pytest.mark.slow
def test_sequential_recommendation_with_its_controls(train, tmp_path):
    interactions = tmp_path / "interactions.txt"
    interactions.write_text(
        "".join(f"u{user} i{(user * step) % 23} {'de'[user % 2]}\n" for user in range(60) for step in range(1, 6)),
        encoding="utf-8",
    )
    flags = (
        *(
            "--interactions_file",
            str(interactions),
            "--items_are_public",
            "true",
            "--arms",
            "off,on,shuffled,constant",
            "--epsilons",
            "8,inf",
        ),
        *("--max_steps", "2", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
        *("--compare_without_privacy", "true"),
    )
    printed, out = train("sequential_recommendation", *flags, "--group_column", "group")
    runs = [f"epsilon {e}, {arm}" for e in ("8", "inf") for arm in ("off", *ATTENTION)]
    kept = json.loads((out / "results.json").read_text(encoding="utf-8"))
    results = {name: value for name, value in kept.items() if not name.startswith("before training: ")}
    assert list(results) == [f"{name}, seed 0" for name in (*runs, "without privacy")]
    # What is released is a start of its own, which there is without a budget as little as without privacy.
    assert kept.keys() - results.keys() == {f"before training: {name}, seed 0" for name in runs if "inf" not in name}
    assert all(name in printed for name in ("popularity alone", "without privacy", *runs))
    assert not list(out.rglob("*true_shares*"))
    for run in results.keys() - {"without privacy, seed 0"}:
        folder = out / run.replace(",", "").replace(" ", "_")
        found = groups_of(folder)
        assert {row["group"]: row["n"] for row in found["groups"]} == {"d": 30, "e": 30}
        assert found["all"]["value"] == pytest.approx(results[run][1])
        assert found["all"]["without_privacy"] == pytest.approx(results["without privacy, seed 0"][1])
        assert (folder / "privacy.json").exists()
    assert not list((out / "without_privacy_seed_0").glob("*.safetensors"))

    weights = {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    train("sequential_recommendation", *flags, "--group_column", "length")
    assert [row["group"] for row in groups_of(out / "epsilon_8_off_seed_0")["groups"]] == ["under 5"]
    assert weights == {path: path.stat().st_mtime_ns for path in out.rglob("model.safetensors")}
    assert json.loads((out / "results.json").read_text(encoding="utf-8")) == kept

    printed, _ = train("sequential_recommendation", *flags, "--max_steps", "3", code=2)
    assert "results with other settings: max_steps 2, now 3" in printed

    (out / "epsilon_8_off_seed_0" / "hits.json").unlink()
    printed, _ = train("sequential_recommendation", *flags, "--group_column", "length", code=2)
    assert "without the hits of these users" in printed


ARMS = "frozen,dense,fest,renewed,adafest,adafest+"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "arms", "ratios"),
    [
        ("stream", "dense,renewed", (1,)),
        pytest.param("stream", ARMS, (1, 5), marks=pytest.mark.slow),
        ("table", "dense,adafest", (1,)),
        pytest.param("table", ARMS, (1, 5), marks=pytest.mark.slow),
    ],
)
def test_sparse_embeddings_beside_dense_ones(task, arms, ratios, train, tmp_path):
    printed, out = train(
        "sparse_embeddings",
        *("--task", task, "--smoke", "True", "--arms", arms),
        *("--noise_ratios", ",".join(map(str, ratios)), "--periods", "2", "--figure", str(tmp_path / "figure.png")),
        *("--group_column", "rarity", "--compare_without_privacy", "true"),
    )
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    settings = [
        name
        for arm in arms.split(",")
        for name in ([f"{arm}, ratio {ratio}, tau default" for ratio in ratios] if "adafest" in arm else [arm])
    ]
    assert list(results) == [*settings, "without privacy"]
    assert all(name in printed for name in results)
    assert "reduction 1, epsilon 4" in printed
    assert (tmp_path / "figure.png").exists()
    for name in results.keys() - {"without privacy"}:
        folder = out / name.replace(",", "").replace(" ", "_")
        found = groups_of(folder)
        assert {row["group"] for row in found["groups"]} == {"head", "middle", "tail"}
        assert found["all"]["value"] == pytest.approx(fmean(results[name]["accuracy"]))
        assert found["all"]["without_privacy"] == pytest.approx(fmean(results["without privacy"]["accuracy"]))
        assert (folder / "privacy.json").exists()
    assert not list((out / "without_privacy").iterdir())


@pytest.mark.slow
def test_sparse_word_embeddings_by_a_column(train):
    flags = ("--smoke", "true", "--arms", "adafest", "--group_column", "branch", "--compare_without_privacy", "true")
    _, out = train("sparse_embeddings_banking77", *flags)
    found = groups_of(out / "adafest_ratio_2_tau_default")
    assert [(row["group"], row["n"]) for row in found["groups"]] == [("north", 24), ("south", 6)]
    assert "without_privacy" in found["all"]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "recipe", ["causal_lm_lora", "classify_as_answers", "classify_as_infilling", "synthetic_text_lora"]
)
def test_too_few_rows_are_refused_before_the_model_is_loaded(recipe, train):
    printed, _ = train(recipe, "--per_device_train_batch_size", "500", "--max_examples", "40", code=2)
    assert "an expected batch of " in printed
    assert "from a training dataset of " in printed
