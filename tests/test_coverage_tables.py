"""How the coverage tables are written down; what is in them is judged in tests/per_example/test_coverage.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts import coverage
from scripts.coverage_tables import MARKS, between_marks, markdown, read, summary

RESULTS = {
    "Architectures": {
        "gpt2": {"causal_lm": "exact 2e-16", "qa": "exact 3e-16"},
        "opt": {"causal_lm": "exact 1e-16", "qa": "-"},
        "bart": {"seq2seq": "exact 2e-16", "causal_lm": "refused: its loss is another."},
        "mixtral": dict.fromkeys(("causal_lm", "qa"), "refused: parameter a.b, a.c, a.d is used by operation bmm."),
    },
    "PEFT": {"LoRA": {"causal_lm": "exact 0e+00"}, "bad": {"causal_lm": "WRONG by 0.1"}},
    "Settings": {"bf16": {"gpt2": "within 0.3 %"}},
}


def test_the_page_has_a_table_for_each_part_and_the_reasons_once() -> None:
    lines = markdown(RESULTS).splitlines()
    assert lines[0] == "# Coverage"
    start = lines.index("## Architectures")
    assert lines[start + 2 : start + 12] == [
        "| | causal_lm | qa | seq2seq |",
        "| --- | --- | --- | --- |",
        "| gpt2 | exact 2e-16 | exact 3e-16 | - |",
        "| opt | exact 1e-16 | - | - |",
        "| bart | refused | - | exact 2e-16 |",
        "| mixtral | refused | refused | - |",
        "",
        "- bart (causal_lm): its loss is another.",
        "- mixtral (causal_lm, qa): parameter a.b and others is used by operation bmm.",
        "",
    ]
    assert "| bad | WRONG by 0.1 |" in lines
    assert "| bf16 | within 0.3 % |" in lines


def test_the_summary_has_one_row_for_each_part() -> None:
    assert summary(RESULTS).splitlines() == [
        "| | exact | refused by name |",
        "| --- | --- | --- |",
        "| Architectures | gpt2; opt; bart | bart (causal_lm); mixtral |",
        "| PEFT | LoRA | bad |",
        "| Settings | bf16 | - |",
        "",
        "Each head with the largest error found, and why something is refused: [docs/coverage.md](docs/coverage.md).",
    ]


def test_only_what_is_between_the_marks_is_replaced() -> None:
    old = r"before <!-- coverage begins: by hand -->old\1<!-- coverage ends --> after <!-- coverage ends -->"
    new = between_marks(old, r"new\1")
    assert new == f"before {MARKS[0]}\n\nnew\\1\n\n{MARKS[1]} after <!-- coverage ends -->"
    assert between_marks(new, "new\\1") == new
    with pytest.raises(ValueError, match="no <!-- coverage begins"):
        between_marks("no marks", "new")


def test_the_readme_has_the_marks() -> None:
    assert "x y z" in between_marks((coverage.ROOT / "README.md").read_text(encoding="utf-8"), "x y z")


def written(root: Path, monkeypatch: pytest.MonkeyPatch, results: object, *arguments: str) -> int:
    (root / "docs").mkdir()
    (root / "README.md").write_text(f"{MARKS[0]}{MARKS[1]}", encoding="utf-8")
    monkeypatch.setattr(coverage, "ROOT", root)
    monkeypatch.setattr(coverage, "judge_all", lambda _: results)
    return CliRunner().invoke(coverage.app, arguments).exit_code


def test_writing_puts_the_page_and_the_summary_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"PEFT": {"LoRA": {"causal_lm": "exact 0e+00"}}}
    assert written(tmp_path, monkeypatch, good, "--write") == 0
    assert summary(good) in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "docs/coverage.md").read_text(encoding="utf-8") == markdown(good)


def test_anything_wrong_makes_the_script_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(tmp_path, monkeypatch, RESULTS) == 1
    assert not (tmp_path / "docs/coverage.md").exists()


def test_a_page_is_read_as_it_was_written() -> None:
    page = markdown({**RESULTS, "PEFT": {"LoRA": {"causal_lm": "exact 0e+00"}}})
    found = read(page)
    assert found["Architectures"]["bart"] == RESULTS["Architectures"]["bart"]
    assert markdown(found) == page


def test_some_rows_take_the_place_of_theirs_and_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written(tmp_path, monkeypatch, {**RESULTS, "PEFT": {}}, "--write") == 0
    new = {
        "Architectures": {"opt": {"qa": "exact 5e-16"}, "t5": {"seq2seq": "exact 1e-16"}},
        "PEFT": {},
        "Settings": {},
    }
    monkeypatch.setattr(coverage, "judge_all", lambda _: new)
    assert CliRunner().invoke(coverage.app, ["--write", "--only", "opt", "--only", "t5"]).exit_code == 0
    rows = read((tmp_path / "docs/coverage.md").read_text(encoding="utf-8"))["Architectures"]
    assert list(rows) == ["gpt2", "opt", "bart", "mixtral", "t5"]
    assert rows["opt"] == {"qa": "exact 5e-16"}
    assert rows["gpt2"] == RESULTS["Architectures"]["gpt2"]
    assert "gpt2; opt; bart; t5" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_rows_are_not_written_beside_those_of_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(tmp_path, monkeypatch, RESULTS, "--write", "--only", "LoRA") == 2
    page = tmp_path / "docs/coverage.md"
    page.write_text(markdown(RESULTS).replace("torch ", "torch 1."), encoding="utf-8")
    before = page.read_text(encoding="utf-8")
    assert CliRunner().invoke(coverage.app, ["--write", "--only", "LoRA"]).exit_code == 2
    assert page.read_text(encoding="utf-8") == before
