"""`hf-dp audit`: a small language model, trained privately with canaries in its data, and attacked."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from hf_dp.accounting import PrivacyReport
from hf_dp.audit import OneRun, gaussian_one_run, one_run, plant, random_tokens
from hf_dp.audit.canaries import IGNORED
from hf_dp.audit.dirac import PLACE, THERE, WithDirac, placed, with_dirac
from hf_dp.audit.given import check_numbers
from hf_dp.audit.outcome import Audit
from hf_dp.audit.public import public_seeds, usual_noises, without_known_noise
from hf_dp.audit.scores import by_gradient, by_loss
from hf_dp.audit.seen import Seen, odd
from hf_dp.config import PrivacyConfig
from hf_dp.demo.audit_figure import draw
from hf_dp.demo.messages import generate
from hf_dp.demo.model import adapted, new_model, train_tokenizer
from hf_dp.demo.quiet import one_thread, quiet
from hf_dp.demo.seen import seen_here
from hf_dp.errors import ConfigurationError
from hf_dp.hub import add_audit
from hf_dp.losses import per_example_losses
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy
from hf_dp.training.private_run import PrivateRun

DIRAC, LOSS, GRADIENT, PUBLIC = "own parameters", "loss", "gradient", "own parameters, less noise from public seeds"
_ATTACKS, _RATE = 4, 0.5
_TEXTS, _PUBLIC_TEXTS, _LENGTH, _AT_ONCE = 200, 300, 12, 512
# With a vocabulary of 50,000 their logits take 100 MB.
_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class Pretrained:
    """A language model that is trained in place of the small one.

    Attributes:
        folder: where it lies with its tokenizer.
        texts: to train on.
    """

    folder: Path
    texts: list[str]


@dataclass(frozen=True)
class Audited:
    """What was claimed of the small model, and what was found.

    Attributes:
        report: the claim.
        audit: the attacks.
        seen: what steps of this library were seen to do, on this machine.
    """

    report: PrivacyReport
    audit: Audit
    seen: tuple[Seen, ...] = ()

    @property
    def odd(self) -> list[Seen]:
        """What steps do otherwise than it is charged."""
        return odd(self.seen)

    @property
    def holds(self) -> bool:
        """No bound is above the claim, and nothing that was seen is odd."""
        return self.audit.epsilon <= self.report.epsilon and not self.odd


def audited(
    output_dir: Path | None, *, epsilon: float, delta: float, steps: int, sampled: float, dirac: int, tokens: int,
    confidence: float, pretrained: Pretrained | None = None,
) -> Audited:  # fmt: skip
    """Trains on texts and canaries, saves the model and its record, and attacks it.

    Args:
        output_dir: where the model goes, with its record, card and what was found; None for nowhere.
        epsilon, delta: that are promised.
        steps: of training.
        sampled: the share of all units that a step draws.
        dirac, tokens: how many canaries have a parameter of their own, and how many are of random tokens.
        confidence: of all bounds together.
        pretrained: adapters (LoRA) on this model, and its texts; None for a small model of the audit's own.

    Raises:
        ConfigurationError: numbers that make no training, or no audit; no model in that folder.
    """
    check_numbers(delta, confidence)  # before minutes of training, not after
    if not 0 < sampled <= 1:
        raise ConfigurationError(
            f"a share of {sampled:g} of all units in a step.",
            why="each unit is drawn with this probability, and where none is an attack would find nothing.",
            fix="give a number above 0 and at most 1 (--sampled; at 1 attacks are strongest).",
        )
    bound, each = _bound(sampled), 1 - (1 - confidence) / _ATTACKS
    for number in (dirac, tokens):
        Audit(attacks={LOSS: bound(np.ones(number - number // 2), np.zeros(number // 2), delta=delta, confidence=each)})
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    place = nullcontext(output_dir) if output_dir is not None else tempfile.TemporaryDirectory()
    threads = one_thread() if pretrained is None else nullcontext()
    with quiet(), threads, place as given, tempfile.TemporaryDirectory() as aside:
        folder = Path(str(given))
        trained, tokenizer, ids = _small() if pretrained is None else _adapted(pretrained)
        data = Dataset.from_list([_row(row, list(row)) for row in ids])
        drawn = random_tokens(tokens, _LENGTH, len(tokenizer), np.random.default_rng())
        outliers = plant(data, [_row(**row) for row in drawn])
        end = [tokenizer.eos_token_id]
        single = [{**_row(end, [IGNORED]), PLACE: i, THERE: 1.0} for i in range(dirac)]
        planted = plant(outliers.dataset, single, nothing=lambda row: {**row, THERE: 0.0})

        model = WithDirac(trained, dirac)
        before, loss, n = copy.deepcopy(model), with_dirac(per_example_losses), len(planted.dataset)
        # A pretrained one is in 16 bits.
        privacy = PrivacyConfig(target_epsilon=epsilon, target_delta=delta, equal_widths=pretrained is not None)
        run = PrivateRun(
            model, planted.dataset, privacy, _collate,
            expected_batch_size=max(1, round(sampled * n)), micro_batch_size=_AT_ONCE, steps=steps, loss=loss,
            max_tokens_per_micro_batch=None if pretrained is None else _TOKENS_AT_ONCE,
        )  # fmt: skip
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
        run.begin(optimizer)
        first: dict[str, Tensor] = {}
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            first = first or _moved(before, model, run.report())
        run.save(folder)
        report = run.report()
        released = _moved(before, model, report)
        canaries = [_collate([_row(**row)]) for row in drawn]
        deviation = report.noise_multiplier * report.clipping_norm

        def less_noise(sums: dict[str, Tensor], of: int, seeds: Iterable[int]) -> tuple[dict[str, Tensor], int | None]:
            noises = [*usual_noises(sums, deviation, of), _of_entropy(sums, deviation, of)]
            return without_known_noise(sums, seeds, noises)

        # All seeds are tried on the first step alone.
        _, seed = less_noise(first, 1, public_seeds(folder))
        rest, _ = less_noise(released, steps, [] if seed is None else [seed])
        own = "places.weight"
        scores = {
            DIRAC: planted.split(-released[own][:, 0]),
            PUBLIC: planted.split(-rest[own][:, 0]),
            LOSS: outliers.split(by_loss(before, model, loss, canaries)),
            GRADIENT: outliers.split(by_gradient(before, released, loss, canaries)),
        }
        assert len(scores) == _ATTACKS
        audit = Audit(attacks={name: bound(*pair, delta=delta, confidence=each) for name, pair in scores.items()})
        add_audit(folder, audit)
        draw(audit, report.epsilon, folder / "audit.png")
        # At last, so that streams of a seed are where that has them begin.
        return Audited(report, audit, tuple(seen_here(Path(aside))))


def _moved(before: WithDirac, model: WithDirac, report: PrivacyReport) -> dict[str, Tensor]:
    """The noisy sums that moved the weights. Known to all: the rates, and what sums are divided by."""
    return {
        name: (was - now).detach() * report.expected_batch_size / _RATE
        for (name, was), now in zip(before.named_parameters(), model.parameters(), strict=True)
        if now.requires_grad
    }


def _small() -> tuple[Any, Any, list[list[int]]]:
    """A model, its tokenizer, and what it is trained on."""
    messages = generate(public=_PUBLIC_TEXTS, private=_TEXTS, evaluation=1, canaries=1, seed=1)
    tokenizer = train_tokenizer(messages.public)
    return new_model(tokenizer, width=32, layers=1), tokenizer, _cut(tokenizer, messages.private)


def _adapted(pretrained: Pretrained) -> tuple[Any, Any, list[list[int]]]:
    model, tokenizer = adapted(pretrained.folder)
    return model, tokenizer, _cut(tokenizer, pretrained.texts)


def _cut(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [row[:_LENGTH] for row in tokenizer(texts)["input_ids"]]


def _bound(sampled: float) -> Callable[..., OneRun]:
    """What is claimed where all are in every step is a Gaussian mechanism, of which more can be shown."""
    return gaussian_one_run if sampled == 1 else one_run


def _row(input_ids: list[int], labels: list[int]) -> dict[str, Any]:
    return {"input_ids": input_ids, "labels": labels, PLACE: 0, THERE: 0.0}


def _collate(rows: list[Any]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, filler: int) -> Tensor:
        return torch.tensor([[*row[name], *[filler] * (longest - len(row[name]))] for row in rows])

    masks = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": padded("input_ids", 0), "labels": padded("labels", IGNORED),
        "attention_mask": torch.tensor(masks), **placed(rows),
    }  # fmt: skip


def _of_entropy(like: Mapping[str, Tensor], deviation: float, steps: int) -> Callable[[int], dict[str, Tensor]]:
    """Noise as this library would draw it from a seed."""

    def noise(seed: int) -> dict[str, Tensor]:
        source, found = GaussianNoise(Entropy(seed)), {name: torch.zeros_like(value) for name, value in like.items()}
        for step in range(steps):
            source.add_(found.values(), deviation, step)
        return found

    return noise
