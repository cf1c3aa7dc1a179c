"""A privacy section that nobody sees, or sees changed, is noticed; none is written where it would not be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dp.hub import verify, write_card
from hf_dp.hub.card import BEGIN, END
from tests.hub.forging import failed, in_text

pytestmark = pytest.mark.usefixtures("checked_once")

AROUND: dict[str, tuple[str, str]] = {
    "comment": ("<!--\n", "\n-->"),
    "comment in a block": ("<div><!--\n\n", "\n\n--></div>"),
    "hidden": ("<div hidden>\n\n", "\n\n</div>"),
    "display:none": ('<div style="display:none">\n\n', "\n\n</div>"),
    "no end": ("<div hidden/>\n\n", ""),
    "half a tag": ("<div hidden\n\n", ""),
    "crossed": ("<b><div hidden></b>\n\n", ""),
    "inline": ("text <span hidden>\n\n", "\n\n</span>"),
    "details": ("<details><summary>More</summary>\n\n", "\n\n</details>"),
    "fence": ("```\n", "\n```"),
    "a tag in a footnote": ("[^1]: \n[^1]<div hidden>\n\n", ""),
    "a tag in a footnote's address": ("[^1]: /<pre></ul>\n\n", ""),
    "HTML in a footnote": ("[^1]: \n</svg>\n", ""),
    "open fence like a table": ("~~~| - |\n|-|-|\n\n", ""),
    "a tag like a table": ("<li>a| - |\n|-|-|\n</svg>\n\n", ""),
    "a tag behind an address with a mark": ("http://a.b` and <div hidden>`\n\n", ""),
    "a tag behind an address with marks": ("www.a.b``\n<div hidden>``\n\n", ""),
    "a tag behind an address with a link": ('http://a.b[a](b "<div hidden>")\n\n', ""),
    "laid over it by a length behind a comment": ("$$ a \\kern% -\n % 1\\%\n-40em b $$\n\n", ""),
    "open fence": ("~~~~html\n", ""),
    "script": ("<script>\n", "\n</script>"),
    "textarea": ("<textarea>\n", "\n</textarea>"),
    "template": ("<template>\n\n", "\n\n</template>"),
    "instruction": ("<?php\n", "\n?>"),
    "declaration": ("<!X\n", "\n>"),
    "style before": ("<style>table { display: none }</style>\n\n", ""),
    "style behind": ("", "\n\n<style>table { display: none }</style>"),
    "list": ("- ", ""),
    "no comment": ("<!--> <div style='display:none'> -->\n\n", ""),
    "no comment either": ("<!---> <div style='display:none'> -->\n\n", ""),
    "comment with another end": ("<!-- a --!> <div style='display:none'> -->\n\n", ""),
    "comment with a blank in its end": ("<!-- a -- > <div hidden> -->\n\n", ""),
    "CDATA": ("<![CDATA[ > <div hidden> ]]>\n\n", ""),
    "instruction before": ("<?x > <div hidden> ?>\n\n", ""),
    "declaration before": ("<!X '>' <div hidden> >\n\n", ""),
    "end of nothing": ("<div></ x='<!--'><!-- '> --></div>\n\n", ""),
    "text for tags": ("<textarea><!-- </textarea><div hidden> --></textarea>\n\n", ""),
    "title for tags": ("<title><!-- </title><div hidden> --></title>\n\n", ""),
    "body": ("<body hidden></body>\n\n", ""),
    "dialog": ("<dialog open>Epsilon is 0.1.</dialog>\n\n", ""),
    "laid over it": ("<div style='position:fixed;inset:0;background:white'>no</div>\n\n", ""),
    "laid over it from behind": ("", "\n\n<div style='margin-top: -90em; background: white'>no</div>"),
    "laid over it by a class": ("<div class='fixed inset-0 bg-white'>no</div>\n\n", ""),
    "an escape in its style": ("<div style='p\\6fsition:fixed'>no</div>\n\n", ""),
    "a comment in its style": ("<div style='a:b;/*;*/position:fixed'>no</div>\n\n", ""),
    "formula": ("$$\\def\\x{\n\n", "\n\n}$$"),
    "formula in a line": ("\\\\(\\def\\x{\n\n", "\n\n}\\\\)"),
    "formula that begins in another": ("$$$$ a $$\n\n", "\n\n$$"),
    "formula that begins in code": ("`$$` and $$\n\n", "\n\n$$"),
    "laid over it by a formula": ("$$\\raisebox{-40em}{\\colorbox{white}{\\rule{40em}{40em}}}$$\n\n", ""),
    "laid over it by a command": ("$$ a \\kern-40em b $$\n\n", ""),
    "laid over it between formulas": ("$$a$$ \\(\n\n{ -40 em}$$\n\n", ""),
    "an end that leaves a form open": ("<form hidden><ol><table></form></table></ol></form>\n\n", ""),
    "an end that is in a drawing": ("<svg></p><g hidden/></svg>\n\n", ""),
    "laid over it by a formula behind": ("", "\n\n\\\\(a \\\\[-40em] \\text{Epsilon is 0.1.}\\\\)"),
}


@pytest.mark.few(18)
@pytest.mark.parametrize("case", AROUND)
def test_a_privacy_section_that_nobody_sees_is_noticed(copy: Path, case: str) -> None:
    before, behind = AROUND[case]
    in_text(lambda text: text.replace(BEGIN, before + BEGIN).replace(END, END + behind))(copy)
    assert failed(copy).startswith("card, visible: "), failed(copy)


LAID_OVER = [
    "</li><a href='\n<br>",
    '</li><a href="\n<br>',
    "<div></b x='>",
    "<div></b x='></div>",
    "<ul><![a](</ul>",
    "<ul><! a></ul>",
    "</div>\n<div title=a\"b c='>",
    "http://a.b\\<div hidden>",
    "http://a.b/`<div hidden>`",
    "a@b.c`<div hidden>`",
    "http://a.b![a](<b>)",
    "<div class='relative bottom-96 bg-white'>no</div>",
    "<div class='mt-[-90rem] bg-white'>no</div>",
    "<div class='h-0 relative'><img src='a.png'></div>",
    "<div class='float-left w-0'><img src='black.png'></div>",
    "<div style='float: left; width: 0'><img src='black.png'></div>",
    "<table align=' LEFT' style='display: block; width: 0'><tr><td><img src='black.png'></td></tr></table>",
    "<div class='rotate-90'>no</div>",
    "<svg overflow='visible'><rect y='-900' width='900' height='900'/></svg>",
    "<svg class='overflow-visible'><rect y='-900' width='900' height='900'/></svg>",
    "<svg transform='translate(0 900)'><rect width='900' height='900'/></svg>",
    "<svg><style>table { display: none }</style></svg>",
    "<svg><foreignobject><div hidden></foreignobject></svg>",
    "no" + "\u0489" * 500,
    "no" + "&#x20DE;" * 500,
    "$$ a \\kern% -\n-40em b $$",
    "$$ a \\kern\\@secondoftwo x-40em b $$",
    "$$ \\genfrac()-90em0ab $$",
    "$$ \\hspace{2em}{ -40em} $$",
    "$$ \\hspace * -40em $$",
    "$$ \\raise40em{\\text{Epsilon is 0.1.}} $$",
]


@pytest.mark.few(6)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("text", LAID_OVER)
def test_failure_157_what_could_lie_over_the_section_is_noticed(copy: Path, text: str, is_before: bool) -> None:
    mark, both = (BEGIN, f"{text}\n\n{BEGIN}") if is_before else (END, f"{END}\n\n{text}\n")
    in_text(lambda card: card.replace(mark, both))(copy)
    assert failed(copy).startswith("card, visible: "), failed(copy)


@pytest.mark.parametrize("end", ["\u2028", "\x0c", "\x0b", "\x85"])
def test_a_section_on_one_line_is_noticed(copy: Path, end: str) -> None:
    text = (copy / "README.md").read_text()
    section = text[text.index(BEGIN) : text.index(END)]
    in_text(lambda card: card.replace(section, section.replace("\n", end)))(copy)
    assert "card, text" in failed(copy)


def test_a_mark_of_the_byte_order_is_no_difference(copy: Path) -> None:
    card = copy / "README.md"
    card.write_bytes(b"\xef\xbb\xbf" + card.read_bytes())
    assert verify(copy).private, failed(copy)


@pytest.mark.parametrize("before", ["    ", "> "])
def test_a_section_of_which_every_line_is_moved_is_noticed(copy: Path, before: str) -> None:
    def move(text: str) -> str:
        head, rest = text.split(BEGIN)
        inside, tail = rest.split(END)
        return head + "\n".join(before + line for line in f"{BEGIN}{inside}{END}".splitlines()) + tail

    in_text(move)(copy)
    assert "card, " in failed(copy)


def test_a_section_in_the_metadata_is_none(copy: Path) -> None:
    text = (copy / "README.md").read_text()
    section = text[text.index(BEGIN) : text.index(END) + len(END)]
    block = "\n".join(f"  {line}" for line in section.splitlines())
    in_text(lambda text: text.replace(section, "").replace("---\n", f"---\nx: |\n{block}\n", 1))(copy)
    assert "card, text" in failed(copy)


@pytest.mark.parametrize(
    "text",
    [
        '<p align="center"><img src="a.png"></p>\n\n',
        "Use `<mask>` and\n\n```html\n<div hidden>\n```\n\n",
        "<!-- a note -->\n\n<details><summary>More</summary>\n\ntext\n\n</details>\n\n",
        '<div align="center" style="text-align: center; margin: 0 auto"><img src="a.png" width="60%"/></div>\n\n',
        "<!--- a note --->\n\n`<!-->` and <!-- two -- notes --> `<![CDATA[`\n\n",
        "a < b\n- [link](x)\n\n| a |\n| - |\n| b |\n\n",
        "$$ e = -m c^2 $$\n\nwith \\\\( m_{-1} > 0 \\\\), which costs $$\n\n",
        "- 2 inputs\n\n$$ a $$\n\nmore than GPT-2 in 2018-2020 in\n\n$$ b $$\n\n- 3 excerpts\\rules\n\n",
        "Run `curl http://a.b` and see `<mask>`, `` http://a.b/` `` and `<s>`, or [http://a.b](c) and <b>d</b>.\n\n",
        "[![a](http://a.b/c.svg)](http://a.b) `<s>` <img src='http://a.b/`'> `<s>` <http://a.b/`> `<s>`\n\n",
        "$$ a $$\n\n- 2 inputs\n- 3 pt of it\n\n$$ b $$\n\n(- 2 in all, as (b) - 3 cm are)\n\n$$ c $$\n\n",
        '<img src="a.png" class="h-8 float-right" style="float:right; letter-spacing:.1em" align="left">\n\n',
        '<span style="letter-spacing: 2px; font-family: serif; text-transform: uppercase">text</span>\n\n',
        '<div class="text-left relative h1-like bottom">text</div>\n\n',
        '<svg width="8" viewBox="0 0 8 8"><g><circle r="4"/><path d="M0 0L8-8"></path></g></svg> and <b>text</b>\n\n',
        "<ul><li>a<li>b</ul>\n\n<table><tr><td>a<td><p>b</table>\n\n<p align=center>c\n\n# D\n\n",
        "[http://a.b](http://a.b)<br>http://a.b/c_(d)<br> `http://a.b`, a\\<b and a@b.c [^1]\n\n[^1]: A note.\n\n",
        "\u0e01\u0e33\u0e49 a\u0301\u0323 1\ufe0f\u20e3 " + "e\u0301" * 20 + "\n\n",
        "It lost -3 in all, which costs $$, and \\\\( has no end: -2 in\n\n",
    ],
)
def test_what_people_write_before_the_section_hides_nothing(copy: Path, text: str) -> None:
    in_text(lambda card: card.replace(BEGIN, text + BEGIN))(copy)
    assert verify(copy).private, failed(copy)


def test_a_section_is_not_written_into_code_nor_between_crossed_marks(copy: Path) -> None:
    old = (copy / "README.md").read_text()
    section = old[old.index(BEGIN) : old.index(END) + len(END)]
    body = f"# A\n\n```bash\n\n## a comment\n```\n\n{END}{BEGIN}\n## B\n{section.replace('Privacy', 'OLD')}\n"
    (copy / "README.md").write_text(body)
    write_card(copy)
    assert verify(copy).private, failed(copy)
    written = (copy / "README.md").read_text()
    assert written.index("a comment") < written.index(BEGIN) < written.index("## B")
    assert "OLD" not in written


def test_a_section_is_not_written_between_formulas(copy: Path) -> None:
    old = (copy / "README.md").read_text()
    section = old[old.index(BEGIN) : old.index(END) + len(END)]
    (copy / "README.md").write_text(old.replace(section, f"$$ a $$\n\n{section}\n\n## B\n\n$$ b $$\n"))
    assert failed(copy).startswith("card, visible: a formula ($$) that begins before it could end behind it")
    write_card(copy)
    assert verify(copy).private, failed(copy)
    written = (copy / "README.md").read_text()
    assert written.index(BEGIN) < written.index("$$ a $$") < written.index("$$ b $$")
