"""The rank of a secret among all that it could have been, by a causal language model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_dp.audit.given import refused
from hf_dp.audit.secrets import Secret, candidates, exposure
from hf_dp.audit.texts import Losses, check_room, shared, without_end

# Tokens whose keys and values are kept at once: of 30 layers with 3 heads of 64, 750 MB in float32.
_AT_ONCE = 16_384
# Rows of logits in float64 at once.
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Guesses:
    """All that a secret could have been, in tokens: those that all begin with, and each one's others.

    Attributes:
        begin: (P,), P at least 1.
        rest: of each candidate, the true one first.
    """

    begin: list[int]
    rest: list[tuple[int, ...]]

    @classmethod
    def of(cls, tokenizer: Any, secret: Secret, most: int = 10_000) -> Guesses:
        """As `candidates` has them.

        Raises:
            ConfigurationError: a secret of which it alone could be true, or without a token before it.
        """
        texts = [secret.prefix + one for one in candidates(secret.secret, most)]
        ids = without_end(tokenizer, texts)
        begin = shared(ids)
        if not begin:
            raise refused(
                f"a secret {secret.secret[:40]!r} after {secret.prefix[:40]!r}, in no token alike",
                "candidates are compared by what the model makes of them after the same tokens.",
                "give the words before the secret as its prefix.",
            )
        return cls(list(ids[0][:begin]), [tuple(row[begin:]) for row in ids])

    def losses(self, model: Any) -> Losses:
        """(N,): minus the log of each candidate's probability, in nats. What begins alike is computed once.

        Raises:
            ConfigurationError: a model that keeps no cache for several rows, or has no room for so many tokens.
        """
        check_room(model, len(self.begin) + max(map(len, self.rest)))
        found = np.zeros(len(self.rest))
        model.eval()
        with torch.no_grad():
            said = model(input_ids=torch.tensor([self.begin], device=model.device), use_cache=True)
            if not hasattr(getattr(said, _name_of_cache(model), None), "reorder_cache"):
                raise refused(
                    f"{type(model).__name__}, which keeps no keys and values of what it has read",
                    "candidates begin alike, and are computed from where they part.",
                    "leave the secrets out, or compute the losses of all candidates and call hf_dp.audit.exposure.",
                )
            self._descend(model, said, [list(range(len(self.rest)))], 0, found)
        return found

    def _descend(self, model: Any, said: Any, nodes: list[list[int]], depth: int, found: Losses) -> None:
        """Adds the loss of what candidates have at `depth`; each node is those that were alike before it."""
        children: dict[tuple[int, int], list[int]] = {}
        for at, node in enumerate(nodes):
            for one in node:
                if depth < len(self.rest[one]):
                    children.setdefault((at, self.rest[one][depth]), []).append(one)
        if not children:
            return
        logits = said.logits[:, -1]
        rows, tokens = (torch.tensor(part, device=logits.device) for part in zip(*children, strict=True))
        # In float32 many hopeless candidates would tie.
        normaliser = torch.cat([part.double().logsumexp(-1) for part in logits.split(_ROWS_AT_ONCE)])
        values = normaliser[rows] - logits[rows, tokens].double()
        for value, node in zip(values.tolist(), children.values(), strict=True):
            found[node] += value
        # Those that go on, as many at once as memory takes.
        deeper = [i for i, node in enumerate(children.values()) if any(len(self.rest[one]) > depth + 1 for one in node)]
        name = _name_of_cache(model)
        at_once, all_nodes = max(1, _AT_ONCE // (len(self.begin) + depth + 1)), list(children.values())
        for first in range(0, len(deeper), at_once):
            part = torch.tensor(deeper[first : first + at_once], device=logits.device)
            cache = copy.deepcopy(getattr(said, name))
            # As for beams; of recurrent states there is no other way to choose some.
            cache.reorder_cache(rows[part])
            more = model(input_ids=tokens[part][:, None], **{name: cache}, use_cache=True)
            self._descend(model, more, [all_nodes[i] for i in part.tolist()], depth + 1, found)


def _name_of_cache(model: Any) -> str:
    """What the model calls the keys and values of what it has read: Transformers has renamed it in 5.24."""
    taken = (inspect.signature(module.forward).parameters for module in model.modules())
    return next((name for names in taken for name in ("cache", "past_key_values") if name in names), "past_key_values")


def exposures(model: Any, guesses: Sequence[Guesses]) -> list[float]:
    """The exposure of each secret among all that it could have been, in bits."""
    return [exposure(one.losses(model), 0) for one in guesses]
