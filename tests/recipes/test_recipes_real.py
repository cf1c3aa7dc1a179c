"""Some recipes on a little of the real data, and a real pretrained encoder."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.running import accuracies, groups_of, head, launched

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("recipe", ["classify", "classify_lora", "classify_full"])
def test_classification_of_bank_questions(recipe, run, data_directory, minilm_directory, tmp_path):
    data = data_directory / "banking77"
    printed = run(
        recipe,
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", head(data / "train.csv", tmp_path / "train.csv", 121)),
        *("--test_file", head(data / "test.csv", tmp_path / "test.csv", 41)),
        *("--max_steps", "2", "--per_device_train_batch_size", "10", "--gradient_accumulation_steps", "3"),
        *("--output_dir", str(tmp_path / "out")),
    )
    assert len(accuracies(tmp_path / "out")) == 2
    assert re.search(r"Differential privacy: epsilon (8|7\.99\d*) at", printed)
    assert (tmp_path / "out" / "privacy.json").exists()


@pytest.mark.data
@pytest.mark.slow
def test_a_head_trained_on_features_is_saved_with_its_encoder_and_scored_on_texts(
    data_directory, minilm_directory, tmp_path
):
    data = data_directory / "banking77"
    questions = head(data / "train.csv", tmp_path / "questions.csv", 121)
    launched(
        "classify",
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", questions, "--test_file", questions),
        *("--max_steps", "20", "--per_device_train_batch_size", "20", "--output_dir", str(tmp_path / "out")),
    )
    before, after = accuracies(tmp_path / "out")
    assert after > before + 0.2
    saved, encoder = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(minilm_directory / "model.safetensors"),
    )
    kept = {name: saved[f"bert.{name}"] for name in encoder if f"bert.{name}" in saved and "pooler" not in name}
    assert len(kept) > 50
    assert all(torch.equal(weight, encoder[name]) for name, weight in kept.items())


@pytest.mark.slow
@pytest.mark.data
def test_a_language_model_of_plays(run, data_directory, tmp_path):
    run(
        "causal_lm",
        *("--text_file", head(data_directory / "tinyshakespeare" / "input.txt", tmp_path / "plays.txt", 1500)),
        *("--max_steps", "10", "--per_device_train_batch_size", "32", "--gradient_accumulation_steps", "2"),
        *("--width", "64"),
        *("--output_dir", str(tmp_path / "out")),
    )
    before, after = accuracies(tmp_path / "out", "loss")
    assert after < before - 0.5


@pytest.mark.slow
@pytest.mark.data
def test_sparse_word_embeddings_of_bank_questions(run, data_directory, minilm_directory, tmp_path):
    data = data_directory / "banking77"
    printed = run(
        "sparse_embeddings_banking77",
        *("--encoder", str(minilm_directory), "--labels_file", str(data / "categories.json")),
        *("--train_file", str(data / "train.csv"), "--test_file", str(data / "test.csv")),
        *("--smoke", "True", "--arms", "adafest", "--output_dir", str(tmp_path / "out"), "--group_column", "category"),
    )
    assert len(groups_of(tmp_path / "out" / "adafest_ratio_2_tau_default")["groups"]) > 1
    assert "adafest, ratio 2, tau default: accuracy" in printed
