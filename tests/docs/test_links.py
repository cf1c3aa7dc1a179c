"""No link of a page is dead: files and headings that it leads to are there. What leads elsewhere is only listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify, unique

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]
LINK = re.compile(r"(?<!`)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()]*\))?[^()\s]*)\)")
CODE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)


def text_of(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Of its headings, as the site and GitHub name them, and of the names that mkdocs puts in."""
    text, found = text_of(page), set[str]()
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        unique(slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", ""), "-"), found)
    return found | set(re.findall(r"^::: (hf_dp[\w.]*)$", text, re.M))


def links(page: Path) -> list[str]:
    return LINK.findall(text_of(page))


def dead(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_leads_to_is_there(page: Path) -> None:
    assert dead(page) == []
    if page.parent == DOCS:
        inside = [link for link in links(page) if not re.match(r"[a-z]+:|#", link)]
        assert not [link for link in inside if link.startswith(("..", "/"))], "the site has no such page"


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_links_that_lead_elsewhere_are_secure() -> None:
    elsewhere = {link for page in PAGES for link in links(page) if re.match(r"[a-z]+:", link)}
    assert {link for link in elsewhere if not link.startswith("https://")} == set()
    print("\n".join(sorted(elsewhere)))  # pytest -rP shows them; nothing here asks the network


def test_negative_control_dead_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, `code` too\n\n```text\n[not](one.md)\n```\n")
    page = tmp_path / "page.md"
    wrong = ["gone.md", "there.md#heading", "#here"]
    page.write_text(f"[a](there.md#a-heading-code-too) [b](https://x.org/) {' '.join(f'[c]({w})' for w in wrong)}")
    assert dead(page) == wrong
