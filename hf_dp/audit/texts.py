"""What an attacker computes of texts with a causal language model: losses, and what it would write."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.audit.given import refused
from hf_dp.audit.secrets import Secret

Losses = np.ndarray[Any, np.dtype[np.float64]]
# Tokens at once; with a vocabulary of 50,000 their logits take 200 MB.
_AT_ONCE = 1024


@dataclass(frozen=True)
class Completion:
    """How a model goes on after a prefix.

    Attributes:
        greedy: whether it writes exactly what followed, taking the likeliest token each time.
        loss: minus the log of the probability that it writes exactly that, drawing each token (temperature 1); in nats.
    """

    greedy: bool
    loss: float

    def within(self, draws: int) -> float:
        """The probability that one of so many draws is exactly that; other ways to write it in tokens would add to it.

        Source: Hayes et al. 2024, arXiv:2410.19482, section 3.
        """
        each = math.exp(-self.loss)
        return 1.0 if each == 1 else -math.expm1(draws * math.log1p(-each))


@dataclass(frozen=True)
class Read:
    """What a model makes of texts.

    Attributes:
        losses: (N,), the mean loss of each text's tokens after its first, in nats.
        second_halves: how it goes on after the first half of each one's tokens.
        cut: of how many texts only the beginning was read.
    """

    losses: Losses
    second_halves: list[Completion]
    cut: int


def read(model: Any, tokenizer: Any, texts: Sequence[str], longest: int) -> Read:
    """Of each text the first `longest` tokens.

    Raises:
        ConfigurationError: no texts, one of fewer than two tokens, or a loss that is NaN.
    """
    if not texts:
        raise refused("no texts", "nothing is told from nothing.", "give a text or more on either side.")
    whole = tokenizer(list(texts))["input_ids"]
    ids = [list(row[:longest]) for row in whole]
    short = [number for number, row in enumerate(ids) if len(row) < 2]
    if short:
        raise refused(
            f"{len(short)} texts of fewer than two tokens, such as {texts[short[0]][:40]!r}",
            "a token's loss is that of predicting it from those before.",
            "take them out, or give longer ones.",
        )
    found = list(_predicted(model, ids))
    means = _finite([float(losses.mean()) for losses, _ in found], texts)
    halves = [_completion(*one, (len(row) + 1) // 2) for one, row in zip(found, ids, strict=True)]
    return Read(means, halves, sum(len(row) > longest for row in whole))


def completions(model: Any, tokenizer: Any, planted: Sequence[Secret], longest: int) -> list[Completion]:
    """How the model goes on after each prefix, in one pass over prefix and secret.

    Where the two are one token at their seam the model is given the tokens before it, and that one is part of what it
    has to write.

    Raises:
        ConfigurationError: no tokens before the secret, none in it, more than `longest`, or a loss that is NaN.
    """
    ids, starts = _from_the_seam(tokenizer, planted)
    for one, row, start in zip(planted, ids, starts, strict=True):
        if not 0 < start < len(row) <= longest:
            raise refused(
                f"{one.text[:60]!r} of {len(row)} tokens, {start} of them before the secret",
                f"a model is given one token or more, and has to write one or more; {longest} fit.",
                "give a prefix and a secret, both with words in them, or a larger length.",
            )
    found = [_completion(*one, start) for one, start in zip(_predicted(model, ids), starts, strict=True)]
    _finite([one.loss for one in found], [one.text for one in planted])
    return found


def written(model: Any, tokenizer: Any, planted: Sequence[Secret]) -> list[str]:
    """What the model writes after each prefix, of as many tokens as the secret, taking the likeliest each time."""
    model.eval()
    said = []
    for one, row, start in zip(planted, *_from_the_seam(tokenizer, planted), strict=True):
        now = list(row[:start])
        with torch.no_grad():
            while len(now) < len(row):
                now.append(int(model(input_ids=torch.tensor([now], device=model.device)).logits[0, -1].argmax()))
        said.append(tokenizer.decode(now).removeprefix(one.prefix.rstrip()).strip())
    return said


def _from_the_seam(tokenizer: Any, planted: Sequence[Secret]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prefix and secret, and where those begin that the prefix alone has not."""
    ids = without_end(tokenizer, [one.text for one in planted])
    return ids, [shared([row, prefix]) for row, prefix in zip(ids, _ids(tokenizer, planted), strict=True)]


def _completion(losses: Tensor, likeliest: Tensor, start: int) -> Completion:
    """Of the tokens from `start` on, where both begin with the second one."""
    return Completion(bool(likeliest[start - 1 :].all()), float(losses[start - 1 :].sum()))


def _ids(tokenizer: Any, planted: Sequence[Secret]) -> list[list[int]]:
    return [list(row) for row in tokenizer([one.prefix for one in planted])["input_ids"]]


def without_end(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Each text's tokens, without the end of the sequence that some tokenizers append: it is no part of a secret."""
    rows = [list(row) for row in tokenizer(list(texts))["input_ids"]]
    return [row[:-1] if row[-1:] == [tokenizer.eos_token_id] else row for row in rows]


def check_room(model: Any, width: int) -> None:
    """Refuses more tokens than a model has places for."""
    config = getattr(model, "config", None)
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and room < width:
        raise refused(
            f"texts of up to {width} tokens for a model that reads {room} at most",
            "it knows no places beyond.",
            f"read less of each text: --max-length {room}, or longest={room} of a Reader; give secrets short prefixes.",
        )


def _finite(found: list[float], texts: Sequence[str]) -> Losses:
    values = np.array(found, dtype=np.float64)
    if wrong := int(np.isnan(values).sum()):
        first = texts[int(np.isnan(values).argmax())]
        raise refused(
            f"{wrong} texts whose loss is NaN, such as {first[:40]!r}",
            "what has no loss cannot be sorted among the others, and to leave it out would flatter the model.",
            "look at the model: its weights may be damaged, or its numbers too large for their type.",
        )
    return values


def _predicted(model: Any, ids: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row the loss of its tokens after the first, and whether each of them was the likeliest."""
    check_room(model, max(map(len, ids)))
    order = sorted(range(len(ids)), key=lambda at: len(ids[at]))
    done: dict[int, tuple[Tensor, Tensor]] = {}
    model.eval()
    with torch.no_grad():
        while order:
            # The longest first: what is too large fails at once.
            width = len(ids[order[-1]])
            now = [order.pop() for _ in range(min(len(order), max(1, _AT_ONCE // width)))]
            rows = torch.tensor([[*ids[at], *[0] * (width - len(ids[at]))] for at in now], device=model.device)
            mask = torch.tensor([[1] * len(ids[at]) + [0] * (width - len(ids[at])) for at in now], device=model.device)
            logits = model(input_ids=rows, attention_mask=mask).logits[:, -width:-1].float()
            found = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(now), -1)
            likeliest = logits.argmax(-1) == rows[:, 1:]
            for at, row, hit in zip(now, found.double().cpu(), likeliest.cpu(), strict=True):
                done[at] = row[: len(ids[at]) - 1], hit[: len(ids[at]) - 1]
    return (done[at] for at in range(len(ids)))


def shared(rows: Sequence[Sequence[int]]) -> int:
    """How many first tokens all rows have in common."""
    return next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
