"""What a refusal quotes fits a screen, and can be printed."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_dp.errors import ConfigurationError, HfDpError, shortened


@pytest.mark.parametrize(
    "quoted", ["x" * 3_000_000, "line\n" * 100_000, "\ud800" * 5000, "\x1b[2J\x00" * 5000, "\u202e" * 3000]
)
def test_a_refusal_fits_a_screen_whatever_it_quotes(quoted: str) -> None:
    error = ConfigurationError(f"found {quoted} here.", why=quoted, fix=quoted)
    said = str(error)
    assert sum(max(1, -(-len(line) // 100)) for line in said.split("\n")) <= 16
    assert said.startswith("found ")
    assert "here.\n  Why this is refused: " in said
    assert said.encode("utf-8")
    assert all(c.isprintable() or c == "\n" for c in said)
    assert str(pickle.loads(pickle.dumps(error))) == said
    assert shortened(error.found) == error.found


def test_what_fits_is_said_as_it_is() -> None:
    words = "clipping_norm: 1.0 in the ledger, 2.0 now;\n\tünï 数"
    assert HfDpError(words, why=words, fix=words).found == words


def written(node: ast.expr | None) -> str:
    """What a message says, with three dots for what it quotes; of two ways to say it the longer."""
    match node:
        case None:
            return ""
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=values):
            return "".join(map(written, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return written(left) + written(right)
        case ast.IfExp(body=body, orelse=orelse):
            return max(written(body), written(orelse), key=len)
        case ast.BoolOp(values=values):
            return max(map(written, values), key=len)
    return "..."


def refusals() -> Iterator[tuple[str, tuple[str, ...]]]:
    package = Path(__file__).resolve().parents[1] / "hf_dp"
    for path in sorted(package.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                parts = {keyword.arg: keyword.value for keyword in call.keywords}
                if {"why", "fix"} <= parts.keys():
                    found = call.args[0] if call.args else parts.get("found")
                    where = f"{path.relative_to(package)}:{call.lineno}"
                    yield where, tuple(map(written, (found, parts["why"], parts["fix"])))


def test_what_a_refusal_says_itself_is_never_cut() -> None:
    said = dict(refusals())
    assert len(said) > 300
    room = [most - 60 * (part == 0) for part, (most, _) in enumerate(HfDpError.longest)]
    for where, parts in said.items():
        assert all(len(words) <= most for words, most in zip(parts, room, strict=True)), where
        assert all(words.strip() for words in parts), where
