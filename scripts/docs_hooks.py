"""What the site says that the code says already: public names and commands, put in when mkdocs builds it (mkdocs.yml).

A page asks for it by a comment on a line of its own: `<!-- names of hf_dp.audit -->`, `<!-- commands -->`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Collection
from fnmatch import fnmatch
from types import ModuleType
from typing import Any

_WHOLE = r'<span class="short">\g<0></span>'
ASKED = re.compile(r"^<!-- (?:names of (?P<module>[\w.]+)|commands) -->$", re.M)


# Whoever searches wants to do something, and seldom to read how it is built: by titles in mkdocs.yml, and by pages.
FIRST = {"Tutorials": 3.0, "How to": 2.0, "Results and comparison": 0.5}
LAST = ("api_*", "architecture.*", "coverage.*", "extending.*", "per_example.*", "proof.*", "rules.*")


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """A page with what its comments ask for, and with a weight in searches."""
    if page is not None:
        page.meta["search"] = {"boost": weight(page.file.src_uri, page.parent and page.parent.title)}
    written = set(re.findall(r"^::: ([\w.]+)$", markdown, re.M))
    return ASKED.sub(lambda found: names(found["module"], written) if found["module"] else commands(), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """A page whose short pieces of code stay in one line, and so does each option of longer ones: browsers break
    `--flag` and 2e-16 after their hyphens. Nor does a percent sign begin a line."""
    html = re.sub(r"<code>(?=[^<]{1,32}</code>)", '<code class="short">', html)
    html = re.sub(r"<code>[^<]{33,}</code>", _with_whole_options, html)
    html = re.sub(r'<div class="language-bash .*?</div>', _with_whole_options, html, flags=re.S)
    # What follows is not the inside of a tag.
    return re.sub(r"\b\d[\d.]*(?:e-\d+\b| %(?!\w))(?=[^<>]*<)", _WHOLE, html)


def _with_whole_options(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[\s>\[])--?[\w-]{1,32}", _WHOLE, code[0])


def weight(path: str, section: str | None) -> float:
    """How high a page stands among what a search finds, other things being equal; 1 where nothing is said of it."""
    return 0.3 if any(fnmatch(path, name) for name in LAST) else FIRST.get(section or "", 1.0)


def names(module: str, written: Collection[str] = ()) -> str:
    """Each public name of a module, but for those that the page has already, for mkdocstrings to read its docstring;
    constants, which nobody looks for first, at the end."""
    home = importlib.import_module(module)
    public = [name for name in home.__all__ if name != "__version__" and not is_module(home, name)]
    assert public, module
    public.sort(key=lambda name: not callable(getattr(home, name)))
    asked = (f"{module}.{place(module, name)}" for name in public)
    return "\n".join(f"::: {name}" for name in asked if name not in written)


def is_module(home: ModuleType, name: str) -> bool:
    """Whether a public name is a module, whose names stand on a page of their own."""
    return isinstance(getattr(home, name), ModuleType)


def place(module: str, name: str) -> str:
    """Where a name is found without being imported: in the file of its own name, where there is one."""
    return f"{name}.{name}" if importlib.util.find_spec(f"{module}.{name}") else name


def commands() -> str:
    """Each command with its options, as `--help` says them, by typer's own words; below a page's title."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from hf_dp.cli import app

    command = get_command(app)
    said = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="hf-dp"), name="hf-dp")
    title, _, rest = said.partition("\n")
    assert title == "# `hf-dp`", title
    # typer cuts the list of commands short; each stands below in full.
    return re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+", "", rest)
