"""The recipe synthetic_text from end to end on a tiny model, and that what it shares holds nothing else."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from datasets import load_dataset
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_dp import PrivacyConfig
from hf_dp.cli import app
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from tests.certified import once
from tests.conftest import recipes_imported_anew

# `part` forgets the modules of the recipe.
pytestmark = pytest.mark.usefixtures("part", "checked_once")

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["lost_card", "late transfer", "praise"]
TINY = ("--width", "32", "--layers", "1", "--max_length", "12", "--smoke", "true", "--use_cpu", "true")
PROMPT = ("--prompt", "Someone writes about {label}:")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of which each holds a word that no other has."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    for split, rows in {"train": 64, "test": 32}.items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label", "language"])
            for i in range(rows):
                label = draw.choice(NAMES)
                writer.writerow([f"about {label.split()[0]}, said {split}secret{i}", label, draw.choice("de")])
    (folder / "labels.json").write_text(json.dumps(NAMES))
    return folder


def arguments(data: Path, output: Path) -> list[str]:
    files = {"train_file": "train.csv", "test_file": "test.csv", "labels_file": "labels.json"}
    given = [part for name, file in files.items() for part in (f"--{name}", str(data / file))]
    return [str(ROOT / "recipes/synthetic_text.yaml"), "--json", *given, *TINY, *PROMPT, "--output_dir", str(output)]


def run(data: Path, output: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["train", *arguments(data, output), *flags])


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    output = tmp_path_factory.mktemp("first") / "out"
    with recipes_imported_anew(), once():
        return run(data, output, "--samples", "10", "--group_column", "language"), output


@pytest.mark.slow
def test_a_corpus_is_shared_with_its_record_and_nothing_else(done: tuple[Result, Path]) -> None:
    said, output = done
    assert said.exit_code == 0, said.output[-3000:]
    corpus = output / "corpus"
    assert {path.name for path in corpus.rglob("*")} == {"corpus.jsonl", "privacy.json", "README.md"}
    rows = [json.loads(line) for line in (corpus / "corpus.jsonl").read_text().splitlines()]
    assert all(set(row) == {"text", "label"} for row in rows)
    assert Counter(row["label"] for row in rows) == {"lost_card": 4, "late transfer": 3, "praise": 3}
    assert "trainsecret" not in "".join(path.read_text() for path in corpus.iterdir())
    found = json.loads(said.stdout)
    assert found["report"]["private"] is True
    assert 0 <= found["metrics"]["corpus"]["trained_on_samples"]["accuracy"] <= 1
    assert found["metrics"]["epsilon 8"]["loss"] > 0
    assert "real" not in json.dumps(found["metrics"])


@pytest.mark.slow
def test_a_corpus_verifies_until_it_is_changed(done: tuple[Result, Path], tmp_path: Path) -> None:
    corpus = done[1] / "corpus"
    found = verify(corpus)
    assert found.private, found.checks
    assert found.report == verify(done[1]).report
    assert any("Texts, and no model" in note for note in found.notes)
    assert CliRunner().invoke(app, ["verify", str(corpus)]).exit_code == 0
    for name in ("corpus.jsonl", "privacy.json", "README.md"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write("{}\n")
    assert not verify(tmp_path).consistent


@pytest.mark.slow
def test_what_reads_private_texts_is_for_the_owner_and_says_so(done: tuple[Result, Path]) -> None:
    said, output = done
    near = json.loads((output / "for_owner_only_near_copies.json").read_text())
    assert {"samples", "held out", "closest"} <= set(near)
    assert "trainsecret" in json.dumps(near["closest"])
    assert "trained on real texts" in (output / "for_owner_only_real_baseline.json").read_text()
    words = " ".join(said.stderr.split())
    assert "FOR THE OWNER ONLY" in words
    assert len(json.loads((output / "groups.json").read_text())["groups"]) == 2


@pytest.mark.slow
def test_adapters_on_a_model_from_a_folder_and_public_frequencies(
    data: Path, done: tuple[Result, Path], tmp_path: Path
) -> None:
    (tmp_path / "shares.json").write_text(json.dumps({"praise": 1, "lost_card": 3}))
    flags = (
        *("--model", str(done[1]), "--method", "lora", "--corpus_format", "csv", "--samples", "8"),
        *("--label_frequencies", str(tmp_path / "shares.json"), "--privacy_seed", "1"),
        *("--bf16", "true", "--max_test_examples", "5", "--other_people", "true"),
    )
    said = run(data, tmp_path / "out", *flags)
    assert said.exit_code == 0, said.output[-3000:]
    with (tmp_path / "out" / "corpus_not_private" / "corpus.csv").open(newline="") as file:
        assert Counter(row["label"] for row in csv.DictReader(file)) == {"lost_card": 6, "praise": 2}
    assert not (tmp_path / "out" / "corpus").exists()
    assert "may be shared" not in said.stderr
    assert "Someone writes about lost card:\\n" in said.stderr
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapters.values()} == {torch.float32}
    assert json.loads(said.stdout)["report"]["private"] is False
    assert not verify(tmp_path / "out" / "corpus_not_private").private


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samples", "0"], "samples=0"),
        (["--max_test_examples", "0"], "--max_test_examples 0"),
        (["--prompt", "A text:"], "does not say {label} once"),
        (["--temperature", "0"], "temperature=0"),
        (["--draws", "2"], "draws=2, and no encoder"),
        (["--method", "lora"], "method=lora, and no model"),
        (["--text_column", "words"], "has no column 'words'"),
        (["--label_column", "text"], "which is not in"),
        (["--learning_rate", "fast"], "learning_rate"),
        (["--target_epsilon", "-1"], "target_epsilon=-1"),
        (["--eval_strategy", "sometimes"], "sometimes"),
        (["--fsdp"], "a recipe under FSDP"),
    ],
)
def test_bad_input_is_refused_before_any_budget_is_spent(
    data: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    said = run(data, tmp_path / "out", *flags)
    assert said.exit_code == 2, said.output
    assert words in said.stderr
    assert "Traceback" not in said.output
    assert not said.stdout


@pytest.mark.parametrize("text", ["[]", "{}", '["a", "a"]', "no JSON"])
def test_what_names_no_labels_is_refused(part: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(ConfigurationError, match="labels_file|is not JSON"):
        part("common.labelled_texts").label_names(str(tmp_path / "labels.json"))


@pytest.mark.parametrize(
    "text", ["[1]", '{"other": 1}', '{"a": -1, "b": 2}', '{"a": "1"}', '{"a": 0}', "{}", '{"a": NaN}']
)
def test_what_are_no_shares_is_refused(part: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "shares.json").write_text(text)
    with pytest.raises(ConfigurationError, match="does not give shares"):
        part("common.labelled_texts").shares(str(tmp_path / "shares.json"), ["a", "b"])


def test_counts_add_up(part: Any) -> None:
    counts, shares = part("common.labelled_texts").counts, part("common.labelled_texts").shares
    assert counts(shares(None, NAMES), 10) == [4, 3, 3]
    assert sum(counts([1 / 77] * 77, 5000)) == 5000
    assert counts([0.5, 0.5, 0.0], 3) in ([2, 1, 0], [1, 2, 0])


def test_nothing_else_may_lie_in_the_shared_folder(part: Any, tmp_path: Path) -> None:
    texts = part("common.labelled_texts")
    (tmp_path / "notes.txt").write_text("about the private texts")
    with pytest.raises(ConfigurationError, match="holds notes.txt"):
        texts.share(texts.Texts([], []), NAMES, tmp_path, tmp_path, "csv", "")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_corpus_is_loaded_by_the_name_of_its_folder(part: Any, tmp_path: Path, kind: str) -> None:
    """Beside a record in JSON, which is no data."""
    texts, folder = part("common.labelled_texts"), tmp_path / "corpus"
    texts.share(texts.Texts(["one", "two"], [2, 0]), NAMES, folder, ROOT / "tests/hub/released/0.2.0/plain", kind, "")
    loaded = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].to_list() == [{"text": "one", "label": NAMES[2]}, {"text": "two", "label": NAMES[0]}]
    assert verify(folder).private


class Echo:
    """Says of each prompt its last token, but nothing at all at first of those that end in a 3."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.silent = True

    def eval(self) -> None: ...

    def get_output_embeddings(self) -> torch.nn.Module:
        return torch.nn.Identity()

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        assert attention_mask.all()
        self.widths.append(input_ids.shape[1])
        said = input_ids[:, -1:].clone()
        if (said == 3).any() and self.silent:
            said[said == 3], self.silent = 0, False
        return torch.cat([input_ids, said], 1)

    def batch_decode(self, ids: torch.Tensor, **_: Any) -> list[str]:
        return ["" if token == 0 else str(token) for token in ids[:, -1].tolist()]

    pad_token_id = eos_token_id = 0


def test_labels_share_batches_without_padding_and_each_text_keeps_its_own(part: Any) -> None:
    recipe = part("synthetic_text")
    settings = recipe.RecipeArguments(train_file="", test_file="", labels_file="", encoder="")
    assert settings.encoder is None, "an empty flag takes a YAML file's encoder out"
    model, before, wanted = Echo(), [[7, 1], [7, 7, 2], [7, 3]], [3, 2, 4]
    corpus = recipe.sampled_corpus(model, model, before, wanted, settings, 5)
    assert Counter(zip(corpus.texts, corpus.labels, strict=True)) == {("1", 0): 3, ("2", 1): 2, ("3", 2): 4}
    # The two that were blank are drawn again with the rest of the short prompts.
    assert model.widths == [2, 2, 3]


def test_of_several_draws_those_stay_whose_label_is_the_likeliest_by_its_name(part: Any) -> None:
    texts, best = part("common.labelled_texts").Texts, part("common.best_draws").best_draws
    places = {"card lost": [1.0, 0.1], "praise": [0.1, 1.0], "a": [0.9, 0.0], "b": [0.5, 0.6], "c": [0.0, 0.9]}
    drawn = texts(["b", "a", "c", "c", "a", "b"], [0, 0, 0, 1, 1, 1])
    found = best(drawn, [1, 2], ["card_lost", "praise"], lambda some: torch.tensor([places[text] for text in some]))
    assert list(zip(found.texts, found.labels, strict=True)) == [("a", 0), ("c", 1), ("b", 1)]
    drawn = texts(["a", "a", "b", "a"], [0, 0, 0, 0])
    found = best(drawn, [3, 0], ["card_lost", "praise"], lambda some: torch.tensor([places[text] for text in some]))
    assert found.texts == ["a", "a", "b"], "the same words again only where there are no others"


@pytest.mark.slow
@pytest.mark.data
def test_a_corpus_from_adapters_on_smollm2(data: Path, smollm2_directory: Path, tmp_path: Path) -> None:
    flags = ("--model", str(smollm2_directory), "--method", "lora", "--bf16", "true", "--samples", "6")
    said = run(data, tmp_path / "out", *flags)
    assert said.exit_code == 0, said.output[-3000:]
    assert verify(tmp_path / "out" / "corpus").private
    assert len((tmp_path / "out" / "corpus" / "corpus.jsonl").read_text().splitlines()) == 6


def test_what_a_seed_or_an_encoder_gives_away_is_not_shared_as_private(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = part("common.labelled_texts")
    assert texts.stays_private(PrivacyConfig(target_epsilon=8))
    assert not texts.stays_private(PrivacyConfig(target_epsilon=8, seed=1))
    after = PrivacyConfig(target_epsilon=8, after="out/first")
    for reproducible, epsilon, holds in ((False, 2.0, True), (True, 2.0, False), (False, math.inf, False)):
        before = SimpleNamespace(reproducible=reproducible, epsilon=epsilon)
        monkeypatch.setattr(texts, "trainings_before", lambda privacy, one=before: (one,))
        assert texts.stays_private(after) is holds
    texts.refuse_choosing_by(str(tmp_path), after)
    (tmp_path / "privacy.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="which a private training saved"):
        texts.refuse_choosing_by(str(tmp_path), after)
    texts.refuse_choosing_by(str(tmp_path), PrivacyConfig(target_epsilon=8, other_people=True))
