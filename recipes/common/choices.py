"""The loss of an answer that is one of a list: only what the answer could have been instead is held against it.

Asked for a label, the model may say nothing but labels; so it is trained to choose between them, and no part of the
clipping norm goes into words that it is not allowed anyway.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from common.answers import IGNORED


def continuations(said: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """For each beginning of some answer, whole ones left out, the tokens with which some answer goes on."""
    found: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for ids in said:
        for i, token in enumerate(ids):
            found[tuple(ids[:i])].add(token)
    return {begun: sorted(tokens) for begun, tokens in found.items()}


@dataclass(frozen=True)
class Choices:
    """Answers as token ids, none of which begins with another, and with which tokens each could have gone on.

    Attributes:
        answers: (A, L), IGNORED after the end of each.
        options: (A, L, K), at each token of an answer those with which some answer goes on there: its own first,
            IGNORED after the last.
    """

    answers: Tensor
    options: Tensor

    @classmethod
    def between(cls, said: list[list[int]]) -> Choices:
        """Of a list of answers."""
        following = continuations(said)
        longest, most = max(map(len, said)), max(map(len, following.values()))
        answers = torch.full((len(said), longest), IGNORED)
        options = torch.full((len(said), longest, most), IGNORED)
        for number, ids in enumerate(said):
            answers[number, : len(ids)] = torch.tensor(ids)
            for i, token in enumerate(ids):
                here = following[tuple(ids[:i])]
                options[number, i, : len(here)] = torch.tensor([token, *(other for other in here if other != token)])
        return cls(answers, options)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(B,): minus the log-probability of each row's answer, among all answers, in nats.

        Args:
            logits: (B, T, V).
            labels: (B, T), IGNORED but where the answer is; 0 is the loss of a row without a whole one.
        """
        answers, options = self.answers.to(labels.device), self.options.to(labels.device)
        last = labels.shape[1] - 1
        at = labels.ne(IGNORED).int().argmax(1, keepdim=True) + torch.arange(answers.shape[1], device=labels.device)
        said = labels.gather(1, at.clamp_max(last)).masked_fill(at > last, IGNORED)
        is_it = said[:, None].eq(answers).all(2)
        there = options[is_it.int().argmax(1)].masked_fill(~is_it.any(1)[:, None, None], IGNORED)
        before = logits.gather(1, (at - 1).clamp(0, last)[..., None].expand(-1, -1, logits.shape[2]))
        scores = before.gather(2, there.clamp_min(0)).float()
        others = torch.arange(there.shape[2], device=labels.device).ne(0) & there.eq(IGNORED)
        return -scores.masked_fill(others, -torch.inf).log_softmax(2)[..., 0].sum(1)


def choosing(kind: type[Trainer], choices: Choices) -> type[Trainer]:
    """A trainer of that kind, private or not, whose loss of a row is that of its answer among all answers."""

    class Choosing(kind):  # type: ignore[misc, valid-type]
        def compute_per_example_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            labels = inputs.pop("labels")
            return choices.losses(model(**inputs).logits, labels)

        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = choices.losses(outputs.logits, inputs["labels"]).mean()
            if model.training and num_items_in_batch is not None:  # of which Trainer takes it for a sum, and leaves it
                loss = loss / self.current_gradient_accumulation_steps
            return (loss, outputs) if return_outputs else loss

    return Choosing
