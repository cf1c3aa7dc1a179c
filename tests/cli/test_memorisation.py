"""`hf-dp memorisation` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_dp.audit.texts import read
from hf_dp.cli import app
from hf_dp.cli.memorised import loaded
from hf_dp.demo.messages import generate
from hf_dp.demo.model import new_model, train_tokenizer
from hf_dp.errors import ConfigurationError
from hf_dp.hub import RECORD_FILE, load_report
from tests.zoo import tiny

MESSAGES = generate(public=300, private=30, evaluation=110, canaries=1, seed=1)
RECORD = next((Path(__file__).parents[1] / "hub" / "dev2").glob(f"*/{RECORD_FILE}"))


def invoke(*args: object) -> Any:
    return CliRunner().invoke(
        app, ["memorisation", *map(str, args)], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with random weights, one of which claims to be private; texts in every kind of file."""
    path = tmp_path_factory.mktemp("memorisation")
    tokenizer = train_tokenizer(MESSAGES.public)
    for name in ("ordinary", "private"):
        torch.manual_seed(len(name))
        new_model(tokenizer, width=32, layers=1).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    shutil.copy(RECORD, path / "private" / RECORD_FILE)
    texts = [*MESSAGES.evaluation, MESSAGES.private[0]]
    (path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in MESSAGES.private))
    (path / "out.csv").write_text("text\n" + "\n".join(f'"{text}"' for text in texts))
    (path / "secrets.tsv").write_text("prefix\tsecret\nThe code is \t47\nMy number: \t11\n")
    return path


def test_models_stand_beside_one_another_and_their_claims(folder: Path, tmp_path: Path) -> None:
    models, texts = (folder / "ordinary", folder / "private"), ("--members", folder / "in.jsonl")
    more = ("--others", folder / "out.csv", "--reference", folder / "ordinary", "--secrets", folder / "secrets.tsv")
    told = invoke(*models, *texts, *more, "--output", tmp_path / "out")
    assert told.exit_code == 0, told.output
    said = " ".join(told.output.split())
    assert "30 texts that were in, 110 that were not; intervals at 95%" in said
    assert "needs 1,000" in said
    assert "1 texts of --others are in --members too, and were left out" in said
    assert "no attack proves privacy, and the claim is epsilon" in said
    assert "loss (control)" in said
    assert (tmp_path / "out" / "memorisation.png").read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "out" / "memorisation.json").read_text())
    assert (values["members"], values["others"], values["others_left_out"]) == (30, 110, 1)
    ordinary, private = (values["models"][str(model)] for model in models)
    assert ordinary["claim"] is None
    assert private["claim"]["epsilon"] == load_report(folder / "private").epsilon
    assert 0.01 < private["claim"]["true_positive_rates"]["0.01"] < 1
    assert ordinary["by_loss"]["at"]["0.001"] is None
    assert ordinary["by_loss"]["at"]["0.01"]["wrong"] <= 1
    # The reference is this very model.
    assert ordinary["by_reference"]["auc"] == 0.5
    assert ordinary["by_loss"] == values["reference"]
    assert len(private["secrets"]["exposures"]) == 2
    assert private["secrets"]["candidates"] == [100, 100]
    strict = invoke(models[0], *texts, *more[:2], "--json")
    assert json.loads(strict.stdout)["models"][str(models[0])]["by_loss"] == ordinary["by_loss"]
    assert json.loads(strict.stdout)["models"][str(models[0])]["secrets"] is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--members": "none.csv"}, "no file"),
        ({"--text-column": "words"}, "has no column 'words'"),
        ({"--secrets": "in.jsonl"}, "has no column 'prefix'"),
        ({"--others": "in.jsonl"}, "no texts"),
        ({"--others": "blank.jsonl"}, "has no text in row 1"),
        ({"--confidence": "0.2"}, "confidence=0.2"),
        ({"--reference": "nowhere"}, "no causal language model can be loaded from"),
        ({"--reference": "classifier"}, "holds GPT2ForSequenceClassification, and would be read as GPT2LMHeadModel"),
        ({"--reference": "less"}, "lacks 1 weights such as transformer.wpe.weight"),
        ({"": "ordinary"}, "a model that is named twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder: Path, changed: dict[str, str], words: str) -> None:
    if changed.get("--reference") in ("classifier", "less"):
        shutil.copytree(folder / "ordinary", made := folder / changed["--reference"])
        if made.name == "classifier":
            tiny("gpt2", "sequence", torch.float32).save_pretrained(made)
        else:
            weights = load_file(made / "model.safetensors")
            del weights["transformer.wpe.weight"]
            save_file(weights, made / "model.safetensors", {"format": "pt"})
    (folder / "blank.jsonl").write_text('{"text": " "}')
    options = {"": "ordinary", "--members": "in.jsonl", "--others": "out.csv", **changed}
    paths = {
        name: value if name in ("--confidence", "--text-column") else str(folder / value)
        for name, value in options.items()
    }
    first = [paths.pop("")] * (2 if "" in changed else 1)
    told = invoke(*first, *(part for pair in paths.items() for part in pair))
    assert told.exit_code == 2, told.output
    assert words in " ".join(told.output.split())
    assert "Traceback" not in told.output


def test_adapters_are_read_with_what_lies_below_them(folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "ordinary")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    for file in (folder / "ordinary").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    below, adapted = (read(*loaded(str(path)), MESSAGES.private, 64).losses for path in (folder / "ordinary", tmp_path))
    assert abs(below - adapted).min() > 0
    tokenizer = loaded(str(tmp_path))[1]
    assert adapted == pytest.approx(read(model, tokenizer, MESSAGES.private, 64).losses, rel=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "task_type": "SEQ_CLS"}))
    with pytest.raises(ConfigurationError, match="holds GPT2LMHeadModel and SEQ_CLS"):
        loaded(str(tmp_path))
