"""The recipes on a little of the real data, as their first lines say to run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]


def run(recipe: str, *flags: str) -> str:
    """What a recipe prints, run with its own YAML file and flags that win over it."""
    name = recipe.removesuffix("_full").removesuffix("_lora").removesuffix("_banking77")
    command = [sys.executable, f"recipes/{name}.py", f"recipes/{recipe}.yaml", *flags, "--use_cpu", "True"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def head(source: Path, target: Path, lines: int) -> str:
    with source.open(encoding="utf-8") as file:
        target.write_text("".join(next(file) for _ in range(lines)), encoding="utf-8")
    return str(target)


@pytest.mark.data
@pytest.mark.parametrize("recipe", ["classify", "classify_lora", "classify_full"])
def test_classification_of_bank_questions(recipe, data_directory, minilm_directory, tmp_path):
    data = data_directory / "banking77"
    printed = run(
        recipe,
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", head(data / "train.csv", tmp_path / "train.csv", 121)),
        *("--test_file", head(data / "test.csv", tmp_path / "test.csv", 41)),
        *("--max_steps", "2", "--per_device_train_batch_size", "10", "--gradient_accumulation_steps", "3"),
        *("--output_dir", str(tmp_path / "out")),
    )
    assert "accuracy after:" in printed
    assert "Differential privacy: epsilon 7.99" in printed
    assert (tmp_path / "out" / "privacy.json").exists()


@pytest.mark.data
def test_a_head_trained_on_features_is_saved_with_its_encoder_and_scored_on_texts(
    data_directory, minilm_directory, tmp_path
):
    data = data_directory / "banking77"
    questions = head(data / "train.csv", tmp_path / "questions.csv", 121)
    printed = run(
        "classify",
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", questions, "--test_file", questions),
        *("--max_steps", "20", "--per_device_train_batch_size", "20", "--output_dir", str(tmp_path / "out")),
    )
    before, after = (float(printed.split(f"accuracy {when}: ")[1].split()[0]) for when in ("before", "after"))
    assert after > before + 0.2
    saved, encoder = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(minilm_directory / "model.safetensors"),
    )
    kept = {name.removeprefix("encoder."): weight for name, weight in saved.items() if name.startswith("encoder.")}
    assert len(kept) > 50
    assert all(torch.equal(weight, encoder[name]) for name, weight in kept.items())


@pytest.mark.data
def test_a_language_model_of_plays(data_directory, tmp_path):
    printed = run(
        "causal_lm",
        *("--text_file", head(data_directory / "tinyshakespeare" / "input.txt", tmp_path / "plays.txt", 1500)),
        *("--max_steps", "20", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2"),
        *("--output_dir", str(tmp_path / "out")),
    )
    before, after = (float(printed.split(f"evaluation loss {when}: ")[1].split()[0]) for when in ("before", "after"))
    assert after < before - 0.5


def test_sequential_recommendation_with_its_controls(tmp_path):
    interactions = tmp_path / "interactions.txt"
    interactions.write_text(
        "".join(f"u{user} i{(user * step) % 23}\n" for user in range(60) for step in range(1, 6)), encoding="utf-8"
    )
    printed = run(
        "sequential_recommendation",
        *("--interactions_file", str(interactions), "--arms", "off,on,shuffled,constant", "--epsilons", "8,inf"),
        *("--max_steps", "2", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
        *("--output_dir", str(tmp_path / "out")),
    )
    for arm in ("off", "on", "shuffled", "constant"):
        assert f"epsilon 8, {arm}" in printed
        assert f"epsilon inf, {arm}" in printed
    assert "popularity: NDCG@10" in printed
    assert (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize("task", ["stream", "table"])
def test_sparse_embeddings_beside_dense_ones(task, tmp_path):
    printed = run(
        "sparse_embeddings",
        *("--task", task, "--smoke", "True", "--arms", "frozen,dense,fest,renewed,adafest,adafest+"),
        *("--noise_ratios", "1,5", "--figure", str(tmp_path / "out" / "figure.png")),
        *("--output_dir", str(tmp_path / "out")),
    )
    for arm in ("frozen", "dense", "fest", "renewed", "adafest, ratio 5", "adafest+, ratio 1"):
        assert f"{arm}" in printed
    assert "reduction 1, epsilon 4.000" in printed
    assert (tmp_path / "out" / "figure.png").exists()
    assert (tmp_path / "out" / "privacy.json").exists()


@pytest.mark.data
def test_sparse_word_embeddings_of_bank_questions(data_directory, minilm_directory, tmp_path):
    data = data_directory / "banking77"
    printed = run(
        "sparse_embeddings_banking77",
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", str(data / "train.csv"), "--test_file", str(data / "test.csv")),
        *("--smoke", "True", "--arms", "adafest", "--output_dir", str(tmp_path / "out")),
    )
    assert "adafest, ratio 2, tau default: accuracy" in printed
