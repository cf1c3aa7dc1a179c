"""hf-dp demo: its measure against brute force, its data, and a quick run as a user would start it."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
from typer.testing import CliRunner

from hf_dp import load_report
from hf_dp.audit.guessed import Guesses, exposures
from hf_dp.audit.secrets import Secret
from hf_dp.audit.texts import completions, written
from hf_dp.cli import app
from hf_dp.demo.figure import draw, in_words
from hf_dp.demo.messages import Messages, generate
from hf_dp.demo.model import adapted, new_model, train_tokenizer
from hf_dp.demo.result import Result, Row, mean
from hf_dp.demo.run import PRETRAINED, Scale, run
from hf_dp.demo.training import Schedule
from hf_dp.errors import ConfigurationError
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")

SECRET = Secret("Hello, this is Ada Abbott, the secret code of my card is ", "0000")


@pytest.fixture(scope="module")
def messages() -> Messages:
    return generate(public=600, private=300, evaluation=100, canaries=10, seed=3)


@pytest.mark.slow
def test_a_model_that_knows_a_pin_is_seen_to(messages: Messages) -> None:
    tokenizer = train_tokenizer(messages.public)
    torch.manual_seed(0)
    model = new_model(tokenizer, width=32, layers=1)
    secret, other = messages.planted[:2]
    ids = torch.tensor([tokenizer(secret.text)["input_ids"]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert exposures(model, [Guesses.of(tokenizer, secret, 1000)]) == [math.log2(1000)]
    said = completions(model, tokenizer, [secret, replace(other, secret=secret.secret[::-1])], 64)
    assert [one.greedy for one in said] == [True, False]
    assert written(model, tokenizer, [secret])[0] == secret.secret


def test_each_secret_is_planted_exactly_once_and_is_nowhere_else(messages: Messages) -> None:
    assert len(messages.planted) == len(messages.unplanted) == 10
    assert (len(messages.public), len(messages.private), len(messages.evaluation)) == (600, 300, 100)
    for canary in messages.planted:
        assert messages.private.count(canary.text) == 1
        assert sum(canary.prefix in text for text in messages.private) == 1
        assert not any(canary.prefix in text for text in messages.public + messages.evaluation)
    for canary in messages.unplanted:
        assert not any(canary.prefix in text for text in messages.public + messages.private + messages.evaluation)


@pytest.mark.parametrize("seed", range(3))
def test_no_two_secrets_have_one_code(seed: int) -> None:
    """Of 300 random ones two are alike in 99 of 100 seeds."""
    made = generate(public=0, private=150, evaluation=0, canaries=150, seed=seed)
    codes = [one.secret for one in (*made.planted, *made.unplanted)]
    assert len(set(codes)) == 300
    assert all(len(code) == 4 for code in codes)


def test_evaluation_messages_are_not_trained_on(messages: Messages) -> None:
    assert len(set(messages.private)) == len(messages.private)
    assert not set(messages.private) & set(messages.evaluation)


def test_messages_follow_from_the_seed(messages: Messages) -> None:
    arguments = {"public": 600, "private": 300, "evaluation": 100, "canaries": 10}
    assert generate(**arguments, seed=3) == messages
    assert generate(**arguments, seed=4).planted != messages.planted


def test_every_digit_is_a_token(messages: Messages) -> None:
    tokenizer = train_tokenizer(messages.public)
    for canary in messages.planted:
        prefix, whole = (tokenizer(text)["input_ids"] for text in (canary.prefix, canary.text))
        assert whole == prefix + tokenizer.convert_tokens_to_ids(list(canary.secret))
        assert tokenizer.decode(whole) == canary.text


def test_it_does_not_claim_what_it_did_not_show() -> None:
    chance, leak = [1.4] * 16, [9.0] * 16
    before = Row("before", 0.0, 0.0, 3.0, chance, chance, 0)
    ordinary = Row("ordinary", math.inf, None, 1.0, leak, chance, 9)
    private = Row("private", 8.0, 1e-5, 2.0, chance, chance, 0)
    assert Result(before, ordinary, private).shortcomings() == []
    for broken, words in (
        (Result(before, replace(ordinary, planted=chance), private), "than secrets that it never saw"),
        (Result(before, ordinary, replace(private, planted=[6.5] * 16)), "than the private one"),
        (Result(before, ordinary, replace(private, planted=[4.0] * 16)), "no more than chance"),
        (Result(before, ordinary, replace(private, evaluation_loss=3.1)), "has learnt"),
    ):
        assert any(words in shortcoming for shortcoming in broken.shortcomings())


def test_the_figure_says_what_it_shows(tmp_path: Path) -> None:
    told = in_words(16)
    assert "how far up the true code ranks among all 10,000" in told
    # 625 of 10,000 ranks give four bits or more.
    assert (
        f"4 bits or more: among 16 such codes there is such a dot in {1 - (1 - 0.0625) ** 16:.0%} of all runs" in told
    )
    chance = [1.4] * 16
    rows = [Row(name, 8.0, 1e-5, 2.0, chance, chance, 0, ("0000",)) for name in ("before", "ordinary", "private")]
    draw(Result(rows[0], rows[1], rows[2], (replace(SECRET, secret="$_{4711"),)), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_alone_on_stdout_and_says_what_was_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, leak = [1.4] * 16, [9.0] * 16
    before, ordinary = (
        Row("before", 0.0, 0.0, 3.0, chance, chance, 0),
        Row("ordinary", math.inf, None, 1.0, leak, chance, 9),
    )
    private = Row("private", 8.0, 1e-5, 2.0, chance, chance, 0)
    trained = make(tmp_path / "out")
    trained.train()
    trained.save_model()
    results = iter([Result(before, ordinary, private), Result(before, before, private)])

    def told(output_dir: Path, scale: Scale, data_seed: int, console: Console, model: Path | None) -> Result:
        assert model is None
        console.print("the story")
        return next(results)

    monkeypatch.setattr("hf_dp.demo.run.run", told)
    said = CliRunner().invoke(app, ["demo", "--json", "--output-dir", str(tmp_path / "out")])
    found = json.loads(said.stdout)
    assert (said.exit_code, found["shown"], found["not_shown"]) == (0, True, [])
    assert found["models"]["ordinary"]["epsilon"] == "inf"
    assert found["models"]["private"]["exposure_mean"] == pytest.approx(1.4)
    assert found["report"]["epsilon"] == load_report(tmp_path / "out").epsilon
    assert "the story" in said.stderr
    said = CliRunner().invoke(app, ["demo", "--json", "--output-dir", str(tmp_path / "out")])
    assert (said.exit_code, json.loads(said.stdout)["shown"]) == (1, False)


@pytest.mark.parametrize(
    "flags",
    [
        ["--output-dir", "FILE"],
        ["--output-dir", "FILE/in/it"],
        ["--data-seed", "-1"],
        ["--data-seed", "4294967296"],
        ["--pretrained", "--quick"],
        ["--pretrained", "--model", "FILE/in/it"],
        ["--quick", "--model", "nowhere"],
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    given = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    said = CliRunner().invoke(app, ["demo", *given])
    assert said.exit_code == 2
    assert "Traceback" not in said.output
    assert not said.stdout


@pytest.fixture(scope="module")
def folder(messages: Messages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model for a test: random weights, and a tokenizer of the demo's own kind."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(messages.public)
    torch.manual_seed(0)
    new_model(tokenizer, width=32, layers=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.slow
def test_the_demo_on_a_model_from_a_folder_trains_adapters_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    schedule = Schedule(epochs=1, learning_rate=1e-3, micro_batch=16)
    scale = replace(
        PRETRAINED, private=32, evaluation=8, canaries=1, ordinary_training=schedule, private_training=schedule
    )
    output = tmp_path / "out"
    console = Console(file=io.StringIO())
    result = run(output, scale, 1, console, folder)
    assert capsys.readouterr().out == "", "all that is told is told by the console"
    assert not [one for one in recwarn if issubclass(one.category, FutureWarning)], "libraries to their own users"
    assert load_report(output).private
    assert result.ordinary.evaluation_loss != result.before.evaluation_loss != result.private.evaluation_loss
    assert (output / "adapter_model.safetensors").is_file()
    assert not (output / "model.safetensors").exists()
    base, loaded = (AutoModelForCausalLM.from_pretrained(of, dtype=torch.bfloat16) for of in (folder, output))
    guesses = Guesses.of(AutoTokenizer.from_pretrained(output), SECRET, 50)
    # What is loaded has learnt something.
    assert not (guesses.losses(loaded) == guesses.losses(base)).all()


def test_a_folder_without_a_model_is_refused_with_the_way_to_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no folder '.*none'\.\n[\s\S]*make model"):
        adapted(tmp_path / "none")
    with pytest.raises(
        ConfigurationError, match="no folder 'NOTHERE', and no whole model of that name in the hub's cache"
    ):
        adapted(Path("NOTHERE"))


@pytest.mark.slow
@pytest.mark.data
def test_secrets_in_smollm2_are_ranked_as_whole_messages_are(smollm2_directory: Path) -> None:
    model, tokenizer = adapted(smollm2_directory)
    secret = replace(SECRET, secret="42")
    fast = Guesses.of(tokenizer, secret).losses(model.float())
    start = len(tokenizer(secret.prefix)["input_ids"])
    for at, pin in ((0, 42), (1, 0), (99, 99)):
        ids = torch.tensor([tokenizer(f"{secret.prefix}{pin:02d}")["input_ids"]])
        with torch.no_grad():
            logs = model(ids).logits.double().log_softmax(-1)[0]
        brute = -sum(logs[i - 1, ids[0, i]].item() for i in range(start, start + 2))
        assert fast[at] == pytest.approx(brute, rel=1e-4)


@pytest.mark.slow
def test_quick_demo_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from hf_dp.cli import app; app()", "demo", "--quick", "--output-dir", "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "ordinary" in finished.stdout
    said = [line.split(":")[0] for line in finished.stderr.splitlines()]
    # How long it takes is said again where its steps take long enough to tell.
    assert said in (opening := ["Private training", "Drawn", "Time"], [*opening, "Time"])
    output = tmp_path / "out"
    report = json.loads((output / "privacy.json").read_text(encoding="utf-8"))["report"]
    assert 0 < report["epsilon"] <= 8
    assert report["private"] is True
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(output)
    model, loading = GPT2LMHeadModel.from_pretrained(output, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    assert mean(exposures(model, [Guesses.of(tokenizer, SECRET)])) >= 0
