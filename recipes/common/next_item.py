"""Scores of the next item: GPT-2 with tied item embeddings, beside a bias that can start from released frequencies.

The bias takes the place of one of the hidden features, so that what was trained is saved as a GPT2LMHeadModel, which
has no bias: there this feature is always 1, and its weights in the output are the bias.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, GPT2PreTrainedModel, TrainerCallback

from common.comparison import collate, scored
from common.next_item_results import Measures
from common.sequences import PADDING

# The score of what cannot be the next; with a smaller one the loss of an example that denies it would be no number.
_NEVER = -1e4
# Of the first weights, beside a bias: what they add to the scores changes the order that was released little.
NEAR_NOTHING = 0.02


class Output(nn.Module):
    """The output layer: a bias of its own, and the table that it is given."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(items))

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """(B, d) to (B, items)."""
        return F.linear(hidden, table, self.bias)


class NextItem(GPT2PreTrainedModel):
    """GPT-2 whose last position scores all items with the embedding table; it is saved as GPT2LMHeadModel.

    Args:
        with_bias: in place of the first hidden feature.
        only_new: what a history has is never the next item.
    """

    def __init__(self, config: GPT2Config, with_bias: bool = False, only_new: bool = False) -> None:
        super().__init__(config)
        self.only_new = only_new
        self.transformer = GPT2Model(config)
        self.output = Output(config.vocab_size) if with_bias else None
        if with_bias:
            kept = torch.ones(config.n_embd)
            kept[0] = 0
            self.register_buffer("kept", kept)
        self.post_init()

    def get_output_embeddings(self) -> Any:
        """What has the bias, if there is one."""
        return self.output

    def forward(self, input_ids: Tensor, attention_mask: Tensor, after: Tensor | None = None) -> Tensor:
        """Scores (B, items + 1) of what follows; or (B, K, items + 1) of what follows the positions `after` (B, K)."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        at = attention_mask.sum(1, keepdim=True) - 1 if after is None else after
        read, table = hidden[torch.arange(len(hidden))[:, None], at], self.transformer.wte.weight
        scores = read @ table.T if self.output is None else self.output(read * self.kept, table)
        if self.only_new:
            places = torch.arange(input_ids.shape[1], device=at.device)
            seen = torch.where(places <= at[..., None], input_ids[:, None], PADDING)
            scores = scores.scatter(2, seen, _NEVER)
        return scores.squeeze(1) if after is None else scores


@torch.no_grad()
def as_language_model(model: NextItem) -> GPT2LMHeadModel:
    """The same scores by the class that Transformers has for GPT-2."""
    config = GPT2Config.from_dict({**model.config.to_dict(), "tie_word_embeddings": model.output is None})
    plain = GPT2LMHeadModel(config)
    state = {name: value for name, value in model.state_dict().items() if name.startswith("transformer.")}
    plain.load_state_dict(state, strict=False)
    if model.output is None:
        plain.tie_weights()
    else:
        norm = plain.transformer.ln_f
        norm.weight[0], norm.bias[0] = 0, 1
        plain.lm_head.weight.copy_(model.transformer.wte.weight)
        plain.lm_head.weight[:, 0] = model.output.bias
    if model.only_new:
        plain.generation_config.no_repeat_ngram_size = 1
    return plain.to(model.device).eval()


def gains(model: Any, test: list[dict[str, Any]]) -> Tensor:
    """(users,): what each test user adds to NDCG@10 over all items; above 0 it is a hit."""
    found = []
    for scores, labels in scored(model, test, collate, 500):
        scores[:, PADDING] = -math.inf
        ranks = (scores > scores.gather(1, labels[:, None])).sum(1)
        found.append(torch.where(ranks < 10, 1 / (ranks + 2.0).log2(), 0.0).cpu())
    return torch.cat(found)


def measures(gains: Tensor) -> Measures:
    """NDCG@10 and HIT@10, in %."""
    return 100 * float(gains.double().mean()), 100 * float(gains.gt(0).double().mean())


class Beginning(TrainerCallback):
    """Measures the model where training begins, when what it starts from was released."""

    def __init__(self, test: list[dict[str, Any]]) -> None:
        self._test = test
        self.found: Measures | None = None

    def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.found = measures(gains(model, self._test))
