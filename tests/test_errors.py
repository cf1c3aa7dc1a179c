"""What a refusal quotes fits a screen, and can be printed."""

from __future__ import annotations

import pickle

import pytest

from hf_dp.errors import ConfigurationError, HfDpError, shortened


@pytest.mark.parametrize(
    "quoted", ["x" * 3_000_000, "line\n" * 100_000, "\ud800" * 5000, "\x1b[2J\x00" * 5000, "\u202e" * 3000]
)
def test_a_refusal_fits_a_screen_whatever_it_quotes(quoted: str) -> None:
    error = ConfigurationError(f"found {quoted} here.", why=quoted, fix=quoted)
    said = str(error)
    assert len(said) < 5000
    assert said.count("\n") < 70
    assert said.startswith("found ")
    assert "here.\n  Why this is refused: " in said
    assert said.encode("utf-8")
    assert all(c.isprintable() or c == "\n" for c in said)
    assert str(pickle.loads(pickle.dumps(error))) == said
    assert shortened(error.found) == error.found


def test_what_fits_is_said_as_it_is() -> None:
    words = "clipping_norm: 1.0 in the ledger, 2.0 now;\n\tünï 数"
    assert HfDpError(words, why=words, fix=words).found == words
