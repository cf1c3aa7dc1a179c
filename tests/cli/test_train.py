"""`hf-dp train`: which script a YAML file runs, and that what goes wrong is said without a traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dp import PrivacyConfig, PrivacyReport
from hf_dp.accounting import ExampleUnit, FlatClipping, GaussianNoise, Ledger, Mechanism, PoissonSampling
from hf_dp.cli import app
from hf_dp.cli.outcome import output_dir
from hf_dp.cli.train import recipe_script
from hf_dp.hub import PrivacyRecord

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import neighbour
from hf_dp.errors import ConfigurationError
if "--refuse" in sys.argv:
    raise ConfigurationError("a thing.", why="it is wrong.", fix="make it right.")
if "--missing" in sys.argv:
    open("/nowhere/at/all")
if "--full" in sys.argv:
    from safetensors import SafetensorError
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
if "--read" in sys.argv:
    from hf_dp.data.files import read_text
    read_text(sys.argv[-1])
if "--leave" in sys.argv:
    sys.exit(3)
if "--save" in sys.argv:
    import json, os, pathlib
    out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
    out.mkdir(exist_ok=True)
    (out / "privacy.json").write_text(os.environ["RECORD"])
    if "--folders" in sys.argv:
        for name in ("checkpoint-2", "one", "two"):
            (out / name).mkdir()
            (out / "privacy.json").rename(out / name / "privacy.json")
            (out / "privacy.json").write_text(os.environ["RECORD"])
        (out / "privacy.json").unlink()
    (out / "eval_results.json").write_text('{"eval_loss": NaN, "eval_accuracy": 0.5}')
    print("a story")
    sys.exit(0)
if "--trl" in sys.argv:
    import trl.trainer
if "--matplotlib" in sys.argv:
    import matplotlib
if "--another" in sys.argv:
    import no_package_of_ours
if "--bug" in sys.argv:
    raise ZeroDivisionError("a bug")
print(__name__, neighbour.NAME, *sys.argv[1:])
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (tmp_path / "mine.yaml").write_text("epsilon: 3\n")
    (tmp_path / "other.yaml").write_text("recipe: mine\nepsilon: 3\n")
    yield tmp_path / "mine.yaml"
    sys.modules.pop("neighbour", None)


def invoke(*args):
    return CliRunner().invoke(app, ["train", *map(str, args)], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def test_the_script_beside_the_file_runs_as_a_program_with_flags(recipe):
    before = list(sys.argv), list(sys.path)
    said = invoke(recipe, "--target_epsilon", "3", "--use_cpu", "True")
    assert said.exit_code == 0, said.output
    assert said.stdout == f"__main__ neighbour {recipe} --target_epsilon 3 --use_cpu True\n"
    assert (sys.argv, sys.path) == before
    assert invoke(recipe.with_name("other.yaml")).exit_code == 0


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_its_script_and_names_it_in_its_first_line(path):
    script = recipe_script(path)
    assert f"recipes/{script.name} recipes/{path.name}" in path.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("flag", "code", "words"),
    [
        ("--refuse", 2, "Refused: a thing.\n  Why this is refused: it is wrong.\n  What to do: make it right."),
        ("--missing", 2, "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'"),
        ("--full", 2, "SafetensorError: Error while serializing: I/O error: No space left on device"),
        ("--leave", 3, ""),
    ],
)
def test_what_the_recipe_refuses_is_said_in_words(recipe, flag, code, words):
    said = invoke(recipe, flag)
    assert said.exit_code == code
    assert words in said.stderr
    assert "Traceback" not in said.output


@pytest.mark.parametrize(("package", "fix"), [("trl", "' (the extra 'trl')."), ("matplotlib", "'.")])
def test_a_package_that_is_not_installed_is_refused_with_the_extra_that_has_it(recipe, monkeypatch, package, fix):
    monkeypatch.setitem(sys.modules, package, None)
    said = invoke(recipe, f"--{package}")
    assert said.exit_code == 2
    assert f"Refused: the package {package} is not installed." in said.stderr
    assert re.search(f"pip install '{package}[<>=0-9.,]*{re.escape(fix)}\n", said.stderr)
    assert "Traceback" not in said.output


@pytest.mark.slow
def test_so_is_one_that_another_command_needs():
    # In an interpreter of its own: here the commands' modules are loaded.
    code = "import sys; sys.modules['matplotlib'] = None; from hf_dp.cli import app; app(['audit'])"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "Refused: the package matplotlib is not installed." in said.stderr


def test_a_package_that_hf_dp_does_not_name_is_an_error_of_the_recipe(recipe):
    assert isinstance(invoke(recipe, "--another").exception, ModuleNotFoundError)


@pytest.fixture
def record():
    ledger = Ledger()
    report = PrivacyReport(
        epsilon=3.0, delta=1e-5, noise_multiplier=1.0, clipping_norm=1.0, sampling_probability=0.1, steps=0,
        accountant="pld", dataset_size=100, expected_batch_size=10.0,
    )  # fmt: skip
    mechanism = Mechanism(
        unit=ExampleUnit(number=100), sampling=PoissonSampling(probability=0.1, expected_batch_size=10.0),
        clipping=FlatClipping(norm=1.0), noise=GaussianNoise(multiplier=1.0), steps=5, delta=1e-5,
    )  # fmt: skip
    record = PrivacyRecord(
        report=report, config=PrivacyConfig(target_epsilon=3.0), mechanism=mechanism, ledger=ledger, files={},
        card_sha256="0" * 64,
    )  # fmt: skip
    return record.to_json()


def test_json_is_the_report_and_the_metrics_of_this_run_alone_on_stdout(recipe, record, tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD", record)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old_results.json").write_text('{"old": 1}')
    (out / "all_results.json").write_text('{"old": 1}')
    said = invoke(recipe, "--json", "--save", "--output_dir", out)
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["source"] == str(out)
    assert found["report"]["epsilon"] == 3.0
    assert found["metrics"] == {"eval_loss": "nan", "eval_accuracy": 0.5}
    assert "a story" in said.stderr


def test_json_of_several_models_has_the_report_of_each(recipe, record, tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD", record)
    said = invoke(recipe, "--json", "--save", "--folders", "--output_dir", tmp_path / "out")
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert {name: report["epsilon"] for name, report in found["reports"].items()} == {"one": 3.0, "two": 3.0}
    assert "report" not in found


def test_json_of_a_run_that_saved_nothing_is_not_that_of_an_earlier_one(recipe, record, tmp_path):
    (tmp_path / "privacy.json").write_text(record)
    said = invoke(recipe, "--json", f"--output_dir={tmp_path}")
    assert said.exit_code == 2
    assert "saved no model" in said.stderr
    assert not said.stdout


def test_json_needs_to_know_where_the_run_saves(recipe, tmp_path):
    for flags in ([], ["--output_dir"], ["--epsilon", "3"]):
        said = invoke(recipe, "--json", *flags)
        assert said.exit_code == 2
        assert "--json, and no output_dir" in said.stderr
    assert output_dir({"output_dir": "a"}, []) == Path("a")
    assert output_dir({"output_dir": "a"}, ["--output-dir=b", "--x"]) == Path("b")
    assert output_dir({}, ["--output_dir", "b", "--output_dir", "c"]) == Path("c")


def test_a_bug_in_a_recipe_keeps_its_traceback(recipe):
    assert isinstance(invoke(recipe, "--bug").exception, ZeroDivisionError)
    assert isinstance(invoke("--traceback", recipe, "--missing").exception, FileNotFoundError)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("[" * 20_000, "cannot be read"),
        ("a: 2020-13-45", "cannot be read"),
        ("a: \x00", "cannot be read"),
        ('recipe: "a\\0b.py"', "there is no"),
        ("- 1\n", "has no settings"),
        ("", "has no settings"),
        ("recipe: ../mine.py\n", "has recipe: '../mine.py'"),
        ("recipe: 3\n", "has recipe: 3"),
        ("recipe: nothing\n", "there is no nothing.py beside"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe, text, words):
    path = recipe.with_name("wrong.yaml")
    if text is not None:
        path.write_text(text)
    said = invoke(path)
    assert said.exit_code == 2
    assert words in said.stderr
    assert "What to do:" in said.stderr


def test_data_of_a_preset_that_is_not_there_is_said_not_to_be_shipped(recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    recipe.write_text(
        "train_file: ../shared/data/some/train.csv\nlabels_file: ../shared/data/some/labels.json\nwidth: 3\n"
    )
    ours, own = (
        CliRunner().invoke(app, ["train", "mine.yaml", "--read", file])
        for file in ("../shared/data/some/train.csv", "own/train.csv")
    )
    assert (ours.exit_code, own.exit_code) == (2, 2)
    assert "'../shared/data/some/train.csv' cannot be read: no file." in ours.stderr
    assert "does not come with hf_dp" in ours.stderr
    assert "--train_file FILE --labels_file FILE (`hf-dp train mine --help`" in ours.stderr
    assert "does not come with hf_dp" not in own.stderr
    assert "give a whole path" in own.stderr
