"""What is to run on a GPU runs, small, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from scripts import gpu


def invoke(path: Path, *sections: str) -> dict[str, dict[str, str]]:
    chosen = [part for section in sections for part in ("--only", section)]
    done = CliRunner().invoke(gpu.app, ["--output", str(path), "--cpu", *chosen])
    assert done.exit_code == 0, done.output
    found: dict[str, dict[str, str]] = json.loads((path / "gpu.json").read_text(encoding="utf-8"))
    return found


def test_what_is_known_so_far_is_written_down_and_a_failure_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> str:
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setitem(gpu.SECTIONS, "Noise", lambda device: iter([("bad", failing), ("good", lambda: "as it is")]))
    assert invoke(tmp_path, "Noise")["Noise"] == {"bad": "failed: RuntimeError: no such kernel", "good": "as it is"}
    written = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| good | as it is |" in written
    assert written.startswith("# Measured small, on a CPU")


def test_cases_of_a_section_are_run_alone_and_beside_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["first", "second", "third"])
    cases = [(name, lambda: next(answers)) for name in ("one", "two")]
    monkeypatch.setitem(gpu.SECTIONS, "Noise", lambda device: iter(cases))
    assert invoke(tmp_path, "Noise")["Noise"] == {"one": "first", "two": "second"}
    CliRunner().invoke(gpu.app, ["--output", str(tmp_path), "--cpu", "--only", "Noise", "--case", "two"])
    assert json.loads((tmp_path / "gpu.json").read_text())["Noise"] == {"one": "first", "two": "third"}
    for chosen in (["--only", "Noise", "--case", "three"], ["--case", "one"]):
        done = CliRunner().invoke(gpu.app, ["--output", str(tmp_path), "--cpu", *chosen])
        assert done.exit_code == 2
        assert "--case is of one section" in done.output


def test_without_a_gpu_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(gpu.app, ["--output", str(tmp_path / "new")])
    assert done.exit_code == 2
    assert "no CUDA device is there" in done.output
    assert not (tmp_path / "new").exists()


def test_what_is_wrong_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.SECTIONS, "Noise", lambda device: iter([("one", lambda: "WRONG by 1")]))
    done = CliRunner().invoke(gpu.app, ["--output", str(tmp_path), "--cpu", "--only", "Noise"])
    assert done.exit_code == 1
    assert "WRONG: Noise: one" in done.output


def test_noise_that_is_too_small_is_called_wrong() -> None:
    class TooSmall(gpu.GaussianNoise):
        def add_(self, tensors: object, standard_deviation: float, step: int, stream: str = "noise") -> None:
            super().add_(tensors, standard_deviation * 2 / 3, step, stream)  # type: ignore[arg-type]

    assert gpu._noise(TooSmall, torch.device("cpu"), size=2**12).startswith("WRONG")
    assert not gpu._noise(gpu.GaussianNoise, torch.device("cpu"), size=2**12).startswith("WRONG")


@pytest.mark.slow
def test_all_of_it_runs_small_on_a_cpu(tmp_path: Path) -> None:
    found = invoke(tmp_path)
    assert set(found) == {"Machine", *gpu.SECTIONS}
    bad = {
        n: text
        for rows in found.values()
        for n, text in rows.items()
        if any(word in text for word in ("WRONG", "failed", "not run"))
    }
    assert not bad


def test_a_section_that_hangs_or_dies_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    script.write_text("import sys, time\ntime.sleep(60 * ('hang' in sys.argv))\nsys.exit(3)\n", encoding="utf-8")
    monkeypatch.setattr(gpu, "__file__", str(script))
    assert gpu._alone(["hang"], 0.5) == "not run: no time was left"
    assert gpu._alone([], None) == "not run: its process ended with 3"
    for title in gpu.SECTIONS:
        monkeypatch.setitem(gpu.SECTIONS, title, lambda device: iter([("one", str), ("two", str)]))
    assert invoke(tmp_path, "Noise", "Machine") == dict.fromkeys(
        ("Noise", "Machine"), dict.fromkeys(("one", "two"), "not run: its process ended with 3")
    )
    assert sum(gpu.SECONDS.values()) <= 480
