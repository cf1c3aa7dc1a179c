"""Loads what recipes save, in a process of its own without hf_dp; questions and answers are lines of JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

sys.modules["hf_dp"] = None  # type: ignore[assignment]

import torch  # noqa: E402
import transformers  # noqa: E402


def logits(directory: str, kind: str, given: Any, answer: str) -> Any:
    """Of the saved model, loaded with nothing newly initialised."""
    model = getattr(transformers, kind).from_pretrained(directory).eval()
    if isinstance(given, str):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        inputs = tokenizer(given, return_tensors="pt")
    else:
        tokenizer, inputs = None, {name: torch.tensor(value) for name, value in given.items()}
    with torch.no_grad():
        known = {"logits": model(**inputs).logits, "inputs": inputs, "tokenizer": tokenizer, "model": model}
    return eval(answer, known).tolist()


def asked(directory: str, kind: str | None, given: Any, answer: str, usage: str) -> dict[str, Any]:
    """The logits, and what the lines that the recipe printed say."""
    known: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(usage, known)
    *_, last = usage.splitlines()
    if kind is None:
        return {"answer": eval(last.removeprefix("print(")[:-1], known)[0].tolist(), "printed": printed.getvalue()}
    return {"answer": logits(directory, kind, given, answer), "printed": printed.getvalue()}


for line in sys.stdin:
    try:
        found = asked(**json.loads(line))
    except Exception as error:  # noqa: BLE001 - it is sent on
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)
