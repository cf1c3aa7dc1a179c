"""How a fast tokenizer cuts and pads texts: each call leaves it there, and it is saved with the model.

A collator that pads to the longest of its rows, as a number, would leave the length of a private row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

# Of each tokenizer, as it was before its first private training: a later one finds what that has left.
_GIVEN: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def note_tokenizers(*holders: Any) -> None:
    """Remembers how the tokenizers of `holders` (themselves, processors, collators) cut and pad before a training."""
    for tokenizer in _tokenizers(holders):
        _GIVEN.setdefault(tokenizer, _settings(tokenizer.backend_tokenizer))


@contextmanager
def tokenizers_as_given(*holders: Any) -> Iterator[None]:
    """Inside, for saving, they cut and pad as they did then."""
    now = {tokenizer: _settings(tokenizer.backend_tokenizer) for tokenizer in _tokenizers(holders)}
    for tokenizer in now:
        _set(tokenizer.backend_tokenizer, *_GIVEN.get(tokenizer, now[tokenizer]))
    try:
        yield
    finally:
        for tokenizer, settings in now.items():
            _set(tokenizer.backend_tokenizer, *settings)


def _tokenizers(holders: tuple[Any, ...]) -> set[Any]:
    collators = [getattr(holder, "data_collator", holder) for holder in holders]
    # A processor may have a second one (InstructBLIP).
    found = [one for each in collators for one in (each, *getattr(each, "__dict__", {}).values())]
    found += [getattr(each, "tokenizer", None) for each in collators]
    return {one for one in found if hasattr(getattr(one, "backend_tokenizer", None), "enable_truncation")}


def _settings(backend: Any) -> tuple[Any, Any]:
    return copy.deepcopy((backend.truncation, backend.padding))


def _set(backend: Any, truncation: Any, padding: Any) -> None:
    if truncation is None:
        backend.no_truncation()
    else:
        backend.enable_truncation(**truncation)
    if padding is None:
        backend.no_padding()
    else:
        backend.enable_padding(**padding)
