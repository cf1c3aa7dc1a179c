"""The loss of a label among all labels, against one probability after the other."""

import math

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.modeling_outputs import CausalLMOutput

pytestmark = pytest.mark.usefixtures("checked_once")

SAID = [[5, 7, 9], [5, 8, 9], [6, 9], [5, 7, 3, 9]]  # as answers of chats, each with an end of its own


@pytest.fixture
def choices(part):
    return part("common.choices").Choices.between(SAID)


def one_by_one(scores, answer):
    """Minus the log-probability of an answer, of scores (T, V) at its tokens."""
    loss = 0.0
    for i, token in enumerate(SAID[answer]):
        may_follow = {ids[i] for ids in SAID if ids[:i] == SAID[answer][:i]}
        exponentials = {other: math.exp(scores[i, other]) for other in may_follow}
        loss -= math.log(exponentials[token] / sum(exponentials.values()))
    return loss


def rows(padding):
    """A row for each answer after a prompt of its own length, padded to 9 tokens on one side."""
    labels = torch.full((len(SAID), 9), -100)
    starts = []
    for row, ids in enumerate(SAID):
        starts.append(9 - len(ids) if padding == "left" else 2 + row % 2)
        labels[row, starts[-1] : starts[-1] + len(ids)] = torch.tensor(ids)
    return labels, starts


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_loss_is_that_of_the_label_among_the_labels(padding, choices):
    logits = torch.randn(len(SAID), 9, 11, generator=torch.Generator().manual_seed(0))
    labels, starts = rows(padding)
    found = choices.losses(logits, labels)
    expected = [one_by_one(logits[row, start - 1 :], row) for row, start in enumerate(starts)]
    torch.testing.assert_close(found, torch.tensor(expected))
    others = logits.clone()
    others[:, :, [0, 1, 2, 4, 10]] += 5.0  # no label has these tokens
    torch.testing.assert_close(choices.losses(others, labels), found)


def test_all_labels_together_have_the_probability_one(choices):
    by_beginning = {}
    generator = torch.Generator().manual_seed(1)
    logits = torch.zeros(len(SAID), 9, 11)
    labels, starts = rows("right")
    for row, ids in enumerate(SAID):  # what comes next follows from what was said
        for i in range(len(ids)):
            said = by_beginning.setdefault(tuple(ids[:i]), torch.randn(11, generator=generator))
            logits[row, starts[row] - 1 + i] = said
    assert choices.losses(logits, labels).neg().exp().sum().item() == pytest.approx(1)


def test_a_row_without_a_whole_answer_has_no_loss_and_no_gradient(choices):
    logits = torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(2), requires_grad=True)
    labels = torch.tensor([[-100, -100, 5, 7], [-100] * 4, [-100, 6, 9, -100]])
    losses = choices.losses(logits, labels)
    losses.sum().backward()
    assert losses[:2].tolist() == [0, 0]
    assert losses[2] > 0
    assert not logits.grad[:2].any()
    assert logits.grad.isfinite().all()


class Speaker(nn.Module):
    """As Transformers' language models do, it takes how many tokens there are, and leaves the loss to that."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Embedding(11, 11)
        nn.init.normal_(self.scores.weight, generator=torch.Generator().manual_seed(3))

    def forward(self, input_ids, labels=None, **kwargs):
        return CausalLMOutput(logits=self.scores(input_ids))


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_an_ordinary_step_is_of_the_mean_however_it_is_cut(at_once, part, choices, tmp_path):
    """Of the plain Trainer, beside which the private one is compared."""
    labels, _ = rows("right")
    data = [{"input_ids": row.clamp_min(0), "labels": row} for row in labels]
    expected = Speaker()
    logits = expected(torch.stack([row["input_ids"] for row in data])).logits
    choices.losses(logits, labels).mean().backward()
    model = Speaker()
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=at_once, gradient_accumulation_steps=4 // at_once, max_steps=1,
        learning_rate=1.0, optim="sgd", max_grad_norm=0.0, use_cpu=True, report_to="none", logging_steps=1,
    )  # fmt: skip
    kind = part("common.choices").choosing(Trainer, choices)
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data, data_collator=default_data_collator)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    moved = expected.scores.weight - expected.scores.weight.grad
    torch.testing.assert_close(model.scores.weight, moved)
    logged = trainer.state.log_history[0]["loss"]
    assert logged == pytest.approx(evaluated, abs=1e-4) == pytest.approx(choices.losses(logits, labels).mean().item())
