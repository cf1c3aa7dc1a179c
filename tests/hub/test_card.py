"""The card as a lawyer and a data subject read it: in words, with what its author has still to say in one place."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_dp.errors import LedgerError
from hf_dp.figures import times
from hf_dp.hub import PrivacyRecord, verify, write_card
from hf_dp.hub.about import RESULTS, about, without_padding
from hf_dp.hub.card import BEGIN, END
from hf_dp.versions import library_versions
from tests.hub.forging import failed, in_card, in_record

DEV3 = Path(__file__).parent / "dev3" / "plain"
# As PEFT writes it: the hub's own template, and what it knows.
PADDED = f"{ModelCard.from_template(ModelCardData()).text}\n### Framework versions\n\n- PEFT 0.21.2\n"


def words(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_card_says_in_words_what_a_person_may_ask(copy: Path) -> None:
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    section = words(copy).partition(BEGIN)[2].partition(END)[0]
    assert section.count(f"at most {times(math.exp(record.report.epsilon))} times") == 2
    assert "e+0" not in section
    assert "e-0" not in section
    assert section.count("at most 1 in ") == 3, "delta, wherever it stands"
    assert "**If something of yours was in the data.**" in section
    assert all(line.count("|") == 4 for line in section.split("\n") if line.startswith("| epsilon"))
    assert f"| saved | {record.saved} (UTC) |" in section


@pytest.mark.slow
def test_the_day_is_the_records_and_no_other(copy: Path) -> None:
    in_card(r"\d{4}-\d\d-\d\d \(UTC\)", "1999-12-31 (UTC)")(copy)
    assert "card, text" in failed(copy)
    in_record("saved", to="1999-12-31")(copy)
    assert "words of the card" in failed(copy)
    for wrong in ("yesterday", 20261123, None, "2026-11-23T00:00"):
        in_record("saved", to=wrong)(copy)
        with pytest.raises(LedgerError, match="no day"):
            PrivacyRecord.from_json((copy / "privacy.json").read_bytes())


def test_what_templates_leave_to_be_filled_in_goes_and_what_a_person_filled_in_stays(copy: Path) -> None:
    header, _, _ = words(copy).partition("\n---\n")
    filled = PADDED.replace("## Citation [optional]", "## Citation [optional]\n\nMine (2026)").replace(
        "### Recommendations", "### Recommendations\n\nNot for doctors."
    )
    (copy / "README.md").write_text(f"{header}\n---\n{filled}", encoding="utf-8")
    write_card(copy, "my-adapter")
    text = words(copy)
    assert "[More Information Needed]" not in text
    assert "<!-- Provide" not in text
    headings = [line for line in text.split("\n") if line.startswith("#")]
    assert headings[:3] == ["# my-adapter", "## About", "## Privacy"], "ours stand first"
    kept = [
        "## Bias, Risks, and Limitations",
        "### Recommendations",
        "## Citation [optional]",
        "### Framework versions",
    ]
    assert headings[3:] == kept
    assert all(said in text for said in ("Mine (2026)", "Not for doctors.", "- PEFT 0.21.2"))
    assert verify(copy).private
    write_card(copy, "my-adapter")
    assert words(copy) == text, "writing twice changes nothing"


def test_of_a_card_without_metadata_nothing_is_said(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "README.md").write_text("# Mine\n\nOf my own.\n", encoding="utf-8")
    with caplog.at_level("WARNING", logger="huggingface_hub"):
        write_card(copy)
    assert not caplog.records
    assert "\n# Mine\n" in words(copy)
    assert "Of my own." in words(copy)
    assert verify(copy).private


def test_a_heading_stays_above_what_an_author_wrote_and_code_is_left_alone() -> None:
    code = "```python\n# [More Information Needed]\n[More Information Needed]\n```"
    found = "### What we found\n\nIt errs."
    risks = "## Bias, Risks, and Limitations"
    filled = PADDED.replace("### Recommendations", f"#### Deep\n\nMine.\n\n{found}\n\n### Recommendations").replace(
        "Use the code below", f"{code}\n\nUse the code below"
    )
    text = without_padding(filled, "mine")
    headings = [line for line in text.split("\n") if line.startswith("##")]
    assert headings == [
        risks, "#### Deep", "### What we found", "## How to Get Started with the Model", "### Framework versions",
    ]  # fmt: skip
    assert code in text
    assert found in text
    assert text.count("[More Information Needed]") == 2
    assert without_padding(text, "mine") == text


def test_what_the_author_says_stays_and_is_no_longer_asked_for(copy: Path) -> None:
    asked = words(copy)
    assert asked.count("not said yet") == 5 == sum(asked.count(f"\n- {name}: ") for name in ROWS)
    in_card(r"\| who answers for it \| not said yet \|", "| who answers for it | ACME, dpo@acme.example |")(copy)
    in_card("library_name: transformers", "license: apache-2.0\nbase_model: someone/base")(copy)
    write_card(copy)
    text = words(copy)
    rows = (
        "| made from | someone/base |",
        "| licence | apache-2.0 |",
        "| who answers for it | ACME, dpo@acme.example |",
    )
    assert all(row in text for row in rows)
    assert [name for name in ROWS if f"\n- {name}: " in text] == ["meant for", "not meant for"]
    assert verify(copy).private
    assert "has still to say" not in about(text.replace("not said yet", "this"), ModelCard(text).data)


def test_what_an_author_adds_to_the_table_stays(copy: Path) -> None:
    row = "| trained by | ACME, 2026 |"
    other = "Ask first.\n\n| uses | how many |\n| --- | --- |\n| chat | 2 |\n\n```\n| licence | none |\n```"
    in_card(r"\| meant for \| not said yet \|", f"| meant for | chat \\| mail |\n{row}")(copy)
    in_card("<!-- hf_dp about ends -->", f"\n{other}\n<!-- hf_dp about ends -->")(copy)
    write_card(copy)
    text = words(copy)
    table = text.partition("<!-- hf_dp about begins -->")[2].partition("<!-- hf_dp about ends -->")[0]
    assert table.count(row) == table.count(other) == table.count("| meant for | chat \\| mail |") == 1
    assert [table.count(f"| {name} |") for name in ROWS] == [1, 2, 1, 1, 1], "one of them in the author's code"
    assert "- licence: " in table
    assert verify(copy).private
    write_card(copy)
    assert words(copy) == text
    in_card("\n+<!-- hf_dp about begins", "\n<!-- hf_dp about begins")(copy)
    write_card(copy)
    assert words(copy) == text


@pytest.mark.parametrize("mark", ["<!-- hf_dp about (begins|ends) -->\n", "<!-- hf_dp about ends -->\n"])
def test_an_authors_own_section_about_it_is_the_only_one(copy: Path, mark: str) -> None:
    text = re.sub(mark, "", words(copy)).replace("not said yet", "mine")
    (copy / "README.md").write_text(text, encoding="utf-8")
    for _ in range(2):
        write_card(copy)
        assert words(copy).count("\n## About\n") == 1
        assert words(copy).count("| mine |") == 5
        assert "hf_dp about" not in words(copy)
        assert verify(copy).private


@pytest.mark.parametrize(("licence", "is_told"), [("Apache License", True), ("MIT, see LICENSE", False)])
def test_a_licence_in_the_table_stays_and_another_in_the_metadata_is_told(
    copy: Path, caplog: pytest.LogCaptureFixture, licence: str, is_told: bool
) -> None:
    in_card(r"\| licence \| not said yet \|", f"| licence | {licence} |")(copy)
    in_card("library_name: transformers", "license: mit")(copy)
    write_card(copy)
    assert f"| licence | {licence} |" in words(copy)
    assert caplog.text.count(f"licence: {licence!r}, and `license`: 'mit'") == is_told
    assert verify(copy).private


def test_a_table_that_stands_twice_becomes_a_persons_own_words_and_one_is_written(copy: Path) -> None:
    table = words(copy).partition("<!-- hf_dp about begins -->")[2].partition("<!-- hf_dp about ends -->")[0]
    doubled = f"\n<!-- hf_dp about begins -->{table.replace('not said yet', 'mine')}<!-- hf_dp about ends -->\n"
    (copy / "README.md").write_text(words(copy) + doubled, encoding="utf-8")
    write_card(copy)
    once = words(copy)
    assert (once.count("<!-- hf_dp about begins -->"), once.count("| mine |"), verify(copy).private) == (1, 5, True)
    write_card(copy)
    assert words(copy) == once


ROWS = ("made from", "licence", "who answers for it", "meant for", "not meant for")


def test_what_dev3_saved_verifies_and_keeps_its_words(tmp_path: Path) -> None:
    version = json.loads((DEV3 / "privacy.json").read_text())["report"]["versions"]["hf_dp"]
    assert version == "0.1.0.dev3" != library_versions()["hf_dp"]
    copy = Path(shutil.copytree(DEV3, tmp_path / "copy"))
    assert (verify(copy).private, failed(copy)) == (True, "")
    write_card(copy)
    assert verify(copy).private
    assert "exp(epsilon) = 2.98e+03 times" in words(copy), "in the words that its record has the digest of"
    in_card("2.98e.03 times", "2 times")(copy)
    assert not verify(copy).private


@pytest.mark.parametrize("is_wanted", [False, True])
def test_failure_78_results_that_trainer_drafted_of_a_training_before_do_not_stay(copy: Path, is_wanted: bool) -> None:
    metric = EvalResult("text-generation", "diary", "diary", "accuracy", 0.1234)
    header = ModelCardData(model_name="before", eval_results=[metric]).to_yaml()
    draft = f"""---
{header}
---

<!-- This model card has been generated automatically according to the information the Trainer had access to. -->

# before

This model is a fine-tuned version of [gpt2](https://huggingface.co/gpt2) on the diary dataset.
It achieves the following results on the evaluation set:
- Loss: 1.0501
- Accuracy: 0.1234
* F1: 0.1234

## Training procedure

### Training hyperparameters

- learning_rate: 0.1
- seed: 42

### Training results

| Training Loss | Epoch  |
|:-------------:|:------:|
| 2.1509        | 0.1667 |

### Framework versions

- Transformers 5.24.0

## Mine

- seed of the pear: 1
"""
    draft += f"\n{RESULTS}\n" * is_wanted
    (copy / "README.md").write_text(draft, encoding="utf-8")
    write_card(copy)
    text = words(copy)
    for told in ("1.0501", "0.1234", "2.1509", "### Training results", "achieves", "- seed: 42"):
        assert (told in text) == is_wanted, told
    for kept in ("learning_rate: 0.1", "on the diary dataset.", "### Framework versions", "- seed of the pear: 1"):
        assert kept in text
    assert not failed(copy)
    write_card(copy)
    assert words(copy) == text
