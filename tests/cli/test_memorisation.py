"""`hf-dp memorisation` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_dp.audit import membership
from hf_dp.audit.texts import read
from hf_dp.cli import app, memorisation_figure
from hf_dp.cli.memorisation import _found
from hf_dp.cli.memorised import loaded
from hf_dp.demo.messages import generate
from hf_dp.demo.model import new_model, train_tokenizer
from hf_dp.errors import ConfigurationError
from hf_dp.hub import CARD_FILE, RECORD_FILE, load_report, write_card
from hf_dp.hub.record import sha256
from tests.hub.forging import in_record
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")

MESSAGES = generate(public=300, private=30, evaluation=110, canaries=1, seed=1)
SAVED = Path(__file__).parents[1] / "hub" / "version1"


def invoke(*args: object) -> Any:
    return CliRunner().invoke(
        app, ["memorisation", *map(str, args)], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    )


def give_record(folder: Path, of: str) -> None:
    """What a training wrote of another model, for the files that lie here."""
    names = [file.name for file in folder.iterdir()]
    for name in (RECORD_FILE, CARD_FILE):
        shutil.copy(SAVED / of / name, folder)
    in_record("files", to={name: sha256(folder / name) for name in names})(folder)
    write_card(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with random weights, one of which claims to be private; texts in every kind of file."""
    path = tmp_path_factory.mktemp("memorisation")
    tokenizer = train_tokenizer(MESSAGES.public)
    for name in ("ordinary", "private"):
        torch.manual_seed(len(name))
        new_model(tokenizer, width=32, layers=1).save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    give_record(path / "private", "plain")
    texts = [*MESSAGES.evaluation, MESSAGES.private[0]]
    (path / "in.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in MESSAGES.private))
    (path / "out.csv").write_text("text\n" + "\n".join(f'"{text}"' for text in texts))
    (path / "secrets.tsv").write_text("prefix\tsecret\nThe code is \t47\nMy number: \t11\n")
    return path


@pytest.mark.slow
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
    assert (private["claim"]["verified"], private["claim"]["private"]) == (True, True)
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("of", "changed", "words"), [("plain", True, "does not verify"), ("reproducible", False, "not private")]
)
def test_no_epsilon_is_shown_that_is_none(
    folder: Path, tmp_path: Path, of: str, changed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path(shutil.copytree(folder / "ordinary", tmp_path / "made"))
    give_record(made, of)
    if changed:
        in_record("report", "epsilon", to=0.1)(made)
    labels: list[str] = []
    monkeypatch.setattr(
        memorisation_figure, "draw", lambda found, path: labels.append(memorisation_figure._name(found, str(made)))
    )
    told = invoke(made, "--members", folder / "in.jsonl", "--others", folder / "out.csv", "--output", tmp_path)
    assert told.exit_code == 0, told.output
    assert labels == [f"made\n{words}"]
    assert f"privacy.json: {words}" in " ".join(told.output.split())
    assert "at most" not in told.output
    claim = json.loads((tmp_path / "memorisation.json").read_text())["models"][str(made)]["claim"]
    assert (claim["said"], claim["verified"], claim["private"]) == (words, not changed, False)
    assert claim["epsilon"] is None
    assert claim["true_positive_rates"] == {}


def test_rates_stand_beside_how_often_they_may_be_wrong() -> None:
    at = membership(np.full(10, 2.0), np.arange(1000) / 1000).at[0.001]
    assert at is not None
    assert _found(0.001, at).endswith("wrong: <=0.56%")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_heads_of_their_own_or_not_are_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    made = Path(shutil.copytree(folder / "ordinary", tmp_path / "made"))
    model = tiny(name, "causal_lm", torch.float32, tie_word_embeddings=name == "gpt2")
    model.save_pretrained(made)
    weights = load_file(made / "model.safetensors")
    assert ("lm_head.weight" in weights) == (name == "llama")
    assert type(loaded(str(made))[0]) is type(model)
    if name == "gpt2":
        # As other savers do.
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
        save_file(weights, made / "model.safetensors", {"format": "pt"})
        loaded(str(made))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--members": "none.csv"}, "no file"),
        ({"--text-column": "words"}, "has no column 'words'"),
        ({"--secrets": "in.jsonl"}, "has no column 'prefix'"),
        ({"--others": "in.jsonl"}, "in.jsonl that is not in "),
        ({"--others": "blank.jsonl"}, "has no text in row 0"),
        ({"--confidence": "0.2"}, "confidence=0.2"),
        ({"--reference": "nowhere"}, "there is no folder '"),
        ({"--reference": "classifier"}, "holds GPT2ForSequenceClassification, and would be read as GPT2LMHeadModel"),
        ({"--reference": "less"}, "lacks 1 weights such as transformer.wpe.weight"),
        ({"--reference": "more"}, "has no place for 1 weights such as transformer.h.1.ln_1.weight"),
        ({"--reference": "shape"}, "has other shapes of 1 weights such as transformer.wpe.weight"),
        ({"--reference": "damaged"}, "no causal language model can be loaded from"),
        ({"--secrets": "long.tsv"}, "tokens for a model that reads"),
        ({"": "ordinary"}, "a model that is named twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder: Path, changed: dict[str, str], words: str) -> None:
    (folder / "long.tsv").write_text("prefix\tsecret\n" + "word " * 400 + "\t47\n")
    if changed.get("--reference") in ("classifier", "less", "more", "shape", "damaged"):
        shutil.copytree(folder / "ordinary", made := folder / changed["--reference"])
        if made.name == "classifier":
            tiny("gpt2", "sequence", torch.float32).save_pretrained(made)
        elif made.name == "damaged":
            (made / "model.safetensors").write_bytes(b"none")
        else:
            weights = load_file(made / "model.safetensors")
            if made.name == "more":
                weights["transformer.h.1.ln_1.weight"] = torch.ones(32)
            else:
                place = weights.pop("transformer.wpe.weight")
                weights |= {"transformer.wpe.weight": place[1:].clone()} if made.name == "shape" else {}
            save_file(weights, made / "model.safetensors", {"format": "pt"})
    (folder / "blank.jsonl").write_text('{"text": " "}')
    options = {"": "ordinary", "--members": "in.jsonl", "--others": "out.csv", **changed}
    if changed == {"--secrets": "long.tsv"}:
        options["--max-length"] = "4000"
    paths = {
        name: value if name in ("--confidence", "--text-column", "--max-length") else str(folder / value)
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
